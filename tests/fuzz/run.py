"""Random models, cuts, schedules and batches, beside unsplit eager.

python -m tests.fuzz.run --seconds 600            as many runs as fit; stops at a difference
python -m tests.fuzz.run --seed 1234 --runs 1     that run again
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import time
import traceback
from collections import Counter, deque
from itertools import count
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fxpipe.errors import FxpipeError, OptionError, ScheduleError
from fxpipe.schedules import families
from tests.fuzz.models import RandomModel, make_batch

LIMIT = 1e-9
FLOOR = 1e-3  # of the largest gradient: what should be zero is rounding alone
TRIES = 3  # plans for each model
BLOCK, BLOCKS_OF_A_PROCESS = 10, 10


class Run(NamedTuple):
    """What one run was, and what came of it."""

    seed: int
    what: str
    outcome: str  # "equal", "refused: ...", "differs: ..." or "failed: ..."

    @property
    def is_fault(self) -> bool:
        return self.outcome.startswith(("differs", "failed"))

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.outcome}\n  {self.what}"


def fuzz(seed: int) -> Run:
    """One run: a model, a plan and two batches of different sizes, all by the seed."""
    rng = random.Random(seed)
    model = RandomModel(seed // TRIES).double()
    options = random_options(rng, model)
    sizes = [rng.randint(1, 8), rng.randint(1, 8)]
    kinds = " ".join(f"{step.kind}{list(step.reads)}" for step in model.steps)
    what = f"{kinds}; {model.loss} {model.returns}; rows {sizes}; {options}"
    torch._dynamo.reset()
    try:
        return Run(seed, what, compare(model, options, sizes, seed))
    except ScheduleError as error:
        return Run(seed, what, f"refused: {str(error).splitlines()[0]}")
    except OptionError as error:
        kind = "refused" if "use fewer stages" in str(error) else "failed"
        return Run(seed, what, f"{kind}: {error}")
    except FxpipeError as error:
        return Run(seed, what, f"failed: {type(error).__name__}: {error}")
    except Exception:
        return Run(seed, what, f"failed: {traceback.format_exc()}")


def random_options(rng: random.Random, model: RandomModel) -> dict[str, Any]:
    stages: Any = rng.randint(1, 5)
    used = model.modules_in_use()
    if used[1:] and rng.random() < 0.3:
        chosen = sorted(rng.sample(used[1:], rng.randint(1, min(4, len(used) - 1))), key=used.index)
        stages = [f"ops.{name}" for name in chosen]
    count = stages if isinstance(stages, int) else len(stages) + 1
    return {
        "stages": stages,
        "microbatches": rng.randint(1, 6),
        "schedule": rng.choice(sorted(families())),
        "ranks": rng.choice([None, rng.randint(1, count)]),
        "lowering": "eager",
        "check": rng.random() < 0.3,
    }


def compare(model: RandomModel, options: dict[str, Any], sizes: list[int], seed: int) -> str:
    reference = copy.deepcopy(model)
    step = torch.compile(model, backend="fxpipe", options=options)
    for number, rows in enumerate(sizes):  # the gradients of both calls add up
        batch = make_batch(rows, seed + number)
        ours, theirs = (leaves(call(*batch)) for call in (step, reference))
        for own, other in zip(ours, theirs, strict=True):
            error = difference(own, other, 0.0)
            if error > LIMIT:
                return f"differs: an output of call {number} is off by {error:.1e}"
        for values in (ours, theirs):
            loss = next((v for v in values if v.dim() == 0), None)
            root = values[0].square().mean() if loss is None else loss
            if root.requires_grad:
                root.backward()
    theirs_by_name = dict(reference.named_parameters())
    norms = [float(p.grad.norm()) for p in theirs_by_name.values() if p.grad is not None]
    floor = FLOOR * max(norms, default=0.0)
    for name, parameter in model.named_parameters():
        own, other = parameter.grad, theirs_by_name[name].grad
        own = torch.zeros_like(parameter) if own is None and other is not None else own
        other = torch.zeros_like(parameter) if other is None and own is not None else other
        if own is not None and other is not None:
            error = difference(own, other, floor)
            if error > LIMIT:
                return f"differs: the gradient of {name} is off by {error:.1e}"
    return "equal"


def leaves(returned: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor)]


def difference(own: Tensor, other: Tensor, floor: float) -> float:
    if own.shape != other.shape:
        return float("inf")
    apart = float((own.detach() - other.detach()).norm())
    return apart / max(float(other.detach().norm()), floor, 1e-300) if apart else 0.0


def run(start: int, seconds: float, jobs: int, limit: int | None = None) -> list[Run]:
    """Runs from a seed on in several processes, until time or the limit is up or one has a fault.

    A process ends after a few blocks: what a compiler keeps would add up.
    """
    end = time.monotonic() + seconds
    blocks = count(start, BLOCK) if limit is None else range(start, start + limit, BLOCK)
    done: list[Run] = []
    with get_context("spawn").Pool(jobs, prepare, maxtasksperchild=BLOCKS_OF_A_PROCESS) as pool:
        waiting: deque[Any] = deque()
        blocks = iter(blocks)
        while not (time.monotonic() > end or any(r.is_fault for r in done[-BLOCK:])):
            while len(waiting) <= jobs and (block := next(blocks, None)) is not None:
                size = BLOCK if limit is None else min(BLOCK, start + limit - block)
                waiting.append(pool.apply_async(run_block, (block, size, end)))
            if not waiting:
                break
            done += waiting.popleft().get()
        pool.close()
        pool.join()
    return done + [r for late in waiting for r in late.get()]


def prepare() -> None:
    torch.set_num_threads(1)


def run_block(start: int, size: int, end: float) -> list[Run]:
    done: list[Run] = []
    for seed in range(start, start + size):
        if time.monotonic() < end and not (done and done[-1].is_fault):
            done.append(fuzz(seed))
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    done = run(given.seed, given.seconds, given.jobs, given.runs)
    kinds = Counter(r.outcome.partition(":")[0] for r in done)
    counted = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    print(f"{len(done)} runs from seed {given.seed}: {counted}")
    faults = [r for r in done if r.is_fault]
    for fault in faults:
        print(f"{fault}\n  again: python -m tests.fuzz.run --seed {fault.seed} --runs 1")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())

"""Random models, cuts, schedules and batches, beside unsplit eager.

python -m tests.fuzz.run --seconds 600            as many runs as fit; stops at a difference
python -m tests.fuzz.run --runs 10000 --jobs 2    so many runs
python -m tests.fuzz.run --seed 1234 --runs 1     that run again
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import count, groupby, islice
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from fxpipe.errors import FxpipeError, OptionError, ScheduleError
from tests.fuzz.plans import Plan, random_plan
from tests.fuzz.trial import Trial

PLANS = 25  # for each model
MODELS_OF_A_PROCESS = 15
INDUCTOR_EVERY = 200
WHOLE_WAY_EVERY = 4 * PLANS  # seeds: a first plan of every fourth model


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


@lru_cache(maxsize=1)
def trial_of(number: int) -> Trial:
    return Trial(number)


def uses_inductor(seed: int) -> bool:
    """Seconds of compiling, so few seeds do."""
    return seed % INDUCTOR_EVERY == INDUCTOR_EVERY // 2 + 1


def plan_of(seed: int, trial: Trial) -> Plan:
    plan = random_plan(random.Random(seed), trial.model, trial.sizes)
    if uses_inductor(seed):
        plan = plan._replace(options={**plan.options, "lowering": "inductor"})
    return plan


def fuzz(seed: int) -> Run:
    """One run: a model, a plan and a batch or two of some sizes, all by the seed."""
    trial = trial_of(seed // PLANS)
    model, plan = trial.model, plan_of(seed, trial)
    kinds = " ".join(f"{step.kind}{list(step.reads)}" for step in model.steps)
    mode = "training" if model.training else "eval"
    what = f"{kinds}; {model.loss} {model.returns} of {model.middle}, {mode}; {plan}"
    try:
        return Run(seed, what, trial.run(plan, whole_way=seed % WHOLE_WAY_EVERY == 0))
    except ScheduleError as error:
        return Run(seed, what, f"refused: {str(error).splitlines()[0]}")
    except OptionError as error:
        kind = "refused" if "use fewer stages" in str(error) else "failed"
        return Run(seed, what, f"{kind}: {error}")
    except FxpipeError as error:
        return Run(seed, what, f"failed: {type(error).__name__}: {error}")
    except Exception:
        return Run(seed, what, f"failed: {traceback.format_exc()}")


def run(seeds: Iterable[int], seconds: float, jobs: int) -> Iterator[Run]:
    """The runs of these seeds in several processes, until time is up or one has a fault.

    A process ends after some models: what a compiler keeps would add up.
    """
    end = time.monotonic() + seconds
    blocks = (tuple(block) for _, block in groupby(seeds, lambda seed: seed // PLANS))
    with get_context("spawn").Pool(jobs, prepare, maxtasksperchild=MODELS_OF_A_PROCESS) as pool:
        waiting: deque[Any] = deque()
        stopped = False
        while not stopped or waiting:
            while not stopped and len(waiting) <= jobs:
                block = next(blocks, None) if time.monotonic() < end else None
                stopped = block is None
                if block is not None:
                    waiting.append(pool.apply_async(run_block, (block, end)))
            if waiting:
                done = waiting.popleft().get()
                stopped = stopped or any(r.is_fault for r in done)
                yield from done
        pool.close()
        pool.join()


def prepare() -> None:
    torch.set_num_threads(1)


def run_block(seeds: Iterable[int], end: float) -> list[Run]:
    done: list[Run] = []
    for seed in seeds:
        if time.monotonic() < end and not (done and done[-1].is_fault):
            done.append(fuzz(seed))
    return done


def counted(runs: Iterable[Run]) -> str:
    kinds = Counter(r.outcome.partition(":")[0] for r in runs)
    return ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items())) or "none"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    start, done = time.monotonic(), []
    for found in run(islice(count(given.seed), given.runs), given.seconds, given.jobs):
        done.append(found)
        if len(done) % 500 == 0:
            print(f"{len(done)} runs in {time.monotonic() - start:.0f} s", flush=True)
    print(f"{len(done)} runs from seed {given.seed}: {counted(done)}")
    reasons = Counter(r.outcome[:100] for r in done if r.outcome.startswith("refused"))
    for reason, number in reasons.most_common(5):
        print(f"  {number} {reason}")
    faults = [r for r in done if r.is_fault]
    for fault in faults:
        print(f"{fault}\n  again: python -m tests.fuzz.run --seed {fault.seed} --runs 1")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())

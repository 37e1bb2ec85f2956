"""What recording a step costs, and what memory that two ranks share saves -> step times.

The same compiled step of the suite's model on two ranks, run in three ways, round after round: as
it is, within `fxpipe.trace`, and with all messages through gloo. A ratio is the median over the
rounds of (time / the time as it is in the same round).

python benchmarks/ways.py --preset medium --schedules 1f1b interleaved-1f1b --rounds 20
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cores import keep_to_core
from gpt import GPT, PRESETS, batch, fxpipe_options, layers_of

import fxpipe
from fxpipe.lowering.watch import watch

RANKS, WARM_UP = 2, 3
STAGES = {"1f1b": 2, "gpipe": 2, "zb-h1": 2, "interleaved-1f1b": 4, "interleaved-zb": 4, "zb-v": 4}


@contextmanager
def through_the_group() -> Iterator[None]:
    boxes = watch().mailboxes
    kept = dict(boxes.inboxes), dict(boxes.outboxes)
    boxes.inboxes.clear()
    boxes.outboxes.clear()
    try:
        yield
    finally:
        boxes.inboxes.update(kept[0])
        boxes.outboxes.update(kept[1])


def work(rank: int, folder: str, given: argparse.Namespace) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(given.cache or folder, f"rank{rank}")
    keep_to_core(rank, RANKS)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    ways: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "as it is": nullcontext,
        "recorded": lambda: fxpipe.trace(os.path.join(folder, "trace")),
        "through gloo": through_the_group,
    }
    for schedule in given.schedules:
        seconds = compare(given.preset, schedule, given, ways)
        if rank == 0:
            report(schedule, seconds)
        torch._dynamo.reset()
    dist.barrier()
    dist.destroy_process_group()


def compare(
    preset: str,
    schedule: str,
    given: argparse.Namespace,
    ways: dict[str, Callable[[], AbstractContextManager[object]]],
) -> dict[str, list[float]]:
    size = PRESETS[preset]
    model = GPT(layers_of(size))
    options = fxpipe_options(size, schedule, STAGES[schedule], given.lowering)
    step = torch.compile(model, backend="fxpipe", options=options)
    inputs = batch(size)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(WARM_UP + given.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            with ways[name]():
                dist.barrier()
                start = time.perf_counter()
                for _ in range(given.steps):
                    step(*inputs).backward()
                dist.barrier()
                taken = (time.perf_counter() - start) / given.steps
            if number >= WARM_UP:
                seconds[name].append(taken)
        model.zero_grad()
    return seconds


def report(schedule: str, seconds: dict[str, list[float]]) -> None:
    base = seconds["as it is"]
    for name, own in seconds.items():
        ratios = [one / other for one, other in zip(own, base)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"{schedule:<18}{name:<14}{1e3 * statistics.median(own):>9.2f} ms{middle:>8.3f}"
            f"   {low:.3f} to {high:.3f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="medium", choices=PRESETS)
    parser.add_argument("--schedules", nargs="+", default=["1f1b"], choices=STAGES)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lowering", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--cache", help="folder for what is compiled, to keep; else a new one")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (folder, given), nprocs=RANKS)


if __name__ == "__main__":
    main()

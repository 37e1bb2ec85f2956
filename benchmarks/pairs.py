"""Pairs `[2F5|3B1]` as one task each -> their step time beside the same actions one by one.

The GPT of examples/train_gpt.py with all ranks in one process and one thread: what a pair costs or
saves is then its own, not that of a rank that waits. Both take turns, round after round; a ratio is
the median over the rounds of (time as pairs / time one by one in the same round).

python benchmarks/pairs.py --schedules combined-1f1b dualpipev
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from train_gpt import GPT, batch  # noqa: E402 - found by the line above

RANKS, MICROBATCHES, WARM_UP = 2, 8, 3


class Contestant:
    """A GPT compiled with its pairs merged, or not."""

    def __init__(self, schedule: str, lowering: str, merge: bool) -> None:
        torch.manual_seed(0)
        self.model = GPT()
        options = {
            "stages": 2 * RANKS,
            "ranks": RANKS,
            "microbatches": MICROBATCHES,
            "schedule": schedule,
            "lowering": lowering,
            "passes": {"merge_pairs": merge},
        }
        self.compiled = torch.compile(self.model, backend="fxpipe", options=options)
        self.seconds: list[float] = []

    def run(self) -> float:
        """One step; returns its loss."""
        self.model.zero_grad()
        start = time.perf_counter()
        loss = self.compiled(*batch(1))
        loss.backward()
        self.seconds.append(time.perf_counter() - start)
        return float(loss.detach())


def compare(schedule: str, lowering: str, rounds: int) -> None:
    merged, apart = (Contestant(schedule, lowering, merge) for merge in (True, False))
    for number in range(WARM_UP + rounds):
        order = (merged, apart) if number % 2 else (apart, merged)
        losses = [contestant.run() for contestant in order]
        assert abs(losses[0] - losses[1]) < 1e-5, f"the losses differ: {losses}"
    pairs, singles = merged.seconds[WARM_UP:], apart.seconds[WARM_UP:]
    ratios = [pair / single for pair, single in zip(pairs, singles)]
    low, _, high = statistics.quantiles(ratios, n=4)
    print(
        f"{schedule:<16}{1e3 * statistics.median(pairs):>10.1f}"
        f"{1e3 * statistics.median(singles):>14.1f}{statistics.median(ratios):>8.3f}"
        f"   {low:.3f} to {high:.3f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schedules", nargs="+", default=["combined-1f1b", "dualpipev"])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--lowering", default="inductor", choices=("inductor", "eager"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'schedule':<16}{'pairs ms':>10}{'one by one ms':>14}{'ratio':>8}   quartiles")
    for schedule in given.schedules:
        compare(schedule, given.lowering, given.rounds)


if __name__ == "__main__":
    main()

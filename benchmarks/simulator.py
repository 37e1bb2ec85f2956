"""How long building and simulating schedules takes, and how it grows with ranks and microbatches.

python benchmarks/simulator.py
"""

from __future__ import annotations

import time

from fxpipe.costs import Costs
from fxpipe.schedules import build
from fxpipe.simulator import simulate

# family, ranks, microbatches, chunks per rank; the last is the target: under 10 s.
SIZES = [
    ("1f1b", 4, 1024, 1),
    ("1f1b", 16, 1024, 1),
    ("1f1b", 64, 1024, 1),
    ("1f1b", 256, 1024, 1),
    ("1f1b", 256, 4096, 1),
    ("interleaved-zb", 256, 1024, 4),
    ("1f1b", 1024, 1024, 1),
    ("1f1b", 1024, 4096, 1),
]


def main() -> None:
    print("schedule        ranks  microbatches  chunks    actions  build s  simulate s  us/action")
    for name, ranks, microbatches, chunks in SIZES:
        start = time.perf_counter()
        schedule = build(name, stages=ranks * chunks, microbatches=microbatches, ranks=ranks)
        built = time.perf_counter()
        costs = Costs.of_share(1, 1, 1, 0.1, ranks=ranks, stages=ranks * chunks)
        timeline = simulate(schedule, costs)
        assert timeline.makespan > 0 and max(timeline.peak_activations) > 0
        end = time.perf_counter()
        actions = sum(map(len, schedule.packed))
        print(
            f"{name:<15} {ranks:>5}  {microbatches:>12}  {chunks:>6}  {actions:>9}  "
            f"{built - start:>7.2f}  {end - built:>10.2f}  {1e6 * (end - built) / actions:>9.2f}"
        )


if __name__ == "__main__":
    main()

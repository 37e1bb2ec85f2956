"""A core of its own for each rank of a benchmark."""

from __future__ import annotations

import os


def keep_to_core(rank: int, num_ranks: int) -> None:
    """Bind this process to one core, where there are enough of them.

    Else a rank that computes holds up, for whole slices of the scheduler, the threads that carry
    the messages of another.
    """
    if not hasattr(os, "sched_getaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= num_ranks:
        os.sched_setaffinity(0, {cores[rank]})

"""A function of a rank to what it returned or raised in N processes, which always end."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.distributed.nursery import NURSERY

ROOT = Path(__file__).parents[2]
GRACE = 10.0  # seconds in which what a process started must end after it


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: with a value, with an exception's text, or neither (it was killed)."""

    value: Any
    error: str | None
    exit_code: int | None
    log: str
    left_behind: bool  # a process that it started was still running

    def __str__(self) -> str:
        return f"exit code {self.exit_code}\n{self.error or ''}\n{self.log}"


def run_ranks(
    work: Callable[..., Any],
    world_size: int,
    folder: Path,
    timeout: float = 120.0,
    **arguments: Any,
) -> list[Any]:
    """What `work(rank, world_size, **arguments)` returned on each rank.

    `work` is a function of a module's top level. Raises AssertionError with every rank's traceback
    and output where one failed, was still running after `timeout` seconds, or left a process.
    """
    outcomes = run_to_the_end(work, world_size, folder, timeout, **arguments)
    failed = [i for i, o in enumerate(outcomes) if o.exit_code != 0 or o.left_behind]
    told = "\n".join(f"--- rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes))
    assert not failed, f"ranks {failed} of {work.__name__} failed\n{told}"
    return [outcome.value for outcome in outcomes]


def run_to_the_end(
    work: Callable[..., Any],
    world_size: int,
    folder: Path,
    timeout: float = 120.0,
    **arguments: Any,
) -> list[Outcome]:
    """How each rank ended. After `timeout` seconds those that still run are killed."""
    folder.mkdir(parents=True, exist_ok=True)
    task = (work.__module__, work.__qualname__, world_size, arguments)
    (folder / "task").write_bytes(pickle.dumps(task))
    pids = [NURSERY.start(folder, rank) for rank in range(world_size)]
    codes: list[int | None] = []
    try:
        ended = wait_for(lambda: all(map(NURSERY.has_ended, pids)), timeout)
        ended_each = [ended or NURSERY.has_ended(pid) for pid in pids]
        left = [done and outlived(pid) for pid, done in zip(pids, ended_each)]
    finally:
        for pid in pids:
            # Before the head of the group is reaped: after that its number may be another's.
            os.killpg(pid, signal.SIGKILL)
            codes.append(NURSERY.reap(pid))
    codes = [code if done else None for code, done in zip(codes, ended_each)]
    return [outcome(folder, rank, codes[rank], left[rank]) for rank in range(world_size)]


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition came to hold within so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def outlived(group: int) -> bool:
    """Whether a process of the group still runs GRACE seconds after its head."""
    return not wait_for(lambda: not is_running(group), GRACE)


def is_running(group: int) -> bool:
    """Whether a process of the group is there and no zombie. Without /proc none is seen."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, pgrp, *_ = path.read_text().rpartition(")")[2].split()
            if int(pgrp) == group and state != "Z":
                return True
    return False


def outcome(folder: Path, rank: int, code: int | None, left: bool) -> Outcome:
    log = (folder / f"log{rank}").read_text(errors="replace")
    saved = folder / f"result{rank}"
    value, error = pickle.loads(saved.read_bytes()) if saved.exists() else (None, None)
    return Outcome(value, error, code, log, left)


def main(folder: Path, rank: int) -> int:
    """Run the task as one rank of a gloo group that meets through a file."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    module, name, world_size, arguments = pickle.loads((folder / "task").read_bytes())
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    value, error = None, None
    try:
        value = getattr(importlib.import_module(module), name)(rank, world_size, **arguments)
    except Exception:
        error = traceback.format_exc()
    (folder / f"result{rank}").write_bytes(pickle.dumps((value, error)))
    if error is None:
        dist.destroy_process_group()
    return int(error is not None)

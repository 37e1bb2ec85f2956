"""The harness tells what ranks did, and leaves no process behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.harness import run_ranks, run_to_the_end


def add_up(rank: int, world_size: int, start: int) -> int:
    value = torch.tensor(start + rank)
    dist.all_reduce(value)
    return int(value)


def misbehave(rank: int, world_size: int, notes: Path) -> None:
    """Rank 0 raises; rank 1 sleeps for ever and has started a process that does so, too."""
    if rank == 0:
        raise ValueError("no such luck")
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (notes / "pids").write_text(f"{os.getpid()} {sleeper.pid}")
    time.sleep(600)


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie that waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_ranks_return_what_they_computed_together(tmp_path: Path) -> None:
    assert run_ranks(add_up, 2, tmp_path, start=10) == [21, 21]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_ranks_that_raise_or_hang_are_told_and_killed(tmp_path: Path) -> None:
    raised, hung = run_to_the_end(misbehave, 2, tmp_path, timeout=15.0, notes=tmp_path)
    assert raised.exit_code == 1 and "ValueError: no such luck" in str(raised.error)
    assert hung.exit_code is None
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    deadline = time.monotonic() + 5
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, pids))

"""A function of a rank to what it returned or raised in N processes, which always end."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

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
    processes = [start(folder, rank) for rank in range(world_size)]
    try:
        deadline = time.monotonic() + timeout
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        codes = [process.poll() for process in processes]
        left = [outlived(p.pid) for p, code in zip(processes, codes) if code is not None]
        left += [False] * (world_size - len(left))
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return [outcome(folder, rank, codes[rank], left[rank]) for rank in range(world_size)]


def start(folder: Path, rank: int) -> subprocess.Popen[bytes]:
    """The process of a rank, at the head of a process group of its own."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / f"cache{rank}"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    with (folder / f"log{rank}").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder), str(rank)],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def outlived(group: int) -> bool:
    """Whether a process of the group still runs GRACE seconds after its head."""
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


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


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))

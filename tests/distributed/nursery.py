"""Processes that begin with torch and fxpipe imported: forked, not started anew.

Importing takes several seconds of each process. This one imports once, and then forks a rank for
each line `start RANK FOLDER` that it reads; `ended PID` and `reap PID` tell of it. The fork is made
before any thread, and what it becomes ends as any interpreter does, its exit handlers included.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Nursery:
    """The process that forks, started when first needed, and what it is asked."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def start(self, folder: Path, rank: int) -> int:
        """The number of a new process for a rank, at the head of a process group of its own."""
        return int(self.ask(f"start {rank} {folder}"))

    def has_ended(self, pid: int) -> bool:
        """Whether a rank has ended; it stays there to be reaped, and so keeps its number."""
        return self.ask(f"ended {pid}") == "True"

    def reap(self, pid: int) -> int:
        """The exit code of a rank that has ended or is about to."""
        return int(self.ask(f"reap {pid}"))

    def ask(self, command: str) -> str:
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            atexit.register(self.close)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        assert answer, f"the process that forks the ranks has died at {command!r}"
        return answer

    def close(self) -> None:
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


NURSERY = Nursery()


def serve() -> int:
    """Fork, and tell. Returns at the end of the input, or in a rank, with its exit code."""
    import torch._inductor.compile_fx  # noqa: F401 - what ranks would import one by one

    import fxpipe.backend  # noqa: F401

    assert threading.active_count() == 1, f"{threading.enumerate()} would not live in a fork"
    while line := sys.stdin.readline():
        command, subject, *rest = line.rstrip("\n").split(" ", 2)
        if command == "start":
            pid = os.fork()
            if pid == 0:
                return become_rank(Path(rest[0]), int(subject))
            print(pid, flush=True)
        elif command == "ended":
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            print(os.waitid(os.P_PID, int(subject), options) is not None, flush=True)
        else:
            _, status = os.waitpid(int(subject), 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
    return 0


def become_rank(folder: Path, rank: int) -> int:
    from tests.distributed.harness import main

    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / f"cache{rank}")
    return main(folder, rank)


if __name__ == "__main__":
    sys.exit(serve())

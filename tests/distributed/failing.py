"""What the ranks of the failure tests run: steps until one rank fails in a given way."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn

import fxpipe
from fxpipe.lowering.executor import Executor, Instruction
from tests.numerics.models import MLP, pipelined, seeded

STEPS = 6  # at most; the failure comes within them
OPERATIONS = 100  # that a rank makes within them, at least
PAUSE = 3.0  # seconds for which a stopped rank stays stopped after the others gave it up


class Told(NamedTuple):
    """How the error came to one rank."""

    kind: str
    message: str
    cause: str
    at: float  # seconds since the epoch
    step: int


class Weapon:
    """Ends or holds up this process in the call of number `at` that its executors make."""

    def __init__(self, how: str, at: int, seconds: float, notes: Path) -> None:
        self.how, self.left, self.seconds, self.notes = how, at, seconds, notes

    def count(self, name: str) -> None:
        self.left -= 1
        if self.left:
            return
        (self.notes / "event").write_text(f"{time.time()} {name}")
        match self.how:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(3)
            case "stop":
                wake_up = f"sleep {self.seconds + PAUSE}; kill -CONT {os.getpid()}"
                subprocess.Popen(["sh", "-c", wake_up])
                os.kill(os.getpid(), signal.SIGSTOP)
            case "sleep":
                time.sleep(self.seconds + PAUSE)
            case "raise":
                raise ValueError("no such luck")
            case "memory":
                raise torch.OutOfMemoryError("tried to allocate 2 EiB")


@contextlib.contextmanager
def each_call(act: Callable[[str], None]) -> Iterator[None]:
    """Call `act` with its name before every call that an executor makes."""
    usual = Executor.instruction

    def instruction(self: Executor, node: Any) -> Instruction | None:
        made = usual(self, node)
        if made is None:
            return None
        call, name = made.run, made.name

        def run(slots: Any) -> None:
            act(name)
            call(slots)

        return made._replace(run=run)

    Executor.instruction = instruction  # type: ignore[method-assign]
    try:
        yield
    finally:
        Executor.instruction = usual  # type: ignore[method-assign]


def step_until_told(
    rank: int, world_size: int, how: str, victim: int, at: int, limit: float, notes: Path
) -> Told:
    """What this rank was told when the victim failed in its call of number `at`."""
    weapon = Weapon(how, at if rank == victim else -1, limit, notes)
    x = torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6)
    step = pipelined(
        seeded(MLP), stages=4, schedule="interleaved-1f1b" if world_size == 2 else "1f1b",
        microbatches=3, timeout=limit,
    )  # fmt: skip
    with each_call(weapon.count):
        return until_told(lambda: step(x, x).backward())


def until_told(step: Callable[[], Any]) -> Told:
    for number in range(STEPS):
        try:
            step()
        except fxpipe.FxpipeError as error:
            cause = error.__cause__
            return Told(type(error).__name__, str(error), repr(cause), time.time(), number)
    return Told("none", "all steps went through", "", time.time(), STEPS)


class OneTable(nn.Module):
    """The second stage looks up ids; those of microbatch 2 are above the table's end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table, self.last = nn.Linear(6, 6), nn.Embedding(8, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        x = x + self.table(ids)
        return self.last(x).square().mean()


def look_up_too_high(rank: int, world_size: int) -> list[Told]:
    """Every rank gets the same batch; the rank of the second stage alone reads the ids."""
    step = pipelined(seeded(OneTable), stages=["table", "last"], microbatches=4)
    x, ids = torch.ones(8, 6, dtype=torch.float64), torch.arange(8)
    step(x, ids).backward()
    ids = torch.where(ids == 5, 99, ids)
    return [until_told(lambda: step(x, ids)), until_told(lambda: step(x, ids % 8))]


class RaisesOnRank1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        if dist.get_rank() == 1:
            raise ValueError("no such luck")
        return x.square().mean()


def raise_at_capture(rank: int, world_size: int) -> Told:
    step = pipelined(seeded(RaisesOnRank1), timeout=30.0)
    return until_told(lambda: step(torch.ones(8, 6, dtype=torch.float64)))


def come_late(rank: int, world_size: int, limit: float, first: int, notes: Path) -> Told:
    """Rank 1 comes to the step of number `first` when the others have given it up."""
    step = pipelined(seeded(MLP), stages=world_size, timeout=limit)
    x = torch.ones(8, 6, dtype=torch.float64)
    for _ in range(first):
        step(x, x).backward()
    deadline = time.monotonic() + 60
    while rank == 1 and len(list(notes.glob("told*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    told = until_told(lambda: step(x, x).backward())
    (notes / f"told{rank}").touch()
    return told


def stop_early(rank: int, world_size: int) -> Told | None:
    """Rank 1 makes one step less than the others."""
    step = pipelined(seeded(MLP), stages=world_size, timeout=30.0)
    x = torch.ones(8, 6, dtype=torch.float64)
    step(x, x).backward()
    return until_told(lambda: step(x, x).backward()) if rank != 1 else None


def fail_over_tcp(rank: int, world_size: int, port: int, victim: int, notes: Path) -> Told:
    """Rank `victim` is killed in a group that meets at a port, where rank 0 keeps its store."""
    dist.destroy_process_group()
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size)
    return step_until_told(rank, world_size, "kill", victim, 20, 30.0, notes)

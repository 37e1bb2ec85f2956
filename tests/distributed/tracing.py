"""What the ranks of the trace tests run: steps inside and outside of a block that records them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fxpipe
from fxpipe.lowering.clocks import measure_offsets
from fxpipe.lowering.executor import Executor
from fxpipe.lowering.metrics import last_plan
from fxpipe.program import Key
from tests.numerics.models import MLP, pipelined, seeded


class Seen(NamedTuple):
    """What one rank saw of itself."""

    schedule: str
    without_task: list[str]  # actions of the schedule for which there is nothing to do
    seconds: list[float]  # of the steps in the block, by its own clock
    recorded_after: int  # calls that note the time, once the block has ended
    metrics: dict[str, Any]
    losses: list[float]
    explained: float  # bytes that this rank sends, as predicted


def record(rank: int, world_size: int, out: Path, schedule: str, stages: int) -> Seen:
    x = torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6)
    step = pipelined(
        seeded(MLP), stages=stages, schedule=schedule, microbatches=4, lowering="eager"
    )
    losses = [train(step, x)]
    seconds = []
    with fxpipe.trace(out):
        for _ in range(3):
            start = time.perf_counter()
            losses.append(train(step, x))
            seconds.append(time.perf_counter() - start)
    found = fxpipe.metrics(step, tokens=8)
    sent = fxpipe.explain(step).ranks[rank].sent
    plan = last_plan(step)
    marked = marks(plan.executors)
    losses.append(train(step, x))
    made, tasks = plan.program.schedule, plan.program.tasks
    idle = [
        str(action)
        for each in range(world_size)
        for action in made.actions(each)
        if action.kind.is_compute and Key(action.stage, action.kind) not in tasks
    ]
    return Seen(str(made), idle, seconds, marked, found, losses, sent)


def train(step: Any, x: torch.Tensor) -> float:
    loss = step(x, x)
    loss.backward()
    return float(loss)


def marks(executors: tuple[Executor, ...]) -> int:
    names = [made.run.__qualname__ for executor in executors for made in executor.instructions]
    return sum("mark" in name for name in names)


def record_first(rank: int, world_size: int, out: Path) -> list[str]:
    """The option `trace`, for a model that returns logits: the step ends in its backward."""
    x = torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6)
    model = torch.nn.Sequential(*[torch.nn.Linear(6, 6, dtype=torch.float64) for _ in range(4)])
    step = pipelined(model, stages=2, microbatches=2, lowering="eager", trace=str(out))
    for _ in range(2):
        step(x).square().mean().backward()
    return sorted(path.name for path in out.iterdir())


def clocks(rank: int, world_size: int) -> list[int]:
    """The offsets as they would be measured between machines."""
    x = torch.ones(8, 6, dtype=torch.float64)
    pipelined(seeded(MLP), stages=world_size, lowering="eager")(x, x).backward()
    return measure_offsets(30.0)

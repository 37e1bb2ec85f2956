"""What the ranks of the tests run: each compares itself with eager and returns plain numbers."""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any, NamedTuple

import torch
import torch.nn as nn

import fxpipe
from tests.numerics.models import CASES, MLP, gradients_of, pipelined, seeded
from tests.numerics.test_refusals import Printing, TwoLosses

STEPS = 3


class Point(NamedTuple):
    """A place in the grid."""

    name: str
    stages: int
    microbatches: int
    schedule: str
    lowering: str = "eager"

    @property
    def options(self) -> dict[str, Any]:
        chosen = self._asdict()
        name = chosen.pop("name")
        return chosen | CASES[name].options


class Report(NamedTuple):
    """What one rank found at a point. Errors are relative to the norms of eager's values."""

    losses: list[float]
    loss_error: float
    gradient_error: float
    trained_error: float
    owned: list[str]
    with_gradient: list[str]
    digests: dict[str, str]  # owned parameter -> its bytes after the last step
    freed: int


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-300))


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train_at(point: Point, free: bool = False) -> Report:
    """Three steps beside eager's; with `free`, after the first the rank keeps only what it owns."""
    case = CASES[point.name]
    model, twin = case.model(), case.model()
    parts = point.microbatches if "loss_reduction" in case.options else 1
    step = pipelined(model, **point.options)
    losses: list[float] = []
    mine: Any = None
    theirs, freed = optimizer(twin.parameters()), 0
    for _ in range(STEPS):
        model.zero_grad()
        theirs.zero_grad()
        loss, expected = step(*case.inputs()), case.loss(twin, parts)
        loss.backward()
        expected.backward()
        if mine is None:
            owned = fxpipe.owned_parameters(model)
            mine = optimizer(owned.values())
            found, wanted = gradients_of(model), gradients_of(twin)
            loss_error = error(loss.detach(), expected.detach())
            gradient_error = max(error(found[name], wanted[name]) for name in owned)
            freed = fxpipe.free_unowned(model) if free else 0
        mine.step()
        theirs.step()
        losses.append(float(loss.detach()))
    plain = dict(twin.named_parameters())
    return Report(
        losses,
        loss_error,
        gradient_error,
        max(error(p.detach(), plain[name].detach()) for name, p in owned.items()),
        sorted(owned),
        sorted(name for name, p in model.named_parameters() if p.grad is not None),
        {name: digest(p) for name, p in owned.items()},
        freed,
    )


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(bytes(tensor.detach().flatten().tolist().__repr__(), "ascii")).hexdigest()


def train(rank: int, world_size: int, points: list[Point], freeing: list[Point]) -> list[Report]:
    reports = []
    for point in points + freeing:
        torch._dynamo.reset()
        reports.append(train_at(point, free=point in freeing))
    return reports


class Refusal(NamedTuple):
    kind: str
    message: str
    seconds: float


def failing_calls(rank: int) -> dict[str, Any]:
    """Calls that must fail on every rank; some are wrong on rank 1 alone."""
    x = torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6)
    first = rank == 0
    return {
        "wrong option": lambda: pipelined(seeded(MLP), stagess=2)(x, x),
        "wrong option on rank 1": lambda: pipelined(seeded(MLP), **({} if first else {"s": 2}))(
            x, x
        ),
        "graph break": lambda: pipelined(seeded(Printing))(x),
        "graph break on rank 1": lambda: (
            pipelined(seeded(MLP))(x, x) if first else pipelined(seeded(Printing))(x)
        ),
        "two losses": lambda: pipelined(seeded(TwoLosses))(x),
        "another batch": lambda: pipelined(seeded(MLP))(x[: 8 - rank], x[: 8 - rank]),
        "other values": lambda: pipelined(seeded(MLP))(x, x + rank),
        "no such module": lambda: pipelined(seeded(MLP), stages=["layers.7"])(x, x),
        "another model": lambda: pipelined(seeded(lambda: MLP(depth=4 + rank)))(x, x),
        "another schedule": lambda: pipelined(seeded(MLP), schedule="1f1b" if first else "gpipe")(
            x, x
        ),
        "more ranks than run": lambda: pipelined(seeded(MLP), ranks=3, stages=3)(x, x),
        "fewer stages than ranks": lambda: pipelined(seeded(MLP), stages=1)(x, x),
    }


def refuse(rank: int, world_size: int) -> tuple[dict[str, Refusal], Report]:
    """Every failing call in turn, then one that is right."""
    found = {}
    for name, call in failing_calls(rank).items():
        torch._dynamo.reset()
        start = time.monotonic()
        try:
            call()
            found[name] = Refusal("none", "the call went through", 0.0)
        except Exception as refusal:
            kind = type(refusal).__name__
            found[name] = Refusal(kind, str(refusal), time.monotonic() - start)
    torch._dynamo.reset()
    return found, train_at(Point("mlp", 2, 3, "1f1b"))


class Failing(nn.Module):
    """A row of ids above the table's end makes the embedding of the second stage raise."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table, self.last = nn.Linear(6, 6), nn.Embedding(4, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        return self.last(x + self.table(ids)).square().mean()


def fail_in_the_middle(rank: int, world_size: int, die: bool) -> Refusal:
    """Rank 1 raises, or dies, in the second of two steps; what rank 0 is told, and when."""
    step = pipelined(seeded(Failing), stages=["table"], timeout=5.0)
    x = torch.ones(8, 6, dtype=torch.float64)
    ids = torch.arange(8) % 4
    step(x, ids).backward()
    if rank == 1 and die:
        os._exit(3)
    start = time.monotonic()
    try:
        step(x, ids + 4)
    except fxpipe.FxpipeError as refusal:
        return Refusal(type(refusal).__name__, str(refusal), time.monotonic() - start)
    return Refusal("none", "the step went through", 0.0)

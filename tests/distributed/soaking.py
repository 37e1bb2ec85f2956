"""What the ranks of the soak tests run: many steps, with random delays, of one model or of two."""

from __future__ import annotations

import gc
import os
import random
import resource
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.distributed.failing import each_call
from tests.distributed.work import error
from tests.numerics.models import MLP, gradients_of, pipelined, seeded

DELAY = 0.004  # seconds at most, before some of the calls


class Soaked(NamedTuple):
    """What one rank saw."""

    losses: list[float]
    sizes: list[int]  # resident bytes, some times over the steps
    seconds: float


def resident() -> int:
    """The resident size of this process in bytes; where the system has no /proc, at its peak."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def soak(rank: int, world_size: int, steps: int, samples: int) -> Soaked:
    """Train with a delay before every eighth call or so, the garbage collector off."""
    draw = random.Random(rank)

    def delay(name: str) -> None:
        if draw.random() < 0.125:
            time.sleep(draw.random() * DELAY)

    model = seeded(MLP)
    step = pipelined(model, stages=world_size, microbatches=4, schedule="zb-h1")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6)
    losses, sizes = [], []
    with each_call(delay):
        step(x, x)
    gc.collect()
    gc.disable()
    start = time.monotonic()
    for number in range(steps):
        optimizer.zero_grad()
        loss = step(x, x)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if number % (steps // samples) == 0:
            sizes.append(resident())
    sizes.append(resident())
    gc.enable()
    return Soaked(losses, sizes, time.monotonic() - start)


class TwoInTurn(NamedTuple):
    """Errors of two models that step in turn, relative to eager's gradients, over all steps."""

    first: float
    second: float


def two_models(rank: int, world_size: int, steps: int) -> TwoInTurn:
    """Both run their forward, then the second its backward, then the first.

    They return no loss, so each stops between forward and backward, with receives posted.
    """
    models = [seeded(partial(Layers, depth)) for depth in (2, 4)]
    twins = [seeded(partial(Layers, depth)) for depth in (2, 4)]
    calls = [pipelined(m, stages=world_size, microbatches=k) for m, k in zip(models, (2, 4))]
    worst = [0.0, 0.0]
    for number in range(steps):
        x = torch.linspace(-1, 1 + number, 48, dtype=torch.float64).view(8, 6)
        for model in (*models, *twins):
            model.zero_grad()
        outputs = [call(x) for call in calls]
        for output in reversed(outputs):
            output.square().mean().backward()
        for i, (model, twin) in enumerate(zip(models, twins)):
            twin(x).square().mean().backward()
            expected = gradients_of(twin)
            found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            assert found
            worst[i] = max(worst[i], *(error(g, expected[name]) for name, g in found.items()))
    return TwoInTurn(*worst)


class Layers(MLP):
    """The layers alone; the loss is the caller's."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth=depth)

    def forward(self, x: torch.Tensor, *unused: Any) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

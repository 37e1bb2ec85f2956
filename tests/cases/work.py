"""What the ranks of the tests of cases run; each returns plain values, None where eager agrees."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from tests.cases.shared import normal
from tests.distributed.failing import each_call
from tests.distributed.work import error
from tests.numerics.models import MLP, pipelined, seeded

LIMIT = 1e-10


def compare(build: Callable[[], nn.Module], *batches: Sequence[Any], **options: Any) -> str | None:
    """How this rank differs from eager in loss and gradients of its parameters; None: it does not.

    Gradients add up over the batches.
    """
    torch._dynamo.reset()
    model = seeded(build)
    twin, step = copy.deepcopy(model), pipelined(model, **options)
    for batch in batches:
        loss, expected = step(*batch), twin(*batch)
        loss.backward()
        expected.backward()
        if error(loss.detach(), expected.detach()) > LIMIT:
            return f"loss {float(loss)}, expected {float(expected)}"
    wanted = dict(twin.named_parameters())
    for name, parameter in fxpipe.owned_parameters(model).items():
        if parameter.grad is None or error(parameter.grad, wanted[name].grad) > LIMIT:
            return f"gradient of {name}"
    return None


class Wide(nn.Module):
    """Messages of 4 MiB a row."""

    WIDTH = 1 << 19

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(self.WIDTH) / i) for i in (2, 3))

    def forward(self, x: Tensor) -> Tensor:
        with fxpipe.stage(0):
            x = torch.tanh(x * self.first)
        with fxpipe.stage(1):
            return (x * self.second).square().mean()


class Boundary(nn.Module):
    """Each stage hands on what the last one made, and the first stage's values of all kinds."""

    def __init__(self, stages: int = 4) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(4, 6), nn.ModuleList()
        for _ in range(stages):
            self.layers.append(nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        with fxpipe.stage(0):
            h = torch.tanh(self.layers[0](x))
            ids, mask = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long(), x > 0
            beside = [ids, ids * 2, mask, mask.to(torch.uint8), x.to(torch.bfloat16)]
            beside += [x.to(torch.float16), x.float(), torch.complex(x, -x)]
            turned, spread = h.view(-1, 2, 3).transpose(1, 2), x[:, :1].expand(-1, 6)
        for number in (1, 2, 3):
            with fxpipe.stage(number):
                h = torch.tanh(self.layers[number](h) + self.table(beside[0]))
                h = torch.where(beside[2], h, h * beside[3]) + turned.reshape(-1, 6) * spread
                for value in beside[4:]:
                    h = h + (value.real if value.is_complex() else value).to(h.dtype)
                h = h + beside[1].unsqueeze(1)
        with fxpipe.stage(3):
            return h.square().mean()


def with_delays(rank: int) -> str | None:
    draw = random.Random(rank)

    def delay(name: str) -> None:
        if draw.random() < 0.2:
            time.sleep(draw.random() * 0.01)

    x = normal(16, 6)
    with each_call(delay):
        return compare(
            MLP, *[(x, x.cos())] * 4,
            stages=4, microbatches=8, schedule="interleaved-1f1b", timeout=60.0,
        )  # fmt: skip


def refused(build: Callable[[], nn.Module], *batch: Any, **options: Any) -> str:
    torch._dynamo.reset()
    try:
        pipelined(seeded(build), **options)(*batch)
        return "none"
    except fxpipe.FxpipeError as raised:
        return f"{type(raised).__name__}: {raised}"


class Normed(nn.Module):
    """Batch norm of the batch itself, and of what comes of it in another stage."""

    def __init__(self, depth: int = 1) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm1d(6), nn.BatchNorm1d(6, momentum=0.3)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(depth))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.norm1(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return (self.norm2(x) - y).square().mean()


def difference_of_statistics(**options: Any) -> str | None:
    """How deferred statistics differ from a computation by hand after two steps."""
    torch._dynamo.reset()
    model = seeded(partial(Normed, depth=3))
    twin = copy.deepcopy(model)
    step = pipelined(model, batchnorm="defer", **options)
    for seed in range(2):
        x = 2 + 3 * normal(8, 6, seed=seed)
        step(x, x).backward()
        parts = [F.batch_norm(part, None, None, training=True) for part in x.tensor_split(3)]
        twin.norm1(x)
        hidden = torch.cat(parts)
        for layer in twin.layers:
            hidden = layer(hidden).tanh()
        twin.norm2(hidden)
    found = fxpipe.state_dict(step)
    for name, buffer in twin.named_buffers():
        if error(found[name].double(), buffer.double()) > LIMIT:
            return f"{name} is {found[name]}, expected {buffer}"
    return None


def lengths() -> list[tuple[Tensor, Tensor]]:
    """Batches whose sequences become longer, then shorter in a batch of as many elements."""
    sizes = [(4, 6, 6), (4, 8, 6), (8, 4, 6)]
    return [(normal(*size), normal(*size, seed=1)) for size in sizes]


def on_two_ranks(rank: int, world_size: int) -> dict[str, Any]:
    x, wide = normal(8, 6), normal(2, Wide.WIDTH)
    limit: dict[str, Any] = {"microbatches": 2, "timeout": 60.0}
    other = x if rank else x.float()
    return {
        "delays": with_delays(rank),
        "crossing": compare(Wide, [wide], stages=None, schedule="1f1b", **limit),
        "boundary": compare(
            Boundary, [x], [x.sin()], stages=None, schedule="interleaved-zb", **limit
        ),
        "lengths": compare(partial(MLP, depth=2), *lengths(), schedule="1f1b", **limit),
        "statistics": difference_of_statistics(stages=None, timeout=60.0),
        "dtype": refused(partial(MLP, depth=2), other, other, **limit),
    }

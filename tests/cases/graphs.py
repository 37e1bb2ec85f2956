"""Cases of steps that are captured, for a stand-in of CUDA's graphs and for a GPU."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.numerics.models import assert_close

Compile = Callable[..., Any]


def batch(device: str, rows: int = 6, width: int = 4, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator, dtype=torch.float64).to(device)


class Chain(nn.Module):
    """Two layers, and a loss."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2)).double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def gradients_add_up_over_steps(compile: Compile, device: str) -> None:
    """Four steps before the optimizer's: each adds a quarter, also in those that replay."""
    model = Chain().to(device)
    twin, step = copy.deepcopy(model), compile(model)
    for start in range(0, 12, 4):
        for seed in range(start, start + 4):
            x = batch(device, seed=seed)
            (step(x) / 4).backward()
            (twin(x) / 4).backward()
        for found, expected in zip(model.parameters(), twin.parameters()):
            assert found.grad is not None and expected.grad is not None
            assert_close(found.grad, expected.grad, 1e-10, "the sum of four steps")
        model.zero_grad()
        twin.zero_grad()


def outputs_of_several_calls_live_side_by_side(compile: Compile, device: str) -> None:
    """Microbatches in flight, a call on another call's output, and results of steps before."""

    class Layer(nn.Sequential):
        pass

    torch.manual_seed(0)
    model = Layer(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double().to(device)
    twin = copy.deepcopy(model)
    step = compile(model, stages=["2"], schedule="gpipe", microbatches=3)
    kept: list[tuple[Tensor, Tensor]] = []
    for seed in range(5):
        x = batch(device, seed=seed)
        found, expected = step(step(x)), twin(twin(x))
        found.sum().backward()
        expected.sum().backward()
        kept.append((found.detach(), expected.detach()))
        for a, b in zip(model.parameters(), twin.parameters()):
            assert a.grad is not None and b.grad is not None
            assert_close(a.grad, b.grad, 1e-10, "a call on another call's output")
    for output, right in kept:
        assert_close(output, right, 1e-10, "an output that was kept")


def weights_that_autocast_casts_are_new_in_each_replay(compile: Compile, device: str) -> None:
    model = Chain().float().to(device)
    twin, step = copy.deepcopy(model), compile(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, twin)]
    losses: list[list[float]] = [[], []]
    for seed in range(6):
        x = batch(device, seed=seed % 2).float()
        for run, optimizer, kept in zip((step, twin), optimizers, losses):
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = run(x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            kept.append(float(loss.detach()))
    assert all(abs(a - b) < 0.02 * abs(b) for a, b in zip(*losses)), losses
    assert losses[0][0] > 1.05 * losses[0][2] > 1.05 * losses[0][4]


def strides_may_change_from_call_to_call(compile: Compile, device: str) -> None:
    """The same sizes, cut from longer and from transposed buffers, in turn."""
    model = Chain().to(device)
    twin, step = copy.deepcopy(model), compile(model)
    for seed in range(12):
        long = batch(device, rows=8, width=6, seed=seed)
        layouts = (long, long.t().contiguous().t(), long[:, ::2].repeat(1, 2))
        x = layouts[seed % 3][:6, :4]
        assert_close(step(x), twin(x), 1e-12, "loss")


def kept_losses_keep_no_activation(compile: Compile, device: str) -> None:
    model = Chain().to(device)
    step = compile(model)
    losses, given = [], []
    for seed in range(5):
        x = batch(device, seed=seed)
        loss = step(x)
        loss.backward()
        losses.append(loss)
        given.append(weakref.ref(x))
        del x
    assert [reference() for reference in given[:-1]] == [None] * 4
    assert len({float(loss.detach()) for loss in losses}) == 5


CHECKS = {
    66: gradients_add_up_over_steps,
    67: outputs_of_several_calls_live_side_by_side,
    68: weights_that_autocast_casts_are_new_in_each_replay,
    69: strides_may_change_from_call_to_call,
    71: kept_losses_keep_no_activation,
}

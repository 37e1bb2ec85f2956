"""The gradients of a step reach parameters and inputs as eager's do, over calls and states."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from fxpipe.errors import FxpipeError, ModelError
from tests.numerics.models import (
    MLP,
    assert_close,
    assert_same_gradients,
    gradients_of,
    pipelined,
    seeded,
)


def batch(rows: int = 8, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, rows, 6, generator=generator, dtype=torch.float64)
    return x, y


@pytest.fixture
def model() -> nn.Module:
    return seeded(MLP)


@pytest.fixture
def twin(model: nn.Module) -> nn.Module:
    """The same weights, run by eager."""
    return copy.deepcopy(model)


def test_gradients_accumulate_over_calls(model: nn.Module, twin: nn.Module) -> None:
    step = pipelined(model)
    for seed in range(3):
        for run in (step, twin):
            (run(*batch(seed=seed)) / 3).backward()
    assert_same_gradients(model, twin)


def test_hooks_see_the_gradient_of_the_whole_batch_once(model: nn.Module, twin: nn.Module) -> None:
    step = pipelined(model)
    seen: dict[str, list[torch.Tensor]] = {"pipelined": [], "eager": []}
    for key, module in (("pipelined", model), ("eager", twin)):
        weight = module.layers[1].weight  # type: ignore[union-attr,index]
        weight.register_hook(lambda grad, key=key: seen[key].append(grad.clone()) or grad * 2)
        weight.register_post_accumulate_grad_hook(lambda p, key=key: seen[key].append(p.grad))
    step(*batch()).backward()
    twin(*batch()).backward()
    assert [len(found) for found in seen.values()] == [2, 2]
    for actual, expected in zip(seen["pipelined"], seen["eager"]):
        assert_close(actual, expected, 1e-10, "what a hook saw")
    assert_same_gradients(model, twin)


def test_a_scaled_loss_scales_the_gradients(model: nn.Module, twin: nn.Module) -> None:
    step = pipelined(model)
    (step(*batch()) * 1024).backward()
    (twin(*batch()) * 1024).backward()
    assert_same_gradients(model, twin)
    step(*batch()).backward(torch.tensor(-0.5, dtype=torch.float64))
    twin(*batch()).backward(torch.tensor(-0.5, dtype=torch.float64))
    assert_same_gradients(model, twin)


def test_a_loss_inside_of_a_larger_one_gets_its_share(model: nn.Module, twin: nn.Module) -> None:
    step = pipelined(model)
    for run, module in ((step, model), (twin, twin)):
        decay = sum(p.square().sum() for p in module.parameters())
        (run(*batch()).exp() + 0.1 * decay).backward()
    assert_same_gradients(model, twin)


def test_calls_without_gradients_change_nothing(model: nn.Module, twin: nn.Module) -> None:
    step = pipelined(model)
    with torch.no_grad():
        before = step(*batch())
    assert not before.requires_grad
    step(*batch()).backward()
    twin(*batch()).backward()
    with torch.no_grad():
        after = step(*batch(5, seed=1))
    assert_close(before, twin(*batch()).detach(), 1e-10, "loss under no_grad")
    assert_close(after, twin(*batch(5, seed=1)).detach(), 1e-10, "loss after training")
    assert_same_gradients(model, twin)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(self.first(x).relu(), 0.5, self.training)
        return F.mse_loss(self.second(hidden), y)


def test_eval_before_and_after_training_gives_the_plain_values() -> None:
    model = seeded(Dropping)
    twin, step = copy.deepcopy(model).eval(), pipelined(model)
    for _ in range(2):
        model.eval()
        with torch.inference_mode():
            assert_close(step(*batch()), twin(*batch()), 1e-10, "loss in eval")
        model.train()
        step(*batch()).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_eval_with_gradients_gives_them(model: nn.Module, twin: nn.Module) -> None:
    step = pipelined(model.eval())
    step(*batch()).backward()
    twin.eval()(*batch()).backward()
    assert_same_gradients(model, twin)


def test_two_forwards_may_come_before_the_backwards(model: nn.Module, twin: nn.Module) -> None:
    step = pipelined(model)
    first, second = step(*batch(seed=1)), step(*batch(5, seed=2))
    (2 * second).backward()
    after_one = gradients_of(model)
    first.backward()
    (2 * twin(*batch(5, seed=2))).backward()
    for name, gradient in gradients_of(twin).items():
        assert_close(after_one[name], gradient, 1e-10, name)
    twin(*batch(seed=1)).backward()
    assert_same_gradients(model, twin)


def test_one_backward_through_two_steps(model: nn.Module, twin: nn.Module) -> None:
    step = pipelined(model)
    (step(*batch(seed=1)) * step(*batch(seed=2))).backward()
    (twin(*batch(seed=1)) * twin(*batch(seed=2))).backward()
    assert_same_gradients(model, twin)


def test_weights_may_be_loaded_between_calls(model: nn.Module, twin: nn.Module) -> None:
    step = pipelined(model)
    step(*batch()).backward()
    other = {name: value + 0.1 for name, value in twin.state_dict().items()}
    for module in (model, twin):
        module.zero_grad()
        module.load_state_dict(other)
    step(*batch()).backward()
    twin(*batch()).backward()
    assert_same_gradients(model, twin)
    assert list(step.state_dict()) == [f"_orig_mod.{name}" for name in twin.state_dict()]


def test_a_model_may_be_compiled_in_place(model: nn.Module, twin: nn.Module) -> None:
    options = {"stages": 2, "microbatches": 3, "lowering": "eager"}
    model.compile(backend="fxpipe", options=options)
    loss, expected = model(*batch()), twin(*batch())
    loss.backward()
    expected.backward()
    assert_close(loss, expected, 1e-10, "loss")
    assert_same_gradients(model, twin)


def test_frozen_parameters_get_no_gradient(model: nn.Module, twin: nn.Module) -> None:
    for module in (model, twin):
        module.layers[0].requires_grad_(False)  # type: ignore[union-attr,index]
        module.layers[2].weight.requires_grad_(False)  # type: ignore[union-attr,index]
    pipelined(model, schedule="zb-h1")(*batch()).backward()
    twin(*batch()).backward()
    assert_same_gradients(model, twin)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_inputs_get_their_gradients(model: nn.Module, twin: nn.Module, schedule: str) -> None:
    step = pipelined(model, schedule=schedule)
    inputs = [tuple(value.requires_grad_() for value in batch()) for _ in range(2)]
    (step(*inputs[0]) / 2).backward()
    (twin(*inputs[1]) / 2).backward()
    for name, actual, expected in zip("xy", *inputs):
        assert_close(actual.grad, expected.grad, 1e-10, f"gradient of {name}")  # type: ignore[arg-type]
    assert_same_gradients(model, twin)


def test_gradients_go_on_to_what_made_the_inputs(model: nn.Module, twin: nn.Module) -> None:
    before = nn.Linear(6, 6, dtype=torch.float64)
    x, y = batch()
    pipelined(model)(before(x), y).backward()
    actual = gradients_of(before)
    before.zero_grad()
    twin(before(x), y).backward()
    for name, expected in gradients_of(before).items():
        assert_close(actual[name], expected, 1e-10, f"gradient of {name}")


def test_a_second_backward_is_refused(model: nn.Module) -> None:
    loss = pipelined(model)(*batch())
    loss.backward(retain_graph=True)
    with pytest.raises(ModelError, match="call the model again before the next backward"):
        loss.backward()


def test_a_double_backward_is_refused(model: nn.Module) -> None:
    loss = pipelined(model)(*batch())
    with pytest.raises(ModelError, match="create_graph=True.*the plain model"):
        loss.backward(create_graph=True)


def test_autograd_grad_gives_the_gradients(model: nn.Module, twin: nn.Module) -> None:
    actual = torch.autograd.grad(pipelined(model)(*batch()), list(model.parameters()))
    expected = torch.autograd.grad(twin(*batch()), list(twin.parameters()))
    for got, wanted in zip(actual, expected):
        assert_close(got, wanted, 1e-10, "gradient")


class Normed(nn.Module):
    """Batch norm in two stages, with momentum and with a cumulative mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm1, self.norm2 = nn.BatchNorm1d(6), nn.BatchNorm1d(6, momentum=0.3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.norm1(self.first(x)).tanh()
        return F.mse_loss(self.norm2(self.second(x)), y)


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_batch_norm_in_training_is_that_of_the_microbatches_in_turn(schedule: str) -> None:
    model = seeded(Normed)
    twin, step = copy.deepcopy(model), pipelined(model, schedule=schedule)
    for seed in range(2):
        x, y = batch(seed=seed)
        loss = step(x, y)
        loss.backward()
        parts = zip(x.tensor_split(3), y.tensor_split(3))
        expected: Any = sum(twin(*part) * (len(part[0]) / 8) for part in parts)
        expected.backward()
        assert_close(loss, expected, 1e-10, "loss")
    assert_same_gradients(model, twin)
    buffers = dict(model.named_buffers())
    for name, buffer in twin.named_buffers():
        assert_close(buffers[name].double(), buffer.double(), 1e-10, name)
    assert int(model.norm1.num_batches_tracked) == 6


class Watched(nn.Module):
    """Norms that watch a value: what they return is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 6), nn.Linear(6, 1)
        self.watch = nn.BatchNorm1d(6)
        self.watch_rows = nn.InstanceNorm1d(1, track_running_stats=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x).tanh()
        self.watch(h)
        self.watch_rows(h.unsqueeze(1))
        return self.head(h).square().mean()


@pytest.mark.parametrize("stages", [1, 2])
def test_statistics_of_a_norm_whose_value_is_not_used_are_kept(stages: int) -> None:
    torch.manual_seed(3)
    model = Watched()
    twin, x = copy.deepcopy(model), torch.randn(8, 5)
    pipelined(model, stages=stages, microbatches=1)(x).backward()
    twin(x).backward()
    for name, buffer in twin.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer)


def test_a_model_without_parameters_still_runs() -> None:
    class Plain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.sin() * x).cos()

    x = batch()[0]
    assert torch.equal(pipelined(Plain(), stages=1)(x), (x.sin() * x).cos())


def test_an_error_of_the_model_leaves_later_calls_intact(model: nn.Module, twin: nn.Module) -> None:
    step = pipelined(model)
    with pytest.raises((FxpipeError, RuntimeError)):
        step(batch()[0], batch(5)[1])
    step(*batch()).backward()
    twin(*batch()).backward()
    assert_same_gradients(model, twin)


class Counting(nn.Module):
    """A buffer that the model writes itself, beside a norm that keeps statistics of its own."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (self.norm(self.linear(x)) * self.calls).square().mean()


def test_a_buffer_that_every_microbatch_would_write_is_refused_with_its_line() -> None:
    x = torch.randn(4, 3)
    step = torch.compile(Counting(), backend="fxpipe", options={"microbatches": 2})
    with pytest.raises(ModelError, match=r"'calls' .* 2 microbatches.*self.calls \+= 1.*buffers"):
        step(x)


@pytest.mark.parametrize(("microbatches", "buffers", "calls"), [(1, None, 1), (2, "microbatch", 2)])
def test_a_buffer_is_written_once_or_as_often_as_was_allowed(
    microbatches: int, buffers: str | None, calls: int
) -> None:
    model = Counting()
    options = {"microbatches": microbatches, "buffers": buffers, "lowering": "eager"}
    torch.compile(model, backend="fxpipe", options=options)(torch.randn(4, 3))
    assert model.calls == calls


@pytest.mark.parametrize("scale", [1.0, 0.25, 1024.0])
def test_a_loss_scale_is_refused_where_it_comes_too_late_for_float16(scale: float) -> None:
    model = nn.Linear(3, 4)

    def loss_of(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return model(x).float().square().mean()

    step = torch.compile(loss_of, backend="fxpipe", options={"lowering": "eager"})
    loss = step(torch.randn(4, 3)) * scale
    if scale <= 1:
        loss.backward()
        assert model.weight.grad is not None
    else:
        with pytest.raises(ModelError, match="scaled by 1024 .* float16"):
            loss.backward()


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-0.1, 0.1)


@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_a_backward_of_ones_own_is_warned_of_where_the_loss_is_scaled(
    scale: float, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(3, 4)
    step = torch.compile(
        lambda x: Clipped.apply(model(x)).square().mean(),
        backend="fxpipe",
        options={"lowering": "eager"},
    )
    (step(torch.randn(4, 3)) * scale).backward()
    assert ("right if that backward is linear" in caplog.text) == (scale != 1)


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


@pytest.mark.parametrize("changed", ["x", "first.weight"])
def test_what_the_backward_reads_may_not_change_before_it(changed: str) -> None:
    model = seeded(Scores)
    x = torch.randn(6, 4, dtype=torch.float64)
    scores = pipelined(model)(x)
    with torch.no_grad():
        (x if changed == "x" else model.first.weight).mul_(2)
    with pytest.raises(ModelError, match=f"'{changed}' was changed in place between"):
        scores.sum().backward()


def test_two_calls_before_their_backwards_are_no_change() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)))
    plain = copy.deepcopy(model)
    first, second = (torch.randn(6, 4, dtype=torch.float64) for _ in range(2))
    step = pipelined(model, microbatches=1)
    (step(first).sum() * 2 + step(second).square().sum()).backward()
    (plain(first).sum() * 2 + plain(second).square().sum()).backward()
    assert_same_gradients(model, plain)

"""What may cross from stage to stage, and what a model may take and return."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import ModelError
from tests.cases.shared import check, check_step, normal, program_of
from tests.numerics.models import assert_close, assert_same_gradients, pipelined, seeded


class Rotary(nn.Module):
    """Positions made once, with a gradient and without, and used by every block."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.position, self.blocks = nn.Linear(6, 6), nn.ModuleList()
        for _ in range(depth):
            self.blocks.append(nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(6, device=x.device, dtype=x.dtype) * x.detach().mean(1, keepdim=True)
        cos, sin, learned = angles.cos(), angles.sin(), self.position(x)
        for block in self.blocks:
            x = torch.tanh(block(x * cos + x.roll(1, 1) * sin) + learned)
        return x.square().mean()


def test_case_8_values_of_the_first_stage_reach_every_stage() -> None:
    stages = ["blocks.1", "blocks.2", "blocks.3"]
    check(Rotary, [normal(8, 6)], stages=stages, schedule="interleaved-zb")


class MaskBeside(nn.Module):
    """Stage 0 hands on a mask without gradient beside the activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with fxpipe.stage(0):
            h, mask = torch.tanh(self.first(x)), (x > 0).to(x.dtype)
        with fxpipe.stage(1):
            return (self.second(h) * mask).square().mean()


def test_case_11_a_value_without_gradient_crosses_beside_an_activation() -> None:
    check(MaskBeside, [normal(8, 6)], stages=None, schedule="zb-h1")


def test_case_11_only_the_activation_sends_a_gradient_back() -> None:
    program = program_of(seeded(MaskBeside), normal(4, 6), stages=2, schedule="1f1b")
    back = [names for edge, names in program.edges.items() if edge.source > edge.target]
    assert [len(names) for names in back] == [1]


class SkippingItsHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(
        self, x: Tensor, skip_head: bool = False, power: int = 2, mask: Tensor | None = None
    ) -> Tensor:
        x = torch.tanh(self.body(x))
        if not skip_head:
            x = self.head(x)
        if mask is not None:
            x = x * mask
        return x.pow(power).mean()


def test_case_14_flags_numbers_and_none_may_change_between_calls() -> None:
    model = seeded(SkippingItsHead)
    twin, step = copy.deepcopy(model), pipelined(model, schedule="zb-h1")
    for kwargs in (
        {},
        {"skip_head": True},
        {"power": 3},
        {"skip_head": False, "power": 4, "mask": None},
        {"mask": normal(8, 1, seed=1)},
        {"skip_head": True},
    ):
        check_step(step, model, twin, normal(8, 6), **kwargs)


@dataclass
class Inputs:
    x: Tensor
    mask: Tensor | None
    extra: dict[str, Any]


class ModelOutput(OrderedDict[str, Any]):
    """A dict whose items are fields too and whose fields of None are left out."""

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value is not None:
                self[field.name] = value


@dataclass
class Output(ModelOutput):
    loss: Tensor | None = None
    logits: Tensor | None = None
    past: tuple[tuple[Tensor, Tensor], ...] | None = None


class InContainers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, batch: Inputs) -> Any:
        hidden = torch.tanh(self.first(batch.x)) * batch.extra["scale"]
        if batch.mask is not None:
            hidden = hidden * batch.mask
        return {"loss": self.second(hidden).square().mean(), "aux": None, "n": [batch.extra]}


def test_case_15_dataclasses_dicts_and_none_go_in_and_come_out() -> None:
    model = seeded(InContainers)
    twin, step = copy.deepcopy(model), pipelined(model)
    for mask in (None, normal(8, 6, seed=1), None):
        given = Inputs(normal(8, 6), mask, {"scale": normal(8, 1, seed=2), "name": "a"})
        found, expected = step(given), twin(given)
        assert list(found) == list(expected) and found["aux"] is None
        assert found["n"][0]["name"] == "a"
        found["loss"].backward()
        expected["loss"].backward()
        assert_same_gradients(model, twin)


class WithCache(nn.Module):
    """No loss; logits and a cache of keys and values, as a language model returns them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Output:
        key = torch.tanh(self.first(x))
        return Output(None, self.second(key), ((key, x * 2),))


def test_case_16_a_model_output_goes_into_the_users_loss() -> None:
    model = seeded(WithCache)
    twin, step = copy.deepcopy(model), pipelined(model)
    x, labels = normal(8, 6), torch.arange(8) % 3
    for run in (step, twin):
        found = run(x)
        assert type(found) is Output and found.loss is None and len(found.past) == 1
        assert list(found) == ["logits", "past"]
        F.cross_entropy(found.logits, labels).backward()
    assert_same_gradients(model, twin)


class Reshaped(nn.Module):
    """Returns its input under another shape, beside the loss."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.shape = shape

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        loss = self.second(self.first(x).tanh()).square().mean()
        return loss, x.view(self.shape)


@pytest.mark.parametrize("shape", [(-1, 2, 3), (-1,)])
def test_case_18_an_output_is_a_view_of_its_input(shape: tuple[int, ...]) -> None:
    x = normal(8, 6)
    model = seeded(lambda: Reshaped(*shape))
    twin, step = copy.deepcopy(model), pipelined(model)
    loss, view = step(x)
    assert torch.equal(view, x.view(shape))
    view.mul_(2)
    assert torch.equal(x, 2 * normal(8, 6))
    expected, _ = twin(normal(8, 6))
    loss.backward()
    expected.backward()
    assert_same_gradients(model, twin)


class Picking(nn.Module):
    """Returns parts of its arguments by other names; one of them is a value of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, whole: Tensor) -> dict[str, Tensor]:
        rows, width = x.shape
        parts = {"half": x[:, 1:].transpose(0, 1), "whole": whole.t().detach()}
        return {"out": self.layer(x), "last": x.reshape(rows * width)[-3:], "new": x * 2, **parts}


def test_case_18_views_of_several_arguments_stay_views_of_them() -> None:
    x, whole = normal(8, 6).requires_grad_(), normal(3, 2).requires_grad_()
    model = seeded(Picking)
    other, other_whole = (value.detach().clone().requires_grad_() for value in (x, whole))
    found, expected = pipelined(model)(x, whole), copy.deepcopy(model)(other, other_whole)
    for name, value in expected.items():
        assert torch.equal(found[name], value) or name == "out"
        assert found[name].requires_grad == value.requires_grad, name
        assert (found[name]._base is x) == (value._base is other), name
    assert found["whole"].data_ptr() == whole.data_ptr()
    for result in (found, expected):
        (result["out"].sum() + 3 * result["half"].sum() + result["last"].sum()).backward()
    assert_close(x.grad, other.grad, 1e-12, "gradient of x")


def test_case_18_a_model_that_returns_views_alone_runs() -> None:
    x = normal(8, 6)
    step = pipelined(Viewing(), stages=1)
    step(x).zero_()
    assert not x.any()


class Viewing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1)


class AddingToAView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        part = x[:, 1:]
        x.add_(1)
        return self.layer(x).square().mean(), part


def test_case_18_an_input_changed_under_a_returned_view_is_refused() -> None:
    with pytest.raises(ModelError, match="changes its batch 'x' in place.*work on a clone"):
        pipelined(seeded(AddingToAView))(normal(8, 6))


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return self.layer(x + y).square().mean()


def test_case_19_a_changed_input_is_refused_whether_inputs_overlap_or_not() -> None:
    step = pipelined(seeded(Doubling))
    base = normal(9, 6)
    for x, y in ((base.clone()[1:], base[:-1]), (base[1:], base[:-1])):
        before = x.clone()
        with pytest.raises(ModelError, match="changes its batch 'x' in place"):
            step(x, y)
        assert torch.equal(x, before)


# One model on two ranks with two stages each: what it sends is transposed, expanded, of integers,
# booleans and floating point of every width.


def test_case_20_what_is_not_contiguous_crosses_ranks(two_ranks: list[dict[str, Any]]) -> None:
    assert [found["boundary"] for found in two_ranks] == [None, None]


def test_case_23_integers_and_floats_of_one_size_do_not_mix(
    two_ranks: list[dict[str, Any]],
) -> None:
    assert [found["boundary"] for found in two_ranks] == [None, None]


def test_case_24_all_dtypes_cross_ranks(two_ranks: list[dict[str, Any]]) -> None:
    assert [found["boundary"] for found in two_ranks] == [None, None]

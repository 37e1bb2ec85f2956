"""Checkpointed regions: backward computes again what is inside, from what goes in."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fxpipe
from tests.cases.shared import check, normal, program_of
from tests.helpers import joint_text, task, task_text
from tests.numerics.models import assert_close, assert_same_gradients, pipelined, seeded

Function = Callable[..., Tensor]
SCHEDULES = ["1f1b", "zb-h1"]


class Checkpointed(nn.Module):
    """Functions of the layer and a value, one after another, each inside of a checkpoint or not."""

    def __init__(self, *functions: Function, recompute: bool = True, **options: Any) -> None:
        super().__init__()
        self.first, self.layer, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.functions, self.recompute, self.options = functions, recompute, options

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for function in self.functions:
            if self.recompute:
                x = checkpoint(function, self, x, use_reentrant=False, **self.options)
            else:
                x = function(self, x)
        return x.square().mean()


def twice_tanh(model: Checkpointed, x: Tensor) -> Tensor:
    return model.layer(x.tanh()).tanh()


def kept_by(*functions: Function, **options: Any) -> list[str]:
    """What the forward of a model in one stage keeps for its backward."""
    model = seeded(partial(Checkpointed, *functions, **options))
    program = program_of(model, normal(4, 6), stages=1)
    reads = task(program, "0B").inputs
    return [name for name in task(program, "0F").outputs if name in reads]


def test_a_region_keeps_what_goes_in_and_backward_computes_the_rest() -> None:
    model = seeded(partial(Checkpointed, lambda model, x: x.sin().tanh() * 2))
    before = program_of(model, normal(4, 6), stages=1, last="partial_gradients")
    after = program_of(model, normal(4, 6), stages=1, last="split_tasks")
    assert_expected_inline(
        joint_text(before),
        """\
graph joint(
    %first_weight: f64[6, 6],
    %first_bias: f64[6],
    %x_size_0: int(s49),
    %x: f64[2, 6],
    %share: f64[],
)
  %full_default: f64[] = full((), 1.0, dtype=f64)
  %t: f64[6, 6] = t(%first_weight)
  %addmm: f64[2, 6] = addmm(%first_bias, %x, %t)
  %sin: f64[2, 6] = sin(%addmm)
  %tanh: f64[2, 6] = tanh(%sin)
  %mul: f64[2, 6] = mul.Tensor(%tanh, 2)
  %pow_1: f64[2, 6] = pow.Tensor_Scalar(%mul, 2)
  %mean: f64[] = mean(%pow_1)
  %mul_1: f64[] = mul.Tensor(%mean, %share)
  %mul_2: f64[] = mul.Tensor(%full_default, %share)
  %expand: f64[2, 6] = expand(%mul_2, [2, 6])
  %div: f64[2, 6] = div.Scalar(%expand, 12)
  %pow_2: f64[2, 6] = pow.Tensor_Scalar(%mul, 1.0)
  %mul_3: f64[2, 6] = mul.Scalar(%pow_2, 2.0)
  %mul_4: f64[2, 6] = mul.Tensor(%div, %mul_3)
  %mul_5: f64[2, 6] = mul.Tensor(%mul_4, 2)
  %tanh_backward: f64[2, 6] = tanh_backward(%mul_5, %tanh)
  %cos: f64[2, 6] = cos(%addmm)
  %mul_6: f64[2, 6] = mul.Tensor(%tanh_backward, %cos)
  %t_1: f64[6, 2] = t(%mul_6)
  %mm: f64[6, 6] = mm(%t_1, %x)
  %t_2: f64[6, 6] = t(%mm)
  %sum_1: f64[1, 6] = sum.dim_IntList(%mul_6, [0], True)
  %view: f64[6] = view(%sum_1, [6])
  %t_3: f64[6, 6] = t(%t_2)
  return (%mul_1, %t_3, %view)""",
    )
    assert_expected_inline(
        task_text(after, "0F"),
        """\
graph 0F(%first_weight: f64[6, 6], %first_bias: f64[6], %x: f64[2, 6], %share: f64[])
  %t: f64[6, 6] = t(%first_weight)
  %addmm: f64[2, 6] = addmm(%first_bias, %x, %t)
  %sin: f64[2, 6] = sin(%addmm)
  %tanh: f64[2, 6] = tanh(%sin)
  %mul: f64[2, 6] = mul.Tensor(%tanh, 2)
  %pow_1: f64[2, 6] = pow.Tensor_Scalar(%mul, 2)
  %mean: f64[] = mean(%pow_1)
  %mul_1: f64[] = mul.Tensor(%mean, %share)
  return (%addmm, %mul, %mul_1)""",
    )
    assert_expected_inline(
        task_text(after, "0B"),
        """\
graph 0B(
    %x: f64[2, 6],
    %share: f64[],
    %addmm: f64[2, 6],
    %mul: f64[2, 6],
    %acc_first_weight: f64[6, 6],
    %acc_first_bias: f64[6],
)
  %full_default: f64[] = full((), 1.0, dtype=f64)
  %mul_2: f64[] = mul.Tensor(%full_default, %share)
  %expand: f64[2, 6] = expand(%mul_2, [2, 6])
  %div: f64[2, 6] = div.Scalar(%expand, 12)
  %pow_2: f64[2, 6] = pow.Tensor_Scalar(%mul, 1.0)
  %mul_3: f64[2, 6] = mul.Scalar(%pow_2, 2.0)
  %mul_4: f64[2, 6] = mul.Tensor(%div, %mul_3)
  %mul_5: f64[2, 6] = mul.Tensor(%mul_4, 2)
  %sin_again: f64[2, 6] = sin(%addmm)
  %tanh_again: f64[2, 6] = tanh(%sin_again)
  %tanh_backward: f64[2, 6] = tanh_backward(%mul_5, %tanh_again)
  %cos: f64[2, 6] = cos(%addmm)
  %mul_6: f64[2, 6] = mul.Tensor(%tanh_backward, %cos)
  %t_1: f64[6, 2] = t(%mul_6)
  %mm: f64[6, 6] = addmm_(%acc_first_weight, %t_1, %x)
  %sum_1: f64[1, 6] = sum.dim_IntList(%mul_6, [0], True)
  %view: f64[6] = view(%sum_1, [6])
  %add__tensor: f64[6] = add_.Tensor(%acc_first_bias, %view)
  return ()""",
    )


def test_a_value_that_the_next_operator_keeps_is_kept_and_not_computed_again() -> None:
    assert kept_by(twice_tanh, recompute=False) == ["tanh", "tanh_1"]
    assert kept_by(twice_tanh) == ["addmm", "tanh_1"]


def test_a_region_starts_from_what_the_one_before_it_gives() -> None:
    last = kept_by(twice_tanh, twice_tanh, lambda model, x: x.tanh() + 1)
    assert last == ["addmm", "tanh_1", "tanh_3", "add"]  # three beginnings, and the loss's own


def test_what_a_region_says_it_saves_is_kept() -> None:
    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator is torch.ops.aten.addmm.default:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def function(model: Checkpointed, x: Tensor) -> Tensor:
        return twice_tanh(model, x).sin()

    contexts = partial(create_selective_checkpoint_contexts, policy)
    assert kept_by(function) == ["addmm", "sin"]
    assert kept_by(function, context_fn=contexts) == ["addmm", "addmm_1", "sin"]


def dropping(model: Checkpointed, x: Tensor) -> Tensor:
    return F.dropout(model.layer(x).tanh(), 0.5) * torch.rand_like(x)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_region_drops_again_what_it_has_dropped(schedule: str) -> None:
    models = [seeded(partial(Checkpointed, dropping, twice_tanh, recompute=r)) for r in (0, 1)]
    losses = []
    for model in models:
        torch.manual_seed(3)
        torch._dynamo.reset()
        losses.append(pipelined(model, schedule=schedule)(normal(8, 6)))
        losses[-1].backward()
    assert torch.equal(*losses)
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters()):
        if one.grad is not None:
            assert torch.equal(one.grad, other.grad), name


def test_dropout_in_a_region_keeps_no_mask() -> None:
    assert len(kept_by(dropping, recompute=False)) > 4
    assert kept_by(dropping) == ["addmm", "mul"]


@pytest.mark.parametrize("setting", ["microbatch", "defer"])
def test_batch_norm_in_a_region_moves_its_buffers_once(setting: str) -> None:
    def normed(model: Checkpointed, x: Tensor) -> Tensor:
        return model.norm(model.layer(x).tanh()).tanh()

    models = [seeded(partial(Checkpointed, normed, recompute=r)) for r in (False, True)]
    for model in models:
        torch._dynamo.reset()
        step = pipelined(model, batchnorm=setting, schedule="zb-h1")
        for seed in range(2):
            step(normal(8, 6, seed=seed)).backward()
    assert_same_gradients(*models)
    for (name, one), other in zip(models[0].named_buffers(), models[1].buffers()):
        assert_close(one.double(), other.double(), 1e-12, name)
    assert kept_by(normed) == ["addmm", "tanh_1"]


class Counting(nn.Module):
    """A buffer that the region reads and the model changes after it."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.layer, self.recompute = nn.Linear(6, 6), recompute
        self.register_buffer("shift", torch.ones(6))

    def inner(self, x: Tensor) -> Tensor:
        return (self.layer(x) + self.shift[None]).tanh().sin()

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.inner, x, use_reentrant=False) if self.recompute else self.inner(x)
        self.shift.mul_(1.5)
        return x.square().mean()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_buffer_that_moves_on_is_read_as_the_forward_read_it(schedule: str) -> None:
    # Eager's own checkpoint would compute again with what the buffer has become.
    model, twin = (seeded(partial(Counting, recompute)) for recompute in (True, False))
    step = pipelined(model, stages=1, schedule=schedule, buffers="microbatch")
    loss = step(normal(9, 6))
    loss.backward()
    expected: Any = sum(twin(part) / 3 for part in normal(9, 6).split(3))
    expected.backward()
    assert_close(loss, expected, 1e-10, "loss")
    assert_same_gradients(model, twin)


class AcrossStages(nn.Module):
    """One region with the end of a stage in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))

    def inner(self, x: Tensor) -> Tensor:
        mask = torch.arange(6) > 2
        with fxpipe.stage(0):
            x = torch.where(mask, self.first(x).tanh(), 0.5 * x).sin()
        with fxpipe.stage(1):
            return torch.where(mask, self.second(x).tanh(), 0.5 * x).sin()

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.inner, x, use_reentrant=False)
        with fxpipe.stage(1):
            return self.third(x).square().mean()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_region_may_have_parts_in_several_stages(schedule: str) -> None:
    check(AcrossStages, [normal(8, 6)], stages=None, schedule=schedule)


def test_each_stage_computes_its_own_part_of_a_region_again() -> None:
    program = program_of(seeded(AcrossStages), normal(4, 6), schedule="1f1b")
    assert task(program, "0F").outputs == ("sin",)
    assert {str(edge): names for edge, names in program.edges.items()} == {
        "0 -> 1": ("sin",),
        "1 -> 0": ("add",),
    }
    assert set(task(program, "1F").outputs) <= {"addmm_2", "sin_1", "mul_2"}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_regions_in_a_row_have_the_plain_models_gradients(schedule: str) -> None:
    functions = (twice_tanh, lambda model, x: x + model.layer(x).sin(), twice_tanh)
    check(partial(Checkpointed, *functions), [normal(8, 6)], schedule=schedule)

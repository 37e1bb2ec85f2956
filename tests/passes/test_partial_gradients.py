"""A tied weight's gradient is taken apart into what each stage makes of it."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from fxpipe.passes import PartialGradients
from fxpipe.program import Program
from tests.helpers import (
    MLP,
    Captured,
    captured,
    joint_text,
    microbatches,
    mlp_batch,
    run_joint,
    run_until,
)


class Tied(nn.Module):
    """One weight in three stages, twice in the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False, dtype=torch.float64)
        self.second = nn.Linear(3, 3, bias=False, dtype=torch.float64)
        self.third = nn.Linear(3, 3, bias=False, dtype=torch.float64)
        self.second.weight = self.third.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh() + x @ self.first.weight
        return self.third(self.second(x).tanh()).sum()


@pytest.fixture(scope="module")
def tied() -> Captured:
    torch.manual_seed(0)
    return captured(Tied(), mlp_batch()[0], stages=["second", "third"])


def assigned(given: Captured) -> Program:
    return run_until(given.program(rows=2), "assign_stages")


def results_text(program: Program) -> str:
    assert program.joint is not None
    values = program.joint.graph.output_node().args[0]
    lines = (
        f"{value}: {result.kind} {result.target}, stage {result.stage}"
        for value, result in zip(values, program.results)
    )
    return "\n".join(lines)


def last_lines(program: Program, count: int) -> str:
    return "\n".join(joint_text(program).splitlines()[-count:])


def test_sum_over_stages_becomes_one_gradient_per_stage(tied: Captured) -> None:
    before = assigned(tied)
    after = PartialGradients()(before)
    assert_expected_inline(
        last_lines(before, 14),
        """\
  %t_9: f64[3, 3] = t(%t_1)
  %mm_7: f64[2, 3] = mm(%tanh_backward, %t_9)
  %t_10: f64[3, 3] = t(%t_8)
  %add_1: f64[3, 3] = add.Tensor(%t_6, %t_10)
  %t_11: f64[3, 2] = t(%x)
  %mm_8: f64[3, 3] = mm(%t_11, %mm_7)
  %add_2: f64[3, 3] = add.Tensor(%add_1, %mm_8)
  %tanh_backward_1: f64[2, 3] = tanh_backward(%mm_7, %tanh)
  %t_12: f64[3, 2] = t(%tanh_backward_1)
  %mm_9: f64[3, 3] = mm(%t_12, %x)
  %t_13: f64[3, 3] = t(%mm_9)
  %t_14: f64[3, 3] = t(%t_13)
  %add_3: f64[3, 3] = add.Tensor(%add_2, %t_14)
  return (%sum_1, %add_3)""",
    )
    assert_expected_inline(
        results_text(before),
        """\
sum_1: output 0, stage None
add_3: gradient first_weight, stage None""",
    )
    assert_expected_inline(
        last_lines(after, 14),
        """\
  %t_7: f64[3, 2] = t(%tanh_backward)
  %mm_6: f64[3, 3] = mm(%t_7, %add)
  %t_8: f64[3, 3] = t(%mm_6)
  %t_9: f64[3, 3] = t(%t_1)
  %mm_7: f64[2, 3] = mm(%tanh_backward, %t_9)
  %t_10: f64[3, 3] = t(%t_8)
  %t_11: f64[3, 2] = t(%x)
  %mm_8: f64[3, 3] = mm(%t_11, %mm_7)
  %tanh_backward_1: f64[2, 3] = tanh_backward(%mm_7, %tanh)
  %t_12: f64[3, 2] = t(%tanh_backward_1)
  %mm_9: f64[3, 3] = mm(%t_12, %x)
  %t_13: f64[3, 3] = t(%mm_9)
  %t_14: f64[3, 3] = t(%t_13)
  return (%sum_1, %t_6, %t_10, %mm_8, %t_14)""",
    )
    assert_expected_inline(
        results_text(after),
        """\
sum_1: output 0, stage None
t_6: gradient first_weight, stage 2
t_10: gradient first_weight, stage 1
mm_8: gradient first_weight, stage 0
t_14: gradient first_weight, stage 0""",
    )


def test_partial_gradients_add_up_to_the_gradient(tied: Captured) -> None:
    before = assigned(tied)
    after = PartialGradients()(before)
    assert [r.stage for r in after.results if r.kind == "gradient"] == [2, 1, 0, 0]
    for values in microbatches(tied, before, (2, 2)):
        loss, whole = run_joint(before, values)
        same_loss, *parts = run_joint(after, values)
        assert torch.equal(loss, same_loss)
        torch.testing.assert_close(sum(parts), whole, rtol=1e-14, atol=0)


def test_gradient_of_one_stage_stays_as_it_is() -> None:
    given = captured(MLP(3, 3, 3), *mlp_batch(), stages=2)
    before = assigned(given)
    after = PartialGradients()(before)
    assert joint_text(after) == joint_text(before)
    assert_expected_inline(
        results_text(after),
        """\
mul: output 0, stage None
t_8: gradient layers_0_weight, stage 0
view_1: gradient layers_0_bias, stage 0
t_5: gradient layers_1_weight, stage 1
view: gradient layers_1_bias, stage 1""",
    )


def test_use_twice_in_one_stage_stays_one_gradient(tied: Captured) -> None:
    alone = captured(Tied(), mlp_batch()[0], stages=1)
    after = PartialGradients()(assigned(alone))
    assert joint_text(after) == joint_text(assigned(alone))
    assert [result.stage for result in after.results if result.kind == "gradient"] == [0]


class Shifted(nn.Module):
    """An argument that needs a gradient and is added to the batch in two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, dtype=torch.float64)
        self.second = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(self.first(x).tanh()) * x).sum()


def test_gradient_of_a_batch_argument_is_not_taken_apart() -> None:
    x = mlp_batch()[0].requires_grad_()
    before = assigned(captured(Shifted(), x, stages=["second"]))
    after = PartialGradients()(before)
    results = [result for result in after.results if result.target == "x"]
    assert len(results) == 1
    values = next(microbatches(captured(Shifted(), x), before, (2, 2)))
    torch.testing.assert_close(run_joint(after, values), run_joint(before, values), rtol=0, atol=0)


class Unused(nn.Module):
    """A parameter whose gradient does not depend on anything: a constant of no stage."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=torch.float64)
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum() + self.scale.sum()


def test_constant_gradient_belongs_to_a_stage() -> None:
    after = PartialGradients()(assigned(captured(Unused(), mlp_batch()[0], stages=2)))
    stages = [r.stage for r in after.results if r.kind == "gradient"]
    assert None not in stages

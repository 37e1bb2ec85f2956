"""What computes nothing leaves the joint graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline

from fxpipe.passes import Normalize
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


@pytest.fixture(scope="module")
def mlp() -> Captured:
    return captured(MLP(3, 3, 3), *mlp_batch())


def test_detached_and_unused_values_go(mlp: Captured) -> None:
    before = run_until(mlp.program(rows=2), "trace_joint")
    after = Normalize()(before)
    gone = [line for line in joint_text(before).splitlines() if line not in joint_text(after)]
    assert_expected_inline(
        "\n".join(gone),
        """\
  %detach: f64[2, 3] = detach(%tanh)
  %detach_1: f64[2, 3] = detach(%detach)
  %tanh_backward: f64[2, 3] = tanh_backward(%mm, %detach_1)""",
    )
    assert_expected_inline(
        joint_text(after),
        """\
graph joint(
    %layers_0_weight: f64[3, 3],
    %layers_0_bias: f64[3],
    %x_size_0: int(s49),
    %x: f64[2, 3],
    %layers_1_weight: f64[3, 3],
    %layers_1_bias: f64[3],
    %y: f64[2, 3],
    %share: f64[],
)
  %full_default: f64[] = full((), 1.0, dtype=f64)
  %t: f64[3, 3] = t(%layers_0_weight)
  %addmm: f64[2, 3] = addmm(%layers_0_bias, %x, %t)
  %tanh: f64[2, 3] = tanh(%addmm)
  %t_1: f64[3, 3] = t(%layers_1_weight)
  %addmm_1: f64[2, 3] = addmm(%layers_1_bias, %tanh, %t_1)
  %mse_loss: f64[] = mse_loss(%addmm_1, %y)
  %mul: f64[] = mul.Tensor(%mse_loss, %share)
  %mul_1: f64[] = mul.Tensor(%full_default, %share)
  %mse_loss_backward: f64[2, 3] = mse_loss_backward(%mul_1, %addmm_1, %y, 1)
  %t_2: f64[3, 3] = t(%t_1)
  %mm: f64[2, 3] = mm(%mse_loss_backward, %t_2)
  %t_3: f64[3, 2] = t(%mse_loss_backward)
  %mm_1: f64[3, 3] = mm(%t_3, %tanh)
  %t_4: f64[3, 3] = t(%mm_1)
  %sum_1: f64[1, 3] = sum.dim_IntList(%mse_loss_backward, [0], True)
  %view: f64[3] = view(%sum_1, [3])
  %t_5: f64[3, 3] = t(%t_4)
  %tanh_backward: f64[2, 3] = tanh_backward(%mm, %tanh)
  %t_6: f64[3, 2] = t(%tanh_backward)
  %mm_2: f64[3, 3] = mm(%t_6, %x)
  %t_7: f64[3, 3] = t(%mm_2)
  %sum_2: f64[1, 3] = sum.dim_IntList(%tanh_backward, [0], True)
  %view_1: f64[3] = view(%sum_2, [3])
  %t_8: f64[3, 3] = t(%t_7)
  return (%mul, %t_8, %view_1, %t_5, %view)""",
    )


def test_numbers_stay_the_same(mlp: Captured) -> None:
    before = run_until(mlp.program(rows=2), "trace_joint")
    after = Normalize()(before)
    for values in microbatches(mlp, before, (2, 2)):
        results = run_joint(after, values)
        torch.testing.assert_close(results, run_joint(before, values), rtol=0, atol=0)


def test_graph_without_identities_stays_as_it_is(mlp: Captured) -> None:
    once = run_until(mlp.program(rows=2), "normalize")
    assert joint_text(Normalize()(once)) == joint_text(once)


def test_input_program_is_left_alone(mlp: Captured) -> None:
    before = run_until(mlp.program(rows=2), "trace_joint")
    text = joint_text(before)
    Normalize()(before)
    assert joint_text(before) == text


def test_random_draw_that_is_used_stays() -> None:
    class Dropped(MLP):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.dropout(super().forward(x, y) * torch.ones(3, dtype=x.dtype), 0.5).sum()

    given = captured(Dropped(3, 3), *mlp_batch(), loss_reduction="mean")
    after = run_until(given.program(rows=2), "normalize")
    assert "bernoulli" in joint_text(after) or "native_dropout" in joint_text(after)

"""BatchNorm's running statistics are merged over microbatches and moved once a step."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from fxpipe.program import Role
from tests.helpers import captured, joint_text, run_until


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, affine=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def test_running_statistics_move_from_where_the_step_found_them() -> None:
    given = captured(Norm(), torch.ones(8, 3, dtype=torch.float64))
    assert_expected_inline(
        joint_text(run_until(given.program(rows=4), "defer_batchnorm")),
        """\
graph joint(
    %x_size_0: int(s46),
    %x: f64[4, 3],
    %norm_num_batches_tracked: i64[],
    %norm_running_mean: f64[3],
    %norm_running_var: f64[3],
)
  %add: i64[] = add.Tensor(%norm_num_batches_tracked, 1)
  %_native_batch_norm_legit_functional: (f64[4, 3], f64[3], f64[3], f64[3], f64[3]) = _native_batch_norm_legit_functional(%x, None, None, %norm_running_mean, %norm_running_var, True, 0.1, 1e-05)
  %getitem: f64[4, 3] = %_native_batch_norm_legit_functional[0]
  %getitem_3: f64[3] = %_native_batch_norm_legit_functional[3]
  %getitem_4: f64[3] = %_native_batch_norm_legit_functional[4]
  return (%add, %getitem_3, %getitem_4, %getitem)""",  # noqa: E501
    )
    deferred = given.with_options(batchnorm="defer").program(rows=4)
    program = run_until(deferred, "defer_batchnorm")
    assert_expected_inline(
        joint_text(program),
        """\
graph joint(
    %x_size_0: int(s46),
    %x: f64[4, 3],
    %norm_num_batches_tracked: i64[],
    %norm_running_mean: f64[3],
    %norm_running_var: f64[3],
    %norm_num_batches_tracked_before: i64[],
    %norm_running_mean_before: f64[3],
    %norm_running_var_before: f64[3],
    %norm_count: f64[],
    %norm_mean: f64[3],
    %norm_squares: f64[3],
)
  %add: i64[] = add.Tensor(%norm_num_batches_tracked_before, 1)
  %_native_batch_norm_legit_functional: (f64[4, 3], f64[3], f64[3], f64[3], f64[3]) = _native_batch_norm_legit_functional(%x, None, None, %norm_running_mean, %norm_running_var, True, 1.0, 1e-05)
  %getitem: f64[4, 3] = %_native_batch_norm_legit_functional[0]
  %getitem_3: f64[3] = %_native_batch_norm_legit_functional[3]
  %getitem_4: f64[3] = %_native_batch_norm_legit_functional[4]
  %add_1: f64[] = add.Tensor(%norm_count, 4)
  %sub: f64[3] = sub.Tensor(%getitem_3, %norm_mean)
  %mul: f64[3] = mul.Tensor(%sub, 4)
  %div: f64[3] = div.Tensor(%mul, %add_1)
  %add_2: f64[3] = add.Tensor(%norm_mean, %div)
  %mul_1: f64[3] = mul.Tensor(%getitem_4, 3)
  %add_3: f64[3] = add.Tensor(%norm_squares, %mul_1)
  %pow_1: f64[3] = pow.Tensor_Scalar(%sub, 2)
  %mul_2: f64[] = mul.Tensor(%norm_count, 4)
  %div_1: f64[] = div.Tensor(%mul_2, %add_1)
  %mul_3: f64[3] = mul.Tensor(%pow_1, %div_1)
  %add_4: f64[3] = add.Tensor(%add_3, %mul_3)
  %mul_4: f64[3] = mul.Tensor(%norm_running_mean_before, 0.9)
  %mul_5: f64[3] = mul.Tensor(%add_2, 0.1)
  %add_5: f64[3] = add.Tensor(%mul_4, %mul_5)
  %mul_6: f64[3] = mul.Tensor(%norm_running_var_before, 0.9)
  %sub_1: f64[] = sub.Tensor(%add_1, 1)
  %div_2: f64[3] = div.Tensor(%add_4, %sub_1)
  %mul_7: f64[3] = mul.Tensor(%div_2, 0.1)
  %add_6: f64[3] = add.Tensor(%mul_6, %mul_7)
  return (%add, %add_5, %add_6, %getitem, %add_1, %add_2, %add_4)""",  # noqa: E501
    )
    added = [i for i in program.inputs if i.role in (Role.SNAPSHOT, Role.SCRATCH)]
    assert_expected_inline(
        "\n".join(f"{i.name}: {i.role.value} {i.source or '-'}" for i in added),
        """\
norm_num_batches_tracked_before: snapshot norm_num_batches_tracked
norm_running_mean_before: snapshot norm_running_mean
norm_running_var_before: snapshot norm_running_var
norm_count: scratch -
norm_mean: scratch -
norm_squares: scratch -""",
    )


def test_a_program_without_batch_norm_in_training_stays_as_it_is() -> None:
    given = captured(Norm().eval(), torch.ones(8, 3, dtype=torch.float64), batchnorm="defer")
    before = run_until(given.program(rows=4), "normalize")
    assert joint_text(run_until(given.program(rows=4), "defer_batchnorm")) == joint_text(before)


def test_instance_norm_which_repeats_its_buffers_is_left_alone() -> None:
    norm = nn.InstanceNorm1d(3, track_running_stats=True, dtype=torch.float64)
    given = captured(norm, torch.randn(4, 3, 5, dtype=torch.float64), batchnorm="defer")
    before = run_until(given.program(rows=2), "normalize")
    assert joint_text(run_until(given.program(rows=2), "defer_batchnorm")) == joint_text(before)

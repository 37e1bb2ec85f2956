"""What crosses stages is one block of memory without gaps."""

from __future__ import annotations

import pytest
import torch
import torch.fx as fx
from expecttest import assert_expected_inline
from torch import Tensor, nn

from fxpipe.passes import MakeCutsDense
from fxpipe.program import Program, is_dense
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


class Halves(nn.Module):
    """Half of a layer's columns, an expanded column and a transpose cross to the next stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4, dtype=torch.float64)
        self.second = nn.Linear(2, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        half, wide, turned = h[:, :2], h[:, 2:3].expand(-1, 2), h.t().unsqueeze(0)
        return (self.second(half) + wide).sum() + turned.sum()


@pytest.fixture(scope="module")
def halves() -> Captured:
    torch.manual_seed(0)
    return captured(Halves(), mlp_batch()[0], stages=["second"])


def scheduled(given: Captured) -> Program:
    return run_until(given.program(rows=2), "build_schedule")


def changed_lines(before: Program, after: Program) -> str:
    old = joint_text(before).splitlines()
    return "\n".join(line for line in joint_text(after).splitlines() if line not in old)


def crossing(program: Program) -> list[fx.Node]:
    """The values that one stage makes and another uses."""
    assert program.joint is not None
    staged = [n for n in program.joint.graph.nodes if "stage" in n.meta]
    return [
        n
        for n in staged
        if any(u.meta.get("stage", n.meta["stage"]) != n.meta["stage"] for u in n.users)
    ]


def test_gaps_and_overlaps_are_copied_before_they_cross(halves: Captured) -> None:
    before = scheduled(halves)
    after = MakeCutsDense()(before)
    assert_expected_inline(
        changed_lines(after, before),
        """\
  %addmm_1: f64[2, 2] = addmm(%second_bias, %slice_1, %t_2)
  %add: f64[2, 2] = add.Tensor(%addmm_1, %expand)
  %mm_1: f64[2, 2] = mm(%t_4, %slice_1)
  %squeeze: f64[4, 2] = squeeze.dim(%expand_1, 0)
  %sum_4: f64[2, 1] = sum.dim_IntList(%expand_2, [1], True)""",
    )
    assert_expected_inline(
        changed_lines(before, after),
        """\
  %clone_default: f64[2, 2] = clone(%slice_1, memory_format=contiguous_format)
  %clone_default_1: f64[2, 2] = clone(%expand, memory_format=contiguous_format)
  %addmm_1: f64[2, 2] = addmm(%second_bias, %clone_default, %t_2)
  %add: f64[2, 2] = add.Tensor(%addmm_1, %clone_default_1)
  %clone_default_2: f64[1, 4, 2] = clone(%expand_1, memory_format=contiguous_format)
  %clone_default_3: f64[2, 2] = clone(%expand_2, memory_format=contiguous_format)
  %mm_1: f64[2, 2] = mm(%t_4, %clone_default)
  %squeeze: f64[4, 2] = squeeze.dim(%clone_default_2, 0)
  %sum_4: f64[2, 1] = sum.dim_IntList(%clone_default_3, [1], True)""",
    )
    assert [n.name for n in crossing(before) if not is_dense(n.meta["val"])] == [
        "slice_1",
        "expand",
        "expand_1",
        "expand_2",
    ]
    assert all(is_dense(node.meta["val"]) for node in crossing(after))


def test_a_copy_has_the_stage_of_what_it_copies(halves: Captured) -> None:
    after = MakeCutsDense()(scheduled(halves))
    assert after.joint is not None
    for node in after.joint.graph.find_nodes(
        op="call_function", target=torch.ops.aten.clone.default
    ):
        if "memory_format" in node.kwargs:
            assert node.meta["stage"] == node.args[0].meta["stage"]
            assert all(user.meta["stage"] != node.meta["stage"] for user in node.users)


def test_numbers_stay_the_same(halves: Captured) -> None:
    before = scheduled(halves)
    after = MakeCutsDense()(before)
    for values in microbatches(halves, before, (2, 2)):
        torch.testing.assert_close(
            run_joint(after, values), run_joint(before, values), rtol=0, atol=0
        )


def test_dense_cuts_stay_as_they_are() -> None:
    before = scheduled(captured(MLP(3, 3, 3), *mlp_batch(), stages=2))
    assert joint_text(MakeCutsDense()(before)) == joint_text(before)


@pytest.mark.parametrize(
    "value, dense",
    [
        (torch.empty(2, 3), True),
        (torch.empty(2, 3).t(), True),
        (torch.empty(4, 2, 3).permute(2, 0, 1), True),
        (torch.empty(2, 1, 3).expand(2, 1, 3), True),
        (torch.empty(()), True),
        (torch.empty(2, 1).expand(2, 3), False),
        (torch.empty(2, 4)[:, :2], False),
        (torch.empty(5)[::2], False),
    ],
)
def test_dense_is_each_element_once_without_gaps(value: Tensor, dense: bool) -> None:
    assert is_dense(value) == dense

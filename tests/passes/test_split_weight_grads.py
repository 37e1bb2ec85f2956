"""Backward nodes are of I, on the way to what another stage awaits, or of W."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from expecttest import assert_expected_inline

from fxpipe.flops import flops
from fxpipe.passes import SplitWeightGrads
from fxpipe.program import Program
from fxpipe.schedule import Kind
from tests.helpers import (
    GPT,
    MLP,
    Captured,
    ConvNet,
    captured,
    convnet_batch,
    gpt_batch,
    joint_text,
    microbatches,
    mlp_batch,
    run_joint,
    run_until,
    staged_text,
)


@pytest.fixture(scope="module")
def mlp() -> Captured:
    return captured(MLP(3, 3, 3), *mlp_batch(), stages=2, schedule="zb-h1")


@pytest.fixture(scope="module")
def convnet() -> Captured:
    model = ConvNet().eval()
    return captured(model, *convnet_batch(), stages=["second"], schedule="zb-h1")


@pytest.fixture(scope="module")
def gpt() -> Captured:
    return captured(GPT(), *gpt_batch(), stages=2, schedule="zb-h1")


def dense(given: Captured) -> Program:
    return run_until(given.program(rows=2, ranks=2), "make_cuts_dense")


def test_backward_is_marked_i_on_the_way_to_other_stages(mlp: Captured) -> None:
    before = dense(mlp)
    after = SplitWeightGrads()(before)
    assert "I" not in staged_text(before, "kind")
    assert_expected_inline(
        staged_text(after, "stage", "kind"),
        """\
full_default: - -
t: 0 F
addmm: 0 F
tanh: 0 F
t_1: 1 F
addmm_1: 1 F
mse_loss: 1 F
mul: 1 F
mul_1: 1 I
mse_loss_backward: 1 I
t_2: 1 I
mm: 1 I
t_3: 1 W
mm_1: 1 W
t_4: 1 W
sum_1: 1 W
view: 1 W
t_5: 1 W
tanh_backward: 0 W
t_6: 0 W
mm_2: 0 W
t_7: 0 W
sum_2: 0 W
view_1: 0 W
t_8: 0 W""",
    )


def test_numbers_stay_the_same(mlp: Captured, gpt: Captured) -> None:
    for given in (mlp, gpt):
        before = dense(given)
        after = SplitWeightGrads()(before)
        for values in microbatches(given, before, (2, 2)):
            torch.testing.assert_close(
                run_joint(after, values), run_joint(before, values), rtol=0, atol=0
            )


def test_convolution_backward_becomes_one_for_input_and_one_for_weights(
    convnet: Captured,
) -> None:
    before = dense(convnet)
    after = SplitWeightGrads()(before)
    assert_expected_inline(
        lines_with(before, "convolution_backward"),
        """\
convolution_backward: stage 1, mask [True, True, True], None
convolution_backward_1: stage 0, mask [False, True, True], None""",
    )
    assert_expected_inline(
        lines_with(after, "convolution_backward"),
        """\
convolution_backward_default_1: stage 1, mask [True, False, False], I
convolution_backward_default: stage 1, mask [False, True, True], W
convolution_backward_1: stage 0, mask [False, True, True], W""",
    )
    for values in microbatches(convnet, before, (2, 2)):
        results = run_joint(after, values)
        torch.testing.assert_close(results, run_joint(before, values), rtol=1e-13, atol=1e-15)


def lines_with(program: Program, word: str) -> str:
    """The operator's output mask: which of input, weight and bias it computes, and its kind."""
    assert program.joint is not None
    lines = [
        f"{node.name}: stage {node.meta['stage']}, mask {node.args[-1]}, {node.meta.get('kind')}"
        for node in program.joint.graph.nodes
        if node.name.startswith(word)
    ]
    return "\n".join(lines)


def test_convolution_backward_stays_whole_where_no_task_is_split() -> None:
    whole = captured(ConvNet().eval(), *convnet_batch(), stages=["second"], schedule="1f1b")
    before = dense(whole)
    assert joint_text(SplitWeightGrads()(before)) == joint_text(before)


def test_stage_that_no_other_waits_for_has_w_alone(mlp: Captured) -> None:
    after = SplitWeightGrads()(dense(mlp))
    assert after.joint is not None
    kinds = {n.meta.get("kind") for n in after.joint.graph.nodes if n.meta.get("stage") == 0}
    assert kinds == {Kind.F, Kind.W}


def test_gradient_of_an_argument_is_i_down_to_the_first_stage() -> None:
    x, y = mlp_batch()
    given = captured(MLP(3, 3, 3), x.requires_grad_(), y, stages=2, schedule="zb-h1")
    after = SplitWeightGrads()(dense(given))
    assert after.joint is not None
    results = after.joint.graph.output_node().args[0]
    (gradient,) = (v for v, r in zip(results, after.results) if r.target == "x")
    assert (gradient.meta["stage"], gradient.meta["kind"]) == (0, Kind.I)


def test_nothing_to_split_without_a_backward() -> None:
    with torch.no_grad():
        given = captured(MLP(3, 3, 3), *mlp_batch(), stages=2, schedule="zb-h1")
    before = dense(given)
    after = SplitWeightGrads()(before)
    assert joint_text(after) == joint_text(before)
    assert set(staged_text(after, "kind").split()[1::2]) <= {"F", "-"}


@pytest.mark.parametrize("name", ["mlp", "gpt", "convnet"])
def test_every_staged_backward_node_has_one_kind_and_w_feeds_no_i(
    name: str, request: pytest.FixtureRequest
) -> None:
    after = SplitWeightGrads()(dense(request.getfixturevalue(name)))
    assert after.joint is not None
    for node in after.joint.graph.nodes:
        if "stage" not in node.meta:
            continue
        expected = {Kind.I, Kind.W} if node.meta.get("backward") else {Kind.F}
        assert node.meta["kind"] in expected
        if node.meta["kind"] is Kind.I:
            assert all(n.meta.get("kind") is not Kind.W for n in node.all_input_nodes)


def test_half_of_the_backwards_work_is_w(gpt: Captured) -> None:
    """A linear layer's two gradients cost the same; attention's products are all of I."""
    after = SplitWeightGrads()(dense(gpt))
    assert after.joint is not None
    work: Counter[Kind] = Counter()
    for node in after.joint.graph.nodes:
        if node.meta.get("stage") == 1:
            work[node.meta["kind"]] += flops(node)
    assert 0.3 * work[Kind.F] < work[Kind.W] < work[Kind.I]
    assert work[Kind.W] + work[Kind.I] == 2 * work[Kind.F]


def test_input_program_is_left_alone(convnet: Captured) -> None:
    before = dense(convnet)
    text, marks = joint_text(before), staged_text(before, "kind")
    SplitWeightGrads()(before)
    assert (joint_text(before), staged_text(before, "kind")) == (text, marks)

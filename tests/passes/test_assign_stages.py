"""Every node of the joint graph gets the stage of its module, its annotation or its cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import ModelError, OptionError
from fxpipe.flops import cost
from fxpipe.options import Options
from fxpipe.passes import AssignStages
from fxpipe.passes._graph import is_random
from fxpipe.program import Program
from tests.helpers import (
    GPT,
    MLP,
    Captured,
    captured,
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
    return captured(MLP(3, 3, 3), *mlp_batch())


@pytest.fixture(scope="module")
def normal(mlp: Captured) -> Program:
    return run_until(mlp.program(rows=2), "normalize")


@pytest.fixture(scope="module")
def gpt() -> Program:
    return run_until(captured(GPT(3), *gpt_batch()).program(rows=2), "normalize")


def with_stages(program: Program, stages: object) -> Program:
    return replace(program, options=Options.parse({"stages": stages}))


def test_backward_nodes_follow_their_forward(normal: Program) -> None:
    after = AssignStages()(with_stages(normal, 2))
    assert all(line.endswith(": -") for line in staged_text(normal, "stage").splitlines())
    assert_expected_inline(
        staged_text(after, "stage"),
        """\
full_default: -
t: 0
addmm: 0
tanh: 0
t_1: 1
addmm_1: 1
mse_loss: 1
mul: 1
mul_1: 1
mse_loss_backward: 1
t_2: 1
mm: 1
t_3: 1
mm_1: 1
t_4: 1
sum_1: 1
view: 1
t_5: 1
tanh_backward: 0
t_6: 0
mm_2: 0
t_7: 0
sum_2: 0
view_1: 0
t_8: 0""",
    )
    assert after.num_stages == 2


def test_numbers_and_graph_stay_the_same(mlp: Captured, normal: Program) -> None:
    after = AssignStages()(with_stages(normal, 2))
    assert joint_text(after) == joint_text(normal)
    values = next(microbatches(mlp, normal, (2, 2)))
    torch.testing.assert_close(run_joint(after, values), run_joint(normal, values), rtol=0, atol=0)


def test_one_stage_holds_everything(normal: Program) -> None:
    after = AssignStages()(with_stages(normal, 1))
    stages = {line.rpartition(" ")[2] for line in staged_text(after, "stage").splitlines()}
    assert stages <= {"0", "-"}


def test_input_program_keeps_its_stages(normal: Program) -> None:
    once = AssignStages()(with_stages(normal, 2))
    text = staged_text(once, "stage")
    AssignStages()(with_stages(once, 1))
    assert staged_text(once, "stage") == text


def test_paths_are_where_stages_begin(gpt: Program) -> None:
    after = AssignStages()(with_stages(gpt, ["blocks.1", "blocks.2.up"]))
    assert after.num_stages == 3
    assert after.joint is not None
    first: dict[int, str] = {}
    for node in after.joint.graph.nodes:
        if "stage" in node.meta and not node.meta.get("backward"):
            paths = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
            first.setdefault(node.meta["stage"], paths[-1] if paths else "")
    assert "blocks" not in first[0]
    assert "1" in first[1] and "norm" in first[1]
    assert "2" in first[2] and "up" in first[2]


def test_balanced_stages_are_cut_at_modules_and_none_is_too_costly(gpt: Program) -> None:
    after = AssignStages()(with_stages(gpt, 3))
    assert after.joint is not None
    costs = [0, 0, 0]
    for node in after.joint.graph.nodes:
        if "stage" in node.meta and not node.meta.get("backward"):
            costs[node.meta["stage"]] += cost(node)
    assert max(costs) < 1.5 * sum(costs) / 3


@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_values_flow_to_higher_stages_and_gradients_to_lower(gpt: Program, stages: int) -> None:
    after = AssignStages()(with_stages(gpt, stages))
    assert after.num_stages == stages
    assert after.joint is not None
    for node in after.joint.graph.nodes:
        if "stage" not in node.meta:
            continue
        for source in node.all_input_nodes:
            if "stage" not in source.meta:
                continue
            if node.meta.get("backward") and source.meta.get("backward"):
                assert node.meta["stage"] <= source.meta["stage"], (node, source)
            elif not node.meta.get("backward"):
                assert node.meta["stage"] >= source.meta["stage"], (node, source)


class Masked(nn.Module):
    """A mask that every layer uses, made of arguments alone, and one that is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, dtype=torch.float64)
        self.second = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        keep = x > 0
        h = F.dropout(self.first(x) * keep, 0.5)
        return (self.second(h) * keep).sum()


def test_masks_have_no_stage_and_random_draws_have_one() -> None:
    given = captured(Masked(), mlp_batch()[0], stages=["second"])
    after = AssignStages()(run_until(given.program(rows=2), "normalize"))
    assert after.joint is not None
    by_name = {node.name: node for node in after.joint.graph.nodes}
    assert "stage" not in by_name["gt"].meta
    drawn = [node for node in after.joint.graph.nodes if is_random(node)]
    assert [node.meta["stage"] for node in drawn] == [0]


class Annotated(nn.Module):
    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.numbers = numbers
        self.layers = nn.ModuleList(nn.Linear(3, 3, dtype=torch.float64) for _ in numbers)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in zip(self.numbers, self.layers):
            with fxpipe.stage(number):
                x = layer(x)
            x = torch.tanh(x)
        return x.sum()


def annotated(*numbers: int, stages: object = None) -> Program:
    given = captured(Annotated(*numbers), mlp_batch()[0], stages=stages)
    return AssignStages()(run_until(given.program(rows=2), "normalize"))


def test_annotations_make_the_stages() -> None:
    after = annotated(0, 1, 1)
    assert after.num_stages == 2
    forward = [line for line in staged_text(after, "stage").splitlines() if "backward" not in line]
    assert_expected_inline(
        "\n".join(forward[:9]),
        """\
full_default: -
t: 0
addmm: 0
tanh: 0
t_1: 1
addmm_1: 1
tanh_1: 1
t_2: 1
addmm_2: 1""",
    )


def test_annotations_that_leave_out_a_stage_are_refused() -> None:
    with pytest.raises(ModelError, match=r"annotates stages \[0, 2\] and leaves out \[1\]"):
        annotated(0, 2)


def test_annotations_against_the_flow_of_data_are_refused() -> None:
    expected = r"stage 0 uses a value of stage 1, at .*test_assign_stages.py:\d+"
    with pytest.raises(ModelError, match=expected):
        annotated(1, 0)


def test_annotations_beside_another_number_of_stages_are_refused() -> None:
    with pytest.raises(OptionError, match=r"stages=3 and the model's .* make 2 stages"):
        annotated(0, 1, stages=3)


def test_path_of_no_module_is_refused_with_the_nearest(gpt: Program) -> None:
    with pytest.raises(OptionError, match=r"'blocks.7', .* did you mean 'blocks.\d'\?"):
        AssignStages()(with_stages(gpt, ["blocks.7"]))


def test_paths_against_the_order_of_the_calls_are_refused(gpt: Program) -> None:
    with pytest.raises(OptionError, match="names 'blocks.1' before 'blocks.0', which the model"):
        AssignStages()(with_stages(gpt, ["blocks.1", "blocks.0"]))


def test_two_stages_at_one_place_are_refused(gpt: Program) -> None:
    with pytest.raises(OptionError, match="begins two stages at the same place"):
        AssignStages()(with_stages(gpt, ["blocks.1", "blocks.1.norm"]))


def test_more_stages_than_operations_are_refused(normal: Program) -> None:
    with pytest.raises(OptionError, match=r"stages=40, but the model has only \d+ operations"):
        AssignStages()(with_stages(normal, 40))

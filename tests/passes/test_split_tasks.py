"""The joint graph becomes one graph per stage and kind, which see nothing but their inputs."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from fxpipe.flops import flops
from fxpipe.passes._graph import aten, is_view
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
    microbatches,
    mlp_batch,
    run_joint,
    run_tasks,
    run_until,
    task,
    task_text,
)


def mlp(schedule: str, **options: object) -> Captured:
    return captured(MLP(3, 3, 3), *mlp_batch(), stages=2, schedule=schedule, **options)


@pytest.fixture(scope="module")
def split_mlp() -> Captured:
    return mlp("zb-h1")


def split(given: Captured, ranks: int | None = 2) -> Program:
    return run_until(given.program(rows=2, ranks=ranks), "split_tasks")


def test_tasks_of_the_split_backward(split_mlp: Captured) -> None:
    after = split(split_mlp)
    assert [str(key) for key in after.tasks] == ["0F", "0W", "1F", "1I", "1W"]
    assert_expected_inline(
        task_text(after, "1F"),
        """\
graph 1F(
    %layers_1_weight: f64[3, 3],
    %layers_1_bias: f64[3],
    %y: f64[2, 3],
    %share: f64[],
    %tanh: f64[2, 3],
)
  %t_1: f64[3, 3] = t(%layers_1_weight)
  %addmm_1: f64[2, 3] = addmm(%layers_1_bias, %tanh, %t_1)
  %mse_loss: f64[] = mse_loss(%addmm_1, %y)
  %mul: f64[] = mul.Tensor(%mse_loss, %share)
  return (%addmm_1, %mul)""",
    )
    assert_expected_inline(
        task_text(after, "1I"),
        """\
graph 1I(%layers_1_weight: f64[3, 3], %y: f64[2, 3], %share: f64[], %addmm_1: f64[2, 3])
  %full_default: f64[] = full((), 1.0, dtype=f64)
  %t_1: f64[3, 3] = t(%layers_1_weight)
  %mul_1: f64[] = mul.Tensor(%full_default, %share)
  %mse_loss_backward: f64[2, 3] = mse_loss_backward(%mul_1, %addmm_1, %y, 1)
  %t_2: f64[3, 3] = t(%t_1)
  %mm: f64[2, 3] = mm(%mse_loss_backward, %t_2)
  return (%mse_loss_backward, %mm)""",
    )
    assert_expected_inline(
        task_text(after, "1W"),
        """\
graph 1W(
    %tanh: f64[2, 3],
    %mse_loss_backward: f64[2, 3],
    %acc_layers_1_weight: f64[3, 3],
    %acc_layers_1_bias: f64[3],
)
  %t_3: f64[3, 2] = t(%mse_loss_backward)
  %mm_1: f64[3, 3] = addmm_(%acc_layers_1_weight, %t_3, %tanh)
  %sum_1: f64[1, 3] = sum.dim_IntList(%mse_loss_backward, [0], True)
  %view: f64[3] = view(%sum_1, [3])
  %add__tensor: f64[3] = add_.Tensor(%acc_layers_1_bias, %view)
  return ()""",
    )
    assert_expected_inline(
        task_text(after, "0W"),
        """\
graph 0W(
    %x: f64[2, 3],
    %tanh: f64[2, 3],
    %mm: f64[2, 3],
    %acc_layers_0_weight: f64[3, 3],
    %acc_layers_0_bias: f64[3],
)
  %tanh_backward: f64[2, 3] = tanh_backward(%mm, %tanh)
  %t_6: f64[3, 2] = t(%tanh_backward)
  %mm_2: f64[3, 3] = addmm_(%acc_layers_0_weight, %t_6, %x)
  %sum_2: f64[1, 3] = sum.dim_IntList(%tanh_backward, [0], True)
  %view_1: f64[3] = view(%sum_2, [3])
  %add__tensor: f64[3] = add_.Tensor(%acc_layers_0_bias, %view_1)
  return ()""",
    )


def test_signatures_say_what_is_added_to_and_what_crosses(split_mlp: Captured) -> None:
    after = split(split_mlp)
    assert task(after, "0W").accumulates == ("layers_0_weight", "layers_0_bias")
    assert task(after, "1F").outputs == ("addmm_1", "mul")
    assert {str(edge): names for edge, names in after.edges.items()} == {
        "0 -> 1": ("tanh",),
        "1 -> 0": ("mm",),
    }
    assert after.returns == {0: (1, "mul")}


def test_without_the_split_i_and_w_are_one_task() -> None:
    after = split(mlp("1f1b"))
    assert [str(key) for key in after.tasks] == ["0F", "0B", "1F", "1B"]
    assert_expected_inline(
        task_text(after, "1B"),
        """\
graph 1B(
    %layers_1_weight: f64[3, 3],
    %y: f64[2, 3],
    %share: f64[],
    %tanh: f64[2, 3],
    %addmm_1: f64[2, 3],
    %acc_layers_1_weight: f64[3, 3],
    %acc_layers_1_bias: f64[3],
)
  %full_default: f64[] = full((), 1.0, dtype=f64)
  %t_1: f64[3, 3] = t(%layers_1_weight)
  %mul_1: f64[] = mul.Tensor(%full_default, %share)
  %mse_loss_backward: f64[2, 3] = mse_loss_backward(%mul_1, %addmm_1, %y, 1)
  %t_2: f64[3, 3] = t(%t_1)
  %mm: f64[2, 3] = mm(%mse_loss_backward, %t_2)
  %t_3: f64[3, 2] = t(%mse_loss_backward)
  %mm_1: f64[3, 3] = addmm_(%acc_layers_1_weight, %t_3, %tanh)
  %sum_1: f64[1, 3] = sum.dim_IntList(%mse_loss_backward, [0], True)
  %view: f64[3] = view(%sum_1, [3])
  %add__tensor: f64[3] = add_.Tensor(%acc_layers_1_bias, %view)
  return (%mm,)""",
    )


def compare_with_joint(given: Captured, after: Program, rows: tuple[int, ...] = (2, 2)) -> None:
    """Outputs of the tasks against the joint graph's, bit for bit; sums of gradients closely."""
    for values in microbatches(given, after, rows):
        copies = {k: v.clone() if isinstance(v, Tensor) else v for k, v in values.items()}
        expected: dict[tuple[str, int | str], Tensor] = {}
        for value, result in zip(run_joint(after, values), after.results):
            key = (result.kind, result.target)
            expected[key] = expected[key] + value if key in expected else value
        outputs, gradients = run_tasks(after, copies)
        found: dict[tuple[str, int | str], Tensor] = {
            **{("output", number): value for number, value in outputs.items()},
            **{("gradient", name): value for name, value in gradients.items()},
            **{("mutation", name): value for name, value in copies.items()},
        }
        for key, value in expected.items():
            # A product that is added as it is made is rounded once, not twice.
            limit = 1e-14 if key[0] == "gradient" else 0
            torch.testing.assert_close(found[key], value, rtol=limit, atol=limit)


@pytest.fixture(scope="module")
def gpt() -> Captured:
    return captured(GPT(), *gpt_batch())


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_gpt_tasks_give_the_numbers_of_the_joint_graph(
    gpt: Captured, stages: int, schedule: str
) -> None:
    given = gpt.with_options(stages=stages, schedule=schedule)
    compare_with_joint(given, split(given, ranks=stages))


@pytest.fixture(scope="module", params=[True, False], ids=["train", "eval"])
def convnet(request: pytest.FixtureRequest) -> Captured:
    return captured(ConvNet().train(request.param), *convnet_batch())


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_convnet_tasks_give_the_numbers_of_the_joint_graph(
    convnet: Captured, schedule: str
) -> None:
    given = convnet.with_options(stages=["second"], schedule=schedule)
    compare_with_joint(given, split(given))


class Skips(nn.Module):
    """A value that skips a stage, a mask that every stage makes anew, an argument's gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 3, dtype=torch.float64)
        self.second = nn.Linear(3, 3, dtype=torch.float64)
        self.third = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        keep = (y > 0) | (y < -1)
        h = self.first(x).tanh() * keep
        g = self.second(h).tanh() * keep
        z = self.third(g) * keep + h
        return F.mse_loss(z, y), z


@pytest.fixture(scope="module")
def skips() -> Captured:
    x, y = mlp_batch()
    stages = ["second", "third"]
    return captured(Skips(), x.requires_grad_(), y, stages=stages, schedule="zb-h1")


def test_skips_outputs_and_argument_gradients(skips: Captured) -> None:
    after = split(skips, ranks=3)
    compare_with_joint(skips, after)
    assert {str(edge): names for edge, names in after.edges.items()} == {
        "0 -> 1": ("mul",),
        "0 -> 2": ("mul",),
        "1 -> 0": ("add_1",),
        "1 -> 2": ("mul_1",),
        "2 -> 1": ("mm", "mse_loss_backward"),
    }
    assert set(after.returns) == {0, 1}
    assert after.input_gradients["x"][0] == 0


def test_mask_without_a_stage_is_made_where_it_is_used(skips: Captured) -> None:
    after = split(skips, ranks=3)
    made = {
        str(key)
        for key, ran in after.tasks.items()
        for node in ran.graph.graph.find_nodes(op="call_function", target=aten.bitwise_or.Tensor)
    }
    assert made == {"0F", "1F", "2F"}
    assert "bitwise_or" in task(after, "1F").outputs
    assert "bitwise_or" in task(after, "1I").inputs


def test_buffers_are_written_in_place_by_the_forward(convnet: Captured) -> None:
    after = split(convnet.with_options(stages=["second"]))
    if not (written := sorted(task(after, "0F").writes)):
        assert "copy_(" not in task_text(after, "0F")  # BatchNorm in eval writes nothing
        return
    assert written == ["norm_num_batches_tracked", "norm_running_mean", "norm_running_var"]
    assert all(not t.writes for key, t in after.tasks.items() if str(key) != "0F")
    assert "copy_(%norm_running_mean" in task_text(after, "0F")


def test_without_gradients_only_forwards_are_left() -> None:
    with torch.no_grad():
        given = mlp("1f1b")
    after = split(given)
    assert [str(key) for key in after.tasks] == ["0F", "1F"]
    assert task(after, "0F").outputs == ("tanh",)
    compare_with_joint(given, after)


def test_one_stage_has_nothing_to_cut() -> None:
    given = captured(MLP(3, 3), *mlp_batch(), stages=1)
    after = split(given, ranks=1)
    assert [str(key) for key in after.tasks] == ["0F", "0B"]
    assert after.edges == {}
    compare_with_joint(given, after)


def test_inputs_are_parameters_kept_values_or_received_ones(split_mlp: Captured) -> None:
    """Every task's graph has one placeholder per input, in the same order."""
    after = split(split_mlp)
    for ran in after.tasks.values():
        names = [node.name for node in ran.graph.graph.find_nodes(op="placeholder")]
        assert tuple(names) == ran.inputs
        assert len(ran.graph.graph.output_node().args[0]) == len(ran.outputs)


@pytest.fixture(scope="module", params=["gpt", "convnet"])
def program(request: pytest.FixtureRequest, gpt: Captured) -> Program:
    if request.param == "gpt":
        return split(gpt.with_options(stages=2, schedule="zb-h1"))
    model = ConvNet().eval()
    return split(captured(model, *convnet_batch(), stages=["second"], schedule="zb-h1"))


def copies_of(program: Program) -> Counter[str]:
    """How many tasks hold each node of the joint graph, by name."""
    assert program.joint is not None
    names = {n.name for n in program.joint.graph.nodes if n.op != "placeholder"}
    return Counter(
        node.name
        for ran in program.tasks.values()
        for node in ran.graph.graph.nodes
        if node.op == "call_function" and node.name in names
    )


def test_no_product_of_the_backward_is_in_both_i_and_w(program: Program) -> None:
    for stage in range(program.num_stages):
        held: dict[Kind, set[str]] = {
            key.kind: {n.name for n in ran.graph.graph.nodes if flops(n)}
            for key, ran in program.tasks.items()
            if key.stage == stage
        }
        forward, of_i, of_w = (held.get(kind, set()) for kind in (Kind.F, Kind.I, Kind.W))
        assert of_w and not of_i & of_w
        assert not forward & (of_i | of_w)


def test_products_of_all_tasks_are_those_of_the_joint_graph(program: Program) -> None:
    assert program.joint is not None
    in_joint = [node.name for node in program.joint.graph.nodes if flops(node)]
    in_tasks = [n.name for ran in program.tasks.values() for n in ran.graph.graph.nodes if flops(n)]
    assert len(in_joint) >= 8
    assert sorted(in_tasks) == sorted(in_joint)


def ends_as_gradient(node: fx.Node) -> bool:
    """Whether a node is a transpose that nothing but further transposes and the end reads."""
    readers = node.users
    return node.target is aten.t.default and all(
        user.op == "output" or ends_as_gradient(user) for user in readers
    )


def test_every_node_is_in_one_task_but_views_and_those_without_a_stage(program: Program) -> None:
    assert program.joint is not None
    copies = copies_of(program)
    for node in program.joint.graph.nodes:
        if node.op != "call_function":
            continue
        if "stage" not in node.meta or is_view(node):
            # A transpose on the way to a gradient goes into the product that is accumulated.
            assert copies[node.name] >= 1 or ends_as_gradient(node), node.format_node()
        else:
            assert copies[node.name] == 1, node.format_node()

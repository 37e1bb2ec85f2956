"""The model graph becomes one graph of forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.fx as fx
from expecttest import assert_expected_inline
from torch import Tensor, nn

from fxpipe.errors import CaptureError, ModelError
from fxpipe.passes import TraceJoint
from fxpipe.passes.trace_joint import keep_what_backward_reads
from fxpipe.program import Program, Result
from fxpipe.text import format_graph
from tests.helpers import (
    MLP,
    Captured,
    captured,
    joint_text,
    microbatches,
    mlp_batch,
    run_graph,
    run_joint,
    run_until,
)

aten = torch.ops.aten


@pytest.fixture(scope="module")
def mlp() -> Captured:
    return captured(MLP(3, 2), *mlp_batch(4, 3)[:1], mlp_batch(4, 2)[1])


def split(given: Captured, rows: int = 2) -> Program:
    return run_until(given.program(rows), "split_loss")


def test_joint_graph_holds_forward_and_backward(mlp: Captured) -> None:
    joint = TraceJoint()(split(mlp))
    assert_expected_inline(
        joint_text(joint),
        """\
graph joint(
    %layers_0_weight: f64[2, 3],
    %layers_0_bias: f64[2],
    %x_size_0: int(s49),
    %x: f64[2, 3],
    %y: f64[2, 2],
    %share: f64[],
)
  %full_default: f64[] = full((), 1.0, dtype=f64)
  %t: f64[3, 2] = t(%layers_0_weight)
  %addmm: f64[2, 2] = addmm(%layers_0_bias, %x, %t)
  %mse_loss: f64[] = mse_loss(%addmm, %y)
  %mul: f64[] = mul.Tensor(%mse_loss, %share)
  %mul_1: f64[] = mul.Tensor(%full_default, %share)
  %mse_loss_backward: f64[2, 2] = mse_loss_backward(%mul_1, %addmm, %y, 1)
  %t_1: f64[2, 2] = t(%mse_loss_backward)
  %mm: f64[2, 3] = mm(%t_1, %x)
  %t_2: f64[3, 2] = t(%mm)
  %sum_1: f64[1, 2] = sum.dim_IntList(%mse_loss_backward, [0], True)
  %view: f64[2] = view(%sum_1, [2])
  %t_3: f64[2, 3] = t(%t_2)
  return (%mul, %t_3, %view)""",
    )
    assert_expected_inline(
        "\n".join(map(str_of, joint.results)),
        """\
output 0
gradient layers_0_weight
gradient layers_0_bias""",
    )
    assert joint.joint is not None
    backward = [n.name for n in joint.joint.graph.nodes if n.meta.get("backward")]
    assert_expected_inline(
        " ".join(backward), """full_default mul_1 mse_loss_backward t_1 mm t_2 sum_1 view t_3"""
    )


def str_of(result: tuple[object, ...]) -> str:
    return " ".join(map(str, result[:2]))


def test_joint_graph_gives_loss_and_gradients_of_the_model(mlp: Captured) -> None:
    before = split(mlp)
    after = TraceJoint()(before)
    for values in microbatches(mlp, after, (2, 2)):
        (loss,) = run_graph(before.model, values)
        weight, bias = values["layers_0_weight"], values["layers_0_bias"]
        expected = (loss.detach(), *torch.autograd.grad(loss, (weight, bias)))
        torch.testing.assert_close(run_joint(after, values), expected, rtol=0, atol=0)


def test_sizes_are_those_of_the_microbatch(mlp: Captured) -> None:
    for rows in (1, 3):
        joint = TraceJoint()(split(mlp, rows)).joint
        assert joint is not None
        (x,) = joint.graph.find_nodes(op="placeholder", target="x")
        assert tuple(x.meta["val"].shape) == (rows, 3)


def test_model_without_a_loss_takes_the_gradients_of_its_outputs() -> None:
    given = captured(nn.Linear(3, 2, dtype=torch.float64), mlp_batch()[0])
    after = TraceJoint()(split(given))
    assert_expected_inline(
        joint_text(after),
        """\
graph joint(
    %weight: f64[2, 3],
    %bias: f64[2],
    %args_0_size_0: int(s49),
    %args_0: f64[2, 3],
    %grad_linear: f64[2, 2],
)
  %t: f64[3, 2] = t(%weight)
  %addmm: f64[2, 2] = addmm(%bias, %args_0, %t)
  %t_1: f64[2, 2] = t(%grad_linear)
  %mm: f64[2, 3] = mm(%t_1, %args_0)
  %t_2: f64[3, 2] = t(%mm)
  %sum_1: f64[1, 2] = sum.dim_IntList(%grad_linear, [0], True)
  %view: f64[2] = view(%sum_1, [2])
  %t_3: f64[2, 3] = t(%t_2)
  return (%addmm, %t_3, %view)""",
    )
    values = next(microbatches(given, after, (2, 2)))
    gradient = torch.ones(2, 2, dtype=torch.float64)
    output, weight, bias = run_joint(after, {**values, "grad_linear": gradient})
    torch.testing.assert_close(weight, gradient.t() @ values["args_0"])
    torch.testing.assert_close(bias, gradient.sum(0))
    assert output.shape == (2, 2)


def test_without_gradients_only_the_forward_is_traced() -> None:
    with torch.no_grad():
        given = captured(MLP(3, 3), *mlp_batch())
    after = TraceJoint()(split(given))
    assert_expected_inline(
        joint_text(after),
        """\
graph joint(
    %layers_0_weight: f64[3, 3],
    %layers_0_bias: f64[3],
    %x_size_0: int(s49),
    %x: f64[2, 3],
    %y: f64[2, 3],
    %share: f64[],
)
  %t: f64[3, 3] = t(%layers_0_weight)
  %addmm: f64[2, 3] = addmm(%layers_0_bias, %x, %t)
  %mse_loss: f64[] = mse_loss(%addmm, %y)
  %mul: f64[] = mul.Tensor(%mse_loss, %share)
  return (%mul,)""",
    )


class Normalized(nn.Module):
    """BatchNorm: its forward moves three buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).square().sum()


def test_replaced_buffers_are_results() -> None:
    given = captured(Normalized(), mlp_batch()[0])
    after = TraceJoint()(split(given))
    changed = [str(result.target) for result in after.results if result.kind == "mutation"]
    expected = ["norm_num_batches_tracked", "norm_running_mean", "norm_running_var"]
    assert sorted(changed) == expected
    values = next(microbatches(given, after, (2, 2)))
    count, mean, *_ = run_joint(after, values)
    assert count == values["norm_num_batches_tracked"] + 1
    moved = 0.9 * values["norm_running_mean"] + 0.1 * values["x"].mean(0)
    torch.testing.assert_close(mean, moved)


def test_buffer_changed_through_its_data_is_a_result() -> None:
    class Halved(nn.Module):
        scale: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3, dtype=torch.float64)
            self.register_buffer("scale", torch.ones(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x) * self.scale
            self.scale.data.mul_(0.5)
            return y.sum()

    after = TraceJoint()(split(captured(Halved(), mlp_batch()[0])))
    assert ("mutation", "scale") in [result[:2] for result in after.results]


def test_backward_reads_a_buffer_as_its_own_forward_saw_it() -> None:
    graph = fx.Graph()
    x, scale, gradient = (graph.placeholder(name) for name in ("x", "scale", "gradient"))
    other = graph.call_function(aten.sin.default, (x,))
    forward = graph.call_function(aten.mul.Tensor, (other, scale))
    halved = graph.call_function(aten.mul.Tensor, (scale, 0.5))
    backward = graph.call_function(aten.mul.Tensor, (gradient, scale))
    graph.output((forward, halved, backward))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(2)
    backward.meta["backward"] = True
    forward.meta["nn_module_stack"] = "its module"
    results = [Result("output", 0), Result("mutation", "scale"), Result("gradient", "x")]
    joint = fx.GraphModule(nn.Module(), graph)
    keep_what_backward_reads(joint, results)
    assert_expected_inline(
        format_graph("joint", joint),
        """\
graph joint(%x: f32[2], %scale: f32[2], %gradient: f32[2])
  %sin_default: f32[2] = sin(%x)
  %clone_default: f32[2] = clone(%scale)
  %mul_tensor: f32[2] = mul.Tensor(%sin_default, %scale)
  %mul_tensor_1: f32[2] = mul.Tensor(%scale, 0.5)
  %mul_tensor_2: f32[2] = mul.Tensor(%gradient, %clone_default)
  return (%mul_tensor, %mul_tensor_1, %mul_tensor_2)""",
    )
    (clone,) = graph.find_nodes(op="call_function", target=aten.clone.default)
    assert clone.meta["nn_module_stack"] == "its module"


class ChangesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return self.linear(x).sum()


def test_argument_changed_in_place_is_refused() -> None:
    given = captured(ChangesItsInput(), mlp_batch()[0])
    with pytest.raises(ModelError, match=r"the model changes its batch 'x' in place, .* a clone"):
        TraceJoint()(split(given))


class ReturnsAView(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))
        self.linear = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.add_(1)
        return self.linear(x).sum(), self.seen[:2]


def test_returned_view_of_a_changed_buffer_shows_the_change() -> None:
    given = captured(ReturnsAView(), mlp_batch()[0])
    after = TraceJoint()(split(given))
    values = next(microbatches(given, after, (2, 2)))
    results = run_joint(after, values)
    outputs = [r for r, result in zip(results, after.results) if result.kind == "output"]
    torch.testing.assert_close(outputs[1], values["seen"][:2] + 1, rtol=0, atol=0)


def test_model_that_torch_cannot_trace_is_refused(
    mlp: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no derivative for frobnicate\nlong story")

    monkeypatch.setattr("fxpipe.passes.trace_joint.export_joint", fail)
    expected = r"cannot trace the model with microbatches of 2 rows \(RuntimeError: no derivative"
    with pytest.raises(CaptureError, match=expected):
        TraceJoint()(split(mlp))

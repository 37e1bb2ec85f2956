"""The printer: the same program gives the same, readable text."""

from __future__ import annotations

import operator
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.fx as fx
from expecttest import assert_expected_inline
from torch.fx.experimental.proxy_tensor import make_fx

from fxpipe.options import Options
from fxpipe.program import Edge, Input, Join, Key, Output, Program, Reduction, Result, Role, Task
from fxpipe.schedule import Kind, Schedule
from fxpipe.text import format_graph, format_program, format_type, format_value

aten = torch.ops.aten


def traced(function: Callable[..., Any], *shapes: tuple[int, ...], mode: str = "fake") -> str:
    inputs = [torch.zeros(shape) for shape in shapes]
    return format_graph("0F", make_fx(function, tracing_mode=mode)(*inputs))


def test_overload_and_namespace_are_shortened() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = x @ w.t()
        return hidden.sum(1, keepdim=True), hidden.to(torch.bfloat16)

    assert_expected_inline(
        traced(function, (2, 3), (4, 3)),
        """\
graph 0F(%x_1: f32[2, 3], %w_1: f32[4, 3])
  %t: f32[3, 4] = t(%w_1)
  %mm: f32[2, 4] = mm(%x_1, %t)
  %sum_1: f32[2, 1] = sum.dim_IntList(%mm, [1], True)
  %_to_copy: bf16[2, 4] = _to_copy(%mm, dtype=bf16)
  return (%sum_1, %_to_copy)""",
    )


def test_tuple_value_shows_the_type_of_every_item() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        values, places = torch.max(x, 1)
        return values[places]

    assert_expected_inline(
        traced(function, (2, 2)),
        """\
graph 0F(%x_1: f32[2, 2])
  %max_1: (f32[2], i64[2]) = max.dim(%x_1, 1)
  %getitem: f32[2] = %max_1[0]
  %getitem_1: i64[2] = %max_1[1]
  %index: f32[2] = index.Tensor(%getitem, [%getitem_1])
  return %index""",
    )


def test_symbolic_sizes_are_expressions() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(2 * x.shape[0], x.shape[1])

    assert_expected_inline(
        traced(function, (3, 5), mode="symbolic"),
        """\
graph 0F(%x_1: f32[s75, s96])
  %sym_size_int: int(s75) = sym_size.int(%x_1, 0)
  %mul: int(2*s75) = operator.mul(2, %sym_size_int)
  %sym_size_int_1: int(s96) = sym_size.int(%x_1, 1)
  %new_zeros: f32[2*s75, s96] = new_zeros(%x_1, [%mul, %sym_size_int_1], pin_memory=False)
  return %new_zeros""",
    )


def test_long_signature_and_return_have_one_item_a_line() -> None:
    graph = fx.Graph()
    inputs = [graph.placeholder(f"activation_of_a_layer_with_a_long_name_{i}") for i in range(3)]
    graph.output(tuple(inputs))
    assert_expected_inline(
        format_graph("0F", fx.GraphModule({}, graph)),
        """\
graph 0F(
    %activation_of_a_layer_with_a_long_name_0,
    %activation_of_a_layer_with_a_long_name_1,
    %activation_of_a_layer_with_a_long_name_2,
)
  return (
    %activation_of_a_layer_with_a_long_name_0,
    %activation_of_a_layer_with_a_long_name_1,
    %activation_of_a_layer_with_a_long_name_2,
  )""",
    )


class Modules(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: torch.Tensor, mask: Any = None) -> dict[str, Any]:
        y = torch.nn.functional.linear(self.layers[0](x), self.scale)
        joined = torch.cat((y, y), dim=-1)
        return {"y": joined.view(-1, 2)[:, 1:], "all": [torch.relu(y), y + 1, None]}


def test_modules_methods_attributes_and_containers_are_printed() -> None:
    assert_expected_inline(
        format_graph("model", fx.symbolic_trace(Modules())),
        """\
graph model(%x, %mask = None)
  %layers_0 = self.layers.0(%x)
  %scale = get_attr scale
  %linear = torch.nn.functional.linear(%layers_0, %scale)
  %cat = torch.cat((%linear, %linear), dim=-1)
  %view = %cat.view(-1, 2)
  %getitem = %view[:, 1:]
  %relu = torch.relu(%linear)
  %add = operator.add(%linear, 1)
  return {'y': %getitem, 'all': [%relu, %add, None]}""",
    )


def test_inner_graph_follows_the_one_that_holds_it() -> None:
    texts = []

    def function(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        texts.append(format_graph("model", gm))
        return gm.forward

    torch.compile(function, backend=backend)(torch.ones(2))
    assert_expected_inline(
        texts[0],
        """\
graph model(%l_x_: f32[2])
  %sum_1: f32[] = %l_x_.sum()
  %gt: bool[] = operator.gt(%sum_1, 0)
  %cond_true_0 = get_attr cond_true_0
  %cond_false_0 = get_attr cond_false_0
  %cond: (f32[2],) = cond(%gt, %cond_true_0, %cond_false_0, (%l_x_,))
  %getitem: f32[2] = %cond[0]
  return (%getitem,)

graph model.cond_true_0(%l_x__1: f32[2])
  %sin: f32[2] = torch.sin(%l_x__1)
  return (%sin,)

graph model.cond_false_0(%l_x__1: f32[2])
  %cos: f32[2] = torch.cos(%l_x__1)
  return (%cos,)""",
    )


def test_empty_graph_returns_none() -> None:
    graph = fx.Graph()
    graph.output(None)
    assert_expected_inline(
        format_graph("1W", fx.GraphModule({}, graph)),
        """\
graph 1W()
  return None""",
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (True, "True"),
        (-float("inf"), "-inf"),
        ("sum", "'sum'"),
        (..., "..."),
        (slice(None), ":"),
        (slice(1, None, 2), "1::2"),
        ((1,), "(1,)"),
        (torch.Size([2, 3]), "[2, 3]"),
        ({"a": [torch.int32]}, "{'a': [i32]}"),
        ({"b", "a", "c"}, "{'a', 'b', 'c'}"),
        (torch.float8_e4m3fn, "float8_e4m3fn"),
        (torch.device("cuda", 1), "cuda:1"),
        (torch.channels_last, "channels_last"),
        (torch.zeros(2, 3), "f32[2, 3]"),
        (operator.add, "operator.add"),
        (len, "len"),
        (aten.mm.default, "mm"),
        (aten.add.Tensor, "add.Tensor"),
        (torch.ops.prims.iota.default, "prims.iota"),
        (torch.nn.functional.softmax, "torch.nn.functional.softmax"),
        (object(), "<object>"),
    ],
)
def test_argument_is_printed(value: Any, text: str) -> None:
    assert format_value(value) == text


def test_type_of_no_tensor_is_its_class() -> None:
    assert format_type([torch.zeros(1), None, 3]) == "(f32[1], None, int)"


def test_same_program_is_the_same_bytes_under_every_hash_seed() -> None:
    code = (
        "import torch, torch.fx as fx\n"
        "from fxpipe.text import format_graph\n"
        "graph = fx.Graph()\n"
        "x = graph.placeholder('x')\n"
        "y = graph.call_function(max, (x,), {'names': {'a', 'b', 'c', 'd'}})\n"
        "graph.output((x, y))\n"
        "print(format_graph('0F', fx.GraphModule({}, graph)))"
    )
    run = [sys.executable, "-c", code]
    texts = {
        subprocess.check_output(run, env=os.environ | {"PYTHONHASHSEED": seed}) for seed in "123"
    }
    assert len(texts) == 1
    assert b"names={'a', 'b', 'c', 'd'}" in texts.pop()


def identity(*names: str) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(tuple(graph.placeholder(name) for name in names))
    return fx.GraphModule({}, graph)


def captured() -> Program:
    return Program(
        options=Options(),
        training=True,
        batch_symbol=None,
        sizes={},
        num_microbatches=2,
        num_ranks=2,
        model=identity("x", "w"),
        inputs=(
            Input("x", Role.BATCH, "batch.x", batch_dim=0),
            Input("w", Role.PARAMETER, "head.weight", requires_grad=True),
        ),
        outputs=(Output("loss", Join.SUM, is_loss=True, requires_grad=True),),
    )


def test_captured_program_shows_its_model() -> None:
    assert_expected_inline(
        str(captured()),
        """\
program: microbatches 2, ranks 2, training

inputs
  %x: batch, batch.x, batch in dimension 0
  %w: parameter, head.weight, gradient

outputs
  %loss: sum, loss, gradient

graph model(%x, %w)
  return (%x, %w)
""",
    )


def test_joint_program_says_what_each_result_is() -> None:
    results = (Result("output", 0), Result("gradient", "w", stage=1))
    program = replace(captured(), joint=identity("loss", "grad"), results=results)
    assert_expected_inline(
        format_program(program).partition("graph ")[2],
        """\
joint(%loss, %grad)
  return (%loss, %grad)

results
  %loss: output 0
  %grad: gradient %w, stage 1
""",
    )


def test_split_program_shows_tasks_edges_and_schedule() -> None:
    forward = Task(identity("x", "state"), ("x", "state"), ("x", "new"), writes=("state",))
    backward = Task(identity("grad", "acc"), ("g", "acc_w"), ("out",), accumulates=("w",))
    program = replace(
        captured(),
        num_stages=2,
        schedule=Schedule.parse("0F0\n1F0 1B0", name="short"),
        tasks={Key(0, Kind.F): forward, Key(1, Kind.B): backward},
        edges={Edge(0, 1): ("x",)},
        returns={0: (1, "out")},
        input_gradients={"x": (0, "dx")},
        reductions={"w": Reduction((0, 1), (1,))},
        last_uses={Key(1, Kind.B): ("g",)},
    )
    assert_expected_inline(
        str(program).partition("outputs")[2],
        """\

  %loss: sum, loss, gradient

schedule short
  rank 0: 0F0
  rank 1: 1F0 1B0

edge 0 -> 1: %x

ends
  output 0: %out of stage 1
  gradient of %x: %dx of stage 0
  gradient of %w: summed over ranks 0, 1, for ranks 1

graph 0F(%x, %state)
  return (%x, %state)
  gives %x, %new
  replaces in place %state

graph 1B(%grad, %acc)
  return (%grad, %acc)
  takes %g, %acc_w
  gives %out
  adds in place to %acc_w
  last use of %g
""",
    )

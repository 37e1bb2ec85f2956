"""The ranks of a process become one list of calls; what keeps it from being captured is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx as fx
from expecttest import assert_expected_inline
from torch import nn

from fxpipe.errors import RankError
from fxpipe.lowering.replay import Function
from fxpipe.lowering.rules import breaches_in, breaches_of
from fxpipe.lowering.static import StaticProgram, make_static
from tests.helpers import MLP, Captured, captured, lowered, mlp_batch, run_until

aten = torch.ops.aten


@pytest.fixture(scope="module")
def mlp() -> Captured:
    return captured(MLP(3, 3, 3), *mlp_batch())


def static(given: Captured, schedule: str, **options: Any) -> StaticProgram:
    program = given.with_options(stages=2, schedule=schedule).program(2, 2, 2)
    return make_static(lowered(run_until(program, "plan_last_uses")), **options)


def test_two_ranks_take_turns_and_messages_vanish(mlp: Captured) -> None:
    assert_expected_inline(
        str(static(mlp, "zb-h1")),
        """\
static program of ranks 0, 1
  inputs v1 layers_0_weight, v2 layers_0_bias, v3 x_mb0, v4 x_mb1, v5 layers_1_weight, v6 layers_1_bias, v7 y_mb0, v8 share_mb0, v9 y_mb1, v10 share_mb1
  v11 = stage0_F(v1, v2, v3)  # 0F0
  v12 = stage0_F(v1, v2, v4)  # 0F1
  v13, v14 = stage1_F(v5, v6, v7, v8, v11)  # 1F0
  v15, v16 = stage1_I(v5, v7, v8, v13)  # 1I0; frees v7, v8, v13
  v17, v18 = stage1_F(v5, v6, v9, v10, v12)  # 1F1
  v19, v20 = stage1_I(v5, v9, v10, v17)  # 1I1; frees v9, v10, v17
  v21 = new_accumulator(v5)  # acc_layers_1_weight; frees v5
  v22 = new_accumulator(v6)  # acc_layers_1_bias; frees v6
  stage1_W(v11, v15, v21, v22)  # 1W0; frees v15
  stage1_W(v12, v19, v21, v22)  # 1W1; frees v19
  v23 = total([v14, v18])  # own_OUTPUT_0_1; frees v14, v18
  v24 = new_accumulator(v1)  # acc_layers_0_weight; frees v1
  v25 = new_accumulator(v2)  # acc_layers_0_bias; frees v2
  stage0_W(v3, v11, v16, v24, v25)  # 0W0; frees v3, v11, v16
  stage0_W(v4, v12, v20, v24, v25)  # 0W1; frees v4, v12, v20
  return (v23, v24, v25, v21, v22)""",  # noqa: E501
    )


def test_the_function_has_a_line_for_each_call(mlp: Captured) -> None:
    assert_expected_inline(
        Function(static(mlp, "gpipe")).source,
        """\
def step(values):
    v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, = values
    values.clear()
    v11, = f0(v1, v2, v3)
    v12, = f0(v1, v2, v4)
    v13, v14, = f1(v5, v6, v7, v8, v11)
    v15, v16, = f1(v5, v6, v9, v10, v12)
    v17 = f2(v5)
    v18 = f2(v6)
    del v6
    v19, = f3(v5, v7, v8, v11, v13, v17, v18)
    del v7, v8, v13
    v20, = f3(v5, v9, v10, v12, v15, v17, v18)
    del v5, v9, v10, v15
    v21 = f4([v14, v16])
    del v14, v16
    v22 = f2(v1)
    del v1
    v23 = f2(v2)
    del v2
    () = f5(v3, v11, v19, v22, v23)
    del v3, v11, v19
    () = f5(v4, v12, v20, v22, v23)
    del v4, v12, v20
    return [v21, v22, v23, v17, v18]
""",
    )


def test_a_rank_of_its_own_keeps_its_messages(mlp: Captured) -> None:
    program = mlp.with_options(stages=2, schedule="1f1b").program(2, 2, 2)
    first, _ = lowered(run_until(program, "plan_last_uses"))
    assert_expected_inline(
        str(make_static([first], together=False)),
        """\
static program of ranks 0
  inputs v1 layers_0_weight, v2 layers_0_bias, v3 x_mb0, v4 x_mb1
  post(v0, '1SEND_B0')  # posted_1SEND_B0
  v5 = stage0_F(v1, v2, v3)  # 0F0
  send(v0, '0SEND_F0', [v5])  # sent_0SEND_F0
  post(v0, '1SEND_B1')  # posted_1SEND_B1
  v6 = stage0_F(v1, v2, v4)  # 0F1
  send(v0, '0SEND_F1', [v6])  # sent_0SEND_F1
  v7 = wait(v0, '1SEND_B0')  # got_1SEND_B0
  v8 = new_accumulator(v1)  # acc_layers_0_weight; frees v1
  v9 = new_accumulator(v2)  # acc_layers_0_bias; frees v2
  stage0_B(v3, v5, v7, v8, v9)  # 0B0; frees v3, v5, v7
  v10 = wait(v0, '1SEND_B1')  # got_1SEND_B1
  stage0_B(v4, v6, v10, v8, v9)  # 0B1; frees v4, v6, v10
  post(v0, 'OUTPUT 0 1>0')  # posted_OUTPUT_0_1_0
  v11 = wait(v0, 'OUTPUT 0 1>0')  # got_OUTPUT_0_1_0
  return (v11, v8, v9)""",
    )


def test_without_the_plan_of_last_uses_nothing_is_freed(mlp: Captured) -> None:
    assert all(not call.frees for call in static(mlp, "1f1b", free=False).calls)


def test_a_pause_lies_between_all_forwards_and_all_backwards() -> None:
    model = nn.Sequential(*(nn.Linear(3, 3, dtype=torch.float64) for _ in range(2)))
    program = static(captured(model, mlp_batch()[0]), "gpipe")
    assert program.pause is not None
    before = [call.name for call in program.calls[: program.pause]]
    after = [call.name for call in program.calls[program.pause :] if "acc" not in call.name]
    assert before == ["0F0", "0F1", "1F0", "1F1", "whole_OUTPUT_0", "whole_OUTPUT_0"]
    assert after == ["1B0", "1B1", "0B0", "0B1"]
    assert len(program.paused) == 1 and len(program.given) == 2


def test_a_rank_without_its_sender_is_refused(mlp: Captured) -> None:
    program = mlp.with_options(stages=2, schedule="1f1b").program(2, 2, 2)
    ranks = lowered(run_until(program, "plan_last_uses"))
    with pytest.raises(RankError, match=r"no rank can go on: they wait for \['1SEND_B0'\]"):
        make_static(ranks[:1])


# What cannot be captured.


def graph_of(target: Any, *arguments: Any, **keywords: Any) -> fx.Graph:
    """A graph of one call: tensors become inputs."""
    graph = fx.Graph()
    nodes = []
    for argument in arguments:
        nodes.append(argument)
        if isinstance(argument, torch.Tensor):
            nodes[-1] = graph.placeholder(f"x{len(nodes)}")
            nodes[-1].meta["val"] = argument
    node = graph.call_function(target, tuple(nodes), keywords)
    node.meta["stack_trace"] = '  File "train.py", line 7, in forward\n    y = use(x)\n'
    graph.output((node,))
    return graph


x, mask = torch.zeros(4), torch.zeros(4, dtype=torch.bool)
counts = torch.ones(4, dtype=torch.int64)
BREACHES = [
    ("reads a Python value from a tensor", aten._local_scalar_dense.default, (x,), {}),
    ("reads a Python value from a tensor", aten.equal.default, (x, x), {}),
    ("has a shape that depends on values", aten.nonzero.default, (x,), {}),
    ("has a shape that depends on values", aten.masked_select.default, (x, mask), {}),
    ("has a shape that depends on values", aten._unique2.default, (x,), {}),
    ("has a shape that depends on values", aten.repeat_interleave.Tensor, (counts,), {}),
    ("draws random numbers from the generator", aten.bernoulli.default, (x,), {}),
    ("draws random numbers from the generator", aten.rand.default, ([4],), {}),
]


@pytest.mark.parametrize(("reason", "target", "arguments", "keywords"), BREACHES)
def test_a_breach_names_node_reason_and_line(
    reason: str, target: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    (breach,) = breaches_in(graph_of(target, *arguments, **keywords))
    assert reason in str(breach)
    assert str(breach).startswith(breach.node.name)
    assert str(breach).endswith("train.py:7: y = use(x)")


def test_copies_between_devices_are_breaches() -> None:
    graph = graph_of(aten._to_copy.default, x, device="meta")
    (node,) = graph.find_nodes(op="call_function", target=aten._to_copy.default)
    node.meta["val"] = x.to("meta")
    (breach,) = breaches_in(graph)
    assert breach.reason == "copies between cpu and meta"
    node.meta["val"] = x
    assert list(breaches_in(graph)) == []


def test_a_number_on_the_host_is_no_breach() -> None:
    graph = graph_of(aten.mul.Tensor, torch.zeros(4, device="meta"), torch.tensor(0.5))
    (node,) = graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    node.meta["val"] = torch.zeros(4, device="meta")
    assert list(breaches_in(graph)) == []


def test_a_count_that_is_given_is_no_breach() -> None:
    given = graph_of(aten.repeat_interleave.Tensor, counts, output_size=4)
    assert list(breaches_in(given)) == []


def test_tasks_with_seeds_have_no_breach() -> None:
    class Dropping(MLP):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().forward(nn.functional.dropout(x), y)

    program = captured(Dropping(3, 3, 3), *mlp_batch()).with_options(stages=2).program(2, 2, 2)
    assert list(breaches_of(lowered(run_until(program, "plan_last_uses")))) == []

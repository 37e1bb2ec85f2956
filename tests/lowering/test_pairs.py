"""A forward and a backward merged into one task do what the two do one after the other."""

from __future__ import annotations

import functools

import pytest
import torch

from fxpipe.lowering.lower import lower
from fxpipe.lowering.tasks import TaskCompiler
from fxpipe.program import Key, PairTask, Program
from tests.helpers import MLP, captured, mlp_batch, run_until

# Rank 0 runs both stages of a V of one rank and a half: stage 1's forward beside 0's backward.
PAIRED = "0F0 1F0 1I0 1W0 0F1 [1F1|0B0] 1B1 0B1"


@functools.cache
def program(schedule: str = PAIRED, lowering: str = "eager") -> Program:
    given = captured(
        MLP(3, 3, 3), *mlp_batch(), stages=2, microbatches=2, schedule=f"{schedule}\n",
        lowering=lowering,
    )  # fmt: skip
    return run_until(given.program(rows=2, microbatches=2), "plan_last_uses")


def pair(made: Program) -> tuple[Key, Key, PairTask]:
    ((forward, backward), task) = next(iter(made.pairs.items()))
    return forward, backward, task


def values_for(task: PairTask) -> list[torch.Tensor]:
    """Made-up values for a merged task's placeholders."""
    generator = torch.Generator().manual_seed(0)
    fakes = [n.meta["val"] for n in task.graph.graph.find_nodes(op="placeholder")]
    return [torch.randn(f.shape, dtype=f.dtype, generator=generator) for f in fakes]


def test_the_merged_graph_is_the_one_task_after_the_other() -> None:
    forward, backward, task = pair(program())
    assert (str(forward), str(backward)) == ("1F", "0B")
    operators = [n.target for n in task.graph.graph.nodes if n.op == "call_function"]
    parts = [
        [n.target for n in program().tasks[key].graph.graph.nodes if n.op == "call_function"]
        for key in (forward, backward)
    ]
    assert operators == parts[0] + parts[1]


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_the_merged_task_returns_what_the_two_return(lowering: str) -> None:
    made = program()
    compiled = TaskCompiler(lowering)
    forward, backward, task = pair(made)
    values = values_for(task)
    expected = []
    for side, key in enumerate((forward, backward)):
        own = made.tasks[key]
        of_side = {n: v.clone() for (s, n), v in zip(task.inputs, values) if s == side}
        shared = {n: v.clone() for (_, n), v in zip(task.inputs, values)}
        arguments = [of_side.get(name, shared.get(name)) for name in own.inputs]
        expected += compiled(own.graph)(*arguments)
        sums = dict(zip(own.inputs, arguments))
    found = compiled(task.graph)(*values)
    limit = 0.0 if lowering == "eager" else 1e-12
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=limit, atol=limit)
    for (side, name), value in zip(task.inputs, values):
        if side == 1 and name.startswith("acc_"):
            torch.testing.assert_close(value, sums[name], rtol=limit, atol=limit)


def test_the_rank_calls_the_merged_task_once_and_both_alone_elsewhere() -> None:
    code = str(lower([program()] * 2, 0, TaskCompiler("eager")))
    calls = [line.split("self.")[1].split("(")[0] for line in code.splitlines() if "self." in line]
    assert calls == [
        "stage0_F", "stage1_F", "stage1_I", "stage1_W", "stage0_F", "stage1_F_stage0_B", "stage1_B",
        "stage0_B",
    ]  # fmt: skip


def test_a_schedule_without_pairs_has_no_merged_task() -> None:
    assert program("0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1").pairs == {}


def test_a_parameter_that_both_sides_read_is_one_input_and_the_rest_is_apart() -> None:
    _, _, task = pair(program("0F0 0F1 0B0 0B1\n1F0 [1F1|1B0] 1B1"))
    names = [name for _, name in task.inputs]
    assert names.count("layers_1_weight") == 1
    placeholders = [n.name for n in task.graph.graph.find_nodes(op="placeholder")]
    assert "layers_1_weight" in placeholders
    assert {"tanh_1f", "tanh_1b"} <= set(placeholders)

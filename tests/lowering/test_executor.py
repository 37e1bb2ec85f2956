"""A rank program runs as calls on numbered slots; what is needed no more is let go at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor, nn

from fxpipe.errors import RankError
from fxpipe.lowering.executor import Executor, Paused, last_uses
from fxpipe.lowering.transport import LocalTransport
from fxpipe.program import Program
from tests.helpers import (
    GPT,
    MLP,
    Captured,
    captured,
    gpt_batch,
    lowered,
    microbatches,
    mlp_batch,
    run_ranks,
    run_until,
    slot_values,
)


@pytest.fixture(scope="module")
def mlp() -> Captured:
    return captured(MLP(3, 3, 3), *mlp_batch(8))


@pytest.fixture(scope="module")
def gpt() -> Captured:
    return captured(GPT(), *gpt_batch(4))


def planned(given: Captured, microbatches: int = 2, rows: int = 2, **options: Any) -> Program:
    chosen = {"stages": 2, "schedule": "1f1b", **options}
    return run_until(given.with_options(**chosen).program(rows, microbatches, 2), "plan_last_uses")


def eager(given: Captured, model: Callable[..., Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the whole batch, run plainly; names as in graphs."""
    leaves = {i.name: v for i, v in zip(given.capture.inputs, given.values) if i.requires_grad}
    (loss,) = fx.Interpreter(given.capture.model).run(*given.values)
    return loss.detach(), dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_ranks_give_loss_and_gradients_of_eager(gpt: Captured, schedule: str, free: bool) -> None:
    program = planned(gpt, schedule=schedule)
    ranks = lowered(program)
    with torch.no_grad():
        results = run_ranks(ranks, list(microbatches(gpt, program, (2, 2))), free)
    loss, expected = eager(gpt, GPT())
    found: dict[str, Tensor] = {}
    for ran, (its_loss, *gradients) in zip(ranks, results):
        torch.testing.assert_close(its_loss, loss, rtol=1e-13, atol=0)
        found |= dict(zip(ran.gradients, gradients))
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-11, atol=1e-14)


class Watched:
    """Counts, before every call of a task, the results of earlier calls that are still alive."""

    def __init__(self) -> None:
        self.references: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []
        self.made: list[int] = []
        self.names: list[str] = []

    def __call__(self, graph: fx.GraphModule) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            self.alive.append(sum(reference() is not None for reference in self.references))
            self.made.append(len(self.references))
            self.names.append(type(graph).__name__)
            results = graph.forward(*arguments)
            self.references += map(weakref.ref, results)
            return results

        return run


def watched_run(given: Captured, schedule: str, free: bool) -> Watched:
    program = planned(given, microbatches=4, schedule=schedule)
    watched = Watched()
    ranks = lowered(program, watched)
    with torch.no_grad():
        run_ranks(ranks, list(microbatches(given, program, (2, 2, 2, 2))), free)
    return watched


def test_values_die_after_their_last_use(mlp: Captured) -> None:
    """In 1F1B two microbatches are in flight, whatever their number; GPipe holds all four."""
    steady = watched_run(mlp, "1f1b", free=True)
    every = watched_run(mlp, "gpipe", free=True)
    assert max(steady.alive) < max(every.alive)
    # At the end: what 0B reads, its microbatch's two values; the losses of all four microbatches
    # are summed on rank 1, which has ended by then.
    assert (steady.names[-1], steady.alive[-1]) == ("Task0B", 2)


def test_without_the_plan_values_stay_to_the_end(mlp: Captured) -> None:
    kept = watched_run(mlp, "1f1b", free=False)
    last = max(i for i, name in enumerate(kept.names) if name == "Task1B")
    assert kept.alive[: last + 1] == kept.made[: last + 1]  # no rank has ended before that
    # Per microbatch 0F gives one value, 1F two, 1B one.
    assert kept.made[last] == 4 * (1 + 2 + 1) - 1


def test_last_uses_name_every_value_once_and_no_result(mlp: Captured) -> None:
    for ran in lowered(planned(mlp)):
        graph = ran.graph.graph
        frees = last_uses(graph)
        freed = [node for nodes in frees.values() for node in nodes]
        assert len(freed) == len(set(freed))
        assert not set(freed) & set(graph.output_node().all_input_nodes)
        order = {node: i for i, node in enumerate(graph.nodes)}
        for user, nodes in frees.items():
            for node in nodes:
                readers = [order[u] for u in node.users]
                assert max(readers, default=order[user]) <= order[user]


def test_rank_that_waits_yields_the_message(mlp: Captured) -> None:
    program = planned(mlp)
    second = lowered(program)[1]
    parts = list(microbatches(mlp, program, (2, 2)))
    transport = LocalTransport({})
    with torch.no_grad():
        step = Executor(second).run(transport, slot_values(second, parts))
        assert next(step) == "0SEND_F0"
        assert next(step) == "0SEND_F0"
        transport.boxes["0SEND_F0"] = (torch.zeros(2, 3, dtype=torch.float64),)
        assert next(step) == "0SEND_F1"
    assert "1SEND_B0" in transport.boxes


def test_error_in_a_task_names_rank_and_action(mlp: Captured) -> None:
    program = planned(mlp)

    def broken(graph: fx.GraphModule) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            raise ValueError("no such row")

        return run

    first = lowered(program, broken)[0]
    parts = list(microbatches(mlp, program, (2, 2)))
    step = Executor(first).run(LocalTransport({}), slot_values(first, parts))
    with pytest.raises(RankError, match=r"rank 0 failed in .*0F0.*: ValueError: no such row"):
        next(step)


def test_error_in_a_graph_names_the_models_line(gpt: Captured) -> None:
    program = planned(gpt)
    first = lowered(program)[0]
    parts = [dict(values) for values in microbatches(gpt, program, (2, 2))]
    for values in parts:
        values["tokens"] = values["tokens"] + 1000
    step = Executor(first).run(LocalTransport({}), slot_values(first, parts))
    with pytest.raises(RankError, match=r"helpers.py:\d+: x = self.tokens\(tokens\)"):
        next(step)


def test_pause_gives_outputs_and_takes_their_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3, dtype=torch.float64) for _ in range(2)))
    x = mlp_batch()[0]
    given = captured(model, x, stages=1, schedule="gpipe")
    program = run_until(given.program(2, 2, 1), "plan_last_uses")
    (ran,) = lowered(program)
    parts = list(microbatches(given, program, (2, 2)))
    output = model(x)
    gradient = torch.randn(4, 3, dtype=torch.float64)
    expected = torch.autograd.grad(output, list(model.parameters()), gradient)
    with torch.no_grad():
        step = Executor(ran).run(LocalTransport({}), slot_values(ran, parts))
        paused = next(step)
        assert isinstance(paused, Paused)
        torch.testing.assert_close(paused.outputs, (output.detach(),), rtol=1e-14, atol=1e-15)
        with pytest.raises(StopIteration) as stop:
            step.send((gradient[:2], gradient[2:]))
    torch.testing.assert_close(stop.value.value[1:], expected, rtol=1e-12, atol=1e-14)


def test_program_runs_again_with_the_same_numbers(mlp: Captured) -> None:
    program = planned(mlp)
    ranks = lowered(program)
    parts = list(microbatches(mlp, program, (2, 2)))
    with torch.no_grad():
        first, second = run_ranks(ranks, parts), run_ranks(ranks, parts)
    torch.testing.assert_close(first, second, rtol=0, atol=0)

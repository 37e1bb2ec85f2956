"""`schedule="auto"`: what is measured becomes costs, and given times always the same choice."""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpipe.errors import OptionError
from fxpipe.lowering import auto
from fxpipe.lowering.auto import choice_for, costs_of, probe_schedule
from fxpipe.lowering.measure import Times, measure_tasks
from fxpipe.lowering.tasks import TaskCompiler
from fxpipe.memory import bytes_of_limit
from fxpipe.options import Options
from fxpipe.program import Key, Program
from fxpipe.schedule import Kind
from fxpipe.schedules import build, families
from fxpipe.simulator import simulate
from tests.helpers import MLP, ConvNet, captured, convnet_batch, mlp_batch, run_until

F64 = 8


def probed(model: nn.Module, *batch: Tensor, stages: int = 4) -> Program:
    """The program that `auto` measures: every task of every stage."""
    schedule = probe_schedule(stages)
    given = captured(model, *batch, stages=stages, schedule=schedule, microbatches=2)
    return run_until(given.program(rows=1, microbatches=2), "plan_last_uses")


@functools.cache
def mlp(stages: int = 4) -> Program:
    return probed(MLP(3, 3, 3, 3, 3), *mlp_batch(), stages=stages)


def equal_times(program: Program, **seconds: float) -> Times:
    return Times({key: seconds.get(key.kind.value, 1.0) for key in program.tasks})


def options(**given: Any) -> Options:
    return Options.parse({"schedule": "auto", "microbatches": 8} | given)


def test_the_first_stage_of_a_probe_has_no_input_gradient_and_the_others_every_task() -> None:
    keys = {str(key) for key in mlp(stages=2).tasks}
    assert keys == {"0F", "0B", "0W", "1F", "1I", "1W", "1B"}


def test_costs_are_the_seconds_and_bytes_of_the_stages() -> None:
    program = mlp(stages=2)
    times = equal_times(program, F=1.0, I=2.0, W=3.0, B=4.0)
    costs = costs_of(program, replace(times, message=0.5, per_byte=0.25))
    row = 3 * F64
    assert (costs.F, costs.I, costs.W, costs.B) == ([1, 1], [0, 2], [3, 3], [4, 4])
    assert costs.edges == {(0, 1): row}
    assert costs.transfer == {(0, 1): 0.5 + row / 4, (1, 0): 0.5 + row / 4}
    parameters = 2 * (9 + 3) * F64
    assert costs.weights == [2 * parameters, 2 * parameters]
    assert costs.reduce == [0.5 + parameters / 4, 0.5 + parameters / 4]
    assert isinstance(costs.activations, list) and min(costs.activations) >= row


def test_the_same_times_give_the_same_choice() -> None:
    program = mlp()
    times = equal_times(program)
    first, second = (choice_for(program, times, 2, options()) for _ in range(2))
    assert str(first) == str(second)
    assert first.schedule == second.schedule


def test_the_choice_is_the_fastest_of_all_families() -> None:
    program = mlp()
    times = equal_times(program, B=2.0)
    costs = costs_of(program, times)
    spans = {
        name: simulate(build(name, stages=4, microbatches=8, ranks=2, costs=costs), costs).makespan
        for name in families()
    }
    assert choice_for(program, times, 2, options()).makespan <= min(spans.values())


def test_the_time_of_messages_is_counted() -> None:
    program = mlp()
    fast = choice_for(program, equal_times(program), 2, options())
    times = replace(equal_times(program), message=9.0)
    slow = choice_for(program, times, 2, options())
    assert fast.makespan < slow.makespan
    assert slow.makespan <= simulate(fast.schedule, costs_of(program, times)).makespan


def test_a_memory_limit_in_bytes_is_kept_or_refused_with_the_least_that_would_do() -> None:
    program = mlp()
    times = equal_times(program)
    free = choice_for(program, times, 2, options())
    taken = max(map(sum, zip(free.timeline.peak_activations, free.timeline.weights)))
    limited = choice_for(program, times, 2, options(memory_limit=taken - 1))
    assert max(map(sum, zip(limited.timeline.peak_activations, limited.timeline.weights))) < taken
    with pytest.raises(OptionError, match=r"keeps memory_limit=100; the least is \d+"):
        choice_for(program, times, 2, options(memory_limit=100))


def test_a_limit_up_to_one_is_a_fraction_of_the_machines_memory() -> None:
    whole = bytes_of_limit(1, torch.device("cpu"))
    assert whole is not None and whole > 1e8
    assert bytes_of_limit(0.25, None) == whole / 4
    assert bytes_of_limit(4096, None) == 4096
    assert bytes_of_limit(None, None) is None


def test_a_model_that_writes_buffers_gets_no_replicas() -> None:
    program = probed(ConvNet().train(), *convnet_batch(), stages=2)
    choice = choice_for(program, equal_times(program), 2, options())
    assert all(len(ranks) == 1 for ranks in choice.schedule.holders.values())
    assert not {"chimera", "dualpipe", "bitpipe"} & {c.name for c in choice.considered}


def test_measuring_leaves_the_random_numbers_of_the_training_alone() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (self.b(nn.functional.dropout(self.a(x))) - y).square().mean()

    program = probed(Dropping(), *mlp_batch(), stages=2)
    before = torch.get_rng_state()
    times = measure_tasks(program, TaskCompiler("eager"), range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert set(times) == set(program.tasks)
    assert min(times.values()) > 0


# Through torch.compile.


def pipelined(model: nn.Module, **given: Any) -> Any:
    usual = {"stages": 4, "microbatches": 4, "schedule": "auto", "ranks": 2, "lowering": "eager"}
    return torch.compile(model, backend="fxpipe", options=usual | given)


@pytest.fixture
def given_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every task takes a second."""
    monkeypatch.setattr(auto, "measure_tasks", lambda program, *_: dict.fromkeys(program.tasks, 1))


def test_what_was_considered_and_why_one_won_is_logged(
    given_times: None, caplog: pytest.LogCaptureFixture
) -> None:
    model = MLP(3, 3, 3, 3, 3)
    with caplog.at_level(logging.INFO, "fxpipe"):
        pipelined(model)(*mlp_batch()).backward()
    (told,) = [r.getMessage() for r in caplog.records if "schedule='auto'" in r.getMessage()]
    assert "decided" in told or "slower by" in told
    assert all(name in told for name in ("1f1b: ", "zb-v: ", "dualpipe: "))


def test_an_evaluation_finds_its_stages_where_the_training_put_them(given_times: None) -> None:
    """Before a training it runs as it can, after it on the ranks that hold the parameters."""
    model = MLP(3, 3, 3, 3, 3)
    step, (x, y) = pipelined(model), mlp_batch()
    holders: list[Any] = []

    def note(program: Program) -> Program:
        holders.append(dict(program.holders))
        return program

    with pytest.MonkeyPatch.context() as patch:
        watch_plans(patch, note)
        with torch.no_grad():
            before = step(x, y)
        step(x, y).backward()
        with torch.no_grad():
            after = step(x, y)
    assert holders[-1] == holders[-2] != holders[0]
    torch.testing.assert_close(before, after, rtol=1e-14, atol=0)


def watch_plans(patch: pytest.MonkeyPatch, note: Any) -> None:
    from fxpipe.lowering import runtime

    usual = runtime.lower

    def lower(programs: Any, *rest: Any) -> Any:
        note(programs[0])
        return usual(programs, *rest)

    patch.setattr(runtime, "lower", lower)


def test_a_family_by_name_is_not_held_to_the_limit_of_auto() -> None:
    """Hanayo counts activations of a rank's share: half of one would refuse every schedule."""
    model = MLP(3, 3, 3, 3, 3)
    x, y = mlp_batch()
    loss = pipelined(model, schedule="hanayo", memory_limit=0.5)(x, y)
    assert float(loss.detach()) == pytest.approx(float(model(x, y).detach()), rel=1e-12)


def test_the_probe_has_every_kind_in_the_order_that_tasks_need() -> None:
    assert str(probe_schedule(2)) == "0F0 0F1 0B0 0I1 0W1\n1F0 1F1 1B0 1I1 1W1"
    assert {Key(1, Kind.I), Key(1, Kind.B)} <= set(mlp(stages=2).tasks)

"""A minute of random models, cuts, schedules and batches: none differs from unsplit eager."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.fx as fx

from fxpipe.checker import check_schedule
from fxpipe.lowering.tasks import TaskCompiler
from fxpipe.passes import TraceJoint
from fxpipe.program import Program
from fxpipe.schedule import Kind
from tests.fuzz.batches import make_batch
from tests.fuzz.models import RandomModel
from tests.fuzz.plans import random_order, random_plan, random_sizes
from tests.fuzz.run import PLANS, Run, counted, fuzz, run, trial_of, uses_inductor
from tests.fuzz.trial import Calls, compare

# The seeds start elsewhere than `make fuzz`, so that both together see more. Six plans of each of
# sixty models; a machine that has time for fewer takes the first of them.
FIRST_SEED, SECONDS = 1_000_000, 60.0
SEEDS = [FIRST_SEED + PLANS * model + plan for model in range(60) for plan in range(6)]


@pytest.mark.timeout(240)
def test_random_models_give_eagers_loss_and_gradients() -> None:
    seeds = [seed for seed in SEEDS if not uses_inductor(seed)]
    done = list(run(seeds, SECONDS, jobs=1))
    faults = [str(r) for r in done if r.is_fault]
    assert not faults, "\n".join(faults)
    print(f"{len(done)} runs: {counted(done)}")
    assert sum(r.outcome == "equal" for r in done) > 0.85 * len(done)


def test_a_batch_of_one_row_on_replicated_stages_ends() -> None:
    assert not fuzz(1_000_252).is_fault


def test_a_seed_is_the_same_run_whatever_ran_before() -> None:
    first = fuzz(8)
    assert [fuzz(7).seed, fuzz(9).seed, fuzz(8)] == [7, 9, first]


def test_plans_of_a_model_share_its_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[bool, tuple[int, ...]]] = []
    trace = TraceJoint.__call__

    def call(self: TraceJoint, program: Program) -> Program:
        sizes.append((program.training, tuple(program.sizes.values())))
        return trace(self, program)

    monkeypatch.setattr(TraceJoint, "__call__", call)
    trial_of.cache_clear()
    first = PLANS + 1  # a seed that does not go the whole way
    assert all(fuzz(first + i).outcome == "equal" for i in range(8))
    assert sizes and len(sizes) == len(set(sizes))


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_graph = TaskCompiler.__call__

    def call(self: TaskCompiler, graph: fx.GraphModule) -> Any:
        function = compile_graph(self, graph)

        def wrong(*arguments: Any) -> Any:
            return tuple(v * 1.0001 if v.is_floating_point() else v for v in function(*arguments))

        return wrong

    monkeypatch.setattr(TaskCompiler, "__call__", call)
    outcomes = [fuzz(seed).outcome for seed in range(6)]
    assert any("is off by" in outcome for outcome in outcomes)
    assert not any(outcome == "equal" for outcome in outcomes)


@pytest.mark.parametrize(
    ("changed", "outcome"),
    [
        ({"outputs": [[torch.tensor(1.0)]]}, "differs: output 0 of call 0 is off"),
        ({"outputs": [[]]}, "differs: call 0 has 0 outputs, not 1"),
        ({"gradients": {"w": None}}, "differs: the gradient of w is off"),
        ({"gradients": {"w": torch.tensor([3.0, float("nan")])}}, "differs: the gradient of w"),
        ({"buffers": {"count": torch.tensor(2)}}, "differs: the buffer count is off"),
    ],
)
def test_outputs_gradients_and_buffers_are_compared(changed: dict[str, Any], outcome: str) -> None:
    right = Calls(
        [[torch.tensor(2.0)]], {"w": torch.tensor([3.0, 0.0])}, {"count": torch.tensor(1)}
    )
    assert compare(right, right) == "equal"
    assert compare(right._replace(**changed), right).startswith(outcome)


def test_batches_differ_by_their_seed_and_count_every_row() -> None:
    first, again, other = make_batch(3, 1), make_batch(3, 1), make_batch(3, 2)
    assert all(a.equal(b) for a, b in zip(first, again)) and not first.x.equal(other.x)
    assert first.mask[0, 0] and len(first.y) == 3


def test_an_order_that_is_drawn_is_a_schedule_that_can_run() -> None:
    rng = random.Random(0)
    for _ in range(200):
        stages, microbatches = rng.randint(1, 5), rng.randint(1, 5)
        schedule = random_order(rng, stages, microbatches, forwards_first=False)
        check_schedule(schedule, stages, microbatches)


def test_an_order_with_forwards_first_has_no_forward_after_a_backward() -> None:
    schedule = random_order(random.Random(1), 3, 4, forwards_first=True)
    for rank in range(schedule.num_ranks):
        kinds = [action.kind is Kind.F for action in schedule.actions(rank)]
        assert kinds == sorted(kinds, reverse=True)


def test_plans_differ_and_a_seed_gives_the_same_one() -> None:
    model, sizes = RandomModel(3), random_sizes(random.Random(3))
    plans = [str(random_plan(random.Random(seed), model, sizes)) for seed in (1, 2, 1)]
    assert plans[0] == plans[2] != plans[1]


def test_a_run_says_how_to_do_it_again() -> None:
    text = str(Run(5, "linear[0]", "differs: by 1"))
    assert text == "seed 5: differs: by 1\n  linear[0]"

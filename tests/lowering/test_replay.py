"""Steps replayed on memory that stays give the bits of the executors, whatever changes between."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe.lowering.captured as captured_module
import fxpipe.lowering.runtime as runtime
from fxpipe.errors import OptionError, RankError
from fxpipe.lowering import rules
from fxpipe.lowering.captured import Captured
from fxpipe.lowering.replay import Replay
from fxpipe.options import Options
from tests.cases.shared import normal
from tests.lowering.bench import WAYS, Bench
from tests.numerics.models import CASES, GPT, MLP, pipelined, seeded


@pytest.fixture(params=WAYS)
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(request.param, monkeypatch)


@pytest.fixture(params=WAYS[1:])
def fixed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A bench whose steps run on memory that stays."""
    return Bench(request.param, monkeypatch)


@pytest.fixture(params=["replayed", "step"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(request.param, monkeypatch)


def inputs_of_steps(case: str, steps: int) -> Iterator[tuple[Tensor, ...]]:
    for step in range(steps):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(step)
            yield seeded_by(step, CASES[case].batch)


def seeded_by(seed: int, make: Callable[[], Any]) -> Any:
    def seeded_make() -> Any:
        torch.manual_seed(seed)
        return make()

    return seeded(seeded_make)


def train(step: Any, model: nn.Module, case: str, steps: int) -> list[Tensor]:
    """Losses of a training with a schedule of rates, new inputs each step, and old gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for number, inputs in enumerate(inputs_of_steps(case, steps)):
        loss = step(*inputs)
        loss.backward()
        losses.append(loss.detach())
        if number % 2:  # two steps make one of the optimizer's
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % 4 == 1)
            rates.step()
    return losses


@pytest.mark.parametrize("case", ["mlp", "gpt"])
def test_twenty_steps_give_the_bits_of_the_executors(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = {}
    for way in ("executors", *(WAYS if case == "mlp" else ("replayed", "step"))):
        bench = Bench(way, monkeypatch)
        model = CASES[case].model()
        step = bench.compile(model, schedule="zb-h1", check=True)
        losses = train(step, model, case, 20)
        results[way] = [*losses, *(p.detach() for p in model.parameters())]
        (plan,) = bench.plans
        assert type(plan.replay) is {"executors": type(None), "replayed": Replay}.get(way, Captured)
        if way in ("step", "task"):
            assert bench.replays == 18 * len(bench.devices[0].graphs) > 0
    for way in results:
        for found, expected in zip(results[way], results["executors"], strict=True):
            assert torch.equal(found, expected), way


def test_memory_that_stays_stays_where_it_is(fixed: Bench) -> None:
    model = seeded(MLP)
    step = fixed.compile(model, check=True)
    places = []
    for inputs in inputs_of_steps("mlp", 5):
        step(*inputs).backward()
        (plan,) = fixed.plans
        assert isinstance(plan.replay, Captured)
        places.append([t.data_ptr() for t in (*plan.replay.inputs, *plan.replay.accumulators)])
    assert places[1] == places[2] == places[4] and len(places[4]) > 8
    plan.replay.inputs[0] = plan.replay.inputs[0].clone()
    with pytest.raises(RankError, match="has moved in memory"):
        step(*inputs)


def check_beside_eager(step: Any, model: nn.Module, twin: nn.Module, *inputs: Tensor) -> None:
    """Gradients are added to what is there, in both."""
    loss, expected = step(*inputs), twin(*inputs)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for found, right in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(found.grad, right.grad, rtol=1e-10, atol=1e-14)


def test_new_weights_are_read_where_they_are_and_where_they_come_to_be(bench: Bench) -> None:
    model = seeded(lambda: MLP(depth=2))
    twin, step = copy.deepcopy(model), bench.compile(model)
    changes: list[Callable[[nn.Module], Any]] = [
        lambda m: None,
        lambda m: None,
        lambda m: None,
        lambda m: [p.data.mul_(0.5) for p in m.parameters()],
        lambda m: setattr(m.layers[0].weight, "data", m.layers[0].weight.data * 2),
        lambda m: m.load_state_dict({k: v + 0.1 for k, v in m.state_dict().items()}),
        lambda m: m.load_state_dict({k: v - 0.1 for k, v in m.state_dict().items()}, assign=True),
        lambda m: None,
    ]
    for change, inputs in zip(changes, inputs_of_steps("mlp", len(changes))):
        for changed in (model, twin):
            change(changed)
            changed.zero_grad()
        check_beside_eager(step, model, twin, *inputs)


def test_gradients_that_are_kept_never_change(bench: Bench) -> None:
    model = seeded(lambda: MLP(depth=2))
    step = bench.compile(model)
    kept = []
    for inputs in inputs_of_steps("mlp", 5):
        model.zero_grad()
        loss = step(*inputs)
        asked = torch.autograd.grad(loss, list(model.parameters()), retain_graph=False)
        step(*inputs).backward()
        given = [p.grad for p in model.parameters()]
        kept += [(g, g.clone()) for g in (*asked, *given) if g is not None]
        assert all(torch.equal(a, g) for a, g in zip(asked, given) if g is not None)
    assert all(torch.equal(gradient, before) for gradient, before in kept)


def test_a_loss_may_wait_while_other_steps_run(either: Bench) -> None:
    model = seeded(lambda: MLP(depth=2))
    twin, step = copy.deepcopy(model), either.compile(model)
    for _ in range(4):
        first, second = inputs_of_steps("mlp", 2)
        for run in (step, twin):
            losses = run(*first), run(*second)
            (losses[0] + 3 * losses[1]).backward()
        for found, right in zip(model.parameters(), twin.parameters()):
            torch.testing.assert_close(found.grad, right.grad, rtol=1e-10, atol=1e-14)


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_a_pause_holds_the_memory_and_a_step_within_it_runs_beside(bench: Bench) -> None:
    model = seeded(Logits)
    twin, step = copy.deepcopy(model), bench.compile(model)
    for number in range(5):
        x, y = normal(6, 4, seed=number), normal(6, 4, seed=number + 50)
        for run in (step, twin):
            outputs = run(x)
            other = run(y)  # begins before the first has had its backward
            kept = outputs.detach().clone()
            (outputs.square().sum() + other.sum()).backward()
            assert torch.equal(outputs, kept)
            run(x)  # never gets a backward
        for found, right in zip(model.parameters(), twin.parameters()):
            torch.testing.assert_close(found.grad, right.grad, rtol=1e-10, atol=1e-14)


def test_plans_of_several_sizes_take_turns(fixed: Bench) -> None:
    bench, model = fixed, seeded(GPT)
    twin, step = copy.deepcopy(model), bench.compile(model)
    for number, rows in enumerate([8, 5] * 4):
        (tokens, targets), *_ = inputs_of_steps("gpt", 1)
        model.zero_grad()
        twin.zero_grad()
        check_beside_eager(step, model, twin, tokens[:rows].roll(number), targets[:rows])
    if bench.way == "step":
        assert [len(d.graphs) for d in bench.devices] == [1, 1] and bench.replays == 4


def test_random_numbers_are_new_in_each_replay(either: Bench) -> None:
    class Dropping(MLP):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(nn.functional.dropout(x, 0.5), y)

    def losses(step: Any) -> list[float]:
        torch.manual_seed(3)
        x = normal(6, 6)
        with torch.no_grad():
            return [float(step(x, x)) for _ in range(6)]

    step = either.compile(seeded(Dropping))
    found = losses(step)
    assert len(set(found)) == 6
    assert losses(step) == found


def test_buffers_are_written_once_a_step(either: Bench) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    options = {"stages": ["1"], "microbatches": 2}
    step = either.compile(model, **options)
    for number in range(5):
        step(normal(6, 4, seed=number)).sum().backward()
    assert int(model[1].num_batches_tracked) == 10


@pytest.mark.parametrize("way", ["replayed", "own memory"])
def test_a_task_that_fails_is_named(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph does not look at its inputs: what is captured has no such error."""
    bench = Bench(way, monkeypatch)
    model = seeded(GPT)
    step = bench.compile(model)
    tokens, targets = next(inputs_of_steps("gpt", 1))
    for _ in range(3):
        step(tokens, targets)
    with pytest.raises(RankError, match=r"rank 0 failed in 0F2 \(stage 0, microbatch 2\)"):
        step(tokens.clone().index_fill_(0, torch.tensor([7]), 99), targets)
    step(tokens, targets).backward()


# Captures.


def test_captures_are_bounded_and_what_is_new_then_runs_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(captured_module, "MOST_CAPTURES", 2)
    monkeypatch.setattr(captured_module.Budget, "left", 2)
    bench = Bench("step", monkeypatch)
    monkeypatch.setattr(runtime, "Budget", lambda: captured_module.Budget(2))
    model = seeded(lambda: MLP(depth=2))
    twin, step = copy.deepcopy(model), bench.compile(model)
    with caplog.at_level(logging.WARNING, "fxpipe"):
        for number, inputs in enumerate(inputs_of_steps("mlp", 8)):
            if number > 3:
                weight = model.layers[0].weight
                weight.data = weight.data.clone()
            model.zero_grad()
            twin.zero_grad()
            check_beside_eager(step, model, twin, *inputs)
    assert len(bench.devices[0].graphs) == 2
    assert "have changed more than 2 times" in caplog.text


def test_closing_frees_memory_and_the_next_step_begins_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench("step", monkeypatch)
    model = seeded(lambda: MLP(depth=2))
    twin, step = copy.deepcopy(model), bench.compile(model)
    for inputs in inputs_of_steps("mlp", 4):
        model.zero_grad()
        twin.zero_grad()
        check_beside_eager(step, model, twin, *inputs)
    replay = bench.plans[0].replay
    assert isinstance(replay, Captured) and replay.captures
    replay.close()
    gc.collect()
    assert not replay.captures and not replay.inputs and not replay.accumulators
    assert bench.devices[0].graphs[0].operations == []
    model.zero_grad()
    twin.zero_grad()
    check_beside_eager(step, model, twin, *inputs)


def test_without_a_gpu_the_option_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    x = normal(6, 6)
    with pytest.raises(OptionError, match="cuda_graphs='step' needs a GPU with CUDA"):
        pipelined(seeded(MLP), lowering="cuda_graph")(x, x)


def test_the_lowering_cuda_graph_is_inductor_with_whole_steps() -> None:
    options = Options.parse({"lowering": "cuda_graph"})
    assert (options.lowering, options.cuda_graphs) == ("inductor", "step")
    assert Options.parse({"lowering": "cuda_graph", "cuda_graphs": "task"}).cuda_graphs == "task"
    assert Options.parse({"cuda_graphs": False}).cuda_graphs is False
    for wrong in (True, "steps"):
        with pytest.raises(OptionError, match="expected one of 'step' and 'task', or False"):
            Options.parse({"cuda_graphs": wrong})


def test_a_step_that_breaks_the_rules_runs_without_capture_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench("step", monkeypatch)
    # No operator that the passes let through breaks a rule: one is declared to.
    monkeypatch.setattr(rules, "READS", (torch.ops.aten.tanh.default,))
    model = seeded(lambda: MLP(depth=2))
    twin, step = copy.deepcopy(model), bench.compile(model)
    with caplog.at_level(logging.WARNING, "fxpipe"):
        for inputs in inputs_of_steps("mlp", 4):
            check_beside_eager(step, model, twin, *inputs)
    assert bench.devices[0].graphs == []
    warnings = [r.getMessage() for r in caplog.records if "without CUDA graphs" in r.getMessage()]
    assert len(warnings) == 1
    assert "tanh reads a Python value from a tensor" in warnings[0]
    assert "models.py:" in warnings[0] and "torch.tanh(layer(x))" in warnings[0]

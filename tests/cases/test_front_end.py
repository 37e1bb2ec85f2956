"""What Dynamo and FX make of a model: sizes, containers, many kinds of calls, compiled stages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.backend import fxpipe as backend
from fxpipe.errors import CaptureError, FxpipeError
from fxpipe.unsplit import warn_of_unsplit_runs
from tests.cases.shared import check, line_of, normal
from tests.numerics.models import MLP, assert_close, pipelined, seeded
from tests.numerics.test_batches import Counting


class Experts(nn.Module):
    """Parts of a split go to experts in two stages; the batch's size is used as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(6, 2), nn.Linear(6, 6)
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        gates, parts = self.gate(x).softmax(-1), x.split([3, 3], 1)
        taken = [
            e(part) * gates[:, i : i + 1] for i, (e, part) in enumerate(zip(self.experts, parts))
        ]
        mixed = self.out(torch.cat(taken, 1)).view(x.shape[0], 2, 3)
        return mixed.square().sum() / x.shape[0]


def test_case_84_parts_of_a_split_and_sizes_cross_stages() -> None:
    check(Experts, [normal(8, 6)], [normal(5, 6)], stages=["experts.1", "out"])


class Identity(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def test_case_84_a_model_without_an_operator_gives_its_input() -> None:
    x = normal(8, 6)
    assert pipelined(Identity(), stages=1)(x) is x


class ShapeFirst(nn.Module):
    """Its first operator is there only where sizes are symbolic."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        x = self.first(x * torch.arange(width)).tanh()
        return self.second(x).view(rows * width).square().mean()


def test_case_84_sizes_may_be_read_before_all_else() -> None:
    check(ShapeFirst, [normal(8, 6)], [normal(5, 6)])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


class PrintingInALoop(nn.Module):
    """Dynamo runs such a frame in Python as a whole, and traces the blocks one by one."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(build() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            print("one more")
        return x.square().mean()


def test_case_86_no_block_of_a_broken_model_becomes_a_pipeline() -> None:
    with pytest.raises(CaptureError, match="not one graph: Dynamo left .*fullgraph=True") as told:
        pipelined(seeded(lambda: PrintingInALoop(Block)))(normal(8, 6))
    assert line_of(PrintingInALoop, "block(x)") in str(told.value)


@pytest.mark.xfail(reason="Dynamo traces nothing, so the backend is never called", strict=True)
def test_case_86_a_model_of_which_nothing_is_traced_is_never_run() -> None:
    with pytest.raises(CaptureError):
        pipelined(seeded(lambda: PrintingInALoop(lambda: nn.Linear(6, 6))))(normal(8, 6))


def test_case_86_a_model_of_which_nothing_is_traced_is_named_in_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxpipe.log._warned", set())
    warn_of_unsplit_runs(backend)
    for _ in range(2):
        pipelined(seeded(lambda: PrintingInALoop(lambda: nn.Linear(6, 6))))(normal(8, 6))
    told = [r.getMessage() for r in caplog.records if "runs unsplit" in r.getMessage()]
    assert len(told) == 1, told
    assert told[0].startswith("Dynamo leaves PrintingInALoop at ") and "fullgraph=True" in told[0]
    assert line_of(PrintingInALoop, "def forward") in told[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.GRU(6, 6, batch_first=True), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None]
        states, _ = self.cells(x)
        return self.out(states[:, 0]).square().mean()


@pytest.mark.parametrize("before", ["nothing", "a step", "a step and a reset"])
def test_case_86_the_warning_and_explain_name_the_call_whatever_ran_before(
    before: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxpipe.log._warned", set())
    if before != "nothing":
        pipelined(seeded(MLP))(normal(8, 6), normal(8, 6)).backward()
    if before == "a step and a reset":
        torch.compiler.reset()
    step = pipelined(seeded(Recurrent).double())
    step(normal(8, 6)).backward()
    told = [r.getMessage() for r in caplog.records if "runs unsplit" in r.getMessage()]
    assert len(told) == 1 and told[0].startswith("Dynamo leaves Recurrent at "), told
    assert line_of(Recurrent, "def forward") in told[0]
    assert line_of(Recurrent, "self.cells(x)") in told[0]
    again = pipelined(seeded(Recurrent).double())
    again(normal(8, 6))
    for ask, of in ((fxpipe.explain, step), (fxpipe.metrics, step), (fxpipe.explain, again)):
        with pytest.raises(
            FxpipeError, match="has run through fxpipe: .*Dynamo leaves Recurrent at"
        ):
            ask(of)


class Moded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, factor: str) -> Tensor:
        return self.second(self.first(x).tanh()).square().mean() * float(factor)


@pytest.fixture
def two_traces() -> Iterator[None]:
    """Dynamo gives up after two, in place of eight."""
    with torch._dynamo.config.patch(recompile_limit=2):
        yield


@pytest.mark.usefixtures("two_traces")
@pytest.mark.xfail(reason="after Dynamo's limit of traces the model runs unpipelined", strict=True)
def test_case_88_too_many_traces_are_never_a_run_without_a_pipeline() -> None:
    step = pipelined(seeded(Moded))
    for factor in "123":
        assert "PipelinedStep" in step(normal(8, 6), factor).grad_fn.name()


@pytest.mark.usefixtures("two_traces")
def test_case_88_the_last_trace_that_dynamo_makes_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxpipe.log._warned", set())
    step = pipelined(seeded(Moded))
    step(normal(8, 6), "1")
    assert "makes no more" not in caplog.text
    step(normal(8, 6), "2")
    assert "this is trace 2 of Moded" in caplog.text and "will run unsplit" in caplog.text


@pytest.mark.usefixtures("two_traces")
def test_case_88_with_fullgraph_too_many_traces_are_an_error() -> None:
    options = {"stages": 2, "microbatches": 3, "lowering": "eager"}
    step = torch.compile(seeded(Moded), backend="fxpipe", options=options, fullgraph=True)
    for factor in "12":
        step(normal(8, 6), factor)
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        step(normal(8, 6), "3")


class Summing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh().sum((1, 2)).mean()


def test_case_88_ten_lengths_of_a_sequence_are_two_traces() -> None:
    backend, model = Counting(), seeded(Summing)
    twin = copy.deepcopy(model)
    options = {"stages": 1, "microbatches": 2, "lowering": "eager"}
    step = torch.compile(model, backend=backend, options=options)
    changes = 0
    for length in range(3, 13):
        called = backend.calls
        x = normal(4, length, 6)
        with torch.no_grad():
            torch.testing.assert_close(step(x), twin(x), rtol=1e-10, atol=0)
        changes += backend.calls > called
    assert changes == 2


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.drop(self.first(x).tanh())).square().mean()


def test_case_90_the_wrapper_is_saved_switched_and_copied_as_the_model() -> None:
    model, x = seeded(Dropping), normal(8, 6)
    step = pipelined(model)
    step(x).backward()
    plain = seeded(Dropping)
    plain.load_state_dict({name: value + 1 for name, value in plain.state_dict().items()})
    plain.load_state_dict(fxpipe.state_dict(step))
    step.eval()
    assert not model.training and not step.training
    assert_close(step(x), plain.eval()(x), 1e-10, "loss in eval")
    average = copy.deepcopy(step)
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.mul_(0.5)
        for parameter in plain.parameters():
            parameter.mul_(0.5)
    assert_close(average(x), plain(x), 1e-10, "loss of the average")
    assert not torch.equal(average(x), step(x))


def test_case_93_v_placement_runs_compiled_tasks() -> None:
    options = {"stages": 4, "ranks": 2, "microbatches": 2, "lowering": "inductor"}
    x = normal(4, 6)
    check(MLP, [x, x.cos()], schedule="zb-v", **options)

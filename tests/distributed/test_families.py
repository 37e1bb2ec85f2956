"""Schedules with folded, looped and replicated stages train on ranks of a gloo group as eager."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import fxpipe
from fxpipe.lowering.runtime import Step
from fxpipe.passes import default_pipeline
from tests.distributed.harness import run_ranks
from tests.distributed.work import digest, error, optimizer
from tests.numerics.models import CASES, gradients_of, pipelined
from tests.numerics.shared import KeepingPipeline, SharedCapture

STEPS = 3


class Point(NamedTuple):
    schedule: str
    stages: int
    microbatches: int = 4


TWO_RANKS = [
    Point("1f1b", 2),
    Point("interleaved-zb", 4),
    Point("zb-v", 4),
    Point("dualpipev", 4, 5),
    Point("chimera", 2),
    Point("bitpipe", 4),
]
FOUR_RANKS = [
    Point("chimera", 4, 8),
    Point("chimera:f=2", 4, 8),
    Point("dualpipe", 4, 8),
    Point("zb-v", 8),
]


class Report(NamedTuple):
    """Of one rank: the largest relative errors, and the bits of the parameters that it holds."""

    gradient_error: float
    trained_error: float
    digests: dict[str, str]
    schedule: str


class SharedRanks(SharedCapture):
    """One capture for all schedules; each process is a rank."""

    def make_step(self) -> Step:
        assert self.captured is not None
        usual = default_pipeline(self.options)
        pipeline = KeepingPipeline(usual.passes, usual.optional, self.options, self.kept)
        return Step(self.captured, self.options, pipeline, dist.get_world_size())


def train_as_eager(step: Any, model: torch.nn.Module, schedule: Any = str) -> Report:
    """Three steps with momentum beside eager's; afterwards the model is as it was."""
    start = {name: value.clone() for name, value in model.state_dict().items()}
    case, twin = CASES["gpt"], CASES["gpt"].model()
    model.zero_grad()
    theirs: Any = optimizer(twin.parameters())
    mine: Any = None
    for _ in range(STEPS):
        step(*case.inputs()).backward()
        twin(*case.inputs()).backward()
        if mine is None:
            owned = fxpipe.owned_parameters(model)
            mine = optimizer(owned.values())
            found, expected = gradients_of(model), gradients_of(twin)
            gradient_error = max(error(found[name], expected[name]) for name in owned)
        for update in (mine, theirs):
            update.step()
            update.zero_grad()
    plain = dict(twin.named_parameters())
    trained_error = max(error(p.detach(), plain[name].detach()) for name, p in owned.items())
    digests = {name: digest(p) for name, p in owned.items()}
    model.load_state_dict(start)
    return Report(gradient_error, trained_error, digests, schedule())


def train_each(rank: int, world_size: int, points: list[Point]) -> list[Report]:
    shared = SharedRanks(CASES["gpt"])
    return [
        train_as_eager(shared.use(**point._asdict(), timeout=60.0), shared.model)
        for point in points
    ]


def choose_and_be_refused(rank: int, world_size: int) -> dict[str, Any]:
    """By the backend's name: a chosen schedule, and starts that are not equal."""
    case = CASES["gpt"]
    shared = SharedRanks(case)
    step = shared.use(schedule="auto", stages=4, microbatches=4)
    report = train_as_eager(step, shared.model, lambda: str(shared.step.schedule))
    model = shared.model
    with torch.no_grad():
        loss = step(*case.inputs())
    return {
        "auto": report,
        "evaluated": error(loss, model(*case.inputs()).detach()),
        "too little memory": refusal(pipelined(case.model(), schedule="auto", memory_limit=2)),
        "tied": refusal(pipelined(changed("token.weight", rank))),
        "replicated": refusal(pipelined(changed("norm.bias", rank), schedule="chimera")),
        "its own": refusal(pipelined(changed("blocks.1.up.bias", rank), microbatches=2)),
    }


def changed(path: str, rank: int) -> torch.nn.Module:
    """The model, one element of a parameter other on rank 1."""
    model = CASES["gpt"].model()
    with torch.no_grad():
        model.get_parameter(path).flatten()[-1] += rank * 1e-9
    return model


def refusal(step: Any) -> str:
    try:
        step(*CASES["gpt"].inputs())
        return "none"
    except fxpipe.FxpipeError as raised:
        return f"{type(raised).__name__}: {raised}"


def reports_of(ranks: int, points: list[Point], folder: Path) -> dict[Point, list[Report]]:
    found = run_ranks(train_each, ranks, folder, timeout=170, points=points)
    return {point: [reports[i] for reports in found] for i, point in enumerate(points)}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[Point, list[Report]]:
    return reports_of(2, TWO_RANKS, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[Point, list[Report]]:
    return reports_of(4, FOUR_RANKS, tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(choose_and_be_refused, 2, tmp_path_factory.mktemp("auto"), timeout=170)


def assert_equals_eager(reports: list[Report]) -> None:
    for report in reports:
        assert report.gradient_error <= 1e-10
        assert report.trained_error <= 1e-9


def assert_same_bits_on_all_holders(reports: list[Report]) -> int:
    """The number of parameters that more than one rank holds."""
    bits: dict[str, list[str]] = {}
    for report in reports:
        for name, own in report.digests.items():
            bits.setdefault(name, []).append(own)
    assert all(len(set(held)) == 1 for held in bits.values())
    return sum(len(held) > 1 for held in bits.values())


@pytest.mark.parametrize("point", TWO_RANKS, ids=str)
def test_two_ranks_train_as_eager(point: Point, two_ranks: dict[Point, list[Report]]) -> None:
    assert_equals_eager(two_ranks[point])
    assert_same_bits_on_all_holders(two_ranks[point])


@pytest.mark.parametrize("point", FOUR_RANKS, ids=str)
def test_four_ranks_train_as_eager(point: Point, four_ranks: dict[Point, list[Report]]) -> None:
    assert_equals_eager(four_ranks[point])
    assert_same_bits_on_all_holders(four_ranks[point])


def test_replicated_stages_have_the_same_bits_after_training(
    two_ranks: dict[Point, list[Report]], four_ranks: dict[Point, list[Report]]
) -> None:
    parameters = len(list(CASES["gpt"].model().parameters()))
    replicated = {Point("chimera", 2): two_ranks, Point("dualpipe", 4, 8): four_ranks}
    for point, reports in replicated.items():
        assert assert_same_bits_on_all_holders(reports[point]) == parameters
    assert assert_same_bits_on_all_holders(two_ranks[Point("1f1b", 2)]) == 1  # the tied weight


def test_auto_decides_the_same_on_all_ranks_and_trains(answers: list[dict[str, Any]]) -> None:
    assert_equals_eager([answer["auto"] for answer in answers])
    assert answers[0]["auto"].schedule == answers[1]["auto"].schedule
    assert answers[0]["auto"].schedule.count("F") >= 4 * 4


def test_an_evaluation_after_auto_equals_eager(answers: list[dict[str, Any]]) -> None:
    assert max(answer["evaluated"] for answer in answers) <= 1e-12


def test_a_choice_that_rank_0_cannot_make_is_refused_on_all_ranks(
    answers: list[dict[str, Any]],
) -> None:
    for answer in answers:
        assert "OptionError" in answer["too little memory"]
        assert "keeps memory_limit=2; the least is" in answer["too little memory"]


@pytest.mark.parametrize(("which", "name"), [("tied", "token.weight"), ("replicated", "norm.bias")])
def test_shared_parameters_that_start_unequal_are_refused_by_name(
    which: str, name: str, answers: list[dict[str, Any]]
) -> None:
    expected = f"RankError: the parameter {name!r} has other values on rank 1 than on rank 0"
    assert all(answer[which].startswith(expected) for answer in answers)


def test_a_parameter_of_one_rank_may_start_as_it_likes(answers: list[dict[str, Any]]) -> None:
    assert [answer["its own"] for answer in answers] == ["none", "none"]

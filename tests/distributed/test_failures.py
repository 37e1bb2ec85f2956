"""What goes wrong on one rank is told on all of them, within seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.harness import run_ranks, run_to_the_end
from tests.distributed.work import Refusal, Report, fail_in_the_middle, refuse

Found = list[tuple[dict[str, Refusal], Report]]
SECONDS = 30.0  # of which most is compiling

REFUSALS = {
    "wrong option": ["OptionError", "OptionError", "did you mean 'stages'"],
    "wrong option on rank 1": ["RankError", "OptionError", "option 's' is unknown"],
    "graph break": ["CaptureError", "CaptureError", "test_refusals.py:"],
    "graph break on rank 1": ["RankError", "CaptureError", "test_refusals.py:"],
    "two losses": ["OptionError", "OptionError", "2 differentiable scalars"],
    "another batch": ["RankError", "RankError", "a batch of the same shape"],
    "other values": ["RankError", "RankError", "the argument 'y' has other values on rank 1"],
    "no such module": ["OptionError", "OptionError", "did you mean"],
    "another model": ["RankError", "RankError", "different steps"],
    "another schedule": ["RankError", "RankError", "the same options, such as stages and sch"],
    "more ranks than run": ["OptionError", "OptionError", "2 processes run"],
    "fewer stages than ranks": ["ScheduleError", "ScheduleError", "stages=1"],
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_ranks(refuse, 2, tmp_path_factory.mktemp("refused"))


@pytest.mark.parametrize("name", REFUSALS)
def test_a_wrong_call_is_refused_on_every_rank(name: str, refused: Found) -> None:
    *kinds, message = REFUSALS[name]
    for (refusals, _), kind in zip(refused, kinds):
        assert refusals[name].kind == kind, refusals[name].message
        assert message in refusals[name].message
        assert refusals[name].seconds < SECONDS


def test_a_right_call_runs_after_wrong_ones(refused: Found) -> None:
    for _, report in refused:
        assert report.gradient_error <= 1e-10


def test_a_rank_that_raises_stops_the_others(tmp_path: Path) -> None:
    told = run_ranks(fail_in_the_middle, 2, tmp_path, die=False)
    assert [refusal.kind for refusal in told] == ["RankError", "RankError"]
    assert told[1].message.startswith("rank 1 failed in 1F0 (stage 1, microbatch 0) at ")
    assert "work.py:" in told[1].message
    assert "IndexError: index out of range in self" in told[1].message
    assert all(refusal.seconds < SECONDS for refusal in told)


def test_a_rank_that_dies_stops_the_others(tmp_path: Path) -> None:
    survivor, dead = run_to_the_end(fail_in_the_middle, 2, tmp_path, die=True)
    assert dead.exit_code == 3
    assert survivor.value is not None, str(survivor)
    assert survivor.value.kind == "RankError"
    assert survivor.value.seconds < SECONDS
    assert not survivor.left_behind

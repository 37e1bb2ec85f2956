"""The option `schedule` becomes a proved order of actions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from fxpipe.errors import ScheduleError
from fxpipe.options import Options
from fxpipe.passes import BuildSchedule
from fxpipe.program import Program
from fxpipe.schedule import Schedule
from tests.helpers import MLP, captured, mlp_batch, run_until


@pytest.fixture(scope="module")
def program() -> Program:
    given = captured(MLP(3, 3, 3), *mlp_batch(), stages=2)
    return run_until(given.program(rows=2, ranks=2), "partial_gradients")


def scheduled(program: Program, schedule: str | Schedule, merge_backward: bool = False) -> str:
    options = Options.parse({"stages": 2, "schedule": schedule})
    made = BuildSchedule(merge_backward)(replace(program, options=options)).schedule
    return str(made)


def test_name_of_a_family_is_built(program: Program) -> None:
    assert program.schedule.ranks == ()
    assert_expected_inline(
        scheduled(program, "1f1b"),
        """\
0F0 0F1 0B0 0B1
1F0 1B0 1F1 1B1""",
    )
    assert_expected_inline(
        scheduled(program, "zb-h1"),
        """\
0F0 0F1 0I0 0W0 0I1 0W1
1F0 1I0 1F1 1I1 1W0 1W1""",
    )


def test_without_the_split_of_backward_i_and_w_run_as_b(program: Program) -> None:
    assert_expected_inline(
        scheduled(program, "zb-h1", merge_backward=True),
        """\
0F0 0F1 0B0 0B1
1F0 1B0 1F1 1B1""",
    )


def test_schedule_given_as_text_or_object_is_taken_as_it_is(program: Program) -> None:
    text = "0F0 0F1 0B1 0B0\n1F0 1F1 1B1 1B0"
    assert scheduled(program, text) == text
    assert scheduled(program, Schedule.parse(text)) == text


def test_pair_keeps_its_forward_and_merges_its_backward(program: Program) -> None:
    text = "0F0 0F1 0I0 0W0 0B1\n1F0 [1F1|1I0] 1W0 1B1"
    assert scheduled(program, text) == text
    merged = "0F0 0F1 0B0 0B1\n1F0 [1F1|1B0] 1B1"
    assert scheduled(program, text, merge_backward=True) == merged


def test_without_gradients_only_the_forwards_are_kept(program: Program) -> None:
    forward_only = replace(program, training=False)
    assert scheduled(forward_only, "zb-h1") == "0F0 0F1\n1F0 1F1"


def test_model_without_a_loss_runs_all_forwards_first() -> None:
    model = nn.Sequential(*(nn.Linear(3, 3, dtype=torch.float64) for _ in range(2)))
    given = captured(model, mlp_batch()[0], stages=2)
    program = run_until(given.program(rows=2, ranks=2), "partial_gradients")
    assert scheduled(program, "1f1b") == "0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1"
    with pytest.raises(ScheduleError, match="a backward before its last forward"):
        scheduled(program, "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")


@pytest.mark.parametrize(
    "schedule, message",
    [
        ("0F0 0B0\n1F0 1B0", "has 1 microbatches, but the options make 2; set microbatches=1"),
        (
            "0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1\n2F0 2F1 2B0 2B1",
            "has 3 stages, but the options make 2; set stages=3",
        ),
        ("0F0 0F1 0B0\n1F0 1F1 1B0 1B1", "0B1"),
        ("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0", "deadlock|waits|cannot"),
        ("0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1", "for 1 ranks, but 2 run"),
    ],
)
def test_wrong_schedule_is_refused(program: Program, schedule: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        scheduled(program, schedule)


def test_unknown_name_is_refused_with_the_nearest(program: Program) -> None:
    with pytest.raises(Exception, match="did you mean '1f1b'"):
        scheduled(program, "1fb1")

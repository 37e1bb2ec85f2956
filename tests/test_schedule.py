"""The nouns: text to schedule and back, and the integers that large schedules are kept in."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe import packed
from fxpipe.errors import ScheduleError
from fxpipe.schedule import Action, Kind, Pair, Schedule, Step

numbers = st.integers(0, 5000)
tasks = st.builds(Action, numbers, st.sampled_from([Kind.F, Kind.I, Kind.W, Kind.B]), numbers)
messages = st.builds(
    Action,
    numbers,
    st.sampled_from([Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B]),
    numbers,
    numbers,
)
pairs = st.builds(
    Pair,
    st.builds(Action, numbers, st.just(Kind.F), numbers),
    st.builds(Action, numbers, st.sampled_from([Kind.B, Kind.I, Kind.W]), numbers),
)
lines = st.lists(tasks | messages | pairs, max_size=12)
written = st.lists(lines, min_size=1, max_size=4)


@given(written)
def test_text_to_schedule_and_back(ranks: list[list[Step]]) -> None:
    schedule = Schedule(tuple(map(tuple, ranks)))
    assert Schedule.parse(str(schedule)) == schedule
    assert str(Schedule.parse(str(schedule))) == str(schedule)


@given(written)
def test_integers_to_schedule_and_back(ranks: list[list[Step]]) -> None:
    schedule = Schedule(tuple(map(tuple, ranks)))
    again = Schedule.from_packed(schedule.packed)
    assert again == schedule
    assert again.packed == schedule.packed


def test_text_may_have_labels_comments_idle_slots_and_empty_lines() -> None:
    schedule = Schedule.parse(
        """
        # two ranks
        rank 0: 0F0 0F1 . . 0B0 0B1   # all forwards first

        rank 1: .   1F0 1B0 1F1 1B1
        """
    )
    assert str(schedule) == "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"


def test_a_message_names_its_peer_where_it_is_no_neighbour() -> None:
    schedule = Schedule.parse("0SEND_F5 0SEND_F5>1 0SEND_F5>4 4RECV_F5<0 2RECV_B1 2SEND_B1>0")
    assert str(schedule) == "0SEND_F5 0SEND_F5 0SEND_F5>4 4RECV_F5<0 2RECV_B1 2SEND_B1>0"
    assert [action.peer for action in schedule.actions(0)] == [1, 1, 4, 0, 3, 0]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the schedule is empty"),
        ("0X0", "'0X0' is no action; expected <stage><kind><microbatch>"),
        ("0F", "'0F' is no action"),
        ("[0F1]", "is no pair; expected the form"),
        ("[0F1|0F2]", "pairs no F with a B, I or W"),
        ("[0B1|0F2]", "pairs no F with a B, I or W"),
        ("0F1>2", "'>' names the stage that a SEND goes to"),
        ("0SEND_F1<2", "'>' names the stage that a SEND goes to"),
        ("rank 1: 0F0", "is labelled rank 1, expected rank 0"),
    ],
)
def test_text_that_is_no_schedule_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ScheduleError) as error:
        Schedule.parse(text)
    assert sentence in str(error.value)


def test_where_stages_live_follows_from_the_forwards() -> None:
    schedule = Schedule.parse("0F0 1F1 1I1 1W1 0B0\n1F0 1B0 0F1 0I1 0W1")
    assert schedule.rank_of == {(0, 0): 0, (1, 1): 0, (1, 0): 1, (0, 1): 1}
    assert schedule.holders == {0: (0, 1), 1: (0, 1)}
    assert schedule.stages_of(1) == (0, 1)
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches) == (2, 2, 2)
    assert schedule.splits_backward
    assert not Schedule.parse("0F0 0B0").splits_backward


def test_reading_sizes_of_a_large_schedule_makes_no_actions() -> None:
    lines = Schedule.parse("0F0 0B0\n1F0 1B0").packed
    schedule = Schedule.from_packed(lines)
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches) == (2, 2, 1)
    assert schedule.holders == {0: (0,), 1: (1,)}
    assert "ranks" not in vars(schedule)
    assert schedule.ranks[1] == (Action(1, Kind.F, 0), Action(1, Kind.B, 0))


def test_a_schedule_made_of_integers_can_be_pickled() -> None:
    schedule = Schedule.from_packed(Schedule.parse("0F0 [0F1|0B0] 0B1").packed, "mine")
    again = pickle.loads(pickle.dumps(schedule))
    assert (again, again.name) == (schedule, "mine")
    with pytest.raises(AttributeError):
        _ = schedule.no_such_thing


def test_a_stage_that_fits_no_integer_is_refused() -> None:
    with pytest.raises(ScheduleError, match="is too large; stages and microbatches go up to"):
        _ = Schedule.parse("9999999F0").packed


def test_integers_are_read_field_by_field() -> None:
    code = packed.W(7, 12)
    assert (packed.kind_of(code), packed.stage_of(code), packed.microbatch_of(code)) == (2, 7, 12)
    assert packed.peer_of(code) is None
    units = list(packed.units([packed.F(0, 0), *packed.pair(packed.F(0, 1), packed.B(0, 0))]))
    assert [len(unit) for unit in units] == [1, 2]

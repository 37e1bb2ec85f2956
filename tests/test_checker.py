"""What the checker accepts, and how it shows what is wrong."""

from __future__ import annotations

import re

import pytest
from expecttest import assert_expected_inline

from fxpipe.checker import check_schedule
from fxpipe.errors import ScheduleError
from fxpipe.schedule import Schedule
from fxpipe.text_grid import grid


def refused(text: str, **sizes: object) -> str:
    with pytest.raises(ScheduleError) as error:
        check_schedule(Schedule.parse(text), **sizes)  # type: ignore[arg-type]
    return str(error.value)


def shown(text: str) -> str:
    """The message with its sentence broken into lines."""
    sentence, _, rest = refused(text).partition("\n")
    return re.sub(r"([,;:]) ", r"\1\n", sentence) + "\n" + rest


def test_a_deadlock_names_the_circle_and_marks_where_it_stopped() -> None:
    assert_expected_inline(
        shown("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"),
        """\
schedule 'custom':
deadlock:
rank 0 waits at 0B0 for 1I0 or 1B0 of rank 1,
rank 1 waits at 1F1 for 0F1 of rank 0;
move one of these steps behind what it waits for

step  rank 0  rank 1
   0  0F0     .
   1  .       1F0
      never reached:
   >  >0B0<   1F1
      0F1     1B0
      0B1     1B1""",
    )


def test_a_backward_before_its_forward_is_a_deadlock_of_one_rank() -> None:
    assert_expected_inline(
        shown("0F0 0B0\n1B0 1F0"),
        """\
schedule 'custom':
deadlock:
rank 1 waits at 1B0 for 1F0,
which it would run only later;
move one of these steps behind what it waits for

step  rank 0  rank 1
   0  0F0     .
      never reached:
   >  0B0     >1B0<
      .       1F0""",
    )


def test_an_action_that_is_there_twice_is_marked() -> None:
    assert_expected_inline(
        shown("0F0 0B0 0F0\n1F0 1B0"),
        """\
schedule 'custom':
0F0 is there twice,
on rank 0;
take one away

step  rank 0  rank 1
   0  0F0     .
   1  .       1F0
   2  .       1B0
   3  0B0     .
 > 4  >0F0<   .""",
    )


def test_a_wide_and_long_schedule_is_shown_around_the_mark() -> None:
    lines = [" ".join(f"{s}F{k}" for k in range(60)) for s in range(30)]
    lines = [line + " " + line.replace("F", "B") for line in lines]
    lines[20] = lines[20].replace("20B30", "20B31 20B30", 1)
    text = refused("\n".join(lines))
    assert text.startswith("schedule 'custom': 20B31 is there twice, on rank 20; take one away\n")
    assert ">20B31<" in text
    assert "rank 20" in text and "rank 0" not in text
    assert len(text.splitlines()) < 50 and max(map(len, text.splitlines())) < 130


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "0F0 0F1 0B0",
            "stage 0 has 0F1 for microbatch 1, expected 0F1 and then either 0B1, or 0I1 and 0W1",
        ),
        ("0F0 0I0", "stage 0 has 0F0, 0I0 for microbatch 0"),
        ("0F0 0B0 0W0", "stage 0 has 0F0, 0B0, 0W0 for microbatch 0"),
        ("0F0 0B0 2F0 2B0", "stage 1 has nothing for microbatch 0"),
        ("0F0 0I0\n0W0", "0W0 is on rank 1 and its forward on rank 0; put them on one rank"),
        ("0F0 0W0 0I0", "rank 0 waits at 0W0 for 0I0 or 0B0, which it would run only later"),
        ("0F0 [0F1|0B1] 0B0", "rank 0 waits at [0F1|0B1] for 0F1, which it would run only later"),
    ],
)
def test_an_incomplete_or_disordered_schedule_is_refused(text: str, sentence: str) -> None:
    assert sentence in refused(text)


def test_sizes_that_the_model_has_are_asked_for() -> None:
    text = "0F0 0B0\n1F0 1B0"
    check_schedule(Schedule.parse(text), 2, 1)
    assert "stage 2 has nothing for microbatch 0" in refused(text, num_stages=3)
    assert "1F0 is of stage 1, expected 0 to 0" in refused(text, num_stages=1)
    assert "stage 0 has nothing for microbatch 1" in refused(text, num_microbatches=2)
    two = "0F0 0B0 0F1 0B1"
    assert "0F1 is of microbatch 1, expected 0 to 0" in refused(two, num_microbatches=1)


def test_a_pair_waits_for_what_both_need() -> None:
    check_schedule(Schedule.parse("0F0 [0F1|0B0] 0B1"))
    check_schedule(Schedule.parse("0F0 0F1 0F2 0B0 0B1 0B2\n1F0 [1F1|1B0] [1F2|1B1] 1B2"))
    crossed = "0F0 0F1 [0F2|0B0] 0B1 0B2\n1F0 1F1 [1F2|1B0] 1B1 1B2"
    assert "deadlock: rank 0 waits at [0F2|0B0] for 1I0 or 1B0 of rank 1" in refused(crossed)


def test_branches_need_no_order_between_them() -> None:
    branches = {(0, 1), (0, 2), (1, 3), (2, 3)}
    schedule = Schedule.parse("0F0 2F0 1F0 3F0 3B0 1B0 2B0 0B0")
    check_schedule(schedule, forward_edges=branches)
    with pytest.raises(ScheduleError, match="rank 0 waits at 2F0 for 1F0"):
        check_schedule(schedule)
    late = Schedule.parse("0F0 2F0 3F0 1F0 3B0 1B0 2B0 0B0")
    with pytest.raises(ScheduleError, match="rank 0 waits at 3F0 for 1F0"):
        check_schedule(late, forward_edges=branches)


SENT = "0F0 0SEND_F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (SENT.replace("1RECV_F0 ", ""), "0SEND_F0 has no 1RECV_F0"),
        (SENT.replace("0SEND_F0 ", ""), "1RECV_F0 has no 0SEND_F0"),
        (SENT.replace("0F0 0SEND_F0", "0SEND_F0 0F0"), "0SEND_F0 stands before the task that"),
        (SENT.replace("1RECV_F0 1F0", "1F0 1RECV_F0"), "1RECV_F0 stands after the task that"),
        (SENT.replace("1RECV_F0 ", "").replace("0F0", "1RECV_F0 0F0"), "1RECV_F0 is on rank 0"),
        (
            "0F0 0F1 0SEND_F1 0SEND_F0 0B0 0B1\n1RECV_F0 1F0 1RECV_F1 1F1 1B0 1B1",
            "rank 1 expects 1RECV_F0 from rank 0, which sends 0SEND_F1 first",
        ),
        (
            "0F0 0SEND_F0 0F1 0B0 0B1\n1RECV_F0 1F0 1F1 1B0 1B1",
            "0SEND_F1 is missing, although others of its kind are there",
        ),
        (SENT.replace("1SEND_B0", "1SEND_B0 1SEND_B0"), "1SEND_B0 is there twice"),
    ],
)
def test_a_message_that_would_hang_is_refused(text: str, sentence: str) -> None:
    assert sentence in refused(text)


def test_messages_may_be_posted_early_and_skip_stages() -> None:
    check_schedule(Schedule.parse(SENT))
    check_schedule(Schedule.parse("0RECV_B0 0F0 0SEND_F0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0"))
    skip = "0F0 0SEND_F0 0SEND_F0>2 0B0\n1RECV_F0 1F0 1SEND_F0 1B0\n2RECV_F0<0 2RECV_F0 2F0 2B0"
    check_schedule(Schedule.parse(skip))
    check_schedule(Schedule.parse(skip), forward_edges={(0, 1), (1, 2), (0, 2)})
    assert "0SEND_F0>2 goes along no edge" in refused(skip, forward_edges={(0, 1), (1, 2)})


def test_the_grid_shows_when_each_step_can_run() -> None:
    schedule = Schedule.parse("0F0 0F1 0B0 0B1\n1F0 [1F1|1B0] 1B1")
    assert_expected_inline(
        grid(schedule, (1, 1)),
        """\
step  rank 0  rank 1
   0  0F0     .
   1  0F1     1F0
 > 2  .       >[1F1|1B0]<
   3  0B0     1B1
   4  0B1     .""",
    )
    assert_expected_inline(
        grid(schedule, (0, 2), max_rows=2, max_columns=1),
        """\
step  rank 0
 ...
   2  .
 > 3  >0B0<
 ...""",
    )

"""Directives, in Python and as text, become schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from expecttest import assert_expected_inline

from fxpipe.directives import Directives, on, parse
from fxpipe.errors import ScheduleError
from fxpipe.schedule import Schedule
from fxpipe.schedules import build, load, resolve
from fxpipe.text_grid import grid


def test_stages_run_where_they_are_placed() -> None:
    strategy = Directives(stages=3, microbatches=2)
    strategy.place(on(stage=[0, 2]), rank=0)
    strategy.place(on(stage=1), rank=1)
    assert_expected_inline(
        grid(strategy.schedule()),
        """\
step  rank 0  rank 1
   0  0F0     .
   1  0F1     1F0
   2  2F0     1F1
   3  2B0     .
   4  2F1     1B0
   5  0B0     .
   6  2B1     .
   7  .       1B1
   8  0B1     .""",
    )


def test_the_example_of_the_module() -> None:
    strategy = Directives(stages=4, microbatches=4, annotations={"heavy": [1, 2]})
    strategy.place(on(stage=[0, 3]), rank=0)
    strategy.replicate(on(annotation="heavy"), ranks=[1, 2])
    strategy.split(on(stage=range(1, 4)))
    strategy.order(on(kind="F"), on(kind="W"), rank=0)
    schedule = strategy.schedule()
    assert schedule.holders == {0: (0,), 1: (1, 2), 2: (1, 2), 3: (0,)}
    assert_expected_inline(
        grid(schedule),
        """\
step  rank 0  rank 1  rank 2
   0  0F0     .       .
   1  0F1     1F0     .
   2  0F2     2F0     1F1
   3  3F0     1F2     2F1
   4  3I0     2F2     .
   5  3F1     2I0     .
   6  3I1     1I0     .
   7  0B0     2W0     2I1
   8  3F2     1W0     1I1
   9  0B1     .       2W1
  10  3I2     .       1W1
  11  0F3     2I2     .
  12  .       1I2     1F3
  13  0B2     2W2     2F3
  14  3F3     1W2     .
  15  3I3     .       .
  16  3W0     .       2I3
  17  3W1     .       1I3
  18  0B3     .       2W3
  19  3W2     .       1W3
  20  3W3     .       .""",
    )
    as_text = parse(
        """
        stages 4
        microbatches 4             # of the batch
        annotation heavy 1,2
        place stage=0,3 rank=0
        replicate annotation=heavy ranks=1,2
        split stage=1..3
        order kind=F then kind=W rank=0
        """
    )
    assert as_text.schedule() == schedule


def test_orders_give_gpipe_and_1f1b() -> None:
    def placed() -> Directives:
        strategy = Directives(stages=3, microbatches=4)
        for rank in range(3):
            strategy.place(on(stage=rank), rank)
        return strategy

    gpipe = placed()
    gpipe.order(on(kind="F"), on(kind="B"))
    assert gpipe.schedule() == build("gpipe", stages=3, microbatches=4)

    one_f_one_b = placed()
    for rank in range(3):
        for k in range(4):
            ahead = 3 - rank + k
            one_f_one_b.order(on(kind="B", microbatch=k), on(kind="F", microbatch=ahead), rank=rank)
    assert one_f_one_b.schedule() == build("1f1b", stages=3, microbatches=4)


def test_a_filter_may_name_microbatches_and_a_later_place_wins() -> None:
    strategy = Directives(stages=2, microbatches=4)
    strategy.place(on(), rank=0)
    strategy.place(on(stage=1, microbatch=[1, 3]), rank=1)
    schedule = strategy.schedule()
    assert schedule.holders == {0: (0,), 1: (0, 1)}
    assert schedule.rank_of[1, 3] == 1


def test_branches_follow_their_own_edges() -> None:
    edges = {(0, 1), (0, 2), (1, 3), (2, 3)}
    strategy = Directives(stages=4, microbatches=1, forward_edges=edges)
    strategy.place(on(stage=[0, 1, 3]), rank=0)
    strategy.place(on(stage=2), rank=1)
    assert str(strategy.schedule()) == "0F0 1F0 3F0 3B0 1B0 0B0\n2F0 2B0"


def test_three_groups_run_in_order_even_where_the_middle_one_is_empty() -> None:
    strategy = Directives(stages=1, microbatches=2)
    strategy.place(on(), rank=0)
    strategy.order(on(microbatch=1), on(microbatch=7), on(microbatch=0))
    assert str(strategy.schedule()) == "0F1 0B1 0F0 0B0"


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ("place stage=0 rank=0", "stage 1 has no rank for microbatch 0; add place(on(stage=1)"),
        ("place stage=7 rank=0", "line 3, 'place stage=7 rank=0': place stage=7 holds for nothing"),
        ("place stage=0 rank=0\nplace stage=1 rank=2", "rank 1 has no stage; number the ranks"),
        ("place kind=F rank=0", "leave kind out of the filter"),
        ("place stage=0", "0 times rank= or ranks=, expected one"),
        ("place stage=0 rank=0,1", "place takes one rank, found 2; use replicate"),
        ("place stage=x rank=0", "'x' is no list of numbers; expected the form 0,2..4"),
        ("place colour=red rank=0", "'colour=red' is no filter; expected stage="),
        ("place stage=0 then stage=1 rank=0", "place takes one filter, found 2; 'then' is for"),
        ("split annotation=heavy", "annotations (none)"),
        ("order kind=F", "order has 1 filters; expected at least 2"),
        ("order kind=G then kind=F", "kind='G'; expected F, I, W or B"),
        ("paint stage=0", "line 3, 'paint stage=0': expected stages N, microbatches N,"),
        (
            "place rank=0\norder kind=B then kind=F",
            "'order kind=B then kind=F' cannot be followed: 0F0 waits for 0B0 waits for 0F0",
        ),
        (
            "place rank=0\norder stage=0 then stage=1",
            "'order stage=0 then stage=1' cannot be followed",
        ),
    ],
)
def test_directives_that_cannot_be_followed_are_refused(lines: str, sentence: str) -> None:
    with pytest.raises(ScheduleError) as error:
        parse(f"stages 2\nmicrobatches 2\n{lines}").schedule()
    assert sentence in str(error.value)


def test_sizes_must_be_said() -> None:
    with pytest.raises(ScheduleError, match="do not say microbatches; add a line"):
        parse("stages 2")
    with pytest.raises(ScheduleError, match="stages=0 and microbatches=2; expected at least 1"):
        Directives(0, 2)
    with pytest.raises(ScheduleError, match=r"ranks=\[\]; expected at least one rank"):
        Directives(1, 1).replicate(on(), ranks=[])


BRANCHES = """
# two branches
stages 4
microbatches 1
place stage=0,1,3 rank=0
place stage=2 rank=1
"""


def test_a_file_of_directives_is_loaded_as_any_other(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(BRANCHES)
    edges = {(0, 1), (0, 2), (1, 3), (2, 3)}
    assert load(path, forward_edges=edges) == parse(BRANCHES, edges).schedule()
    assert load(path).name == "mine"
    sizes: dict[str, Any] = {"stages": 4, "microbatches": 1}
    assert resolve(path, forward_edges=edges, **sizes) == load(path, forward_edges=edges)
    with pytest.raises(ScheduleError, match="stage 4"):
        resolve(path, stages=5, microbatches=1, forward_edges=edges | {(3, 4)})


def test_directives_as_text_of_a_schedule_say_how_they_are_read() -> None:
    with pytest.raises(ScheduleError) as error:
        Schedule.parse("stages 4\nmicrobatches 8")
    assert "line 1 (rank 0): 'stages 4' is a directive, expected a rank's act" in str(error.value)
    assert "fxpipe.directives.parse(text).schedule()" in str(error.value)

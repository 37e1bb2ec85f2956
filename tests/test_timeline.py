"""Timelines: what the simulator plans, what shares and bubbles say, and the files made of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fxpipe import schedules
from fxpipe.costs import Costs
from fxpipe.errors import OptionError
from fxpipe.messages import with_messages
from fxpipe.planned import measured_costs, planned
from fxpipe.program import Edge
from fxpipe.schedule import Schedule
from fxpipe.simulator import simulate
from fxpipe.timeline import Span, Timeline, in_order
from fxpipe.views.chrome_trace import chrome_trace, label

CHAIN = (Edge(0, 1), Edge(1, 0))
COSTS = Costs(F=1.0, I=2.0, W=0.5, transfer=0.25, edges={(0, 1): 96.0})


def built(name: str) -> Schedule:
    made = schedules.build(name, stages=2, microbatches=4, ranks=2)
    return with_messages(made, lambda microbatch: CHAIN)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_json_gives_back_an_equal_timeline(name: str) -> None:
    timeline = planned(built(name), COSTS)
    assert Timeline.from_json(json.loads(json.dumps(timeline.to_json()))) == timeline


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_planned_timeline_is_the_simulators(name: str) -> None:
    simulated, timeline = simulate(built(name), COSTS), planned(built(name), COSTS)
    assert timeline.duration == simulated.makespan
    for rank in (0, 1):
        gaps = [(gap.start, gap.end) for gap in simulated.gaps(rank)]
        assert [(bubble.start, bubble.end) for bubble in timeline.bubbles(rank)] == gaps
        shares = timeline.shares(rank)
        busy = shares["F"] + shares["I"] + shares["W"] + shares["B"]
        assert busy == simulated.busy[rank]
        assert sum(shares.values()) == timeline.duration
        assert shares["host"] == 0.0
        assert timeline.peak_memory(rank) == simulated.peak_activations[rank]


def test_planned_waits_name_what_they_wait_for() -> None:
    timeline = planned(built("1f1b"), COSTS)
    first, *_, last = timeline.bubbles(1)
    assert str(first) == "rank 1 idle 1.25 s at 0 s: waits for 0F0 of rank 0"
    assert last.cause is None and last.end == timeline.duration
    backward = next(b for b in timeline.bubbles(0) if b.cause)
    assert backward.cause == "1B0 of rank 1"


def test_shares_put_each_second_in_one_place() -> None:
    spans = (
        Span(0, "compute", "F", "0F0", 1.0, 3.0, stage=0, microbatch=0),
        Span(0, "send", "send", "0SEND_F0", 3.5, 4.0, bytes=8),
        Span(0, "compute", "wait", "1SEND_B0", 4.0, 6.0, "1B0 of rank 1"),
        Span(0, "compute", "B", "0B0", 6.0, 7.0, stage=0, microbatch=0),
        Span(0, "compute", "other", "acc_w", 7.0, 7.25),
    )
    timeline = Timeline("measured", 1, 8.0, in_order(spans))
    shares = {name: value for name, value in timeline.shares(0).items() if value}
    # host: 1 s before the first call, 0.5 s between calls, and the call that is no task.
    assert shares == {"F": 2.0, "B": 1.0, "communication": 0.5, "idle": 2.75, "host": 1.75}
    assert timeline.bubble() == 2.75 / 8
    assert [b.cause for b in timeline.bubbles(0)] == ["1B0 of rank 1", None]


def test_measured_costs_are_medians_of_tasks_and_waits() -> None:
    step = planned(built("1f1b"), COSTS)
    slower = planned(built("1f1b"), Costs(F=3.0, I=2.0, W=0.5, transfer=0.25, edges=COSTS.edges))
    known = Costs(edges=COSTS.edges, activations=[10.0, 20.0])
    costs = measured_costs([step, step, slower], 2, known)
    assert costs.F == [1.0, 1.0] and costs.B == [2.5, 2.5]
    assert costs.I == [0.0, 0.0]  # 1f1b runs none
    assert costs.transfer == {(0, 1): pytest.approx(0.25), (1, 0): pytest.approx(0.25)}
    assert costs.activations == [10.0, 20.0]


def test_pairs_are_one_span_and_one_cost() -> None:
    schedule = Schedule.parse("0F0 [0F1|0B0] 0B1")
    timeline = planned(schedule, Costs(F=[1.0], B=[2.0], pair=2.5))
    (pair,) = (span for span in timeline.spans if span.kind == "pair")
    assert (pair.name, pair.seconds) == ("[0F1|0B0]", 2.5)
    assert label(pair) == "F s0 mb1 | B s0 mb0"
    assert timeline.shares(0)["pair"] == 2.5
    costs = measured_costs([timeline], 1, Costs())
    assert costs.pair == {(0, 0): 2.5}


def test_trace_begins_each_timeline_where_it_was() -> None:
    timeline = planned(built("1f1b"), COSTS)
    events = chrome_trace([(0.0, timeline), (100.0, timeline)])["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == 2 * len(timeline.spans)
    named = [e for e in slices if e["name"] == "F s1 mb2"]
    assert [e["ts"] for e in named] == [named[0]["ts"], named[0]["ts"] + 100e6]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"planned"}


def test_picture_shows_planned_above_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from fxpipe.views.timeline_pictures import boxes_of, draw_timelines, title_of

    timeline = planned(built("zb-h1"), COSTS)
    draw_timelines([timeline, timeline], tmp_path / "steps.svg")
    text = (tmp_path / "steps.svg").read_text()
    assert text.count(title_of(timeline)) == 2
    tasks = [box for rank in (0, 1) for box in boxes_of(timeline, rank) if box.text]
    assert len(tasks) == 2 * 4 * 3
    with pytest.raises(OptionError, match="suffix '.gif'"):
        draw_timelines([timeline], tmp_path / "steps.gif")

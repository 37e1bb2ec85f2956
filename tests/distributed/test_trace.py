"""Recorded steps of several ranks: one trace that viewers open, times that add up."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fxpipe.schedule import Schedule
from fxpipe.timeline import SHARES, Timeline
from tests.distributed import tracing
from tests.distributed.harness import run_ranks
from tests.distributed.tracing import Seen

Event = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traced")


@pytest.fixture(scope="module")
def seen(folder: Path) -> list[Seen]:
    return run_ranks(
        tracing.record, 2, folder / "ranks", out=folder / "trace", schedule="zb-h1", stages=2
    )


@pytest.fixture(scope="module")
def measured(seen: list[Seen], folder: Path) -> list[Timeline]:
    data = json.loads((folder / "trace" / "timelines.json").read_text())
    return [Timeline.from_json(each) for each in data["measured"]]


@pytest.fixture(scope="module")
def planned(seen: list[Seen], folder: Path) -> Timeline:
    return Timeline.from_json(
        json.loads((folder / "trace" / "timelines.json").read_text())["planned"]
    )


@pytest.fixture(scope="module")
def events(seen: list[Seen], folder: Path) -> list[Event]:
    found: list[Event] = json.loads((folder / "trace" / "trace.json").read_text())["traceEvents"]
    return found


def tracks(events: list[Event]) -> Iterator[tuple[str, str, list[Event]]]:
    """(process, thread, its slices by start)."""
    named = [e for e in events if e["ph"] == "M"]
    processes = {e["pid"]: e["args"]["name"] for e in named if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in named if e["name"] == "thread_name"}
    slices: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append(event)
    for (pid, tid), found in slices.items():
        yield processes[pid], threads[pid, tid], sorted(found, key=lambda e: (e["ts"], e["dur"]))


def test_every_action_is_in_the_trace_once_per_rank_and_step(
    seen: list[Seen], events: list[Event]
) -> None:
    schedule = Schedule.parse(seen[0].schedule)
    found: dict[tuple[str, int, int], list[str]] = defaultdict(list)
    for process, thread, slices in tracks(events):
        rank = int(thread.split()[1])
        for event in slices:
            if event["cat"] not in ("wait", "other") and " " not in event["args"]["action"]:
                place = process, event["args"]["step"], rank
                found[place].append(event["args"]["action"])
    assert seen[0].without_task == [f"0I{k}" for k in range(4)]  # nobody waits for its gradient
    for rank, steps in enumerate(schedule.ranks):
        expected = sorted(map(str, steps))
        for process, numbers in (("planned", [0]), ("measured", [0, 1, 2])):
            for number in numbers:
                none = [] if process == "planned" else seen[0].without_task
                wanted = [action for action in expected if action not in none]
                assert sorted(found[process, number, rank]) == wanted, (process, number, rank)


def test_no_two_slices_of_a_track_overlap(events: list[Event]) -> None:
    seen_tracks = set()
    for process, thread, slices in tracks(events):
        seen_tracks.add((process, thread))
        for before, after in zip(slices, slices[1:]):
            assert after["ts"] >= before["ts"] + before["dur"] - 0.002, (process, thread, after)
    kinds = ("compute", "send", "receive")
    assert seen_tracks == {
        (process, f"rank {rank} {kind}")
        for process in ("planned", "measured") for rank in (0, 1) for kind in kinds
    }  # fmt: skip


def test_every_arrow_leads_from_a_send_to_the_wait_for_it(events: list[Event]) -> None:
    slices = [e for e in events if e["ph"] == "X"]

    def holding(arrow: Event) -> list[Event]:
        return [
            e for e in slices
            if (e["pid"], e["tid"]) == (arrow["pid"], arrow["tid"])
            and e["ts"] - 0.002 <= arrow["ts"] <= e["ts"] + e["dur"] + 0.002
        ]  # fmt: skip

    begins = {(e["pid"], e["id"]): e for e in events if e["ph"] == "s"}
    ends = {(e["pid"], e["id"]): e for e in events if e["ph"] == "f"}
    assert begins.keys() == ends.keys()
    sends = [e for e in slices if e["cat"] == "send"]
    assert len(begins) == len(sends)
    for key, begin in begins.items():
        end = ends[key]
        assert begin["ts"] <= end["ts"]
        assert any(
            e["cat"] == "send" and e["args"]["action"] == begin["name"] for e in holding(begin)
        )
        assert any(
            e["cat"] == "wait" and e["args"]["action"] == begin["name"] for e in holding(end)
        )


def test_shares_add_up_to_the_step_that_was_timed_outside(
    seen: list[Seen], measured: list[Timeline]
) -> None:
    assert len(measured) == 3
    for number, timeline in enumerate(measured):
        for rank in (0, 1):
            shares = timeline.shares(rank)
            assert tuple(shares) == SHARES
            assert abs(sum(shares.values()) - timeline.duration) < 1e-9
            assert min(shares.values()) > -1e-9, shares
            # What the rank's own clock says of the whole call holds more than the step.
            # No rank begins a step before all have come to it.
            assert timeline.duration < max(each.seconds[number] for each in seen)
            if number == 2:
                assert sum(shares.values()) >= 0.98 * seen[rank].metrics["step_seconds"]
            assert shares["F"] > 0 and shares["I"] + shares["W"] + shares["B"] > 0


def test_each_rank_sends_what_explain_predicts(seen: list[Seen]) -> None:
    for each in seen:
        assert each.explained == each.metrics["bytes_sent"] > 0


def test_waits_name_the_action_of_the_other_rank(
    seen: list[Seen], measured: list[Timeline]
) -> None:
    steps = [set(line.split()) for line in seen[0].schedule.splitlines()]
    for timeline in measured:
        for rank in (0, 1):
            bubbles = timeline.bubbles(rank)
            idle = sum(bubble.seconds for bubble in bubbles)
            assert idle == pytest.approx(timeline.shares(rank)["idle"])
            for bubble in bubbles:
                if bubble.cause is None or bubble.cause.startswith(("SUM", "OUTPUT")):
                    continue
                action, _, source = bubble.cause.partition(" of rank ")
                assert int(source) == 1 - rank and action in steps[1 - rank], bubble
        first = timeline.bubbles(1)[0]
        assert first.cause == "0F0 of rank 0"


def test_the_plan_takes_the_measured_medians(planned: Timeline, measured: list[Timeline]) -> None:
    tasks = [s for t in measured for s in t.spans if s.kind == "F" and s.stage == 1]
    seconds = sorted(span.seconds for span in tasks)
    expected = (seconds[len(seconds) // 2 - 1] + seconds[len(seconds) // 2]) / 2
    (first,) = (span for span in planned.spans if span.name == "1F0")
    assert first.seconds == pytest.approx(expected)
    for rank in (0, 1):
        assert planned.shares(rank)["host"] == pytest.approx(0.0, abs=1e-9)
        assert planned.peak_memory(rank)


def test_the_block_leaves_no_trace_in_the_program_or_the_numbers(seen: list[Seen]) -> None:
    for each in seen:
        assert each.recorded_after == 0
        assert len(set(each.losses)) == 1


def test_metrics_are_of_the_own_rank(seen: list[Seen], measured: list[Timeline]) -> None:
    for rank, each in enumerate(seen):
        found = each.metrics
        spans = measured[-1].of_rank(rank)
        assert found["rank"] == rank
        assert found["bytes_sent"] == sum(s.bytes or 0 for s in spans if s.kind == "send")
        assert found["bytes_received"] == sum(s.bytes or 0 for s in spans if s.kind == "receive")
        assert 0 < found["step_seconds"] <= each.seconds[-1]
        assert found["tokens_per_second"] == pytest.approx(8 / found["step_seconds"])
        assert 0 <= found["bubble"] <= 1 and found["waiting_seconds"] >= 0


def test_the_option_records_the_first_steps_of_a_model_without_a_loss(tmp_path: Path) -> None:
    out = tmp_path / "trace"
    out.mkdir()
    found = run_ranks(tracing.record_first, 2, tmp_path / "ranks", out=out)
    assert {"metrics.json", "timelines.json", "trace.json"} <= set(found[0])
    data = json.loads((out / "timelines.json").read_text())
    timelines = [Timeline.from_json(each) for each in data["measured"]]
    assert [timeline.step for timeline in timelines] == [0, 1]
    for timeline in timelines:
        pauses = [span for span in timeline.spans if span.name == "pause"]
        assert [span.rank for span in pauses] == [0, 1]
        assert all(min(timeline.shares(rank).values()) > -1e-9 for rank in (0, 1))


def test_measured_offsets_of_one_clock_are_nothing(tmp_path: Path) -> None:
    first, _ = run_ranks(tracing.clocks, 2, tmp_path)
    assert first[0] == 0 and abs(first[1]) < 2e6

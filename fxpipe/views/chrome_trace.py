"""Timelines -> a trace that chrome://tracing and ui.perfetto.dev open, as a dict for `json`.

Format: "Trace Event Format" (Google, 2016), the object form. Times there are microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fxpipe.errors import ScheduleError
from fxpipe.schedule import Pair, parse_step
from fxpipe.timeline import Span, Timeline

TRACKS = ("compute", "send", "receive")
# Reserved names of chrome://tracing; Perfetto takes its colours from the names.
_COLOURS = {
    "F": "thread_state_running",
    "I": "thread_state_iowait",
    "W": "good",
    "B": "bad",
    "pair": "yellow",
    "wait": "grey",
}


def chrome_trace(steps: Sequence[tuple[float, Timeline]]) -> dict[str, Any]:
    """A process per name of a timeline, a track per rank and stream, an arrow per message.

    steps: timelines, each with the second at which it begins.
    """
    names = list(dict.fromkeys(timeline.name for _, timeline in steps))
    events: list[dict[str, Any]] = []
    for pid, name in enumerate(names):
        events.append(_meta(pid, 0, "process_name", {"name": name}))
        events.append(_meta(pid, 0, "process_sort_index", {"sort_index": pid}))
        ranks = max(timeline.num_ranks for _, timeline in steps if timeline.name == name)
        for rank in range(ranks):
            for track in TRACKS:
                tid = _tid(rank, track)
                events.append(_meta(pid, tid, "thread_name", {"name": f"rank {rank} {track}"}))
                events.append(_meta(pid, tid, "thread_sort_index", {"sort_index": tid}))
    arrows = 0
    for begin, timeline in steps:
        pid = names.index(timeline.name)
        events += [_slice(pid, begin, timeline, span) for span in timeline.spans]
        for send, wait in messages(timeline):
            arrows += 1
            events += _arrow(pid, begin, arrows, send, wait)
        for rank, points in enumerate(timeline.memory):
            events += [
                {"ph": "C", "pid": pid, "tid": 0, "ts": _micro(begin + at),
                 "name": f"rank {rank} holds", "args": {"bytes": size}}
                for at, size in points
            ]  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def messages(timeline: Timeline) -> Iterator[tuple[Span, Span]]:
    """Every message: its send, and the wait that takes it."""
    sends = {span.name: span for span in timeline.spans if span.kind == "send"}
    for span in timeline.spans:
        if span.kind == "wait" and span.name in sends:
            yield sends[span.name], span


def label(span: Span) -> str:
    """What stands in a box: `F s2 mb5`, `F s2 mb5 | B s3 mb1`, `wait for 0F3 of rank 0`."""
    if span.kind == "wait":
        return f"wait for {span.cause or span.name}"
    if span.kind == "other":
        return span.name
    try:
        step = parse_step(span.name)
    except ScheduleError:
        return f"{span.kind} {span.name}"
    sides = (step.forward, step.backward) if isinstance(step, Pair) else (step,)
    return " | ".join(f"{side.kind} s{side.stage} mb{side.microbatch}" for side in sides)


def _tid(rank: int, track: str) -> int:
    return 1 + len(TRACKS) * rank + TRACKS.index(track)


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _meta(pid: int, tid: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": args}


def _slice(pid: int, begin: float, timeline: Timeline, span: Span) -> dict[str, Any]:
    start, end = _micro(begin + span.start), _micro(begin + span.end)
    given = {"action": span.name, "step": timeline.step, "cause": span.cause, "bytes": span.bytes}
    event = {
        "ph": "X",
        "pid": pid,
        "tid": _tid(span.rank, span.track),
        "ts": start,
        "dur": round(end - start, 3),
        "name": label(span),
        "cat": span.kind,
        "args": {name: value for name, value in given.items() if value is not None},
    }
    if span.kind in _COLOURS:
        event["cname"] = _COLOURS[span.kind]
    return event


def _arrow(pid: int, begin: float, number: int, send: Span, wait: Span) -> list[dict[str, Any]]:
    """From the send's start (a message may arrive before the call that sends it has returned) to
    the end of the wait. A clock that is off must not let it run backwards."""
    start, end = _micro(begin + send.start), _micro(begin + wait.end)
    about = {"pid": pid, "id": number, "name": send.name, "cat": "message"}
    return [
        {"ph": "s", "tid": _tid(send.rank, send.track), "ts": start, **about},
        {"ph": "f", "bp": "e", "tid": _tid(wait.rank, wait.track), "ts": max(start, end), **about},
    ]

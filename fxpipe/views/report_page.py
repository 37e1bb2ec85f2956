"""The files of a dump and of a trace -> one HTML page: plan, timelines, memory, passes.

What is missing in the folder is left out, with a sentence that says what to switch on.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxpipe.errors import OptionError
from fxpipe.explanation import Explanation
from fxpipe.timeline import SHARES, Timeline
from fxpipe.views.dump_page import read_dump, read_json
from fxpipe.views.explanation_text import schedule_text, summary, tables
from fxpipe.views.pages import render
from fxpipe.views.units import percent, plural, scaled, seconds, size

NO_TRACE = (
    "No timeline was recorded: options={'trace': 'DIR'} records the first steps, "
    "fxpipe.trace('DIR') any others."
)
NO_DUMP = "The passes were not dumped: options={'dump': 'DIR'}, or FXPIPE_DUMP=DIR, writes them."
NO_PLAN = (
    "The plan is not there: it is written with a dump or a trace, options={'trace': 'DIR'} or "
    "options={'dump': 'DIR'}."
)
# Steps of a trace that the page holds: the last ones.
MOST_STEPS = 10


@dataclass(frozen=True)
class Contents:
    """What a folder holds. `folders`: the dumps in it, that of the largest microbatch first."""

    explanation: Explanation | None
    planned: Timeline | None
    measured: tuple[Timeline, ...]
    folders: tuple[Path, ...]

    @property
    def timelines(self) -> list[Timeline]:
        return [*([self.planned] if self.planned else []), *self.measured[-MOST_STEPS:]]


@dataclass(frozen=True)
class Number:
    """One of the numbers at the top: what, how much, and beside what to see it."""

    label: str
    value: str
    note: str = ""


def write_report(folder: str | Path, output: str | Path) -> None:
    """Write the page of a folder of `dump`, of `trace`, or of both.

    Raises OptionError where the folder holds neither, or jinja2 is missing.
    """
    folder, output = Path(folder), Path(output)
    if not folder.is_dir():
        raise OptionError(f"{str(folder)!r} is no folder; name that of the option trace or dump")
    found = read(folder)
    if found.explanation is None and not found.timelines and not found.folders:
        raise OptionError(
            f"{str(folder)!r} holds neither a trace nor a dump; make them with "
            f"options={{'trace': {str(folder)!r}, 'dump': {str(folder)!r}}}"
        )
    if not output.parent.is_dir():
        raise OptionError(f"the report {str(output)!r} lies in no folder that exists; make it")
    output.write_text(page_of(folder.resolve().name, found), encoding="utf-8")


def read(folder: Path) -> Contents:
    dumps = [path.parent for path in (*folder.glob("00-*.txt"), *folder.glob("*/00-*.txt"))]
    dumps.sort(key=lambda path: (not (path / "schedule.txt").exists(), _rows(path)))
    places = [folder, *dumps]
    stored = (read_json(at / "explanation.json", None) for at in places)
    explained = next(filter(None, stored), None)
    lines = read_json(folder / "timelines.json", {})
    return Contents(
        Explanation.from_json(explained) if explained else None,
        Timeline.from_json(lines["planned"]) if lines.get("planned") else None,
        tuple(map(Timeline.from_json, lines.get("measured", ()))),
        tuple(dict.fromkeys(dumps)),
    )


def _rows(folder: Path) -> int:
    """Sorts dumps: training before forward only, more rows first."""
    number = folder.name.removeprefix("microbatch-of-")
    return -int(number) if number.isdigit() else 1


def page_of(title: str, found: Contents) -> str:
    explained = found.explanation
    data = {
        "timelines": [timeline_data(timeline) for timeline in found.timelines],
        "shares": list(SHARES),
        "dump": read_dump(found.folders[0]) if found.folders else None,
    }
    return render(
        "report.html",
        title=title,
        numbers=numbers_of(found),
        summary=summary(explained) if explained else "",
        tables=[table for table in tables(explained) if table.rows] if explained else [],
        schedule=schedule_text(explained) if explained else "",
        explanation=explained,
        has_timeline=bool(found.timelines),
        bubbles=longest_bubbles(found),
        dump=found.folders[0].name if found.folders else "",
        others=[path.name for path in found.folders[1:]],
        no_plan=NO_PLAN,
        no_trace=NO_TRACE,
        no_dump=NO_DUMP,
        data=data,
    )


def timeline_data(timeline: Timeline) -> dict[str, Any]:
    """What the page draws of a timeline: its JSON, by rank, with what follows from it."""
    ranks = []
    spans = timeline.to_json()["spans"]
    for rank in range(timeline.num_ranks):
        ranks.append(
            {
                "spans": [span for span in spans if span["rank"] == rank],
                "bubbles": [
                    {"start": b.start, "end": b.end, "cause": b.cause}
                    for b in timeline.bubbles(rank)
                ],
                "shares": timeline.shares(rank),
                "memory": timeline.memory[rank] if rank < len(timeline.memory) else (),
            }
        )
    return {
        "name": timeline.name,
        "step": timeline.step,
        "duration": timeline.duration,
        "shared_thread": timeline.shared_thread,
        "ranks": ranks,
    }


def numbers_of(found: Contents) -> list[Number]:
    """Step time, bubble, peak memory, bytes sent, rows a second: measured where that is known."""
    explained, measured = found.explanation, found.measured
    step = median([timeline.duration for timeline in measured])
    plan = found.planned.duration if found.planned else None
    expected = plan if plan is not None else explained.seconds if explained else None
    time = step if step is not None else expected
    numbers = []
    if time is not None:
        beside = plan if step is not None else None
        note = f"planned {seconds(beside)}" if beside is not None else "predicted"
        numbers.append(Number("Step time", seconds(time), note))
    idle = median([timeline.bubble() for timeline in measured])
    planned = found.planned.bubble() if found.planned else explained.bubble if explained else None
    if idle is not None or planned is not None:
        note = "predicted" if idle is None else f"planned {percent(planned or 0.0)}"
        numbers.append(Number("Bubble", percent(planned or 0.0 if idle is None else idle), note))
    numbers += [memory_number(found), sent_number(found)]
    rows = sum(explained.rows) if explained else 0
    if rows and time:
        numbers.append(Number("Speed", scaled(rows / time, "").strip() + " rows/s", f"{rows} rows"))
    return [number for number in numbers if number.value]


def memory_number(found: Contents) -> Number:
    if found.explanation is not None:
        rank = max(found.explanation.ranks, key=lambda rank: rank.peak)
        return Number("Peak memory", size(rank.peak), f"predicted, rank {rank.rank}")
    peaks = [
        (peak, rank)
        for timeline in found.measured
        for rank in range(timeline.num_ranks)
        if (peak := timeline.peak_memory(rank)) is not None
    ]
    if not peaks:
        return Number("Peak memory", "")
    return Number("Peak memory", size(max(peaks)[0]), f"held by rank {max(peaks)[1]}")


def sent_number(found: Contents) -> Number:
    """Bytes that all ranks send in a step."""
    if found.explanation is not None:
        messages = sum(rank.messages for rank in found.explanation.ranks)
        return Number("Sent a step", size(found.explanation.sent), plural(messages, "message"))
    if not found.timelines:
        return Number("Sent a step", "")
    sends = [span for span in found.timelines[-1].spans if span.kind == "send"]
    total = sum(span.bytes or 0 for span in sends)
    return Number("Sent a step", size(total), plural(len(sends), "message"))


def longest_bubbles(found: Contents, most: int = 10) -> list[dict[str, Any]]:
    """The longest idle times of the last step, or of the plan where nothing was measured."""
    if not found.timelines:
        return []
    timeline = found.timelines[-1]
    all_of_them = [b for rank in range(timeline.num_ranks) for b in timeline.bubbles(rank)]
    chosen = sorted(all_of_them, key=lambda b: -b.seconds)[:most]
    return [
        {
            "rank": bubble.rank,
            "start": bubble.start,
            "at": seconds(bubble.start),
            "length": seconds(bubble.seconds),
            "cause": f"waits for {bubble.cause}" if bubble.cause else "nothing left to do",
        }
        for bubble in chosen
    ]


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None

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
from fxpipe.files import object_of, read_json, write_text
from fxpipe.timeline import SHARES, Timeline
from fxpipe.views.dump_page import read_dump
from fxpipe.views.explanation_text import HOST, schedule_text, summary, tables
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

    Raises OptionError where the folder holds neither, or a file that is not whole, or jinja2 is
    missing.
    """
    folder, output = Path(folder), Path(output)
    if not folder.is_dir():
        raise OptionError(f"{str(folder)!r} is no folder; name that of the option trace or dump")
    found = read(folder)
    if found.explanation is None and not found.timelines and not found.folders:
        inside = [str(path) for path in sorted(folder.iterdir()) if holds_something(path)]
        cure = (
            f"{plural(len(inside), 'folder')} in it {'do' if len(inside) > 1 else 'does'}: "
            f"{', '.join(inside)}"
            if inside
            else f"make them with options={{'trace': {str(folder)!r}, 'dump': {str(folder)!r}}}"
        )
        raise OptionError(f"{str(folder)!r} holds neither a trace nor a dump; {cure}")
    if not output.parent.is_dir():
        raise OptionError(f"the report {str(output)!r} lies in no folder that exists; make it")
    write_text(output, page_of(title_of(folder), found))


def read(folder: Path) -> Contents:
    dumps = [path.parent for path in (*folder.glob("00-*.txt"), *folder.glob("*/00-*.txt"))]
    dumps.sort(key=lambda path: (not (path / "schedule.txt").exists(), _rows(path)))
    places = [folder, *dumps]
    stored = (read_json(at / "explanation.json", explanation_of, None) for at in places)
    plan, measured = read_json(folder / "timelines.json", timelines_of, (None, ()))
    # The page shows none of it, but a folder with a file that is no metrics is not a trace's.
    read_json(folder / "metrics.json", object_of("planned", "steps"), {})
    return Contents(next(filter(None, stored), None), plan, measured, tuple(dict.fromkeys(dumps)))


def explanation_of(value: Any) -> Explanation:
    """Of `explanation.json`, with everything in it that the page shows."""
    found = Explanation.from_json(object_of()(value))
    summary(found), list(tables(found)), schedule_text(found)
    return found


def timelines_of(value: Any) -> tuple[Timeline | None, tuple[Timeline, ...]]:
    """The planned one and the measured ones of `timelines.json`, of which the page can be drawn."""
    lines = object_of("planned", "measured")(value)
    plan = Timeline.from_json(lines["planned"]) if lines["planned"] else None
    measured = tuple(map(Timeline.from_json, lines["measured"]))
    for timeline in (plan, *measured):
        if timeline is not None:
            timeline_data(timeline)
    return plan, measured


def holds_something(path: Path) -> bool:
    """Whether a report can be made of a folder, by the names of its files."""
    names = ("timelines.json", "explanation.json")
    return path.is_dir() and (
        any((path / name).is_file() for name in names)
        or any(path.glob("00-*.txt"))
        or any(path.glob("*/00-*.txt"))
    )


def title_of(folder: Path) -> str:
    """`runs/1`: a folder's name says little without that of the one around it."""
    return "/".join(folder.resolve().parts[-2:]).removeprefix("//")


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
        medians=medians_text(found),
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
        note = f"predicted, without {HOST}" if found.planned is None else "planned"
        if step is not None:
            note = "; ".join([of_steps(measured), *([f"planned {seconds(plan)}"] if plan else [])])
        numbers.append(Number("Step time", seconds(time), note))
    idle = median([timeline.bubble() for timeline in measured])
    planned = found.planned.bubble() if found.planned else explained.bubble if explained else None
    if idle is not None or planned is not None:
        note = f"predicted, without {HOST}" if found.planned is None else "planned"
        if idle is not None:
            beside = [] if planned is None else [f"planned {percent(planned)}"]
            note = "; ".join([of_steps(measured), *beside])
        numbers.append(Number("Bubble", percent(planned or 0.0 if idle is None else idle), note))
    numbers += [memory_number(found), sent_number(found)]
    rows = sum(explained.rows) if explained else 0
    if rows and time:
        note = plural(rows, "row") + (" in the median step" if len(measured) > 1 else "")
        note += "" if measured else ", predicted"
        numbers.append(Number("Speed", scaled(rows / time, "").strip() + " rows/s", note))
    return [number for number in numbers if number.value]


def memory_number(found: Contents) -> Number:
    if found.explanation is not None:
        rank = max(found.explanation.ranks, key=lambda rank: rank.peak)
        note = f"predicted, rank {rank.rank}; weights, gradients, saved values"
        return Number("Peak memory", size(rank.peak), note)
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
    """Bytes that all ranks send in a step: of the last that was measured, else as predicted."""
    explained = found.explanation
    if explained is not None and not found.measured:
        messages = plural(sum(rank.messages for rank in explained.ranks), "message")
        return Number("Sent a step", size(explained.sent), f"predicted; {messages}")
    if not found.timelines:
        return Number("Sent a step", "")
    timeline = found.timelines[-1]
    sends = [span for span in timeline.spans if span.kind == "send"]
    total = sum(span.bytes or 0 for span in sends)
    which = f"measured, step {timeline.step}" if found.measured else "planned"
    note = f"{which}; {plural(len(sends), 'message')}"
    if explained is not None and size(explained.sent) != size(total):
        note += f"; predicted {size(explained.sent)}"
    return Number("Sent a step", size(total), note)


def of_steps(measured: Sequence[Timeline]) -> str:
    """How a number of several steps was made."""
    return f"median of {len(measured)} steps" if len(measured) > 1 else "measured, one step"


def medians_text(found: Contents) -> str:
    """What the numbers at the top count, where they stand beside others that count otherwise."""
    if not found.measured:
        return ""
    last = found.measured[-1].step
    which = f" The timeline opens at step {last}." if len(found.measured) > 1 else ""
    return (
        f"Bubble is idle time alone. In the plan a message takes no rank's time and the host none; "
        f"measured, both do and are counted apart, so that the measured bubble may be below the "
        f"planned one.{which}"
    )


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

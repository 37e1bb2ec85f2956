"""Timelines, planned above measured -> a picture with one scale of time (extra `viz`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fxpipe.schedule import Kind, Pair, parse_step
from fxpipe.timeline import COMPUTING, Span, Timeline
from fxpipe.views import palette
from fxpipe.views.figures import add_legend, check_path, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MESSAGE_COLOUR = "#7F7F7F"

# Inches.
_WIDTH, _ROW_HEIGHT, _HEAD, _FOOT = 13.0, 0.42, 0.42, 0.9
_LABEL_WIDTH = 0.11  # a narrower box has no room for the number of its microbatch


class Box(NamedTuple):
    """A rectangle: seconds, and from 0 (top) to 1 of a rank's row."""

    start: float
    end: float
    top: float
    bottom: float
    colour: str
    text: str = ""


def draw_timelines(timelines: Sequence[Timeline], path: str | Path) -> None:
    """Draw timelines below each other; the suffix (.svg, .png, .pdf) gives the format.

    Raises OptionError for another suffix, and where matplotlib is not installed.
    """
    path = check_path(path)
    save(figure_of_timelines(timelines), path)


def figure_of_timelines(timelines: Sequence[Timeline]) -> Figure:
    """The picture as a matplotlib figure. A row per rank: its tasks, below them its messages."""
    rows = [_ROW_HEIGHT * timeline.num_ranks for timeline in timelines]
    height = sum(rows) + _HEAD * len(rows) + _FOOT
    figure = new_figure(_WIDTH, height)
    end = 1e3 * max((timeline.duration for timeline in timelines), default=1.0) or 1.0
    top = height
    for timeline, row in zip(timelines, rows, strict=True):
        top -= _HEAD + row
        axes = figure.add_axes((0.055, top / height, 0.93, row / height))
        _draw_rows(axes, timeline, end)
    if timelines:
        axes.tick_params(labelbottom=True, bottom=True)
        axes.set_xlabel("time (ms)", color=palette.TEXT)
    _add_legend(figure, timelines)
    return figure


def title_of(timeline: Timeline) -> str:
    """`measured step 2: 12.3 ms, 21.4 % idle`."""
    step = f" step {timeline.step}" if timeline.name == "measured" else ""
    turns = ", ranks in turn on one thread" if timeline.shared_thread else ""
    idle = f"{100 * timeline.bubble():.1f} % idle"
    return f"{timeline.name}{step}: {1e3 * timeline.duration:.4g} ms, {idle}{turns}"


def boxes_of(timeline: Timeline, rank: int) -> Iterator[Box]:
    """The boxes of a rank; times in milliseconds."""
    for span in timeline.of_rank(rank):
        if span.kind in COMPUTING:
            yield from _task_boxes(span)
        elif span.track in ("send", "receive") and span.end > span.start:
            yield Box(1e3 * span.start, 1e3 * span.end, 0.8, 0.95, MESSAGE_COLOUR)


def _task_boxes(span: Span) -> Iterator[Box]:
    step = parse_step(span.name)
    if isinstance(step, Pair):
        sides = [(step.forward, 0.05, 0.4), (step.backward, 0.4, 0.76)]
    else:
        sides = [(step, 0.05, 0.76)]
    for side, top, bottom in sides:
        text = str(side.microbatch)
        yield Box(1e3 * span.start, 1e3 * span.end, top, bottom, palette.KINDS[side.kind], text)


def _draw_rows(axes: Axes, timeline: Timeline, end: float) -> None:
    from matplotlib.collections import PolyCollection

    num_ranks = timeline.num_ranks
    axes.set_xlim(0, end * 1.002)
    axes.set_ylim(num_ranks, 0)
    axes.set_yticks([rank + 0.5 for rank in range(num_ranks)], [str(r) for r in range(num_ranks)])
    axes.set_ylabel("rank", color=palette.TEXT)
    axes.tick_params(length=0, labelbottom=False, colors=palette.TEXT)
    axes.set_title(title_of(timeline), loc="left", fontsize=10, color=palette.TEXT)
    for side in axes.spines.values():
        side.set_visible(False)
    middles = [rank + 0.5 for rank in range(num_ranks)]
    axes.barh(middles, 1e3 * timeline.duration, 0.9, color=palette.IDLE)
    placed = [(rank, box) for rank in range(num_ranks) for box in boxes_of(timeline, rank)]
    corners = [
        [
            (box.start, rank + box.top),
            (box.end, rank + box.top),
            (box.end, rank + box.bottom),
            (box.start, rank + box.bottom),
        ]
        for rank, box in placed
    ]
    colours = [box.colour for _, box in placed]
    axes.add_collection(
        PolyCollection(corners, facecolors=colours, edgecolors="#FFFFFF", linewidths=0.3)
    )
    inches = _WIDTH * 0.93 / end
    for rank, box in placed:
        if box.text and (box.end - box.start) * inches >= _LABEL_WIDTH * len(box.text):
            axes.text(
                (box.start + box.end) / 2, rank + (box.top + box.bottom) / 2, box.text,
                ha="center", va="center_baseline", fontsize=7, color=palette.TEXT,
            )  # fmt: skip


def _add_legend(figure: Figure, timelines: Sequence[Timeline]) -> None:
    from matplotlib.patches import Patch

    used = {
        box.colour
        for timeline in timelines
        for rank in range(timeline.num_ranks)
        for box in boxes_of(timeline, rank)
    }
    entries = [
        Patch(color=palette.KINDS[kind], label=meaning)
        for kind, meaning in palette.MEANINGS.items()
        if palette.KINDS[Kind(kind)] in used
    ]
    if MESSAGE_COLOUR in used:
        entries.append(Patch(color=MESSAGE_COLOUR, label="messages begun"))
    entries.append(Patch(facecolor=palette.IDLE, edgecolor="#BBBBBB", label="idle or host"))
    add_legend(figure, entries)

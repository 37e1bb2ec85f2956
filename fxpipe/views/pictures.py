"""Simulated schedules -> a picture: a row of boxes per rank, time to the right (extra `viz`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fxpipe.schedule import Action, Kind, Pair, Step, actions_of
from fxpipe.simulator import Timeline
from fxpipe.views import palette
from fxpipe.views.figures import add_legend, check_path, new_figure, save
from fxpipe.views.palette import MEANINGS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = palette.KINDS
IDLE_COLOUR = palette.IDLE
TEXT_COLOUR = palette.TEXT
LINE_COLOUR = "#FFFFFF"

# Inches.
_WIDTH, _ROW_HEIGHT, _HEAD, _FOOT = 13.0, 0.3, 0.42, 0.95
# A box narrower than so many inches has no room for its number.
_LABEL_WIDTH = 0.085
_MOST_LABELS = 6_000


def shade(kind: Kind, chunk: int, num_chunks: int) -> tuple[float, float, float]:
    """A kind's colour, nearer to white for later chunks of a rank; parts from 0 to 1."""
    hexadecimal = COLOURS[kind].lstrip("#")
    parts = [int(hexadecimal[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    white = 0.55 * chunk / (num_chunks - 1) if num_chunks > 1 else 0.0
    red, green, blue = (part + (1 - part) * white for part in parts)
    return red, green, blue


def draw(timelines: Sequence[tuple[str, Timeline]], path: str | Path, unit: str = "") -> None:
    """Draw titled timelines below each other on one scale of time; the suffix gives the format."""
    path = check_path(path)
    save(figure_of(timelines, unit), path)


def figure_of(timelines: Sequence[tuple[str, Timeline]], unit: str = "") -> Figure:
    """The picture as a matplotlib figure, for a notebook or for saving elsewhere."""
    rows = [_ROW_HEIGHT * timeline.schedule.num_ranks for _, timeline in timelines]
    height = sum(rows) + _HEAD * len(rows) + _FOOT
    figure = new_figure(_WIDTH, height)
    end = max(timeline.makespan for _, timeline in timelines) or 1.0
    top, numbered = height, False
    for (title, timeline), row in zip(timelines, rows, strict=True):
        top -= _HEAD + row
        axes = figure.add_axes((0.055, top / height, 0.93, row / height))
        numbered |= _draw_rows(axes, title, timeline, end)
    axes.tick_params(labelbottom=True, bottom=True)
    axes.set_xlabel(f"time ({unit})" if unit else "time", color=TEXT_COLOUR)
    _add_legend(figure, [timeline for _, timeline in timelines], numbered)
    return figure


def _draw_rows(axes: Axes, title: str, timeline: Timeline, end: float) -> bool:
    """Draw one timeline; whether some box had room for its number."""
    num_ranks = timeline.schedule.num_ranks
    axes.set_xlim(0, end * 1.002)
    axes.set_ylim(num_ranks, 0)
    axes.set_yticks([rank + 0.5 for rank in range(num_ranks)], [str(r) for r in range(num_ranks)])
    axes.set_ylabel("rank", color=TEXT_COLOUR)
    axes.tick_params(length=0, labelbottom=False, colors=TEXT_COLOUR)
    axes.set_title(title, loc="left", fontsize=10, color=TEXT_COLOUR)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.barh([rank + 0.5 for rank in range(num_ranks)], timeline.makespan, 0.9, color=IDLE_COLOUR)
    boxes = [box for rank in range(num_ranks) for box in _boxes(timeline, rank)]
    return _draw_boxes(axes, boxes, _WIDTH * 0.93 / (end * 1.002))


# left, right, top, bottom in data units; colour; what is written in it
_Box = tuple[float, float, float, float, tuple[float, float, float], str]


def _boxes(timeline: Timeline, rank: int) -> list[_Box]:
    schedule = timeline.schedule
    stages = schedule.stages_of(rank)
    boxes: list[_Box] = []
    spans = zip(schedule.ranks[rank], timeline.starts[rank], timeline.ends[rank], strict=True)
    for step, start, end in spans:
        for action, top, bottom in _parts(step):
            if action.kind.is_compute:
                colour = shade(action.kind, stages.index(action.stage), len(stages))
                label = str(action.microbatch)
                boxes.append((start, end, rank + top, rank + bottom, colour, label))
    return boxes


def _parts(step: Step) -> list[tuple[Action, float, float]]:
    """The actions of a step with the share of the row that they take: a pair's take half each."""
    if isinstance(step, Pair):
        return [(step.forward, 0.05, 0.5), (step.backward, 0.5, 0.95)]
    return [(action, 0.05, 0.95) for action in actions_of(step)]


def _draw_boxes(axes: Axes, boxes: list[_Box], inches_per_time: float) -> bool:
    from matplotlib.collections import PolyCollection

    corners = [
        [(left, top), (right, top), (right, bottom), (left, bottom)]
        for left, right, top, bottom, _, _ in boxes
    ]
    # A white line between boxes, as thin as they are narrow, or it would bleach their colours.
    lines = [min(0.6, 4 * (right - left) * inches_per_time) for left, right, *_ in boxes]
    axes.add_collection(
        PolyCollection(
            corners,
            facecolors=[colour for *_, colour, _ in boxes],
            edgecolors=LINE_COLOUR,
            linewidths=lines,
        )
    )
    numbered = False
    longest = max((len(label) for *_, label in boxes), default=0)
    for left, right, top, bottom, _, label in boxes if len(boxes) <= _MOST_LABELS else []:
        width, is_half = (right - left) * inches_per_time, bottom - top < 0.5
        if width >= _LABEL_WIDTH * longest:
            numbered = True
            size = min(5.5 if is_half else 8.0, 62 * width / (len(label) + 0.4))
            axes.text(
                (left + right) / 2,
                (top + bottom) / 2,
                label,
                ha="center",
                va="center_baseline",
                fontsize=size,
                color=TEXT_COLOUR,
            )
    return numbered


def _add_legend(figure: Figure, timelines: list[Timeline], numbered: bool) -> None:
    from matplotlib.patches import Patch

    ranks = [(t.schedule, rank) for t in timelines for rank in range(t.schedule.num_ranks)]
    used = {action.kind for schedule, rank in ranks for action in schedule.actions(rank)}
    entries = [
        Patch(color=COLOURS[kind], label=MEANINGS[kind]) for kind in MEANINGS if kind in used
    ]
    entries.append(Patch(facecolor=IDLE_COLOUR, edgecolor="#BBBBBB", label="idle"))
    notes = ["numbers are microbatches"] if numbered else []
    if any(len(schedule.stages_of(rank)) > 1 for schedule, rank in ranks):
        notes.append("a paler shade is a later chunk of the rank")
    add_legend(figure, entries)
    note, height = "; ".join(notes), 0.13 / figure.get_figheight()
    figure.text(0.985, height, note, ha="right", fontsize=8, color="#555555")

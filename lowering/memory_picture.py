"""A memory plan -> a picture: calls to the right, bytes upwards, a box per value (extra `viz`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fxpipe.lowering.memory_plan import MemoryPlan, Storage
from fxpipe.views.figures import check_path, new_figure, save
from fxpipe.views.palette import TEXT

# Okabe and Ito's palette; neighbours differ.
COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
MOST_LABELS = 400


def draw_memory(plans: Sequence[MemoryPlan], path: str | Path) -> None:
    """Draw the placed values of ranks below each other; the suffix gives the format."""
    path = check_path(path)
    figure = new_figure(12.0, 3.2 * len(plans), layout="constrained")
    for plan, axes in zip(plans, figure.subplots(len(plans), squeeze=False)[:, 0]):
        draw_plan(plan, axes)
    save(figure, path)


def draw_plan(plan: MemoryPlan, axes: object) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    entries = plan.of(Storage.PLACED)
    for i, entry in enumerate(entries):
        width = entry.end - entry.start + 1
        colour = COLOURS[i % len(COLOURS)]
        axes.bar(
            entry.start, entry.size, width, entry.offset, align="edge", color=colour, lw=0.5, ec="w"
        )
        if len(entries) <= MOST_LABELS:
            x, y = entry.start + width / 2, entry.offset + entry.size / 2
            axes.text(x, y, entry.name, ha="center", va="center", fontsize=6, clip_on=True)
    axes.axhline(plan.least, color=TEXT, lw=0.8, ls="--")
    axes.set_title(
        f"rank {plan.rank}: {plan.placed} bytes placed, {plan.least} live at once (dashed), "
        f"{plan.owned} owned beside them",
        loc="left",
        fontsize=10,
    )
    axes.set_xlim(0, max(1, len(plan.calls)))
    axes.set_xlabel("call")
    axes.set_ylabel("bytes")

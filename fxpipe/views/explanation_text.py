"""An Explanation -> plain text, tables in a terminal (extra `cli`), tables in a notebook."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from fxpipe.views import palette
from fxpipe.views.units import count, percent, plural, scaled, seconds, size

if TYPE_CHECKING:
    from fxpipe.explanation import Explanation

# A schedule of more rows is not shown as a grid.
GRID_ROWS, GRID_RANKS = 40, 12
KINDS = ("F", "I", "W", "B")
# What a prediction leaves out, and what most of a small model's step is.
HOST = "the host's time"


class Table(NamedTuple):
    """Rows under a title. `stages`: per row, the stage whose colour it has, if one."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    stages: list[int | None]


def summary(found: Explanation) -> str:
    """The whole in one sentence or two."""
    batch = sum(found.rows)
    speed = (
        f", {scaled(batch / found.seconds, '').strip()} rows/s" if batch and found.seconds else ""
    )
    rows = " ".join(map(str, dict.fromkeys(found.rows)))
    of_rows = f" of {rows} rows" if batch else ""
    return (
        f"{plural(len(found.stages), 'stage')} on {plural(len(found.ranks), 'rank')}, schedule "
        f"{found.schedule}, {plural(len(found.rows), 'microbatch', 'es')}{of_rows}, "
        f"{'training' if found.training else 'forward only'}. Predicted from operations and bytes, "
        f"without {HOST}: {seconds(found.seconds)} a step{speed}, bubble {percent(found.bubble)}, "
        f"peak {size(found.peak)}, {size(found.sent)} sent."
    )


def tables(found: Explanation) -> Iterator[Table]:
    """Stages, edges and ranks."""
    kinds = [kind for kind in KINDS if any(kind in stage.flops for stage in found.stages)]
    columns = ("stage", "ranks", "parameters", "bytes", *(f"{kind} flop" for kind in kinds))
    yield Table(
        "Stages (numbers of a microbatch)",
        (*columns, "saved", "modules"),
        [
            (
                str(stage.stage),
                _numbers(stage.ranks),
                count(stage.parameters),
                size(stage.parameter_bytes),
                *(scaled(stage.flops.get(kind, 0), "").strip() for kind in kinds),
                size(stage.saved),
                brief(stage.modules),
            )
            for stage in found.stages
        ],
        [stage.stage for stage in found.stages],
    )
    yield Table(
        "Edges (a microbatch)",
        ("edge", "bytes", "values"),
        [
            (
                f"{edge.source} -> {edge.target}",
                size(edge.bytes),
                brief([f"{name}: {kind}" for name, kind, _ in edge.values]),
            )
            for edge in found.edges
        ],
        [edge.source for edge in found.edges],
    )
    yield Table(
        "Ranks (predicted, a step)",
        ("rank", "stages", "busy", "peak", "weights and gradients", "messages", "sent"),
        [
            (
                str(rank.rank),
                _numbers(rank.stages),
                percent(rank.busy / found.seconds if found.seconds else 0.0),
                size(rank.peak),
                size(rank.weights),
                str(rank.messages),
                size(rank.sent),
            )
            for rank in found.ranks
        ],
        [None] * len(found.ranks),
    )


def schedule_text(found: Explanation) -> str:
    """The grid, or where that is too large each rank's actions."""
    if found.grid.count("\n") <= GRID_ROWS and len(found.ranks) <= GRID_RANKS:
        return found.grid
    return "\n".join(f"rank {rank}: {actions}" for rank, actions in enumerate(found.actions))


def passes_text(found: Explanation) -> str:
    ran = " ".join(entry.name for entry in found.passes if entry.on)
    off = " ".join(entry.name for entry in found.passes if not entry.on)
    return f"passes: {ran}" + (f"\noff: {off}" if off else "")


def as_text(found: Explanation) -> str:
    parts = [summary(found)]
    for table in tables(found):
        if table.rows:
            parts.append(f"{table.title}\n{_aligned(table)}")
    parts += [f"Schedule\n{schedule_text(found)}", passes_text(found)]
    return "\n\n".join(parts)


def as_rich(found: Explanation) -> Any:
    """What `rich.print` shows; the package is there, since it is what asks."""
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    parts: list[Any] = [Text(summary(found)), Text()]
    for table in tables(found):
        if not table.rows:
            continue
        shown = RichTable(title=table.title, title_justify="left", box=None, pad_edge=False)
        for column in table.columns:
            shown.add_column(column, justify="left" if column in LEFT else "right")
        for row, stage in zip(table.rows, table.stages):
            first = Text(row[0])
            if stage is not None:
                first.stylize(f"black on {palette.of_stage(stage)}")
            shown.add_row(first, *(Text(cell) for cell in row[1:]))
        parts += [shown, Text()]
    return Group(*parts, Text(schedule_text(found)), Text(), Text(passes_text(found)))


def as_html(found: Explanation) -> str:
    """Tables without a style sheet but for the colours of stages; all text is escaped."""
    parts = [f"<p>{escape(summary(found))}</p>"]
    for table in tables(found):
        if table.rows:
            head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
            body = "".join(
                f"<tr>{_html_row(row, s)}</tr>" for row, s in zip(table.rows, table.stages)
            )
            parts.append(
                f"<p><b>{escape(table.title)}</b></p><table><thead><tr>{head}</tr></thead>"
                f"<tbody>{body}</tbody></table>"
            )
    parts.append(f"<pre>{escape(schedule_text(found))}</pre>")
    parts.append(f"<pre>{escape(passes_text(found))}</pre>")
    return "".join(parts)


# Columns of words; the others hold numbers.
LEFT = ("stage", "ranks", "modules", "edge", "values", "rank", "stages")


def brief(names: Sequence[str], most: int = 6) -> str:
    """The names, or the first and the last of many."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[: most - 2])}, ... {names[-1]} ({len(names)})"


def _numbers(values: Sequence[int]) -> str:
    return " ".join(map(str, values))


def _aligned(table: Table) -> str:
    lines = [table.columns, *table.rows]
    widths = [max(len(line[k]) for line in lines) for k in range(len(table.columns))]

    def shown(line: Sequence[str]) -> str:
        cells = (
            cell.ljust(width) if column in LEFT else cell.rjust(width)
            for cell, width, column in zip(line, widths, table.columns)
        )
        return f"  {'  '.join(cells)}".rstrip()

    return "\n".join(map(shown, lines))


def _html_row(row: Sequence[str], stage: int | None) -> str:
    style = "" if stage is None else f' style="background:{palette.of_stage(stage)};color:#1a1a1a"'
    cells = [f"<td{style}>{escape(row[0])}</td>", *(f"<td>{escape(cell)}</td>" for cell in row[1:])]
    return "".join(cells)

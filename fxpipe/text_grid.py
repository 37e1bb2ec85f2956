"""A schedule becomes a grid: one row a step, one column a rank, as far as its order can run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from fxpipe.schedule import RECEIVES, SENDS, Action, Kind, Schedule, actions_of

Edges = Collection[tuple[int, int]]
_Key = tuple[str, int, int, int]


@dataclass(frozen=True)
class Layout:
    """Per rank, the row in which each step runs; steps that can never run have no row.

    `lacks` says of each rank that stopped early what its next step needs, and which step of which
    rank would give it (None where none does).
    """

    rows: tuple[tuple[int, ...], ...]
    lacks: dict[int, tuple[str, tuple[int, int] | None]]


def chain(num_stages: int) -> set[tuple[int, int]]:
    """The edges of a line of stages, s to s + 1."""
    return {(stage, stage + 1) for stage in range(num_stages - 1)}


def lay_out(schedule: Schedule, forward_edges: Edges | None = None) -> Layout:
    """Run each rank's steps in order, every step one row long and waiting for what it needs."""
    needs = _Needs(schedule, chain(schedule.num_stages) if forward_edges is None else forward_edges)
    rows: list[list[int]] = [[] for _ in schedule.ranks]
    done: dict[_Key, int] = {}
    waiting: dict[_Key, list[int]] = defaultdict(list)
    missing: dict[int, _Key] = {}
    ready = list(reversed(range(schedule.num_ranks)))
    while ready:
        rank = ready.pop()
        steps, row = schedule.ranks[rank], rows[rank]
        missing.pop(rank, None)
        while len(row) < len(steps):
            actions = actions_of(steps[len(row)])
            keys = [key for action in actions for key in needs.of(action)]
            lacking = next((key for key in keys if key not in done), None)
            if lacking is not None:
                waiting[lacking].append(rank)
                missing[rank] = lacking
                break
            row.append(max([done[key] for key in keys] + row[-1:], default=-1) + 1)
            for action in actions:
                for key in needs.given_by(action):
                    done.setdefault(key, row[-1])
                    ready += waiting.pop(key, ())
    return Layout(tuple(map(tuple, rows)), needs.explain(missing) if missing else {})


class _Needs:
    """What an action waits for and what it gives, as keys."""

    def __init__(self, schedule: Schedule, edges: Edges) -> None:
        self.schedule = schedule
        self.sources: dict[int, list[int]] = defaultdict(list)
        self.targets: dict[int, list[int]] = defaultdict(list)
        for source, target in sorted(edges):
            self.sources[target].append(source)
            self.targets[source].append(target)
        self.messages = {
            message(action)
            for rank in range(schedule.num_ranks)
            for action in schedule.actions(rank)
            if action.peer is not None
        }

    def of(self, action: Action) -> Iterator[_Key]:
        stage, kind, microbatch = action.stage, action.kind, action.microbatch
        if kind in SENDS:
            yield ("F" if kind is Kind.SEND_F else "I", stage, microbatch, 0)
        elif kind is Kind.F:
            for source in self.sources[stage]:
                yield from self._value("F", source, stage, microbatch)
        elif kind is Kind.W:
            yield ("I", stage, microbatch, 0)
        elif kind not in RECEIVES:
            yield ("F", stage, microbatch, 0)
            for target in self.targets[stage]:
                yield from self._value("I", target, stage, microbatch)

    def _value(self, kind: str, source: int, target: int, microbatch: int) -> Iterator[_Key]:
        sent = ("B" if kind == "I" else "F", source, target, microbatch)
        if sent in self.messages:
            yield ("SEND_" + sent[0], *sent[1:])
            yield ("RECV_" + sent[0], *sent[1:])
        else:
            yield (kind, source, microbatch, 0)

    @staticmethod
    def given_by(action: Action) -> Iterator[_Key]:
        if action.peer is not None:
            yield (action.kind.value, *message(action)[1:])
        elif action.kind is Kind.F:
            yield ("F", action.stage, action.microbatch, 0)
        elif action.kind is not Kind.W:
            yield ("I", action.stage, action.microbatch, 0)

    def explain(self, missing: dict[int, _Key]) -> dict[int, tuple[str, tuple[int, int] | None]]:
        wanted = set(missing.values())
        givers = {
            key: (rank, place)
            for rank, steps in enumerate(self.schedule.ranks)
            for place, step in enumerate(steps)
            for action in actions_of(step)
            for key in self.given_by(action)
            if key in wanted
        }
        return {rank: (_name(key), givers.get(key)) for rank, key in sorted(missing.items())}


def message(action: Action) -> tuple[str, int, int, int]:
    """Direction, stage it leaves, stage it reaches, microbatch."""
    assert action.peer is not None
    ends = (action.stage, action.peer)
    source, target = ends if action.kind in SENDS else ends[::-1]
    return (action.kind.value[-1], source, target, action.microbatch)


def _name(key: _Key) -> str:
    kind, stage, other, microbatch = key
    if kind == "F":
        return f"{stage}F{other}"
    if kind == "I":
        return f"{stage}I{other} or {stage}B{other}"
    at, peer = (stage, other) if kind.startswith("SEND") else (other, stage)
    return str(Action(at, Kind(kind), microbatch, peer))


def grid(
    schedule: Schedule,
    mark: tuple[int, int] | None = None,
    *,
    forward_edges: Edges | None = None,
    max_rows: int | None = None,
    max_columns: int | None = None,
) -> str:
    """The schedule as text; `mark` is the (rank, step) to show as `>2F5<` in a row marked `>`.

    Steps that the order can never reach stand below a line that says so. With `max_rows` and
    `max_columns`, only the part around the mark is shown (around the last row that ran, and from
    rank 0, where there is no mark).
    """
    layout = lay_out(schedule, forward_edges)
    table, ran = _table(schedule, layout)
    marked = -1
    if mark is not None:
        rank, step = mark
        row = layout.rows[rank]
        marked = row[step] if step < len(row) else ran + step - len(row)
        table[marked][rank] = f">{table[marked][rank]}<"
    rows = _window(len(table), max_rows, marked if marked >= 0 else ran)
    columns = _window(schedule.num_ranks, max_columns, mark[0] if mark else 0)
    return "\n".join(_lines(table, rows, columns, ran, marked))


def _window(size: int, shown: int | None, centre: int) -> range:
    if shown is None or size <= shown:
        return range(size)
    first = min(max(0, centre - shown * 2 // 3), size - shown)
    return range(first, first + shown)


def _table(schedule: Schedule, layout: Layout) -> tuple[list[list[str]], int]:
    """The cells row by row, and how many rows ran."""
    ran = 1 + max((row[-1] for row in layout.rows if row), default=-1)
    rest = max(
        len(steps) - len(row) for steps, row in zip(schedule.ranks, layout.rows, strict=True)
    )
    table = [["."] * schedule.num_ranks for _ in range(ran + rest)]
    for rank, (steps, row) in enumerate(zip(schedule.ranks, layout.rows, strict=True)):
        places = (*row, *range(ran, ran + len(steps) - len(row)))
        for step, place in zip(steps, places, strict=True):
            table[place][rank] = str(step)
    return table, ran


def _lines(
    table: list[list[str]], rows: range, columns: range, ran: int, marked: int
) -> Iterator[str]:
    heads = [f"rank {rank}" for rank in columns]
    shown = [table[row][columns.start : columns.stop] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *shown, strict=True)]
    number = max(4, 2 + len(str(ran)))

    def line(label: str, cells: list[str]) -> str:
        padded = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=False))
        return f"{label:>{number}}  {padded}".rstrip()

    yield line("step", heads)
    if rows.start > 0:
        yield line("...", [])
    for row, cells in zip(rows, shown, strict=True):
        if row == ran:
            yield line("", ["never reached:"])
        label = "" if row >= ran else str(row)
        yield line(f"> {label}".rstrip() if row == marked else label, cells)
    if rows.stop < len(table):
        yield line("...", [])

"""What was measured, as JSON has it -> lines that say what was asked, and whether it is so."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from contestants import NUM_RANKS, PEERS, stages_of

ALONE = "tasks alone"
Rounds = Sequence[Sequence[float]]
Row = Mapping[str, Any]


class Figure(NamedTuple):
    """A median and its quartiles, over so many rounds."""

    median: float
    low: float
    high: float
    count: int

    @staticmethod
    def of(values: Sequence[float]) -> Figure:
        if len(values) < 2:
            return Figure(values[0], values[0], values[0], len(values))
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return Figure(middle, low, high, len(values))


class Bar(NamedTuple):
    """One thing that was asked for. `at_least`: the limit is a least value, else a greatest."""

    preset: str
    what: str
    figure: Figure
    limit: float
    at_least: bool
    unit: str = ""

    @property
    def met(self) -> bool:
        value = self.figure.median
        return value >= self.limit if self.at_least else value <= self.limit

    def cells(self) -> tuple[str, ...]:
        median, low, high, count = self.figure
        sign = ">=" if self.at_least else "<="
        return (
            self.preset,
            self.what,
            f"{median:.3g}{self.unit}",
            f"{low:.3g} to {high:.3g} ({count})",
            f"{sign} {self.limit:g}{self.unit}",
            "yes" if self.met else "NO",
        )

    def as_json(self) -> dict[str, Any]:
        return self._asdict() | {"figure": self.figure._asdict(), "met": self.met}


def bars_of(results: Mapping[str, Any]) -> list[Bar]:
    """Every bar that the parts which were run can tell of."""
    lowering = results["about"]["lowerings"][0]
    found: list[Bar] = []
    for preset, measured in results["presets"].items():
        rows = Rows(measured["rows"], lowering)
        for group in (speeds, bounds, bubbles, hosts, halves, singles, lives):
            found += group(preset, measured, rows)
    found += compiles(results["starts"])
    found += residents(results["starts"])
    return found


class Rows:
    """The contestants' rows, found by name and schedule."""

    def __init__(self, rows: Sequence[Row], lowering: str) -> None:
        self.rows, self.lowering = rows, lowering

    def all(self, prefix: str, schedule: str | None = None) -> list[Row]:
        return [
            row
            for row in self.rows
            if row["name"].startswith(prefix)
            and ALONE not in row["name"]
            and (schedule is None or row["schedule"] == schedule)
        ]

    def fxpipe(self, schedule: str | None = None) -> list[Row]:
        """Pipelines of the main lowering."""
        return [r for r in self.all(f"fxpipe, {self.lowering}", schedule) if r["schedule"]]

    def named(self, name: str, schedule: str = "") -> Row | None:
        of = (r for r in self.rows if (r["name"], r["schedule"]) == (name, schedule))
        return next(of, None)

    def alone(self, schedule: str) -> Row | None:
        """The bare tasks of a pipeline of the main lowering."""
        return self.named(f"fxpipe, {self.lowering}, {ALONE}", schedule)


def middle(rounds: Rounds) -> list[float]:
    return [statistics.median(steps) for steps in rounds]


def ratio(row: Row, other: Row, key: str = "whole", other_key: str | None = None) -> Figure:
    """row / other, round by round."""
    pairs = zip(middle(row[key]), middle(other[other_key or key]))
    return Figure.of([own / theirs for own, theirs in pairs])


def fastest(rows: Sequence[Row]) -> Row:
    return min(rows, key=lambda row: statistics.median(middle(row["whole"])))


def title(row: Row) -> str:
    return f"{row['schedule']} ({row['name']})"


def speeds(preset: str, measured: Row, rows: Rows) -> Iterator[Bar]:
    """Against torch.distributed.pipelining: best against best, and schedule by schedule."""
    ours, peers = rows.fxpipe(), rows.all("torch")
    if not ours or not peers:
        return
    best, theirs = fastest(ours), fastest(peers)
    asked = 1.8 if preset == "small" else 1.15
    what = f"speed of {title(best)} to torch's best, {title(theirs)}"
    yield Bar(preset, what, ratio(theirs, best), asked, True, "x")
    for schedule in PEERS:
        own, shared = rows.fxpipe(schedule), rows.all("torch", schedule)
        asked = 1.08
        if preset == "small":
            asked = 3.5 if schedule in ("interleaved-zb", "zb-v") else 1.0
        if own and shared and asked != 1.0:
            other = fastest(shared)
            what = f"speed of {schedule} to torch's own ({other['name']})"
            yield Bar(preset, what, ratio(other, fastest(own)), asked, True, "x")


def bounds(preset: str, measured: Row, rows: Rows) -> Iterator[Bar]:
    ours = rows.fxpipe()
    if preset == "small" or "bubble" not in measured:
        return
    best = fastest(ours)
    alone = rows.alone(best["schedule"])
    if alone is not None:
        what = f"step of {title(best)} / its tasks alone (no-communication bound)"
        yield Bar(preset, what, ratio(best, alone, "inner"), 1.05, False)


def bubbles(preset: str, measured: Row, rows: Rows) -> Iterator[Bar]:
    """The schedule whose bubble is furthest from what its tasks' times should make it."""
    off = {
        name: Figure.of([100 * abs(r["measured"] - r["simulated"]) for r in bubble["steps"]])
        for name, bubble in measured.get("bubble", {}).items()
    }
    if off:
        name = max(off, key=lambda name: off[name].median)
        what = f"bubble, measured - by the formula, worst of {len(off)}: {name}"
        yield Bar(preset, what, off[name], 2.0, False, " points")


def extra_cpu(row: Row, alone: Row, microbatches: int) -> Figure:
    """CPU milliseconds of a step beyond its bare tasks, for each stage and microbatch."""
    count = stages_of(row["schedule"]) * microbatches
    return Figure.of(
        [1e3 * (own - bare) / count for own, bare in zip(middle(row["cpu"]), middle(alone["cpu"]))]
    )


def hosts(preset: str, measured: Row, rows: Rows) -> Iterator[Bar]:
    """The schedule with the most CPU time beside its tasks."""
    extra = {
        row["schedule"]: extra_cpu(row, alone, measured["microbatches"])
        for row in rows.fxpipe()
        if (alone := rows.alone(row["schedule"])) is not None
    }
    if extra:
        name = max(extra, key=lambda name: extra[name].median)
        what = f"extra CPU for each stage and microbatch, worst of {len(extra)}: {name}"
        yield Bar(preset, what, extra[name], 0.2, False, " ms")


def halves(preset: str, measured: Row, rows: Rows) -> Iterator[Bar]:
    """I + W against B: the sum over the stages of one schedule that splits, and one that not."""
    tasks = measured.get("tasks", {})
    if "1f1b" not in tasks or "zb-h1" not in tasks:
        return

    def total(schedule: str, kinds: str) -> list[float]:
        """Per run of the tasks alone: the seconds of these kinds, all stages added."""
        runs = zip(*tasks[schedule])
        return [sum(t for own in run for key, t in own.items() if key[-1] in kinds) for run in runs]

    pairs = list(zip(total("zb-h1", "IW"), total("1f1b", "B")))
    figure = Figure.of([split / whole for split, whole in pairs])
    yield Bar(preset, "I + W / B, stages of 1f1b and zb-h1", figure, 1.03, False)


def singles(preset: str, measured: Row, rows: Rows) -> Iterator[Bar]:
    own = rows.named(f"fxpipe, one rank, {rows.lowering}")
    compiled = [r for r in rows.all("one process") if r["name"] != "one process, eager"]
    if own is not None and compiled:
        what = f"one rank, one stage / {compiled[0]['name']} with gradient accumulation"
        yield Bar(preset, what, ratio(own, compiled[0], "inner"), 1.0, False)


def lives(preset: str, measured: Row, rows: Rows) -> Iterator[Bar]:
    """The rank and schedule with the most saved activations alive, against the schedule's count."""
    over = {
        (name, rank): found / expected
        for name, live in measured.get("live", {}).items()
        for rank, (found, expected) in enumerate(zip(live["measured"], live["expected"]))
    }
    if over:
        (name, rank), most = max(over.items(), key=lambda item: item[1])
        what = f"live activations / formula, worst of {len(over)}: {name}, rank {rank}"
        yield Bar(preset, what, Figure.of([most]), 1.05, False)


# Fresh processes. Their results: name -> {"start": ..., "runs": [...]}.


def firsts(starts: Mapping[str, Any], name: str) -> list[float]:
    return [run["first"] for run in starts[name]["runs"]] if name in starts else []


def compiles(starts: Mapping[str, Any]) -> Iterator[Bar]:
    def bar(preset: str, what: str, own: str, other: str, limit: float) -> Iterator[Bar]:
        pairs = list(zip(firsts(starts, own), firsts(starts, other)))
        if pairs:
            yield Bar(preset, what, Figure.of([a / b for a, b in pairs]), limit, False)

    for preset in dict.fromkeys(entry["start"]["preset"] for entry in starts.values()):
        if preset == "deep-12":
            continue
        cold, warm = f"{preset} cold", f"{preset} warm"
        if preset == "deep":
            what = "first step of 48 layers, 4 stages / of 12 layers"
            yield from bar(preset, what, cold, "deep-12 cold", 2.0)
        else:
            what = "first step / one process's, nothing cached"
            yield from bar(preset, what, cold, f"{preset} one process cold", 1.5)
        yield from bar(preset, "first step of a second start / cold", warm, cold, 0.3)


def residents(starts: Mapping[str, Any]) -> Iterator[Bar]:
    """Peaks of the process that takes more: the whole, and what steps add to what was there."""
    picks: dict[str, Callable[[Row], float]] = {
        "resident peak": lambda r: r["peak"],
        "peak beyond what is resident between steps": lambda r: r["peak"] - r["resident"],
    }
    for name, entry in starts.items():
        if not name.endswith("memory fxpipe"):
            continue
        peer = starts.get(name.removesuffix("fxpipe") + "torch")
        if peer is None:
            continue
        about, other = entry["start"], peer["start"]
        for what, pick in picks.items():
            ratios = [
                max(map(pick, own["ranks"])) / max(map(pick, theirs["ranks"]))
                for own, theirs in zip(entry["runs"], peer["runs"])
            ]
            what = f"{what}, {about['schedule']}: {about['how']} / torch, {other['how']}"
            yield Bar(about["preset"], what, Figure.of(ratios), 1.0, False)


# Tables, in Markdown.


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |"
        for line in lines
    )


def bars_table(bars: Sequence[Bar]) -> str:
    head = ("model", "what", "measured", "quartiles (rounds)", "bar", "met")
    return table(head, [bar.cells() for bar in bars])


def steps_table(measured: Row, lowering: str) -> str:
    """Every contestant: its time to that of torch's best, and what is known of its bubble."""
    rows = Rows(measured["rows"], lowering)
    peers = rows.all("torch") or rows.rows
    base = fastest(peers)
    lines = []
    for row in rows.rows:
        figure, schedule = ratio(row, base), row["schedule"]
        cells = [schedule, row["name"], f"{1e3 * statistics.median(middle(row['whole'])):.1f}"]
        cells += [f"{figure.median:.3f}", f"{figure.low:.3f} to {figure.high:.3f}"]
        cells += [f"{1e3 * statistics.median(middle(row['cpu'])):.1f}"]
        lines.append([*cells, *extras(row, measured, rows)])
    head = ["schedule", "contestant", "ms", "to torch's best", "quartiles", "CPU ms"]
    head += ["to its bound", "extra CPU us", "bubble %", "formula", "closed form"]
    return table(head, lines)


def extras(row: Row, measured: Row, rows: Rows) -> list[str]:
    """Bound, host time and bubble of a row, where they are known."""
    schedule, name = row["schedule"], row["name"]
    ours = row in rows.fxpipe()
    alone = rows.alone(schedule) if ours else None
    if name.startswith("torch") and ALONE not in name:
        twin = "1f1b" if stages_of(schedule) == NUM_RANKS else "interleaved-1f1b"
        alone = rows.named(f"{name}, {ALONE}", twin)
    cells = ["", "", "", "", ""]
    if alone is not None:
        extra = extra_cpu(row, alone, measured["microbatches"])
        cells[:2] = [f"{ratio(row, alone, 'inner').median:.3f}", f"{1e3 * extra.median:.0f}"]
    bubble = measured.get("bubble", {}).get(schedule) if ours else None
    if bubble:
        kinds = ("measured", "simulated", "closed_form")
        cells[2:] = [f"{100 * bubble[kind]:.1f}" if kind in bubble else "" for kind in kinds]
    return cells


def memory_table(measured: Row) -> str:
    """What a rank sends in a step, and the saved activations that are alive at once."""
    lines = []
    for name in measured.get("sent") or measured.get("live") or ():
        sent, live = measured.get("sent", {}).get(name), measured.get("live", {}).get(name)
        cells = [name, "", "", "", ""]
        if sent:
            cells[1] = " ".join(f"{count}x" for count, _ in sent["ranks"])
            cells[2] = " ".join(f"{size / 1e3:.0f}" for _, size in sent["ranks"])
            cells[2] += (
                f" ({sent['bytes_by_formula'] / 1e3:.0f})" if sent["bytes_by_formula"] else ""
            )
        if live:
            cells[3] = " ".join(f"{size / 1e6:.2f}" for size in live["measured"])
            cells[4] = " ".join(f"{size / 1e6:.2f}" for size in live["expected"])
        lines.append(cells)
    head = ["schedule", "messages of ranks", "kB of ranks (formula, all)", "live MB", "formula"]
    return table(head, lines)


def starts_table(starts: Mapping[str, Any]) -> str:
    lines = []
    for name, entry in starts.items():
        runs = entry["runs"]
        ranks = [rank for run in runs for rank in run["ranks"]]
        start = entry["start"]
        about = ", ".join(filter(None, (start["schedule"], start["kind"], start["how"])))
        cells = [name, about, str(len(runs))]
        for key in ("first", "cpu"):
            cells.append(f"{statistics.median(run[key] for run in runs):.1f}")
        for key in ("resident", "peak"):
            cells.append(f"{max(rank[key] for rank in ranks) / 1e6:.1f}")
        lines.append(cells)
    head = ["start", "of", "runs", "first step s", "CPU s", "resident MB", "peak MB"]
    return table(head, lines)

"""The commands of `fxpipe` as functions: `schedule`, `schedules`, `compare` and `check`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fxpipe.choose import choose
from fxpipe.costs import Costs
from fxpipe.errors import OptionError, ScheduleError
from fxpipe.schedules import Family, build, families, load, to_csv
from fxpipe.schedules.builder import find
from fxpipe.simulator import simulate
from fxpipe.views.report import ClosedForm, Report

app = typer.Typer(
    help="Pipeline schedules: list, simulate, compare. Models: check one against plain eager.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

NAME = "A family such as 1f1b or chimera:f=2, a .txt file of actions or directives, PyTorch's .csv"
LETTERS = """\
p ranks, m microbatches, v chunks per rank, f half the number of replicas, r the rank;
F, B (input gradient), W: times of one rank's share of the model for one microbatch;
memory and weights in units of that share.
Formulas are for equal stages, messages without delay and enough microbatches: where each holds."""

Ranks = Annotated[int, typer.Option("--ranks", "-p", min=1, help="Ranks of the pipeline.")]
Microbatches = Annotated[
    int, typer.Option("--microbatches", "-m", min=1, help="Microbatches of a step.")
]
Chunks = Annotated[
    int | None,
    typer.Option("--chunks", "-v", min=1, help="Stages per rank; default: as the family needs."),
]
Times = Annotated[
    str,
    typer.Option(
        help="F,B,W,c: forward, input gradient and weight gradient of one rank's share of the "
        "model for one microbatch, and the delay of a message. A stage takes its part of them."
    ),
]
PairTime = Annotated[
    float | None,
    typer.Option(
        "--pair", min=0.0, help="Time of a pair of one rank's share; default: F + B + W added."
    ),
]
MemoryLimit = Annotated[
    float | None,
    typer.Option(
        min=0.0, help="Activations that a rank may hold, in those of its share of a microbatch."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Picture = Annotated[
    Path | None, typer.Option(help="Draw time as rows of boxes into this .svg, .png or .pdf.")
]
Target = Annotated[
    str,
    typer.Argument(
        help="script.py:name or package.module:name of a model, or of a function that returns "
        "model, or (model, args), or (model, args, kwargs)"
    ),
]
BackendOptions = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", help="An option of the backend: -o stages=2"),
]
Inputs = Annotated[
    list[str] | None,
    typer.Option("--input", "-i", help="A random argument: float:8x16, int:8x128:512, bool:8"),
]


@app.command()
def schedule(
    name: Annotated[
        str,
        typer.Argument(help="A family such as 1f1b or chimera:f=2, a .txt or .csv file, or auto."),
    ],
    ranks: Ranks = 4,
    microbatches: Microbatches = 8,
    chunks: Chunks = None,
    times: Times = "1,1,1,0",
    pair: PairTime = None,
    memory_limit: MemoryLimit = None,
    as_json: AsJson = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print PyTorch's CSV of actions.")] = False,
    grid: Annotated[bool, typer.Option("--grid", help="Print a row per step.")] = False,
    picture: Picture = None,
) -> None:
    """Simulate one schedule: bubble, memory, messages."""
    if as_json + csv + grid > 1:
        raise OptionError("--json, --csv and --grid exclude each other; give one")
    report = _report(name, ranks, microbatches, chunks, times, pair, memory_limit)
    if picture is not None:
        _draw([report], picture)
    if as_json:
        _print_json(report.as_dict())
    elif csv:
        typer.echo(to_csv(report.timeline.schedule), nl=False)
    elif grid:
        from fxpipe.text_grid import grid as as_grid

        typer.echo(as_grid(report.timeline.schedule))
    else:
        _print_report(report)


@app.command()
def schedules(as_json: AsJson = False) -> None:
    """List the families: what they are, their formulas, memory and constraints."""
    known = [families()[name] for name in sorted(families())]
    if as_json:
        _print_json([_family_dict(family) for family in known])
        return
    for family in known:
        entry = _family_dict(family)
        typer.secho(f"{family.name}: ", bold=True, nl=False)
        typer.echo(entry.pop("summary"))
        entry.pop("name")
        for what, value in entry.items():
            if value:
                typer.echo(f"    {what.replace('_', ' '):<17}{value}")
    typer.echo(LETTERS)


@app.command()
def compare(
    names: Annotated[list[str], typer.Argument(help=f"{NAME}; none: all families.")] = [],  # noqa: B006
    ranks: Ranks = 4,
    microbatches: Microbatches = 8,
    chunks: Chunks = None,
    times: Times = "1,1,1,0",
    pair: PairTime = None,
    memory_limit: MemoryLimit = None,
    as_json: AsJson = False,
    picture: Picture = None,
) -> None:
    """Put schedules side by side, the fastest first."""
    reports, refused = [], []
    for name in names or sorted(families()):
        try:
            reports.append(_report(name, ranks, microbatches, chunks, times, pair, memory_limit))
        except ScheduleError as error:
            if names:
                raise
            refused.append(str(error))
    reports.sort(key=lambda report: (round(report.timeline.makespan, 9), report.name))
    if picture is not None:
        _draw(reports, picture)
    if as_json:
        _print_json([report.as_dict() for report in reports])
        return
    _print_comparison(reports)
    for reason in refused:
        typer.echo(f"left out: {reason}")


@app.command()
def check(
    target: Target,
    options: BackendOptions = None,
    inputs: Inputs = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 2,
    dtype: Annotated[
        str, typer.Option(help="What the model and its inputs are cast to.")
    ] = "float64",
) -> None:
    """Train a model by plain eager and by fxpipe, and show where they differ."""
    import torch

    from fxpipe import parity
    from fxpipe import target as targets

    wanted = getattr(torch, dtype, None)
    if not isinstance(wanted, torch.dtype) or not wanted.is_floating_point:
        raise OptionError(f"--dtype {dtype} is no floating point type; write for instance float64")
    model, (args, kwargs) = targets.load(target, inputs or ())
    given = targets.read_options(options or ())
    found = parity.check(model, args, kwargs, given, steps, wanted)
    typer.echo(str(found))
    if not found.agrees:
        raise typer.Exit(1)


def _report(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int | None,
    times: str,
    pair: float | None,
    memory_limit: float | None,
) -> Report:
    """Build and simulate a schedule; a file says itself for how many ranks and microbatches."""
    if name.endswith((".txt", ".csv")):
        return _report_file(Path(name), times, pair, memory_limit)
    family = None if name == "auto" else find(name.partition(":")[0])
    if chunks is None:
        chunks = family.chunks(2 * ranks, ranks) if family else 2
    costs = costs_of(times, ranks=ranks, stages=ranks * chunks, pair=pair)
    if family is None:
        choice = choose(ranks * chunks, microbatches, ranks, costs, memory_limit)
        return Report(
            choice.name, choice.timeline, chunks, note=str(choice), memory_limit=memory_limit
        )
    built = build(
        name,
        stages=ranks * chunks,
        microbatches=microbatches,
        ranks=ranks,
        costs=costs,
        memory_limit=memory_limit,
    )
    timeline = simulate(built, costs)
    return Report(name, timeline, chunks, family, memory_limit=memory_limit)


def _report_file(path: Path, times: str, pair: float | None, memory_limit: float | None) -> Report:
    loaded = load(path)
    ranks, stages = loaded.num_ranks, loaded.num_stages
    costs = costs_of(times, ranks=ranks, stages=stages, pair=pair)
    chunks = stages // ranks if stages % ranks == 0 else stages / ranks
    return Report(path.name, simulate(loaded, costs), chunks, memory_limit=memory_limit)


def costs_of(times: str, *, ranks: int, stages: int, pair: float | None = None) -> Costs:
    """Read `F,B,W` or `F,B,W,c`; B is the input gradient's time, as the papers have it."""
    words = times.split(",")
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        numbers = []
    if len(numbers) not in (3, 4) or not all(0 <= number < float("inf") for number in numbers):
        raise OptionError(
            f"times={times!r} is not F,B,W,c; expected three or four numbers of at least 0 "
            f"such as 1,1,1,0.1"
        )
    share = Costs.of_share(*numbers, ranks=ranks, stages=stages)
    return Costs(
        F=share.F,
        I=share.I,
        W=share.W,
        transfer=share.transfer,
        pair=None if pair is None else pair * ranks / stages,
    )


def _draw(reports: list[Report], path: Path) -> None:
    from fxpipe.views.pictures import draw

    draw([(report.title, report.timeline) for report in reports], path)


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))


def _family_dict(family: Family) -> dict[str, str]:
    return {
        "name": family.name,
        "summary": family.summary,
        "placement": family.placement,
        "backward": "split into I and W" if family.splits_backward else "B",
        "flush_bubble": family.flush,
        "own_bubble": family.own,
        "formulas_hold": family.holds if family.flush or family.own else "",
        "peak_activations": family.peak,
        "weights": family.weights,
        "messages": family.messages,
        "constraint": family.constraint,
        "source": family.source,
    }


def _print_report(report: Report) -> None:
    timeline = report.timeline
    flush, own = report.form("flush"), report.form("own")
    typer.echo(report.title)
    typer.echo(
        f"  flush bubble   {_percent(timeline.bubble_flush)}   time {timeline.bubble_flush_time:g} "
        f"of {timeline.makespan:g}{_formula(flush)}"
    )
    typer.echo(
        f"  own bubble     {_percent(timeline.bubble_own)}   time {timeline.bubble_own_time:g}"
        f"{_formula(own)}"
    )
    typer.echo(f"  messages       {sum(report.messages)}")
    table = _table("rank", "peak activations", "weights", "messages sent", "busy", "stages")
    for rank in range(timeline.schedule.num_ranks):
        table.add_row(
            str(rank),
            f"{timeline.peak_activations[rank]:g}",
            f"{timeline.weights[rank]:g}",
            str(report.messages[rank]),
            _percent(timeline.busy[rank] / timeline.makespan if timeline.makespan else 0.0),
            " ".join(map(str, timeline.schedule.stages_of(rank))),
        )
    _print_table(table)
    for which, form in (("flush", flush), ("own", own)):
        if form is not None and not form.holds:
            typer.echo(_where_it_holds(report, which, form))
    if report.over_limit:
        typer.echo(_over_limit(report))
    if report.note:
        typer.echo(report.note)


def _formula(form: ClosedForm | None) -> str:
    return f"   {form.text}" if form is not None and form.holds else ""


def _where_it_holds(report: Report, which: str, form: ClosedForm) -> str:
    assert report.family is not None
    conditions = ["equal stages", "messages without delay"]
    if report.family.holds != "always":
        conditions.insert(0, report.family.holds)
    if report.memory_limit is not None and "memory_limit" in report.family.takes:
        conditions.append("no memory limit")
    return (
        f"the {which} bubble is {form.text} only for {', '.join(conditions)}; "
        f"that would be {form.value:g} here"
    )


def _over_limit(report: Report) -> str:
    ranks, several = report.over_limit, len(report.over_limit) > 1
    return (
        f"over the limit: --memory-limit is {report.memory_limit:g}, but "
        f"rank{'s' if several else ''} {', '.join(map(str, ranks))} hold{'' if several else 's'} "
        f"up to {max(report.timeline.peak_activations):g} activations; "
        f"fxpipe schedule auto keeps the limit"
    )


def _print_comparison(reports: list[Report]) -> None:
    table = _table(
        "schedule", "stages", "time", "flush bubble", "own bubble", "peak activations", "weights",
        "messages",
    )  # fmt: skip
    limit = next((report.memory_limit for report in reports), None)
    if limit is not None:
        table.add_column(f"limit {limit:g}")
    for report in reports:
        timeline, peak = report.timeline, report.timeline.peak_activations
        table.add_row(
            report.name,
            str(len(timeline.costs.F)),
            f"{timeline.makespan:g}",
            _percent(timeline.bubble_flush),
            _percent(timeline.bubble_own),
            f"{min(peak):g}" + (f"..{max(peak):g}" if max(peak) > min(peak) else ""),
            f"{max(timeline.weights):g}",
            str(sum(report.messages)),
            *(["over the limit" if report.over_limit else ""] if limit is not None else []),
        )
    _print_table(table)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in ("schedule", "stages") else "right")
    return table


def _print_table(table: Table) -> None:
    """Wide enough, and without blanks at the ends of lines, where the output is no terminal."""
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(table)
        return
    wide = Console(highlight=False, width=160)
    with wide.capture() as capture:
        wide.print(table)
    for line in capture.get().splitlines():
        typer.echo(line.rstrip())


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.2f} %"

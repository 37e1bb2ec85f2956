"""The commands that show what a model became: `report` and `graph`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fxpipe.commands import app as app
from fxpipe.errors import OptionError
from fxpipe.views.graph_forms import FORMATS, can_draw_svg, draw, model_explorer_costs


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="The folder of the options trace and dump.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Default: report.html in the folder.")
    ] = None,
) -> None:
    """Write one HTML page of a trace and a dump: plan, timelines, memory, passes."""
    from fxpipe.views.report_page import write_report

    place = output or folder / "report.html"
    write_report(folder, place)
    typer.echo(f"wrote {place}")


@app.command()
def graph(
    target: Annotated[
        str, typer.Argument(help="script.py:name or package.module:name of a model, as for check.")
    ],
    form: Annotated[
        str, typer.Option("--format", "-f", help=f"One of {', '.join(FORMATS)}.")
    ] = "svg",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Default: text goes to the terminal, SVG to svg.svg."),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--option", "-p", help="An option of the backend: -p stages=2"),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", "-i", help="A random argument: float:8x16, int:8x128:512, bool:8"),
    ] = None,
) -> None:
    """Draw the stages of a model, or the actions of its schedule."""
    if form not in FORMATS:
        raise OptionError(f"--format {form!r} is unknown; write one of {', '.join(FORMATS)}")
    from fxpipe import target as targets

    model, (args, kwargs) = targets.load(target, inputs or ())
    program = targets.program_of(model, args, kwargs, targets.read_options(options or ()))
    if output is None and form != "svg":
        typer.echo(draw(program, form))
        return
    output = output or Path(f"{form}.svg")
    if not output.parent.is_dir():
        raise OptionError(f"{str(output)!r} lies in no folder that exists; make it first")
    if output.suffix == ".svg" and not can_draw_svg():
        form, output = "mermaid" if form == "svg" else form, output.with_suffix(".mmd")
        typer.echo("SVG needs graphviz and its command dot: this is text for Mermaid instead")
    output.write_text(draw(program, form, output.suffix), encoding="utf-8")
    typer.echo(f"wrote {output}")
    if form == "model-explorer":
        overlay = output.with_suffix(".costs.json")
        overlay.write_text(json.dumps(model_explorer_costs(program)), encoding="utf-8")
        typer.echo(f"wrote {overlay}, to lay over it as custom node data")

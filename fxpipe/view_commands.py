"""The commands that show what a model became: `report` and `graph`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fxpipe.commands import BackendOptions, Inputs, Target
from fxpipe.commands import app as app
from fxpipe.errors import OptionError
from fxpipe.files import write_json, write_text
from fxpipe.views.graph_forms import FORMATS, can_draw_svg, draw, model_explorer_costs


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="The folder of the options trace and dump.")],
    output: Annotated[
        Path | None, typer.Option("--output", help="Default: report.html in the folder.")
    ] = None,
) -> None:
    """Write one HTML page of a trace and a dump: plan, timelines, memory, passes."""
    from fxpipe.views.report_page import write_report

    place = output or folder / "report.html"
    write_report(folder, place)
    typer.echo(f"wrote {place}")


@app.command()
def graph(
    target: Target,
    form: Annotated[
        str, typer.Option("--format", "-f", help=f"One of {', '.join(FORMATS)}.")
    ] = "svg",
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Default: text goes to the terminal, SVG to svg.svg."),
    ] = None,
    options: BackendOptions = None,
    inputs: Inputs = None,
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
    write_text(output, draw(program, form, output.suffix))
    typer.echo(f"wrote {output}")
    if form == "model-explorer":
        overlay = output.with_suffix(".costs.json")
        write_json(overlay, model_explorer_costs(program))
        typer.echo(f"wrote {overlay}, to lay over it as custom node data")

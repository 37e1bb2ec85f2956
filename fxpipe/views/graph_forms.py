"""Pictures of a program -> SVG (graphviz), Mermaid's text, Model Explorer's JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from shutil import which
from typing import TYPE_CHECKING, Any

from fxpipe.errors import OptionError
from fxpipe.views import palette

if TYPE_CHECKING:
    from fxpipe.program import Program
    from fxpipe.views.graphs import Picture

FORMATS = ("svg", "mermaid", "model-explorer", "actions")


def draw(program: Program, form: str, suffix: str = "") -> str:
    """The text of a file of this form.

    `actions` is SVG where the file's suffix is `.svg`, else Mermaid's text; the others show the
    model. Raises OptionError for SVG without graphviz.
    """
    from fxpipe.views.graphs import actions_picture, modules_picture

    if form == "model-explorer":
        return json.dumps(model_explorer(program), indent=1)
    picture = actions_picture(program) if form == "actions" else modules_picture(program)
    if form == "svg" or (form == "actions" and suffix == ".svg"):
        return svg(picture)
    return mermaid(picture)


def can_draw_svg() -> bool:
    """Whether the package graphviz and its command dot are there."""
    from importlib.util import find_spec

    return find_spec("graphviz") is not None and which("dot") is not None


def svg(picture: Picture) -> str:
    if not can_draw_svg():
        raise OptionError(
            "SVG needs the package graphviz, pip install 'fxpipe[viz]', and its command dot from "
            "the system; --format mermaid needs neither"
        )
    import graphviz

    return str(graphviz.Source(dot(picture)).pipe("svg", encoding="utf-8"))


def dot(picture: Picture) -> str:
    """The language of graphviz."""
    number = {name: f"n{i}" for i, name in enumerate(picture.boxes)}
    lines = [
        "digraph {",
        f'  graph [rankdir={picture.direction}, fontname="Helvetica", fontsize=12, labeljust=r, '
        'ranksep=0.35, compound=true, bgcolor="white"];',
        '  node [shape=box, style="filled,rounded", fontname="Helvetica", fontsize=11, '
        f'color="#00000033", fontcolor="{palette.TEXT}"];',
        '  edge [fontname="Helvetica", fontsize=10, color="#555555", fontcolor="#555555"];',
    ]
    for index, (group, (title, colour)) in enumerate(picture.groups.items()):
        inside = [name for name, box in picture.boxes.items() if box.group == group]
        lines.append(f"  subgraph cluster_{index} {{")
        lines.append(f'    style="rounded,filled"; color="{colour}";')
        lines.append('    fillcolor="#FAFAFA"; penwidth=2;')
        if picture.direction == "LR":
            # A box before the others: arrows and their labels would run over the cluster's title.
            lines.append(f'    t{index} [label={_quoted(title)}, shape=plaintext, style=""];')
            lines += [f"    t{index} -> {number[name]} [style=invis];" for name in inside[:1]]
        else:
            lines.append(f"    label={_quoted(title)};")
        for name in inside:
            box = picture.boxes[name]
            label = _quoted(box.label)
            lines.append(f'    {number[name]} [label={label}, fillcolor="{box.colour}"];')
        lines.append("  }")
    for (source, target), label in picture.arrows.items():
        lines.append(f"  {number[source]} -> {number[target]} [label={_quoted(label)}];")
    for source, target in picture.order:
        if (source, target) not in picture.arrows:
            style = "style=dotted, arrowhead=none, weight=10"
            lines.append(f"  {number[source]} -> {number[target]} [{style}];")
    return "\n".join([*lines, "}"])


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def mermaid(picture: Picture) -> str:
    """A flowchart; GitHub and others draw it inside a ```mermaid block."""
    number = {name: f"n{i}" for i, name in enumerate(picture.boxes)}
    lines = [f"flowchart {picture.direction}"]
    for index, (group, (title, _)) in enumerate(picture.groups.items()):
        lines.append(f"  subgraph g{index}[{_mermaid(title)}]")
        for name, box in picture.boxes.items():
            if box.group == group:
                lines.append(f"    {number[name]}[{_mermaid(box.label)}]")
        lines.append("  end")
    for (source, target), label in picture.arrows.items():
        shown = f"|{_mermaid(label)}|" if label else ""
        lines.append(f"  {number[source]} -->{shown} {number[target]}")
    for source, target in picture.order:
        if (source, target) not in picture.arrows:
            lines.append(f"  {number[source]} -.- {number[target]}")
    colours: dict[str, list[str]] = {}
    for name, box in picture.boxes.items():
        colours.setdefault(box.colour, []).append(number[name])
    for colour, names in colours.items():
        style = f"fill:{colour},stroke:#999,color:{palette.TEXT}"
        lines.append(f"  classDef c{colour[1:]} {style}")
        lines.append(f"  class {','.join(names)} c{colour[1:]}")
    return "\n".join(lines)


def _mermaid(text: str) -> str:
    return f'"{escape(text, quote=False).replace(chr(34), "#quot;").replace(chr(10), "<br>")}"'


# Model Explorer: github.com/google-ai-edge/model-explorer. A file of graphs, and one of data per
# node that it lays over them.


def model_explorer(program: Program) -> list[dict[str, Any]]:
    """One collection with the graph of a microbatch's forward and backward.

    Stages, then kinds, then modules are its nested layers; ids are the names of the values.
    """
    nodes = list(_explorer_nodes(program))
    return [{"label": "fxpipe", "graphs": [{"id": "microbatch", "nodes": nodes}]}]


def model_explorer_costs(program: Program) -> dict[str, Any]:
    """The overlay: per node its cost in floating point operations, moved bytes included."""
    from fxpipe.flops import cost

    calls = (node for node in program.joint.graph.nodes if node.op == "call_function")
    results = {node.name: {"value": cost(node)} for node in calls}
    gradient = [{"stop": 0, "bgColor": "#FFFFFF"}, {"stop": 1, "bgColor": "#E69F00"}]
    return {"microbatch": {"results": results, "gradient": gradient}}


def _explorer_nodes(program: Program) -> Iterator[dict[str, Any]]:
    from fxpipe.flops import cost, flops
    from fxpipe.modules import module_paths
    from fxpipe.program import where
    from fxpipe.text import format_type

    for node in program.joint.graph.nodes:
        stage, kind = node.meta.get("stage"), node.meta.get("kind")
        layers = [] if stage is None else [f"stage {stage}"]
        layers += [str(kind)] if kind is not None else []
        paths = module_paths(node)
        layers += paths[-1].split(".") if paths else []
        facts = {"type": format_type(node.meta.get("val"))}
        if node.op == "call_function":
            facts |= {"cost": str(cost(node)), "flop": str(flops(node))}
            facts |= {"line": where(node)} if node.meta.get("stack_trace") else {}
        entry: dict[str, Any] = {
            "id": node.name,
            "label": getattr(node.target, "__name__", str(node.target)),
            "namespace": "/".join(layers),
            "attrs": [{"key": key, "value": value} for key, value in facts.items()],
            "incomingEdges": [
                {
                    "sourceNodeId": source.name,
                    "sourceNodeOutputId": "0",
                    "targetNodeInputId": str(i),
                }
                for i, source in enumerate(node.all_input_nodes)
            ],
        }
        if stage is not None:
            entry["style"] = {"backgroundColor": palette.of_stage(stage)}
        yield entry

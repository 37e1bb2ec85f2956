"""A program after a pass -> what a page shows beside its text: counts, source lines, stages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.fx as fx

from fxpipe.program import Program, where

# Lines of the model's source that are shown on either side of a node's.
AROUND = 4
_PLACE = re.compile(r"(.*?):(\d+)(?:: .*)?", re.DOTALL)


def snapshot(
    number: int, name: str, description: str, program: Program, seconds: float
) -> dict[str, Any]:
    """The entries of `NN-<pass>.json` in a dump.

    nodes: graph -> its number of operators. lines: where in the user's code nodes come from.
    places: node -> [number of its line or None, its stage or None]. tags: what passes have noted
    of the nodes of the joint graph, which its text does not show.
    """
    lines: dict[str, int] = {}
    places: dict[str, list[int | None]] = {}
    nodes: dict[str, int] = {}
    tags: dict[str, str] = {}
    for graph, stage, gm in graphs_of(program):
        operators = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
        nodes[graph] = len(operators)
        for node in operators:
            line = None
            if node.meta.get("stack_trace"):
                line = lines.setdefault(where(node), len(lines))
            of_stage = node.meta.get("stage", stage)
            if line is not None or of_stage is not None:
                places.setdefault(node.name, [line, of_stage])
            if graph == "joint" and "stage" in node.meta:
                kind = node.meta.get("kind")
                tags[node.name] = f"stage {of_stage}" + (f", {kind}" if kind else "")
    return {
        "number": number,
        "name": name,
        "description": description,
        "seconds": seconds,
        "nodes": nodes,
        "total": sum(nodes.values()),
        "lines": list(lines),
        "places": places,
        "tags": tags,
    }


def graphs_of(program: Program) -> Iterator[tuple[str, int | None, fx.GraphModule]]:
    """The graphs in their latest form, as the program's text shows them: name, stage, graph."""
    if program.prologue is not None:
        yield "prologue", None, program.prologue
    if program.tasks:
        for key, task in program.tasks.items():
            yield str(key), key.stage, task.graph
    elif program.joint is not None:
        yield "joint", None, program.joint
    else:
        yield "model", None, program.model


def excerpt(line: str, files: dict[str, list[str]]) -> dict[str, Any]:
    """The lines of source around `file.py:12: code`; none where the file cannot be read.

    files: what was read before, by path; filled here.
    """
    match = _PLACE.fullmatch(line)
    if match is None:
        return {"text": line, "file": "", "line": 0, "first": 0, "source": []}
    path, number = match[1], int(match[2])
    if path not in files:
        try:
            files[path] = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            files[path] = []
    first = max(1, number - AROUND)
    source = files[path][first - 1 : number + AROUND]
    return {"text": line, "file": path, "line": number, "first": first, "source": source}


def output_codes(program: Program) -> Mapping[str, str]:
    """Task -> the file with the code that Inductor made of it, where that is known."""
    found = {str(key): task.graph.meta.get("output_code") for key, task in program.tasks.items()}
    return {key: path for key, path in found.items() if path}

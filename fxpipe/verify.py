"""What a program promises after each pass, checked (option `check`)."""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.errors import PassError
from fxpipe.program import Key, Program
from fxpipe.schedule import Kind


def verify(program: Program, after: str) -> None:
    """Raise PassError for the first promise that the program breaks."""
    for broken in problems(program):
        raise PassError(f"after {after}: {broken}")


def problems(program: Program) -> Iterator[str]:
    if program.joint is not None:
        program.joint.graph.lint()
        count = len(program.joint.graph.output_node().args[0])
        if count != len(program.results):
            yield f"the joint graph has {count} outputs, but {len(program.results)} are described"
    yield from problems_of_tasks(program)


def problems_of_tasks(program: Program) -> Iterator[str]:
    known = {i.name for i in program.inputs}
    for key, task in program.tasks.items():
        task.graph.graph.lint()
        names = [n.name for n in task.graph.graph.find_nodes(op="placeholder")]
        if len(names) != len(task.inputs):
            yield f"task {key} takes {len(names)} inputs, but {len(task.inputs)} are described"
        for name in task.inputs:
            is_accumulator = name.removeprefix("acc_") in task.accumulates
            if name in known or is_accumulator or name.startswith("grad_"):
                continue
            if not any(name in values for values in sources(program, key)):
                yield f"task {key} reads {name}, which no task before it gives"
    for edge, carried in program.edges.items():
        given = {n for k, t in program.tasks.items() if k.stage == edge.source for n in t.outputs}
        if missing := sorted(set(carried) - given):
            yield f"edge {edge} carries {missing}, which stage {edge.source} does not give"


def sources(program: Program, key: Key) -> Iterator[tuple[str, ...]]:
    for edge, names in program.edges.items():
        if edge.target == key.stage:
            yield names
    earlier = {Kind.F: "", Kind.B: "F", Kind.I: "F", Kind.W: "FI"}[key.kind]
    for kind in earlier:
        task = program.tasks.get(Key(key.stage, Kind(kind)))
        if task is not None:
            yield task.outputs

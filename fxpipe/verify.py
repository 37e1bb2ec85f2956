"""What a program promises after each pass, checked (option `check`)."""

from __future__ import annotations

from collections.abc import Iterator

import torch.fx as fx

from fxpipe.errors import PassError
from fxpipe.program import Key, Program, where
from fxpipe.schedule import Kind


def verify(program: Program, after: str, note: str = "") -> None:
    """Raise PassError for the first promise that the program breaks; `note` ends its message."""
    for broken in problems(program):
        raise PassError(f"after {after}: {broken}{note}")


def problems(program: Program) -> Iterator[str]:
    if program.joint is not None:
        yield from problems_of_graph("the joint graph", program.joint)
        count = len(program.joint.graph.output_node().args[0])
        if count != len(program.results):
            yield f"the joint graph has {count} outputs, but {len(program.results)} are described"
        if program.num_stages:
            for node in program.joint.graph.nodes:
                yield from problems_of_stage(node, program.num_stages)
    yield from problems_of_tasks(program)


def problems_of_graph(name: str, gm: fx.GraphModule) -> Iterator[str]:
    """What no pass can work on: a graph that is none, or a node of which the value is not known."""
    try:
        gm.graph.lint()
    except RuntimeError as error:
        yield f"{name} is malformed: {error}"
    for node in gm.graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            yield (
                f'{node.name} in {name} has no meta["val"] ({where(node)}); set it to what the '
                f"operator makes of the vals of its inputs"
            )


def problems_of_stage(node: fx.Node, num_stages: int) -> Iterator[str]:
    """Values go to higher stages in the forward, and to lower ones in the backward."""
    stage, kind = node.meta.get("stage"), node.meta.get("kind")
    if kind is not None and not isinstance(kind, Kind):
        yield f'{node.name} has meta["kind"] {kind!r}, expected one of Kind ({where(node)})'
    if stage is None:
        return
    if type(stage) is not int or not 0 <= stage < num_stages:
        yield (
            f'{node.name} has meta["stage"] {stage!r}, but stages are 0 to {num_stages - 1} '
            f"({where(node)})"
        )
        return
    backward = bool(node.meta.get("backward"))
    for source in node.all_input_nodes:
        other = source.meta.get("stage")
        if other is None or bool(source.meta.get("backward")) != backward:
            continue
        if other < stage if backward else other > stage:
            yield (
                f"{node.name} of stage {stage} reads {source.name} of stage {other}, but in the "
                f"{'backward' if backward else 'forward'} values go to "
                f"{'lower' if backward else 'higher'} stages ({where(node)})"
            )


def problems_of_tasks(program: Program) -> Iterator[str]:
    known = {i.name for i in program.inputs}
    for key, task in program.tasks.items():
        yield from problems_of_graph(f"task {key}", task.graph)
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

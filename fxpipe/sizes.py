"""A program whose tasks are made -> what its stages hold and read, and how many bytes it is."""

from __future__ import annotations

from collections.abc import Iterable

from fxpipe.flops import bytes_of
from fxpipe.program import Key, Program, Role
from fxpipe.schedule import Kind


def size_of(program: Program, names: Iterable[str]) -> int:
    """The bytes of values of the joint graph."""
    wanted = set(names)
    nodes = program.joint.graph.nodes
    return sum(bytes_of(node.meta.get("val")) for node in nodes if node.name in wanted)


def kept(program: Program, stage: int) -> set[str]:
    """The values that a stage holds between its forward and its backward."""
    forward = program.tasks.get(Key(stage, Kind.F))
    received = {n for e, names in program.edges.items() if e.target == stage for n in names}
    held = received | set(forward.outputs if forward else ())
    read = {
        name
        for key, task in program.tasks.items()
        if key.stage == stage and key.kind is not Kind.F
        for name in task.inputs
    }
    values = {node.name: node for node in program.joint.graph.nodes}
    return {name for name in held & read if not values[name].meta.get("backward")}


def left_for_w(program: Program, stage: int) -> set[str]:
    task = program.tasks.get(Key(stage, Kind.W))
    return kept(program, stage) & set(task.inputs if task else ())


def weights_of(program: Program, stage: int) -> set[str]:
    """The parameters that a stage reads."""
    tasks = [task for key, task in program.tasks.items() if key.stage == stage]
    read = {name for task in tasks for name in task.inputs}
    return {i.name for i in program.inputs if i.role is Role.PARAMETER and i.name in read}


def trained_by(program: Program, stage: int) -> set[str]:
    """The parameters whose gradients a stage adds up."""
    tasks = [task for key, task in program.tasks.items() if key.stage == stage]
    return {name for task in tasks for name in task.accumulates}

"""A program whose tasks are made -> the seconds and bytes to expect, from shapes alone."""

from __future__ import annotations

from operator import getitem

import torch
import torch.fx as fx

from fxpipe.costs import Costs
from fxpipe.flops import FLOPS_PER_BYTE_SENT, cost, flops
from fxpipe.program import Key, Program, Task
from fxpipe.schedule import Kind
from fxpipe.sizes import kept, left_for_w, size_of, trained_by, weights_of

# What fxpipe.flops takes a core of a CPU, and an accelerator, to do.
FLOPS_PER_SECOND = {"cpu": 50e9}
FLOPS_PER_SECOND_OF_ACCELERATOR = 50e12


def estimated_costs(program: Program) -> Costs:
    """Seconds and bytes of the program's tasks and messages for one microbatch.

    Good for comparing stages and schedules of one model; the seconds themselves are those of a
    machine as fxpipe.flops takes it to be.
    """
    stages = range(program.num_stages)
    rate = flops_per_second(program)

    def seconds(kind: Kind) -> list[float]:
        return [work_of(program.tasks.get(Key(stage, kind))) / rate for stage in stages]

    sizes = {(e.source, e.target): size_of(program, names) for e, names in program.edges.items()}
    weights = [size_of(program, weights_of(program, stage)) for stage in stages]
    gradients = [size_of(program, trained_by(program, stage)) for stage in stages]
    ahead = {(min(edge), max(edge)): 0.0 for edge in sizes}
    return Costs(
        F=seconds(Kind.F),
        I=seconds(Kind.I),
        W=seconds(Kind.W),
        B=seconds(Kind.B) if any(key.kind is Kind.B for key in program.tasks) else None,
        transfer={
            way: FLOPS_PER_BYTE_SENT * sizes.get(way, 0) / rate
            for edge in ahead
            for way in (edge, edge[::-1])
        },
        edges={edge: float(sizes.get(edge, sizes.get(edge[::-1], 0))) for edge in ahead},
        activations=[float(size_of(program, kept(program, stage))) for stage in stages],
        saved_for_w=[float(size_of(program, left_for_w(program, stage))) for stage in stages],
        weights=[float(own + of) for own, of in zip(weights, gradients)],
        reduce=[FLOPS_PER_BYTE_SENT * size / rate for size in gradients],
    )


def flops_per_second(program: Program) -> float:
    values = (n.meta.get("val") for n in program.joint.graph.find_nodes(op="placeholder"))
    devices = {value.device.type for value in values if isinstance(value, torch.Tensor)}
    return next(
        (FLOPS_PER_SECOND_OF_ACCELERATOR for kind in devices if kind not in FLOPS_PER_SECOND),
        FLOPS_PER_SECOND["cpu"],
    )


def work_of(task: Task | None) -> int:
    """Floating point operations, and what moving the results costs, in the same unit."""
    return sum(map(cost, operators(task)))


def flops_of(task: Task | None) -> int:
    """Floating point operations of products, convolutions and attention."""
    return sum(map(flops, operators(task)))


def operators(task: Task | None) -> list[fx.Node]:
    """The nodes that compute: no views, no parts of tuples."""
    calls = task.graph.graph.nodes if task is not None else ()
    return [
        node
        for node in calls
        if node.op == "call_function"
        and node.target is not getitem
        and not getattr(node.target, "is_view", False)
    ]

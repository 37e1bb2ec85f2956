"""A plan while it is made and once it is -> a bar, and one line of log that says what it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.fx as fx

from fxpipe.estimate import estimated_costs
from fxpipe.lowering.plan import Plan
from fxpipe.messages import without_messages
from fxpipe.modules import modules_by_stage
from fxpipe.program import Program
from fxpipe.simulator import simulate
from fxpipe.sizes import size_of
from fxpipe.views.progress import progress
from fxpipe.views.units import percent, size


def compiled_line(plan: Plan, seconds: float, number: int) -> str:
    """`compiled 2 stages on 2 ranks, cut before blocks.2, schedule 1f1b, ...`, in one line.

    seconds: that it took. number: how many plans this trace of the model has, this one included.
    Bubble and bytes are those of explanations: an estimate from shapes, bytes of one microbatch.
    """
    program = plan.program
    sent = {name for executor in plan.executors for name in executor.program.messages}
    own = "" if plan.timeout is None else " of this rank"
    parts = [
        f"compiled {program.num_stages} stages on {program.schedule.num_ranks} ranks",
        cuts(program),
        f"schedule {program.schedule.name}",
        f"microbatches of {' '.join(map(str, plan.rows))} rows",
        f"bubble about {percent(bubble(program))}",
        edges(program),
        f"{len(sent)} messages a step{own}",
        f"in {seconds:.1f} s (plan {number} of this trace)",
    ]
    return ", ".join(filter(None, parts))


def cuts(program: Program) -> str:
    """`cut before blocks.2 and head`: where stages 1, 2, ... begin, as far as modules tell."""
    forward = (n for n in program.joint.graph.nodes if not n.meta.get("backward"))
    modules = modules_by_stage(n for n in forward if n.op == "call_function")
    starts = [modules.get(stage, ())[:1] for stage in range(1, program.num_stages)]
    named = [start[0] if start else "?" for start in starts]
    return f"cut before {' and '.join(named)}" if named else ""


def bubble(program: Program) -> float:
    return simulate(without_messages(program.schedule), estimated_costs(program)).bubble_flush


def edges(program: Program) -> str:
    """`0 -> 1: 1.02 kB, 1 -> 0: 512 B a microbatch`."""
    sizes = [f"{edge}: {size(size_of(program, names))}" for edge, names in program.edges.items()]
    return f"{', '.join(sizes)} a microbatch" if sizes else ""


@contextmanager
def counted(
    compile_graph: Callable[[fx.GraphModule], Any],
    programs: Sequence[Program],
    ranks: Sequence[int],
) -> Iterator[Callable[[fx.GraphModule], Any]]:
    """The function, which in this block moves a bar with every task that it compiles."""
    schedule = programs[0].schedule
    stages = [stage for rank in ranks for stage in schedule.stages_of(rank)]
    distinct = {id(program): program for program in programs}.values()
    total = sum(key.stage == stage for p in distinct for key in p.tasks for stage in stages)
    with progress("tasks compiled", total) as advance:

        def compile_and_count(graph: fx.GraphModule) -> Any:
            compiled = compile_graph(graph)
            advance()
            return compiled

        yield compile_and_count

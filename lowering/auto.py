"""`schedule="auto"`: tasks measured once, every schedule that fits simulated, the best taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fxpipe import schedules
from fxpipe.choose import SECONDS_AND_BYTES, Choice, choose
from fxpipe.costs import Costs
from fxpipe.errors import FxpipeError, RankError
from fxpipe.log import logger
from fxpipe.lowering import group
from fxpipe.lowering.group import gather_objects
from fxpipe.lowering.measure import Compile, Times, measure_messages, measure_tasks
from fxpipe.memory import bytes_of_limit
from fxpipe.options import Options
from fxpipe.program import Key, Program
from fxpipe.schedule import Action, Kind, Schedule
from fxpipe.schedules.family import BIDIRECTIONAL, BIDIRECTIONAL_V
from fxpipe.sizes import kept, left_for_w, size_of, trained_by, weights_of

log = logger(__name__)
# What adding up gradients in one process takes, per byte that is read.
SECONDS_PER_BYTE_OF_MEMORY = 1e-10


def probe_schedule(num_stages: int) -> Schedule:
    """A schedule for which every stage has every task: F, B, I and W."""
    kinds = [(Kind.F, 0), (Kind.F, 1), (Kind.B, 0), (Kind.I, 1), (Kind.W, 1)]
    ranks = tuple(tuple(Action(s, kind, k) for kind, k in kinds) for s in range(num_stages))
    return Schedule(ranks, "probe")


def choose_schedule(
    program: Program, compile_graph: Compile, num_ranks: int, options: Options
) -> Schedule:
    """The best schedule for a program that was built with `probe_schedule`.

    Each rank measures some of the stages; rank 0 decides and all ranks follow. Where one of them
    fails, all raise.
    """
    world = group.num_ranks()
    if world == 1:
        tasks = measure_tasks(program, compile_graph, range(program.num_stages))
        return decide(program, Times(tasks), num_ranks, options)
    rank = dist.get_rank()
    own = range(rank, program.num_stages, world)
    measured = attempt(lambda: measure_tasks(program, compile_graph, own))
    parts = everywhere("the times of all tasks", measured, options.timeout)
    times = Times({k: t for part in parts for k, t in part.items()}, *measure_messages(program))
    decided = attempt(lambda: decide(program, times, num_ranks, options)) if rank == 0 else None
    chosen: Schedule = everywhere("the choice of a schedule", decided, options.timeout)[0]
    return chosen


def decide(program: Program, times: Times, num_ranks: int, options: Options) -> Schedule:
    choice = choice_for(program, times, num_ranks, options)
    log.info("schedule='auto' took %s", choice.describe(SECONDS_AND_BYTES))
    return choice.schedule


def choice_for(program: Program, times: Times, num_ranks: int, options: Options) -> Choice:
    """The best schedule given all times; the same program and times give the same choice.

    Raises OptionError where nothing keeps the option `memory_limit`.
    """
    values = program.joint.graph.find_nodes(op="placeholder")
    device = next((n.meta["val"].device for n in values if is_tensor(n.meta["val"])), None)
    families: list[str] | None = None
    if any(task.writes for task in program.tasks.values()):
        # Copies of a written buffer would drift apart, so no stage may be on two ranks.
        families = [
            name
            for name, family in schedules.families().items()
            if family.placement not in (BIDIRECTIONAL, BIDIRECTIONAL_V)
        ]
    return choose(
        program.num_stages,
        options.microbatches,
        num_ranks,
        costs_of(program, times),
        bytes_of_limit(options.memory_limit, device),
        families,
    )


# Agreement of ranks.


def attempt(work: Callable[[], Any]) -> Any:
    """What `work` returns, or the error that it raises, as a value."""
    try:
        return work()
    except Exception as error:
        return error


def everywhere(label: str, own: Any, limit: float) -> list[Any]:
    """Each rank's value, on all ranks; an error among them is raised on all."""
    told: tuple[type[FxpipeError] | None, Any] = (None, own)
    if isinstance(own, FxpipeError):
        told = (type(own), str(own))
    elif isinstance(own, Exception):
        told = (RankError, repr(own))
    parts = gather_objects(label, told, limit)
    if isinstance(own, Exception):
        raise own
    for rank, (kind, value) in enumerate(parts):
        if kind is not None:
            raise kind(f"schedule='auto' failed on rank {rank}: {value}")
    return [value for _, value in parts]


# Costs.


def costs_of(program: Program, times: Times) -> Costs:
    """Times and sizes of the program's stages: seconds and bytes."""
    stages = range(program.num_stages)

    def seconds(kind: Kind) -> list[float]:
        return [times.tasks.get(Key(stage, kind), 0.0) + handling(kind, stage) for stage in stages]

    def handling(kind: Kind, stage: int) -> float:
        """Of the messages to and from a task, as though every neighbour were on another rank."""
        if kind is Kind.W:
            return 0.0
        own = (e for e in program.edges if stage in e and e.forward == (kind is Kind.F))
        return times.handling * sum(1 for _ in own)

    sizes = {(e.source, e.target): size_of(program, names) for e, names in program.edges.items()}
    weights = [size_of(program, weights_of(program, stage)) for stage in stages]
    gradients = [size_of(program, trained_by(program, stage)) for stage in stages]
    per_byte = max(times.per_byte, SECONDS_PER_BYTE_OF_MEMORY)
    return Costs(
        F=seconds(Kind.F),
        I=seconds(Kind.I),
        W=seconds(Kind.W),
        B=seconds(Kind.B),
        transfer={edge: times.message + size * times.per_byte for edge, size in sizes.items()},
        edges={(a, b): float(size) for (a, b), size in sizes.items() if a < b},
        activations=[float(size_of(program, kept(program, stage))) for stage in stages],
        saved_for_w=[float(size_of(program, left_for_w(program, stage))) for stage in stages],
        weights=[float(own + of) for own, of in zip(weights, gradients)],
        # A sum over replicas sends the gradients, or within a process reads and adds them.
        reduce=[times.message + size * per_byte for size in gradients],
    )


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)

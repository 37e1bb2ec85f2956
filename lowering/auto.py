"""`schedule="auto"`: tasks measured once, every schedule that fits simulated, the best taken."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx

from fxpipe.choose import Choice, choose
from fxpipe.costs import Costs
from fxpipe.errors import OptionError
from fxpipe.log import logger
from fxpipe.program import Key, Program, Role, Task
from fxpipe.schedule import Action, Kind, Schedule

log = logger(__name__)
REPEATS = 5
SECONDS_PER_BYTE_OF_MEMORY = 1e-10


def probe_schedule(num_stages: int) -> Schedule:
    """A schedule for which every stage has every task: F, B, I and W."""
    kinds = [(Kind.F, 0), (Kind.F, 1), (Kind.B, 0), (Kind.I, 1), (Kind.W, 1)]
    ranks = tuple(tuple(Action(s, kind, k) for kind, k in kinds) for s in range(num_stages))
    return Schedule(ranks, "probe")


def choose_schedule(
    program: Program,
    compile_graph: Callable[[fx.GraphModule], Any],
    num_ranks: int,
    microbatches: int,
) -> Choice:
    """The best schedule for a program that was built with `probe_schedule`.

    Each rank measures some of the stages; rank 0 decides and all ranks follow.
    """
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    rank = dist.get_rank() if world > 1 else 0
    own = {
        key: measure(task, compile_graph)
        for key, task in program.tasks.items()
        if key.stage % world == rank
    }
    times = own
    if world > 1:
        gathered: list[dict[Key, float]] = [{} for _ in range(world)]
        dist.all_gather_object(gathered, own)
        times = {key: seconds for part in gathered for key, seconds in part.items()}
    costs = costs_of(program, times, seconds_per_byte(program) if world > 1 else 0.0)
    choice: list[Any] = [None]
    if rank == 0:
        choice[0] = choose(
            program.num_stages, microbatches, num_ranks, costs, memory_bytes(program)
        )  # fmt: skip
        log.info("schedule='auto' took %s: %s", choice[0].name, choice[0].reason)
        log.debug("%s", choice[0])
    if world > 1:
        dist.broadcast_object_list(choice, 0)
    chosen: Choice = choice[0]
    return chosen


def measure(task: Task, compile_graph: Callable[[fx.GraphModule], Any]) -> float:
    """Seconds of a task on made-up values, the median of a few runs after the first."""
    function = compile_graph(task.graph)
    inputs = [make_value(n.meta["val"]) for n in task.graph.graph.find_nodes(op="placeholder")]
    seconds = []
    with torch.no_grad():
        for _ in range(REPEATS + 1):
            start = time.perf_counter()
            function(*inputs)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def make_value(fake: Any) -> Any:
    if not isinstance(fake, torch.Tensor):
        return fake
    made = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
    # Zeros are indices that every table has; small numbers keep arithmetic out of denormals.
    return made.fill_(0.01) if made.is_floating_point() else made.zero_()


def costs_of(program: Program, times: Mapping[Key, float], per_byte: float) -> Costs:
    stages = range(program.num_stages)

    def seconds(kind: Kind) -> list[float]:
        return [times.get(Key(stage, kind), 0.0) for stage in stages]

    edges = {
        (edge.source, edge.target): float(bytes_of(program, names))
        for edge, names in program.edges.items()
        if edge.forward
    }
    back = {
        (edge.source, edge.target): float(bytes_of(program, names))
        for edge, names in program.edges.items()
        if not edge.forward
    }
    return Costs(
        F=seconds(Kind.F),
        I=seconds(Kind.I),
        W=seconds(Kind.W),
        B=seconds(Kind.B),
        transfer={edge: size * per_byte for edge, size in (edges | back).items()},
        edges=edges,
        activations=[float(bytes_of(program, kept(program, stage))) for stage in stages],
        saved_for_w=[float(bytes_of(program, left_for_w(program, stage))) for stage in stages],
        weights=[float(bytes_of_weights(program, stage)) for stage in stages],
        # A sum over replicas sends the gradients, or within a process reads and adds them.
        reduce=[
            bytes_of_weights(program, stage) / 2 * max(per_byte, SECONDS_PER_BYTE_OF_MEMORY)
            for stage in stages
        ],
    )


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
    return {name for name in held & read if not is_gradient(program, name)}


def left_for_w(program: Program, stage: int) -> set[str]:
    task = program.tasks.get(Key(stage, Kind.W))
    return kept(program, stage) & set(task.inputs if task else ())


def is_gradient(program: Program, name: str) -> bool:
    return bool(node_of(program, name).meta.get("backward"))


def node_of(program: Program, name: str) -> fx.Node:
    return next(node for node in program.joint.graph.nodes if node.name == name)


def bytes_of(program: Program, names: Sequence[str] | set[str]) -> int:
    values = [node_of(program, name).meta["val"] for name in names]
    return sum(math.prod(v.shape) * v.dtype.itemsize for v in values if isinstance(v, torch.Tensor))


def bytes_of_weights(program: Program, stage: int) -> int:
    """Parameters and their gradients."""
    parameters = {i.name for i in program.inputs if i.role is Role.PARAMETER}
    used = {
        name
        for key, task in program.tasks.items()
        if key.stage == stage
        for name in task.inputs
        if name.removeprefix("acc_") in parameters
    }
    return bytes_of(program, {name.removeprefix("acc_") for name in used}) + bytes_of(
        program, {name.removeprefix("acc_") for name in used if name.startswith("acc_")}
    )


def seconds_per_byte(program: Program) -> float:
    """A message between the first two ranks, there and back, by the size of the largest edge."""
    sizes = [bytes_of(program, names) for names in program.edges.values()]
    size = max(sizes, default=0)
    if not size:
        return 0.0
    device = next(iter(program.joint.graph.find_nodes(op="placeholder"))).meta["val"].device
    buffer = torch.zeros(size, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        if dist.get_rank() == 0:
            dist.send(buffer, 1)
            dist.recv(buffer, 1)
        elif dist.get_rank() == 1:
            dist.recv(buffer, 0)
            dist.send(buffer, 0)
        seconds.append((time.perf_counter() - start) / 2)
    return statistics.median(seconds[1:]) / size


def memory_bytes(program: Program) -> float | None:
    """The option `memory_limit` in bytes: as it is, or a fraction of what the device has."""
    limit = program.options.memory_limit
    if limit is None or limit > 1:
        return limit
    if torch.cuda.is_available():
        return limit * torch.cuda.get_device_properties(0).total_memory
    try:
        with open("/proc/meminfo") as lines:
            total = next(int(line.split()[1]) for line in lines if line.startswith("MemTotal"))
    except OSError as error:
        raise OptionError(
            f"memory_limit={limit} is a fraction, but this machine's memory is unknown ({error}); "
            f"give it in bytes"
        ) from error
    return limit * total * 1024

"""The tasks of a program and its messages -> the seconds that they take on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx

from fxpipe.flops import bytes_of
from fxpipe.program import Key, Program, Task

REPEATS = 5
# What pushes the values of a step out of the caches of a core.
BYTES_OF_CACHES = 2**23

Compile = Callable[[fx.GraphModule], Callable[..., Any]]


@dataclass(frozen=True)
class Times:
    """Seconds: of each task, and of a message.

    A message keeps its sender, and again its receiver, from computing for `handling`, and comes
    `message + bytes * per_byte` after that: o, L and G of LogGP (Alexandrov et al., 1995).
    """

    tasks: Mapping[Key, float]
    message: float = 0.0
    per_byte: float = 0.0
    handling: float = 0.0


@dataclass
class _Timed:
    """One task with made-up values, and how long it took, time after time."""

    function: Callable[..., Any]
    inputs: list[Any]
    seconds: list[float]


def measure_tasks(
    program: Program, compile_graph: Compile, stages: Sequence[int]
) -> dict[Key, float]:
    """The times of the tasks of some stages. Random numbers of the training stay as they are.

    They run in turn, and what they return stays until all have run: a task that runs again and
    again on the same memory is faster than it is within a step.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices), torch.no_grad():
        timed = {
            key: _Timed(compile_graph(task.graph), inputs_of(task), [])
            for key, task in program.tasks.items()
            if key.stage in stages
        }
        for _ in range(REPEATS + 1):
            kept = []
            for task in timed.values():
                with stopwatch(task.seconds):
                    kept.append(task.function(*task.inputs))
    return {key: statistics.median(task.seconds[1:]) for key, task in timed.items()}


@contextmanager
def stopwatch(seconds: list[float]) -> Iterator[None]:
    """Add how long the block takes, work on a GPU included."""
    start = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds.append(time.perf_counter() - start)


def inputs_of(task: Task) -> list[Any]:
    return [make_value(n.meta["val"]) for n in task.graph.graph.find_nodes(op="placeholder")]


def make_value(fake: Any) -> Any:
    if not isinstance(fake, torch.Tensor):
        return fake
    made = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
    # Zeros are indices that every table has; small numbers keep arithmetic out of denormals.
    return made.fill_(0.01) if made.is_floating_point() else made.zero_()


def measure_messages(program: Program) -> tuple[float, float, float]:
    """`message`, `per_byte` and `handling` of Times, from messages between ranks 0 and 1."""
    sizes = [size_of(program, names) for names in program.edges.values()]
    largest = max(sizes, default=0)
    if not largest:
        return 0.0, 0.0, 0.0
    device = next(iter(program.joint.graph.find_nodes(op="placeholder"))).meta["val"].device
    (small, _), (large, handling) = (there_and_back(size, device) for size in (1, largest))
    per_byte = max(0.0, large - small) / largest
    return max(0.0, large - handling - largest * per_byte), per_byte, handling


def there_and_back(size: int, device: torch.device) -> tuple[float, float]:
    """Half of what a message of so many bytes and its answer take, and what of it is handling.

    Both are 0 on ranks from 2 on.
    """
    buffer = torch.zeros(size, dtype=torch.uint8, device=device)
    caches = torch.zeros(BYTES_OF_CACHES, dtype=torch.uint8, device=device)
    rank, ways, handling = dist.get_rank(), list[float](), list[float]()
    for _ in range(2 * REPEATS + 1 if rank < 2 else 0):
        caches.add_(1)
        sync = torch.zeros(1, device=device)
        for first in (0, 1):
            (dist.send if first == rank else dist.recv)(sync, 1 - rank)
        whole: list[float] = []
        with stopwatch(whole):
            for sender in (0, 1):
                with stopwatch(handling):
                    start: Any = dist.isend if sender == rank else dist.irecv
                    work = start(buffer, 1 - rank)
                work.wait()
        ways.append(whole[0] / 2)
    if not ways:
        return 0.0, 0.0
    return statistics.median(ways[1:]), statistics.median(handling[2:])


def size_of(program: Program, names: Sequence[str] | set[str]) -> int:
    """The bytes of values of the joint graph."""
    wanted = set(names)
    nodes = program.joint.graph.nodes
    return sum(bytes_of(node.meta.get("val")) for node in nodes if node.name in wanted)

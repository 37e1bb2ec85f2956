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

from fxpipe.lowering.group import open_mailboxes
from fxpipe.lowering.packing import Spec
from fxpipe.lowering.rank_program import Message, RankProgram
from fxpipe.lowering.transport import GroupTransport
from fxpipe.lowering.watch import watch
from fxpipe.program import Key, Program, Task
from fxpipe.sizes import size_of
from fxpipe.views.progress import each

REPEATS = 5
MEASURED = {"there": 0, "back": 1}  # a message -> the rank that sends it
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
        wanted = [(key, task) for key, task in program.tasks.items() if key.stage in stages]
        timed = {
            key: _Timed(compile_graph(task.graph), inputs_of(task), [])
            for key, task in each("tasks compiled to be measured", wanted, len(wanted))
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
    rank, limit = dist.get_rank(), program.options.timeout
    open_mailboxes({1 - rank} if rank < 2 else (), limit)
    small, _ = there_and_back(1, device, limit)
    large, handling = there_and_back(largest, device, limit)
    per_byte = max(0.0, large - small) / largest
    return max(0.0, large - handling - largest * per_byte), per_byte, handling


def there_and_back(size: int, device: torch.device, limit: float) -> tuple[float, float]:
    """Half of what a message of so many bytes and its answer take, and what of it is handling.

    Both are 0 on ranks from 2 on.
    """
    rank, ways, handling = dist.get_rank(), list[float](), list[float]()
    buffers = {name: torch.zeros(size, dtype=torch.uint8, device=device) for name in MEASURED}
    messages = {
        name: Message(source, 1 - source, (Spec.of(buffers[name]),))
        for name, source in MEASURED.items()
    }
    nothing = fx.GraphModule({}, fx.Graph())
    transport = GroupTransport(RankProgram(rank, nothing, (), (), (), messages), watch(), limit)
    caches = torch.zeros(BYTES_OF_CACHES, dtype=torch.uint8, device=device)
    for _ in range(2 * REPEATS + 1 if rank < 2 else 0):
        caches.add_(1)
        for measured in (False, True):  # the first turn lets both begin at once
            whole: list[float] = []
            with stopwatch(whole):
                for name, source in MEASURED.items():
                    if source == rank:
                        with stopwatch(handling if measured else []):
                            transport.send(name, (buffers[name],))
                    else:
                        transport.post(name)
                        transport.wait(name)
        ways.append(whole[0] / 2)
        transport.finish()
    if not ways:
        return 0.0, 0.0
    return statistics.median(ways[1:]), statistics.median(handling[1:])

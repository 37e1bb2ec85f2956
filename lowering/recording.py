"""An executor's calls -> when each began and ended, for the steps that are recorded, as spans.

While a step is recorded, its executors run a second list of instructions, whose calls note the
time before and after; all other steps run the list without them. Times are host time
(time.perf_counter_ns); on a GPU they are those of the device's stream, by CUDA events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import getitem
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.fx as fx

from fxpipe.flops import bytes_of
from fxpipe.lowering import instructions
from fxpipe.lowering.executor import PAUSE, Executor, Instruction, Slots
from fxpipe.lowering.plan import Plan
from fxpipe.lowering.rank_program import Message
from fxpipe.lowering.run import Recording
from fxpipe.planned import describe, receive_name, step_of_results
from fxpipe.schedule import Action, Kind
from fxpipe.timeline import Span


class Clock(Protocol):
    """Notes times in numbered places, which are there before the step begins."""

    def mark(self, call: Callable[[Slots], None], place: int) -> Callable[[Slots], None]:
        """The call, with the time before it in `place`, and after it in the next one."""

    def begin(self) -> None: ...

    def times(self) -> list[int]:
        """Of the step that has just ended: nanoseconds, as time.perf_counter_ns has them."""


class HostClock:
    def __init__(self, places: int) -> None:
        self.marks = [0] * places

    def mark(self, call: Callable[[Slots], None], place: int) -> Callable[[Slots], None]:
        marks, now, after = self.marks, time.perf_counter_ns, place + 1

        def run(slots: Slots) -> None:
            marks[place] = now()
            call(slots)
            marks[after] = now()

        return run

    def begin(self) -> None:
        pass

    def times(self) -> list[int]:
        return self.marks.copy()


class DeviceClock:
    """The times of the current CUDA stream. It waits for the device when a step begins and ends.

    Written after CUDA's documentation; not yet run on a GPU.
    """

    def __init__(self, places: int) -> None:
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(places + 1)]
        self.origin = 0

    def mark(self, call: Callable[[Slots], None], place: int) -> Callable[[Slots], None]:
        before, after = self.events[place].record, self.events[place + 1].record

        def run(slots: Slots) -> None:
            before()
            call(slots)
            after()

        return run

    def begin(self) -> None:
        torch.cuda.synchronize()
        self.events[-1].record()
        torch.cuda.synchronize()
        self.origin = time.perf_counter_ns()

    def times(self) -> list[int]:
        torch.cuda.synchronize()
        first = self.events[-1]
        return [self.origin + int(first.elapsed_time(e) * 1e6) for e in self.events[:-1]]


class About(NamedTuple):
    """What is known of an instruction before it runs; see Span."""

    track: str
    kind: str
    name: str
    cause: str | None
    stage: int | None
    microbatch: int | None
    bytes: int | None


class Recorded(NamedTuple):
    """A step that has run: nanoseconds of its begin, of its end, and of each executor's calls."""

    number: int
    plan: Plan
    begin: int
    sent: int  # all calls are done; what was sent may be under way
    end: int
    times: tuple[list[int], ...]


class Timed(NamedTuple):
    """A second list of an executor's instructions, and the clock that they note the time by."""

    clock: Clock
    instructions: list[Instruction]


class Recorder:
    """Records steps, at most `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.begun = 0
        self.steps: list[Recorded] = []
        self.unused: WeakKeyDictionary[Executor, list[Timed]] = WeakKeyDictionary()

    @property
    def left_out(self) -> int:
        """How many steps were too many."""
        return max(0, self.begun - self.limit)

    def begin(self, plan: Plan) -> Recording | None:
        number, self.begun = self.begun, self.begun + 1
        return StepRecording(self, plan, number) if number < self.limit else None

    def tell(self) -> None:
        """A step was recorded; called where ranks may talk to each other."""

    def take(self, executor: Executor) -> Timed:
        """A clock with a list of instructions that no step uses: one may begin in another."""
        unused = self.unused.setdefault(executor, [])
        return unused.pop() if unused else timed(executor)

    def give_back(self, executor: Executor, used: Timed) -> None:
        self.unused[executor].append(used)


def timed(executor: Executor) -> Timed:
    """An executor's instructions, each of which also notes when it began and ended."""
    places = 2 * len(executor.instructions)
    clock = DeviceClock(places) if is_on_gpu(executor) else HostClock(places)
    marked = [
        made if made.run is PAUSE else made._replace(run=clock.mark(made.run, 2 * i))
        for i, made in enumerate(executor.instructions)
    ]
    return Timed(clock, marked)


class StepRecording:
    """One step while it is recorded: what Run calls."""

    def __init__(self, recorder: Recorder, plan: Plan, number: int) -> None:
        self.recorder, self.plan, self.number = recorder, plan, number
        self.timed = [recorder.take(executor) for executor in plan.executors]
        self.start = self.sent = 0
        self.ended = False

    def instructions(self, index: int) -> Sequence[Instruction]:
        return self.timed[index].instructions

    def begin(self) -> None:
        for clock, _ in self.timed:
            clock.begin()
        self.start = time.perf_counter_ns()

    def called(self) -> None:
        self.sent = time.perf_counter_ns()

    def end(self) -> None:
        # Which waits for a GPU; the step is over when its work is.
        times = tuple(clock.times() for clock, _ in self.timed)
        end = time.perf_counter_ns()
        for executor, used in zip(self.plan.executors, self.timed, strict=True):
            self.recorder.give_back(executor, used)
        step = Recorded(self.number, self.plan, self.start, self.sent, end, times)
        self.recorder.steps.append(step)
        self.plan.recorded = step
        self.ended = True

    def tell(self) -> None:
        if self.ended:
            self.recorder.tell()


def is_on_gpu(executor: Executor) -> bool:
    return any(
        isinstance(value, torch.Tensor) and value.is_cuda
        for module in executor.program.graph.children()
        for node in module.graph.find_nodes(op="placeholder")
        for value in [node.meta.get("val")]
    )


# From times to spans.


def spans_of(step: Recorded, origin: int) -> Iterator[Span]:
    """What the ranks of this process did, in seconds after `origin`."""
    together = len(step.plan.executors) > 1
    for executor, times in zip(step.plan.executors, step.times, strict=True):
        rank, last = executor.program.rank, step.begin
        first = True
        for index, about in enumerate(abouts(executor, step.plan)):
            start, end = times[2 * index : 2 * index + 2]
            if about.name == "pause":
                # The executor waits for the caller; the next call tells when it went on.
                start, end = last, times[2 * index + 2]
            elif together and first:
                turn = About("compute", "wait", "turn", "its turn", None, None, None)
                yield span(rank, turn, last, start, origin)
            elif together and about.kind == "wait":
                # Until it is this rank's turn again, which comes when the message may be there.
                start = last
            yield span(rank, about, start, end, origin)
            last, first = end, False
        if not together:
            sent = About("send", "wait", "sent", None, None, None, None)
            yield span(rank, sent, max(step.sent, last), step.end, origin)


def span(rank: int, about: About, start: int, end: int, origin: int) -> Span:
    return Span(
        rank,
        about.track,
        about.kind,
        about.name,
        (start - origin) / 1e9,
        (end - origin) / 1e9,
        about.cause,
        about.stage,
        about.microbatch,
        about.bytes,
    )


def abouts(executor: Executor, plan: Plan) -> list[About]:
    """Of every instruction of an executor."""
    results = step_of_results(plan.program.schedule)
    sizes = executor.program.messages
    return [about(made.name, sizes, results) for made in executor.instructions]


def about(
    name: str,
    sizes: Mapping[str, Message],
    results: Mapping[tuple[int, bool, int], tuple[int, str]],
) -> About:
    if name == "pause":
        return About("compute", "wait", name, "backward() of the caller", None, None, None)
    for verb in ("send ", "post ", "wait for "):
        if name.startswith(verb):
            message = name.removeprefix(verb)
            break
    else:
        return About(*describe(name)[:2], name, None, *describe(name)[2:], None)
    size = sizes[message].nbytes
    if verb == "post ":
        receive = receive_name(message)
        return About("receive", "receive", receive, None, *describe(receive)[2:], size)
    _, _, stage, microbatch = describe(message)
    if verb == "send ":
        return About("send", "send", message, None, stage, microbatch, size)
    awaited = message.rpartition(" ")[0]
    if stage is not None and microbatch is not None:
        backward = Action.parse(message).kind is Kind.SEND_B
        awaited = results[stage, backward, microbatch][1]
    cause = f"{awaited} of rank {sizes[message].source}"
    return About("compute", "wait", message, cause, stage, microbatch, size)


# Memory.


def held_bytes(executor: Executor) -> list[int]:
    """What the slots of an executor hold after each instruction, inputs of the step left out.

    From the sizes of values, each counted by itself: a view counts like what it is a view of.
    """
    sizes: dict[fx.Node, int] = {}
    arguments = sizes_of_arguments(executor)
    held, found = 0, []
    for node in executor.program.graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.target is getitem and executor.is_unpacked(node.args[0]):
            continue
        for made, size in sizes_made(executor, node, sizes, arguments):
            sizes[made] = size
            held += size
        held -= sum(sizes.pop(dead, 0) for dead in executor.frees.get(node, ()))
        found.append(held)
    return found


def sizes_of_arguments(executor: Executor) -> dict[fx.Node, int]:
    """Of the values that tasks read, as their placeholders say."""
    found = {}
    for call in executor.program.graph.graph.find_nodes(op="call_module"):
        task = executor.program.graph.get_submodule(call.target).graph
        for argument, place in zip(call.args, task.find_nodes(op="placeholder")):
            if isinstance(argument, fx.Node):
                found[argument] = bytes_of(place.meta.get("val"))
    return found


def sizes_made(
    executor: Executor,
    node: fx.Node,
    known: Mapping[fx.Node, int],
    arguments: Mapping[fx.Node, int],
) -> Iterator[tuple[fx.Node, int]]:
    """The values that a call makes, those of its getitems included."""
    parts = {user.args[1]: user for user in node.users if user.target is getitem}
    if node.op == "call_module":
        task = executor.program.graph.get_submodule(node.target).graph
        results = task.output_node().args[0]
        for index, part in parts.items():
            yield part, bytes_of(results[index].meta.get("val"))
    elif node.target is instructions.wait:
        for index, part in parts.items():
            yield part, executor.program.messages[node.args[1]].specs[index].nbytes
    elif node.target is instructions.total:
        yield node, known.get(node.args[0][0], 0)
    elif node.target is instructions.join:
        yield node, sum(known.get(part, 0) for part in node.args[0])
    elif node.target is instructions.new_accumulator:
        yield node, arguments.get(node, 0)


def memory_of(step: Recorded, origin: int) -> dict[int, tuple[tuple[float, float], ...]]:
    """rank -> (seconds, bytes) points: after every call that changes what is held."""
    found: dict[int, tuple[tuple[float, float], ...]] = {}
    for executor, times in zip(step.plan.executors, step.times, strict=True):
        points: list[tuple[float, float]] = [((step.begin - origin) / 1e9, 0.0)]
        for index, size in enumerate(held_bytes(executor)):
            if size != points[-1][1] and times[2 * index + 1]:
                points.append(((times[2 * index + 1] - origin) / 1e9, float(size)))
        found[executor.program.rank] = tuple(points)
    return found


def peak_held(executor: Executor) -> int:
    """The most that a rank's program keeps at once, in bytes; see held_bytes."""
    return max(held_bytes(executor), default=0)

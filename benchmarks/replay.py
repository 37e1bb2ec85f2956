"""A pipelined step to its bare tasks: what they were given, when they ran, what they left alive.

The tasks of a rank, run in the order of the schedule with every input at hand, are what no pipeline
can beat: no message, no wait, no bookkeeping. Values that one task hands to a later one of the same
rank are handed on, and die after their last use, as in the step itself.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from fxpipe.lowering.runtime import Step
from fxpipe.program import Key, Program
from fxpipe.schedule import Kind, Pair, actions_of

Function = Callable[..., Any]


class Work(NamedTuple):
    """One task on its microbatch; two where a pair is one task."""

    keys: tuple[Key, ...]
    microbatches: tuple[int, ...]


class Span(NamedTuple):
    """A call of a task, in seconds of the clock that all processes share."""

    keys: tuple[Key, ...]
    start: float
    end: float


@dataclass
class Call:
    """A call of a task as it was in the step."""

    graph: fx.GraphModule
    function: Function
    arguments: list[Any]
    results: Sequence[Any]


class Recorder:
    """Stands in for a step's compiler: the tasks that it returns tell of their calls."""

    def __init__(self, compile_graph: Callable[[fx.GraphModule], Function]) -> None:
        self.compile_graph = compile_graph
        self.calls: list[Call] = []
        self.spans: list[tuple[fx.GraphModule, float, float]] = []
        self.alive: Alive | None = None
        self.keep = False

    def __call__(self, graph: fx.GraphModule) -> Function:
        function = self.compile_graph(graph)

        def task(*arguments: Any) -> Any:
            given = list(arguments)
            start = time.perf_counter()
            results = function(*arguments)
            self.spans.append((graph, start, time.perf_counter()))
            if self.keep:
                self.calls.append(Call(graph, function, given, list(results)))
            if self.alive is not None:
                self.alive.note(given, results)
            return results

        return task


class Replay:
    """The tasks of one rank as one function without arguments."""

    def __init__(self, calls: Sequence[Call]) -> None:
        made = {
            id(value): (number, place)
            for number, call in enumerate(calls)
            for place, value in enumerate(call.results)
            if isinstance(value, torch.Tensor)
        }
        self.steps: list[tuple[Function, list[Any], list[tuple[int, int, int]], list[int]]] = []
        last = {}
        for number, call in enumerate(calls):
            sources = [(i, *made[id(a)]) for i, a in enumerate(call.arguments) if id(a) in made]
            last.update({source: number for _, source, _ in sources})
            constants = [None if id(a) in made else a for a in call.arguments]
            self.steps.append((call.function, constants, sources, []))
        for source, number in last.items():
            self.steps[number][3].append(source)
        self.seconds = [0.0] * len(self.steps)  # of each call in the last run

    def __call__(self) -> None:
        results: list[Any] = [None] * len(self.steps)
        for number, (function, constants, sources, dying) in enumerate(self.steps):
            arguments = constants.copy()
            for index, source, place in sources:
                arguments[index] = results[source][place]
            start = time.perf_counter()
            results[number] = function(*arguments)
            self.seconds[number] = time.perf_counter() - start
            del arguments
            for source in dying:
                results[source] = None


class Alive:
    """Counts, after every task, the bytes that forwards have saved and that still exist."""

    def __init__(self, saved: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        self.saved, self.number, self.peak = saved, 0, 0
        self.held: list[tuple[weakref.ref[torch.Tensor], int, int]] = []

    def note(self, arguments: Sequence[Any], results: Sequence[Any]) -> None:
        received, made = self.saved[self.number]
        self.number += 1
        for value in (*(arguments[i] for i in received), *(results[i] for i in made)):
            self.held.append((weakref.ref(value), *storage_of(value)))
        self.held = [entry for entry in self.held if entry[0]() is not None]
        sizes = {pointer: size for _, pointer, size in self.held}
        self.peak = max(self.peak, sum(sizes.values()))


def storage_of(value: torch.Tensor) -> tuple[int, int]:
    storage = value.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


class Recorded:
    """A pipelined step whose tasks are watched; `run` does one such step on every rank."""

    def __init__(self, step: Step, run: Callable[[], Any], rank: int) -> None:
        self.recorder = Recorder(step.compile)
        step.compile = self.recorder  # type: ignore[assignment]
        self.run, self.rank = run, rank
        self.alone: list[dict[Key, float]] = []  # per run of the tasks alone
        run()
        (plan,) = step.plans.values()
        self.plan = plan
        self.program: Program = plan.program
        self.recorder.keep = True
        self.recorder.calls.clear()
        run()
        self.recorder.keep = False
        self.work = self.name_calls()
        self.replay = Replay(self.recorder.calls)
        self.saved, self.shares = self.find_saved()
        self.recorder.calls.clear()

    def run_alone(self) -> None:
        """The tasks alone; adds each task's time, the median over the microbatches."""
        self.replay()
        seconds: dict[Key, list[float]] = {}
        for work, spent in zip(self.work, self.replay.seconds):
            if len(work.keys) == 1:
                seconds.setdefault(work.keys[0], []).append(spent)
        self.alone.append({key: statistics.median(spent) for key, spent in seconds.items()})

    def spans(self) -> list[Span]:
        """The calls of one more step."""
        self.recorder.spans.clear()
        self.run()
        return [
            Span(work.keys, start, end)
            for work, (_, start, end) in zip(self.work, self.recorder.spans)
        ]

    def peak_of_saved(self) -> int:
        """The most bytes that forwards had saved at once on this rank in one more step."""
        self.recorder.alive = alive = Alive(self.saved)
        self.run()
        self.recorder.alive = None
        return alive.peak

    def sent(self) -> tuple[int, int]:
        """Messages and bytes that this rank sends in a step."""
        (executor,) = self.plan.executors
        own = [m for m in executor.program.messages.values() if m.source == self.rank]
        sizes = [
            spec.dtype.itemsize * torch.Size(spec.shape).numel() for m in own for spec in m.specs
        ]
        return len(own), sum(sizes)

    def name_calls(self) -> list[Work]:
        """Which task each call was, and of which microbatch: a task's calls come in order."""
        keys: dict[int, tuple[Key, ...]] = {
            id(task.graph): (key,) for key, task in self.program.tasks.items()
        }
        keys |= {id(pair.graph): both for both, pair in self.program.pairs.items()}
        order: dict[Key, list[int]] = {}
        for step in self.program.schedule.ranks[self.rank]:
            for action in actions_of(step) if isinstance(step, Pair) else (step,):
                if action.kind.is_compute:
                    key = Key(action.stage, action.kind)
                    order.setdefault(key, []).append(action.microbatch)
        seen: Counter[Key] = Counter()
        found = []
        for call in self.recorder.calls:
            own = keys[id(call.graph)]
            found.append(Work(own, tuple(order[key][seen[key]] for key in own)))
            seen.update(own)
        return found

    def find_saved(self) -> tuple[list[tuple[list[int], list[int]]], dict[int, int]]:
        """Per call, the places of arguments and results that a forward saves for its backward.

        And what one microbatch of each stage saves, in bytes. Parameters and the batch, which the
        forwards of several microbatches share, are not saved values.
        """
        calls = self.recorder.calls
        users: dict[int, set[int]] = {}
        for work, call in zip(self.work, calls):
            for value in tensors(call.arguments):
                users.setdefault(storage_of(value)[0], set()).update(work.microbatches)
        read: dict[tuple[int, int], set[int]] = {}
        for work, call in zip(self.work, calls):
            for key, microbatch in zip(work.keys, work.microbatches):
                if key.kind is not Kind.F:
                    storages = {storage_of(v)[0] for v in tensors(call.arguments)}
                    read.setdefault((key.stage, microbatch), set()).update(storages)
        saved: list[tuple[list[int], list[int]]] = []
        shares: dict[int, int] = {}
        for work, call in zip(self.work, calls):
            saved.append(([], []))
            for key, microbatch in zip(work.keys, work.microbatches):
                if key.kind is not Kind.F:
                    continue
                wanted = read.get((key.stage, microbatch), set())
                wanted = {pointer for pointer in wanted if len(users[pointer]) == 1}
                sizes: dict[int, int] = {}
                for places, values in zip(saved[-1], (call.arguments, call.results)):
                    for place, value in enumerate(values):
                        if isinstance(value, torch.Tensor) and storage_of(value)[0] in wanted:
                            places.append(place)
                            sizes.update([storage_of(value)])
                shares[key.stage] = sum(sizes.values())
        return saved, shares


def tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]

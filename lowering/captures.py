"""How the parts of a step run: as they are, as one graph each, or as one graph for each task.

A step without a pause is one part; else the forward is part 0, and the backward part 1.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

from fxpipe.lowering.devices import Device, Graph
from fxpipe.lowering.executor import Paused
from fxpipe.lowering.replay import Function
from fxpipe.lowering.static import Call, Place, StaticProgram


class Capture(Protocol):
    def run(self, part: int, values: list[Any]) -> Any:
        """Paused, or the results of the step. `values`: the inputs, or what the pause was given."""

    def close(self) -> None:
        """Give memory back."""


class Walk:
    """One execution of a function that may pause."""

    def __init__(self, function: Function, is_paused: bool) -> None:
        self.function, self.is_paused = function, is_paused
        self.generator: Generator[Paused, tuple[Any, ...], Any] | None = None

    def go(self, part: int, values: list[Any]) -> Any:
        if part == 1:
            return self.go_on(values)
        started = self.function(list(values))
        if not self.is_paused:
            return tuple(started)
        self.generator = started
        return next(started)

    def go_on(self, values: list[Any]) -> tuple[Any, ...]:
        assert self.generator is not None
        try:
            self.generator.send(tuple(values))
        except StopIteration as stop:
            return tuple(stop.value)
        raise AssertionError("a step pauses once")


class Uncaptured:
    """Runs calls as they are; on the stream that will capture them, where there is one."""

    def __init__(self, device: Device | None, function: Function, is_paused: bool) -> None:
        self.device, self.walk = device, Walk(function, is_paused)

    def run(self, part: int, values: list[Any]) -> Any:
        with self.device.aside() if self.device is not None else nullcontext():
            return self.walk.go(part, values)

    def close(self) -> None:
        pass


class StepCapture:
    """One graph for each part. The walk that was captured holds what lives over the pause."""

    def __init__(self, device: Device, function: Function, is_paused: bool) -> None:
        self.device, self.walk = device, Walk(function, is_paused)
        self.parts: list[tuple[Graph, Any]] = []

    def run(self, part: int, values: list[Any]) -> Any:
        if part == len(self.parts):
            self.parts.append(self.device.capture(partial(self.walk.go, part, values)))
        graph, value = self.parts[part]
        graph.replay()
        return value

    def close(self) -> None:
        for graph, _ in self.parts:
            graph.reset()
        self.parts.clear()


class TaskCapture:
    """One graph for each call. What a call frees, later ones take: memory is that of the step.

    Graphs are as many as actions. With one for each task and buffer set there would be fewer, but
    every input of a microbatch would have to be copied to its set's place.
    """

    def __init__(self, device: Device, program: StaticProgram) -> None:
        self.device, self.program = device, program
        self.values: dict[Place, Any] = {}
        self.graphs: list[Graph] = []
        self.parts: list[tuple[list[Callable[[], Any]], Any]] = []

    def run(self, part: int, values: list[Any]) -> Any:
        if part == len(self.parts):
            return self.capture(part, values)
        steps, value = self.parts[part]
        for step in steps:
            step()
        return value

    def capture(self, part: int, values: list[Any]) -> Any:
        """Capture call by call, and run each at once: a later one may wait for what it sends."""
        program, steps = self.program, list[Callable[[], Any]]()
        pause = len(program.calls) if program.pause is None else program.pause
        places = map(Place, range(len(values))) if part == 0 else iter(program.given)
        self.values |= zip(places, values)
        for call in program.calls[pause:] if part else program.calls[:pause]:
            graph, value = self.device.capture(partial(self.call, call))
            self.values |= zip(call.results, (value,) if call.whole else value)
            self.graphs.append(graph)
            steps.append(graph.replay)
            graph.replay()
            for place in call.frees:
                self.values.pop(place, None)
        value = self.results(part)
        self.parts.append((steps, value))
        return value

    def results(self, part: int) -> Any:
        if part == 0 and self.program.pause is not None:
            return Paused(tuple(map(self.read, self.program.paused)))
        return tuple(map(self.read, self.program.results))

    def call(self, call: Call) -> Any:
        return call.function(*map(self.read, call.arguments))

    def read(self, argument: Any) -> Any:
        if isinstance(argument, list):
            return [self.read(item) for item in argument]
        return self.values[argument] if isinstance(argument, Place) else argument

    def close(self) -> None:
        for graph in self.graphs:
            graph.reset()
        self.graphs.clear()
        self.parts.clear()
        self.values.clear()

"""A CPU that captures and replays as CUDA does, so that all but the capture itself runs anywhere.

What is captured is not computed: what it wrote is put back, and what it made is filled with NaN.
A replay runs the same operators on the same memory, and no Python of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch

from fxpipe.torch_private import OperatorMode, reads_and_writes, storage_number, tensors_within

Value = TypeVar("Value")
Tensors = list[torch.Tensor]


class Operation(NamedTuple):
    """An operator, and the tensors that take its results."""

    function: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    made: Tensors


class StandIn:
    """A device as fxpipe.lowering.devices has it. Tasks must not be compiled."""

    def __init__(self) -> None:
        self.graphs: list[StandInGraph] = []

    def aside(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def capture(self, work: Callable[[], Value]) -> tuple[StandInGraph, Value]:
        recorder = Recorder()
        with recorder:
            value = work()
        recorder.undo()
        graph = StandInGraph(recorder.operations)
        self.graphs.append(graph)
        return graph, value


class StandInGraph:
    def __init__(self, operations: list[Operation]) -> None:
        self.operations = operations
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        with torch.no_grad():
            for function, arguments, keywords, made in self.operations:
                results = tensors_within(function(*arguments, **keywords))
                for place, result in zip(made, results):
                    place.copy_(result)

    def reset(self) -> None:
        self.operations = []


class Recorder(OperatorMode):
    """Notes the operators of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.made: Tensors = []
        self.own: set[int] = set()
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.kept: set[int] = set()

    def operator(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        tags = getattr(function, "tags", ())
        if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
            raise RuntimeError(f"{function} is not permitted when a stream is capturing")
        read, written, _ = reads_and_writes(function, arguments, keywords)
        self.keep(written)
        value = function(*arguments, **keywords)
        known = {storage_number(tensor) for tensor in read + written}
        results = tensors_within(value)
        made = [r for r in results if storage_number(r) not in known]
        if made or written:
            # Results that are what was written stand first or alone in every schema of ATen's.
            fresh = results if len(made) == len(results) else made
            self.operations.append(Operation(function, arguments, keywords, fresh))
        self.made += made
        self.own.update(map(storage_number, made))
        return value

    def keep(self, written: Tensors) -> None:
        """Note what tensors from outside hold before they are written to."""
        for tensor in written:
            number = storage_number(tensor)
            if number not in self.own and number not in self.kept:
                self.kept.add(number)
                self.before.append((tensor, tensor.clone()))

    def undo(self) -> None:
        with torch.no_grad():
            for tensor, before in self.before:
                tensor.copy_(before)
            for tensor in self.made:
                if tensor.is_floating_point():
                    tensor.fill_(torch.nan)

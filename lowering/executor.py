"""A rank program to a flat list of calls on numbered slots, and its execution step by step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from operator import getitem, itemgetter
from typing import Any, NamedTuple

import torch.fx as fx

from fxpipe.errors import FxpipeError, RankError
from fxpipe.lowering import instructions
from fxpipe.lowering.blame import line_of, task_call
from fxpipe.lowering.instructions import Transport
from fxpipe.lowering.rank_program import RankProgram
from fxpipe.lowering.status import about

Slots = list[Any]


class Instruction(NamedTuple):
    """One call. `awaits` is the message that must have come before it can run."""

    run: Callable[[Slots], None]
    name: str
    awaits: str | None = None


class Paused(NamedTuple):
    """The forward is done: its outputs. Send their gradients back to go on."""

    outputs: tuple[Any, ...]


class Executor:
    """Runs a rank program. Every look-up is made here, once; a step is one loop over the calls.

    Values die after their last use where `free` is set.
    """

    def __init__(self, program: RankProgram, free: bool = True) -> None:
        self.program = program
        self.number: dict[fx.Node, int] = {}
        self.template: Slots = []
        self.frees = last_uses(program.graph.graph) if free else {}
        self.instructions = [
            made for node in program.graph.graph.nodes if (made := self.instruction(node))
        ]
        self.results = self.reader(program.graph.graph.output_node().args[0])

    def run(
        self,
        transport: Transport,
        values: Sequence[Any],
        recorded: Sequence[Instruction] | None = None,
    ) -> Generator[Paused | str, tuple[Any, ...] | None, tuple[Any, ...]]:
        """Execute a step; returns the program's results.

        `recorded` takes the place of the instructions: the same ones, which also note the time.
        Yields the name of a message that has not come yet (go on when it may have), or Paused.
        """
        slots = self.template.copy()
        slots[: len(values) + 1] = transport, *values
        status = transport.status
        try:
            for run, status.action, awaits in recorded or self.instructions:
                if awaits is not None:
                    while not transport.ready(awaits):
                        yield awaits
                if run is PAUSE:
                    index, outputs, frees = self.pause
                    given = yield Paused(outputs(slots))
                    assert given is not None
                    slots[index : index + len(given)] = given
                    for i in frees:
                        slots[i] = None
                else:
                    run(slots)
        except (FxpipeError, GeneratorExit):
            raise
        except Exception as error:
            line = self.line_of(error, status.action, self.arguments(status.action, slots))
            raise RankError(
                f"rank {self.program.rank} failed in {about(status.action)}{line}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return self.results(slots)

    def line_of(self, error: Exception, action: str, arguments: Sequence[Any] | None = None) -> str:
        """` at m.py:7: x = self.table(ids)`, or nothing; see fxpipe.lowering.blame.

        `arguments` are those of the call, where they are still there.
        """
        call = task_call(self.program, action)
        return "" if call is None else line_of(error, self.program, call, arguments)

    def arguments(self, action: str, slots: Slots) -> list[Any]:
        """What the call of a task was given; empty for other calls."""
        call = task_call(self.program, action)
        given = call.args if call is not None else ()
        return [slots[self.number[a]] if isinstance(a, fx.Node) else a for a in given]

    def observe(self, seen: Callable[[str, Slots], None]) -> None:
        """Have `seen` called with the name of every call and the slots as the call left them."""

        def then(instruction: Instruction) -> Instruction:
            def run(slots: Slots) -> None:
                instruction.run(slots)
                seen(instruction.name, slots)

            return instruction if instruction.run is PAUSE else instruction._replace(run=run)

        self.instructions = [then(instruction) for instruction in self.instructions]

    # Building.

    def instruction(self, node: fx.Node) -> Instruction | None:
        if node.op == "placeholder":
            self.place(node)
            return None
        if node.op == "output" or node.target is getitem and self.is_unpacked(node.args[0]):
            return None
        name = str(node.meta.get("action", node.name))
        if node.op == "call_module":
            function = self.program.graph.get_submodule(node.target).function
            return Instruction(self.call(function, node, self.reader(node.args)), name)
        match node.target:
            case instructions.send:
                _, message, tensors = node.args
                return Instruction(
                    self.send(message, self.reader(tensors), node), f"send {message}"
                )
            case instructions.post:
                return Instruction(post(node.args[1]), f"post {node.args[1]}")
            case instructions.wait:
                message = node.args[1]
                return Instruction(self.wait(message, node), f"wait for {message}", message)
            case instructions.pause:
                read = self.reader(node.args[0])
                self.pause = (self.place_unpacked(node), read, self.free_numbers(node))
                return Instruction(PAUSE, "pause")
        return Instruction(self.single(node), name)

    def is_unpacked(self, node: Any) -> bool:
        """Whether a call's results go to slots of their own: a task's, a message's."""
        unpacked = (instructions.wait, instructions.pause)
        return node.op == "call_module" or node.target in unpacked

    def place(self, node: fx.Node) -> int:
        if node not in self.number:
            self.number[node] = len(self.template)
            self.template.append(None)
        return self.number[node]

    def place_unpacked(self, node: fx.Node) -> int:
        """Slots side by side for what a call returns; the first one's number."""
        first = len(self.template)
        parts = {user.args[1]: user for user in node.users if user.target is getitem}
        for index in range(max(parts, default=-1) + 1):
            self.template.append(None)
            if index in parts:
                self.number[parts[index]] = first + index
        return first

    def constant(self, value: Any) -> int:
        self.template.append(value)
        return len(self.template) - 1

    def reader(self, arguments: Sequence[Any]) -> Callable[[Slots], tuple[Any, ...]]:
        """Slots to the values of arguments that are nodes or constants."""
        numbers = [
            self.number[a] if isinstance(a, fx.Node) else self.constant(a) for a in arguments
        ]
        match numbers:
            case []:
                return lambda slots: ()
            case [number]:
                return lambda slots: (slots[number],)
        return itemgetter(*numbers)

    def call(
        self, function: Callable[..., Any], node: fx.Node, read: Callable[[Slots], tuple[Any, ...]]
    ) -> Callable[[Slots], None]:
        first = self.place_unpacked(node)
        end = len(self.template)
        frees = self.free_numbers(node)

        def run(slots: Slots) -> None:
            slots[first:end] = function(*read(slots))
            for number in frees:
                slots[number] = None

        return run

    def send(
        self, message: str, read: Callable[[Slots], tuple[Any, ...]], node: fx.Node
    ) -> Callable[[Slots], None]:
        frees = self.free_numbers(node)

        def run(slots: Slots) -> None:
            slots[0].send(message, read(slots))
            for number in frees:
                slots[number] = None

        return run

    def wait(self, message: str, node: fx.Node) -> Callable[[Slots], None]:
        first = self.place_unpacked(node)
        end = len(self.template)

        def run(slots: Slots) -> None:
            slots[first:end] = slots[0].wait(message)

        return run

    def single(self, node: fx.Node) -> Callable[[Slots], None]:
        """A call with one result, whose arguments may hold lists of nodes."""
        read = self.nested_reader(node.args)
        target, number, frees = node.target, self.place(node), self.free_numbers(node)

        def run(slots: Slots) -> None:
            slots[number] = target(*read(slots))
            for i in frees:
                slots[i] = None

        return run

    def nested_reader(self, arguments: Sequence[Any]) -> Callable[[Slots], Sequence[Any]]:
        if not any(isinstance(argument, (list, tuple)) for argument in arguments):
            return self.reader(arguments)
        nested = [
            self.reader(a) if isinstance(a, (list, tuple)) else first_of(self.reader([a]))
            for a in arguments
        ]
        return lambda slots: [read(slots) for read in nested]

    def free_numbers(self, node: fx.Node) -> tuple[int, ...]:
        return tuple(self.number[n] for n in self.frees.get(node, ()))


def PAUSE(slots: Slots) -> None:
    """Stands for the pause in the list of calls; `Executor.run` acts on it."""


def first_of(read: Callable[[Slots], tuple[Any, ...]]) -> Callable[[Slots], Any]:
    return lambda slots: read(slots)[0]


def post(message: str) -> Callable[[Slots], None]:
    def run(slots: Slots) -> None:
        slots[0].post(message)

    return run


def last_uses(graph: fx.Graph) -> Mapping[fx.Node, tuple[fx.Node, ...]]:
    """Per node, the values whose last use it is. Results of the program are never freed."""
    kept = set(graph.output_node().all_input_nodes)
    seen: set[fx.Node] = set(kept)
    frees: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in reversed(graph.nodes):
        if node.op == "output" or node.target is getitem:
            continue
        unused = [n for n in node.users if n.target is getitem and not n.users]
        dying = [n for n in node.all_input_nodes if n not in seen]
        seen.update(dying)
        frees[node] = tuple(n for n in unused + dying if n.target != "transport")
    return frees

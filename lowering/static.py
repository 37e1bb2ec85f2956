"""The rank programs of one process -> one flat list of calls on numbered places.

Every look-up is made here, once: what a call reads and where its results go are numbers. Where all
ranks are in one process a message is the values themselves, so that sends and waits vanish; where a
rank has a process of its own they are calls of its transport, which is place 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.fx as fx

from fxpipe.errors import RankError
from fxpipe.lowering import instructions
from fxpipe.lowering.rank_program import RankProgram, Slot
from fxpipe.lowering.values import is_call, parts_of, task_of


class Place(int):
    """The number of a value; written `v7`."""

    def __repr__(self) -> str:
        return f"v{int(self)}"


class Call(NamedTuple):
    """One call. `arguments` are places, lists of places and constants.

    `results`: where the parts of what it returns go. Where `whole` is set it returns one value and
    no tuple. `frees`: what nothing reads after it.
    """

    function: Callable[..., Any]
    label: str
    arguments: tuple[Any, ...]
    results: tuple[Place, ...]
    whole: bool
    name: str
    rank: int
    frees: tuple[Place, ...] = ()

    def __str__(self) -> str:
        made = ", ".join(map(repr, self.results))
        made = f"{made} = " if made else ""
        return f"{made}{self.label}({', '.join(map(repr, self.arguments))})"

    @property
    def reads(self) -> list[Place]:
        return list(places_in(self.arguments))


@dataclass(frozen=True)
class StaticProgram:
    """What a process runs in a step. `slots[i]` fills place `i + 1`.

    `pause`: the number of the call before which the caller gets `paused` and gives what goes to
    `given`; None where the step is one piece. `results`: the outputs, then the gradients.
    """

    programs: tuple[RankProgram, ...]
    slots: tuple[Slot, ...]
    calls: tuple[Call, ...]
    outputs: tuple[int, ...]
    gradients: tuple[str, ...]
    results: tuple[Any, ...]
    pause: int | None = None
    paused: tuple[Any, ...] = ()
    given: tuple[Place, ...] = ()

    def __str__(self) -> str:
        ranks = ", ".join(str(program.rank) for program in self.programs)
        names = [f"v{i + 1} {written(slot)}" for i, slot in enumerate(self.slots)]
        lines = [f"static program of ranks {ranks}", f"  inputs {', '.join(names)}"]
        for i, call in enumerate(self.calls):
            if i == self.pause:
                lines.append(f"  pause: gives {self.paused}, gets {self.given}")
            frees = f"; frees {', '.join(map(repr, call.frees))}" if call.frees else ""
            lines.append(f"  {call}  # {call.name}{frees}")
        return "\n".join([*lines, f"  return {self.results}"])


def written(slot: Slot) -> str:
    return slot.name if slot.microbatch is None else f"{slot.name}_mb{slot.microbatch}"


def places_in(arguments: Any) -> Iterator[Place]:
    for argument in arguments:
        if isinstance(argument, Place):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from places_in(argument)


def make_static(
    programs: Sequence[RankProgram], together: bool = True, free: bool = True
) -> StaticProgram:
    """`together`: all ranks are in this process; else there is one program, with a transport."""
    return StaticBuilder(tuple(programs), together, free).run()


class StaticBuilder:
    def __init__(self, programs: tuple[RankProgram, ...], together: bool, free: bool) -> None:
        self.programs, self.together, self.free = programs, together, free
        self.slots: dict[Slot, Place] = {}
        for program in programs:
            for slot in program.slots:
                self.slots.setdefault(slot, Place(1 + len(self.slots)))
        self.count = 1 + len(self.slots)
        self.place: dict[fx.Node, Any] = {}
        self.calls: list[Call] = []
        self.boxes: dict[str, tuple[Place, ...]] = {}
        self.is_paused = False
        self.pause: int | None = None
        self.paused: tuple[Any, ...] = ()
        self.given: dict[int, Place] = {}
        self.returned: dict[int, tuple[Any, ...]] = {}

    def run(self) -> StaticProgram:
        self.take_turns()
        first = self.programs[0]
        count = len(first.outputs)
        results = dict(enumerate(self.returned[first.rank][:count]))
        gradients: dict[str, Any] = {}
        for program in self.programs:
            handed = self.returned[program.rank][len(program.outputs) :]
            for name, place in zip(program.gradients, handed):
                gradients.setdefault(name, place)
        returned = (*results.values(), *gradients.values())
        given = [self.given.get(i) for i in range(max(self.given, default=-1) + 1)]
        if self.free:
            self.add_frees(returned)
        return StaticProgram(
            self.programs,
            tuple(self.slots),
            tuple(self.calls),
            first.outputs,
            tuple(gradients),
            returned,
            self.pause,
            self.paused,
            tuple(self.new_place() if place is None else place for place in given),
        )

    def take_turns(self) -> None:
        """Every rank goes on until it waits for a message that has not been sent, as in a run."""
        for paused in (False, True):
            ranks = {p.rank: self.rank_calls(p, paused) for p in self.programs}
            waits: dict[int, str] = {}
            while ranks:
                before = dict(waits)
                for rank, calls in list(ranks.items()):
                    waits[rank] = next(calls, "")
                    if not waits[rank]:
                        del ranks[rank]
                if ranks and waits == before:
                    raise RankError(f"no rank can go on: they wait for {list(waits.values())}")
            if not self.is_paused:
                return
            if not paused:
                self.pause = len(self.calls)

    def rank_calls(self, program: RankProgram, paused: bool) -> Iterator[str]:
        """Lower a rank's calls before its pause, or those after it. Yields what it waits for."""
        graph = program.graph.graph
        if not paused:
            inputs = list(graph.find_nodes(op="placeholder"))
            self.place[inputs[0]] = Place(0)
            self.place |= {n: self.slots[s] for n, s in zip(inputs[1:], program.slots)}
        behind = not paused
        for node in graph.nodes:
            if node.target is instructions.pause:
                if paused:
                    behind = True
                    continue
                self.open_pause(node, program)
                return
            if behind and node.op != "placeholder":
                yield from self.lower(node, program)

    def open_pause(self, node: fx.Node, program: RankProgram) -> None:
        if program is self.programs[0]:
            self.paused = tuple(self.value(node.args[0]))
        for number, part in parts_of(node):
            if number not in self.given:
                self.given[number] = self.new_place()
            self.place[part] = self.given[number]
        self.is_paused = True

    def lower(self, node: fx.Node, program: RankProgram) -> Iterator[str]:
        if node.op == "output":
            self.returned[program.rank] = tuple(self.value(node.args[0]))
        elif not is_call(node):
            return
        elif not self.together or not self.is_message(node):
            self.add_call(node, program)
        elif node.target is instructions.send:
            self.boxes[str(node.args[1])] = tuple(self.value(node.args[2]))
        elif node.target is instructions.wait:
            message = str(node.args[1])
            while message not in self.boxes:
                yield message
            values = self.boxes.pop(message)
            self.place |= {part: values[number] for number, part in parts_of(node)}

    def is_message(self, node: fx.Node) -> bool:
        return node.target in (instructions.send, instructions.post, instructions.wait)

    def add_call(self, node: fx.Node, program: RankProgram) -> None:
        arguments = tuple(self.value(node.args))
        function: Callable[..., Any]
        if node.op == "call_module":
            function = program.graph.get_submodule(str(node.target)).function
            label, count = str(node.target), len(task_of(program, node).output_node().args[0])
        else:
            function, label = node.target, node.target.__name__
            count = self.count_of(node, program)
        whole = node.op != "call_module" and node.target is not instructions.wait
        parts = {number: self.named(part) for number, part in parts_of(node)} if count else {}
        results = tuple(parts[n] if n in parts else self.new_place() for n in range(count))
        name = str(node.meta.get("action", node.name))
        self.calls.append(Call(function, label, arguments, results, whole, name, program.rank))

    def count_of(self, node: fx.Node, program: RankProgram) -> int:
        """How many values a call gives that is no task."""
        if node.target is instructions.wait:
            return len(program.messages[str(node.args[1])].specs)
        return 0 if node.target in (instructions.send, instructions.post) else 1

    def named(self, part: fx.Node) -> Place:
        self.place[part] = self.new_place()
        return self.place[part]

    def new_place(self) -> Place:
        self.count += 1
        return Place(self.count - 1)

    def value(self, argument: Any) -> Any:
        """Nodes to places, in lists too."""
        if isinstance(argument, fx.Node):
            return self.place[argument]
        if isinstance(argument, (list, tuple)):
            return [self.value(item) for item in argument]
        return argument

    def add_frees(self, returned: Sequence[Any]) -> None:
        kept = {*places_in(returned), *places_in(self.paused), Place(0)}
        for i in reversed(range(len(self.calls))):
            call = self.calls[i]
            dying = [p for p in dict.fromkeys([*call.reads, *call.results]) if p not in kept]
            kept.update(dying)
            self.calls[i] = call._replace(frees=tuple(dying))

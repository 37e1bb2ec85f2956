"""A program to rank programs: what each rank executes, as an FX graph of calls and messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
import torch.fx as fx

from fxpipe.lowering import instructions
from fxpipe.lowering.packing import Spec
from fxpipe.lowering.rank_program import Message, RankProgram, Slot
from fxpipe.lowering.results import Results
from fxpipe.messages import send_of, with_messages, without_messages
from fxpipe.program import Edge, Key, Program, Role
from fxpipe.schedule import (
    BACKWARD,
    COMPUTE,
    SENDS,
    Action,
    Kind,
    Pair,
    Schedule,
    actions_of,
)


def lower(
    programs: Sequence[Program], rank: int, compile_graph: Callable[[fx.GraphModule], Any],
    listeners: Iterable[int] | None = None,
) -> RankProgram:  # fmt: skip
    """The rank program for `programs[k]` being the program of microbatch k.

    Programs differ in the microbatch's size alone. `listeners` are the ranks that get the model's
    outputs; all by default.
    """
    schedule = programs[0].schedule
    assert schedule is not None
    if any(program.edges.keys() != programs[0].edges.keys() for program in programs):
        schedule = with_messages(without_messages(schedule), lambda k: programs[k].edges)
    ranks = tuple(range(schedule.num_ranks)) if listeners is None else tuple(listeners)
    return RankBuilder(programs, schedule, rank, compile_graph, ranks).run()


@dataclass
class RankBuilder:
    programs: Sequence[Program]
    schedule: Schedule
    rank: int
    compile_graph: Callable[[fx.GraphModule], Any]
    listeners: tuple[int, ...]
    graph: fx.Graph = field(default_factory=fx.Graph)
    root: torch.nn.Module = field(default_factory=torch.nn.Module)
    slots: dict[Slot, fx.Node] = field(default_factory=dict)
    values: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    accumulators: dict[str, fx.Node] = field(default_factory=dict)
    messages: dict[str, Message] = field(default_factory=dict)
    waiting: dict[tuple[int, int], list[tuple[str, tuple[str, ...]]]] = field(default_factory=dict)
    output_gradients: dict[Slot, fx.Node] = field(default_factory=dict)
    fakes: dict[int, dict[str, Any]] = field(default_factory=dict)

    def run(self) -> RankProgram:
        self.transport = self.graph.placeholder("transport")
        self.last_placeholder = self.transport
        actions = list(self.schedule.actions(self.rank))
        merged = self.find_merged_pairs()
        opened = {pair.forward for pair in merged.values()}
        self.last_accumulation = self.find_last_accumulations(actions)
        self.results = Results(self)
        pauses = self.programs[0].loss is None and self.programs[0].training
        outputs: dict[int, Any] | None = None
        for index, action in enumerate(actions):
            if pauses and outputs is None and action.kind in BACKWARD:
                outputs = self.pause(self.results.outputs())
            if action in merged:
                self.lower_pair(index, merged[action])
            elif action not in opened:
                self.lower_action(index, action)
        if outputs is None:
            outputs = self.results.outputs()
            # A rank without a backward pauses with the others: sums come to it after that.
            outputs = self.pause(outputs) if pauses else outputs
        gradients = self.results.input_gradients() | self.results.summed_gradients()
        self.graph.output((*outputs.values(), *gradients.values()))
        graph = fx.GraphModule(self.root, self.graph, class_name=f"Rank{self.rank}")
        return RankProgram(
            self.rank, graph, tuple(self.slots), tuple(outputs), tuple(gradients), self.messages
        )

    # One action at a time.

    def lower_action(self, index: int, action: Action) -> None:
        if action.kind in COMPUTE:
            self.lower_task(index, action)
        elif action.kind in SENDS:
            names = self.register(action)
            values = [self.values[action.stage, action.microbatch][name] for name in names]
            self.send(str(action), values)
        else:
            sent = send_of(action)
            names = self.register(sent)
            self.post(str(sent))
            place = (action.stage, action.microbatch)
            self.waiting.setdefault(place, []).append((str(sent), names))

    def register(self, send: Action) -> tuple[str, ...]:
        """Describe a message; the names of the values that it carries."""
        source, target, k = send.stage, send.other, send.microbatch
        names = self.programs[k].edges[Edge(source, target)]
        specs = tuple(Spec.of(self.value_of(k, name)) for name in names)
        ends = self.schedule.rank_of[source, k], self.schedule.rank_of[target, k]
        self.messages[str(send)] = Message(*ends, specs)
        return names

    def value_of(self, microbatch: int, name: str) -> torch.Tensor:
        """The fake tensor that stands for a value."""
        joint = self.programs[microbatch].joint
        if id(joint) not in self.fakes:
            self.fakes[id(joint)] = {n.name: n.meta.get("val") for n in joint.graph.nodes}
        return self.fakes[id(joint)][name]

    def lower_task(self, index: int, action: Action) -> None:
        key, microbatch = Key(action.stage, action.kind), action.microbatch
        program = self.programs[microbatch]
        task = program.tasks.get(key)
        if task is None:
            return
        place = (action.stage, microbatch)
        self.wait_for(place, task.inputs)
        arguments = [self.argument(name, program, place) for name in task.inputs]
        module = self.task_module(f"stage{key.stage}_{key.kind}", program, task.graph)
        call = self.graph.create_node("call_module", module, tuple(arguments), name=f"ran_{action}")
        call.meta["action"] = action
        self.unpack(call, task.outputs, place)
        self.finish_task(index, action)

    def finish_task(self, index: int, action: Action) -> None:
        """What follows a task's call: its values to other stages, its finished gradients out."""
        program = self.programs[action.microbatch]
        task = program.tasks[Key(action.stage, action.kind)]
        self.hand_over(action, program, task.outputs)
        for name in task.accumulates:
            if self.last_accumulation[name] == index and name in program.reductions:
                self.results.send_sum(name)

    def find_merged_pairs(self) -> dict[Action, Pair]:
        """Backward action -> the pair that runs in its place, where the two are one task."""
        found = {}
        for step in self.schedule.ranks[self.rank]:
            if isinstance(step, Pair):
                keys = keys_of(step)
                programs = [self.programs[a.microbatch] for a in actions_of(step)]
                if programs[0] is programs[1] and keys in programs[0].pairs:
                    found[step.backward] = step
        return found

    def lower_pair(self, index: int, pair: Pair) -> None:
        program = self.programs[pair.forward.microbatch]
        task = program.pairs[keys_of(pair)]
        sides = actions_of(pair)
        places = [(action.stage, action.microbatch) for action in sides]
        for side, place in enumerate(places):
            self.wait_for(place, [name for of, name in task.inputs if of == side])
        arguments = [self.argument(name, program, places[side]) for side, name in task.inputs]
        name = "_".join(f"stage{action.stage}_{action.kind}" for action in sides)
        module = self.task_module(name, program, task.graph)
        call = self.graph.create_node("call_module", module, tuple(arguments), name=f"ran_{pair}")
        call.meta["action"] = pair
        for position, (side, name) in enumerate(task.outputs):
            self.unpack_one(call, position, name, places[side])
        for action in sides:
            self.finish_task(index, action)

    def task_module(self, name: str, program: Program, graph: fx.GraphModule) -> str:
        if len({p.microbatch_size for p in self.programs}) > 1:
            name += f"_rows{program.microbatch_size}"
        if not hasattr(self.root, name):
            self.root.add_module(name, TaskModule(self.compile_graph(graph), graph.graph))
        return name

    def argument(self, name: str, program: Program, place: tuple[int, int]) -> Any:
        stage, microbatch = place
        if name in self.values.get(place, {}):
            return self.values[place][name]
        if name.startswith("acc_") and any(
            name.removeprefix("acc_") in t.accumulates for t in program.tasks.values()
        ):
            return self.accumulator(name.removeprefix("acc_"))
        if Slot(name, microbatch) in self.output_gradients:
            return self.output_gradients[Slot(name, microbatch)]
        entry = program.input(name)
        if entry.role is Role.SIZE:
            return int(entry.size.subs(program.sizes))
        split = entry.role in (Role.BATCH, Role.SHARE, Role.SEED)
        return self.slot(Slot(name, microbatch if split else None))

    def slot(self, slot: Slot) -> fx.Node:
        if slot not in self.slots:
            suffix = "" if slot.microbatch is None else f"_mb{slot.microbatch}"
            with self.graph.inserting_after(self.last_placeholder):
                self.slots[slot] = self.graph.placeholder(f"{slot.name}{suffix}")
            self.last_placeholder = self.slots[slot]
        return self.slots[slot]

    def accumulator(self, name: str) -> fx.Node:
        if name not in self.accumulators:
            made = self.slot(Slot(name))
            made = self.call(instructions.new_accumulator, made, name=f"acc_{name}")
            self.accumulators[name] = made
        return self.accumulators[name]

    def wait_for(self, place: tuple[int, int], names: Iterable[str]) -> None:
        """Wait for the posted messages that a task reads."""
        wanted = set(names)
        rest = []
        for message, carried in self.waiting.get(place, ()):
            if wanted & set(carried):
                received = self.receive(message)
                self.unpack(received, carried, place)
            else:
                rest.append((message, carried))
        self.waiting[place] = rest

    def unpack(self, call: fx.Node, names: Sequence[str], place: tuple[int, int]) -> None:
        for index, name in enumerate(names):
            self.unpack_one(call, index, name, place)

    def unpack_one(self, call: fx.Node, index: int, name: str, place: tuple[int, int]) -> None:
        value = self.call(getitem, call, index, name=f"{name}_mb{place[1]}")
        self.values.setdefault(place, {})[name] = value

    def hand_over(self, action: Action, program: Program, names: Iterable[str]) -> None:
        """Values for another stage of this rank need no message."""
        given = set(names)
        for edge, carried in program.edges.items():
            place = (edge.target, action.microbatch)
            if edge.source == action.stage and self.schedule.rank_of[place] == self.rank:
                own = self.values[action.stage, action.microbatch]
                for name in given.intersection(carried):
                    self.values.setdefault(place, {})[name] = own[name]

    def call(
        self, function: Callable[..., Any], *arguments: Any, name: str | None = None
    ) -> fx.Node:
        return self.graph.create_node("call_function", function, arguments, name=name)

    def send(self, message: str, values: Sequence[Any]) -> None:
        self.call(instructions.send, self.transport, message, list(values), name=f"sent_{message}")

    def post(self, message: str) -> None:
        self.call(instructions.post, self.transport, message, name=f"posted_{message}")

    def receive(self, message: str) -> fx.Node:
        return self.call(instructions.wait, self.transport, message, name=f"got_{message}")

    def find_last_accumulations(self, actions: Sequence[Action]) -> dict[str, int]:
        last: dict[str, int] = {}
        for index, action in enumerate(actions):
            task = self.programs[action.microbatch].tasks.get(Key(action.stage, action.kind))
            for name in task.accumulates if task is not None else ():
                last[name] = index
        return last

    def pause(self, outputs: dict[int, Any]) -> dict[int, Any]:
        """Outputs go to the caller; their gradients come back, microbatch by microbatch."""
        given = self.call(instructions.pause, list(outputs.values()))
        index = 0
        for output in self.programs[0].outputs:
            if output.requires_grad:
                for microbatch in range(len(self.programs)):
                    slot = Slot(f"grad_{output.name}", microbatch)
                    self.output_gradients[slot] = self.call(getitem, given, index)
                    index += 1
        return outputs


def keys_of(pair: Pair) -> tuple[Key, Key]:
    return Key(pair.forward.stage, Kind.F), Key(pair.backward.stage, pair.backward.kind)


class TaskModule(torch.nn.Module):
    """A compiled task as a submodule, so that the rank program calls it by name.

    `graph` is what was compiled: an error that it raises is traced back to the model's line.
    """

    def __init__(self, function: Callable[..., Any], graph: fx.Graph) -> None:
        super().__init__()
        self.function, self.graph = function, graph

    def forward(self, *arguments: Any) -> Any:
        return self.function(*arguments)

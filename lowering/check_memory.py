"""A memory plan, followed call by call -> proof that nothing is written over what is still read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch.fx as fx

from fxpipe.errors import PassError
from fxpipe.lowering import instructions
from fxpipe.lowering.memory_plan import Entry, MemoryPlan, Storage, end_of_send
from fxpipe.lowering.rank_program import RankProgram
from fxpipe.lowering.values import is_call, parts_of, storages_of
from fxpipe.program import Program


class Lost(NamedTuple):
    """A value was written over by another one."""

    by: str
    at: str


def check_memory(plan: MemoryPlan, program: Program, ran: RankProgram) -> None:
    """Raise PassError for the first value that is read, or still sent, after it was overwritten.

    The lifetimes that the plan states are not looked at: what each call reads and writes is.
    """
    memory = Memory(plan)
    calls = [node for node in ran.graph.graph.nodes if is_call(node)]
    number = {node: i for i, node in enumerate(calls)}
    shared = storages_of(ran)
    ending: dict[int, list[tuple[str, str]]] = {}
    for at, call in enumerate(calls):
        name = plan.calls[at]
        inputs = [shared.get(node, node).name for node in call.all_input_nodes]
        if call.target is instructions.send:
            end = end_of_send(program, call, number)
            ending.setdefault(end, []).extend((n, f"the end of {name}") for n in inputs)
        for written in writes(call, shared):
            memory.write(written, name)
        for read, reader in [*((n, name) for n in inputs), *ending.get(at, ())]:
            memory.read(read, reader)
    for node in ran.graph.graph.output_node().all_input_nodes:
        memory.read(shared.get(node, node).name, "the end of the step")


def writes(call: fx.Node, shared: dict[fx.Node, fx.Node]) -> Iterator[str]:
    """The values that a call writes. What a message brings is written from its post on."""
    if call.target is instructions.post:
        for wait in call.graph.find_nodes(op="call_function", target=instructions.wait):
            if wait.args[1] == call.args[1]:
                yield from (part.name for _, part in parts_of(wait))
    elif call.target is not instructions.wait:
        yield from (part.name for _, part in parts_of(call) if part not in shared)


class Memory:
    """What lies where at one moment."""

    def __init__(self, plan: MemoryPlan) -> None:
        self.rank = plan.rank
        self.entries = {entry.name: entry for entry in plan.entries}
        self.present: dict[str, Entry] = {}
        self.lost: dict[str, Lost] = {}

    def write(self, name: str, call: str) -> None:
        entry = self.entries.get(name)
        if entry is None:
            return
        for other in [e for e in self.present.values() if e is not entry and overlap(e, entry)]:
            del self.present[other.name]
            self.lost[other.name] = Lost(name, call)
        self.present[name] = entry

    def read(self, name: str, reader: str) -> None:
        if name in self.lost:
            by, at = self.lost[name]
            raise PassError(
                f"the memory plan of rank {self.rank} lets {at} write %{by} over %{name}, which is "
                f"needed until {reader}"
            )


def overlap(one: Entry, other: Entry) -> bool:
    """Whether two values share bytes. Owned storage is each value's own, but for buffer sets."""
    if one.storage is not other.storage:
        return False
    if one.storage is Storage.MESSAGE:
        return (one.spec, one.set) == (other.spec, other.set)
    if one.storage is not Storage.PLACED:
        return False
    return one.offset < other.offset + other.size and other.offset < one.offset + one.size

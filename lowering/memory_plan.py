"""A rank program -> its memory plan: what is stored, from which call to which, and where.

What keeps its address from step to step is owned: made once and used again. What lives between
tasks is placed in one block of memory. Tasks allocate what they return themselves, and no copy is
made to obey a plan: on a CPU the placed part is for knowing alone; in a captured graph the pool of
the capture takes its place. The owned part is real in both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch.fx as fx

from fxpipe.errors import ScheduleError
from fxpipe.lowering import instructions
from fxpipe.lowering.offsets import Block, colour, peak, place
from fxpipe.lowering.packing import Spec
from fxpipe.lowering.rank_program import RankProgram
from fxpipe.lowering.values import bytes_of_spec, is_call, parts_of, specs_of, storages_of
from fxpipe.program import Edge, Key, Program, Role
from fxpipe.schedule import SENDS, Action, parse_step
from fxpipe.text import format_dtype

ALIGNMENT = {"cuda": 512, "cpu": 64}


class Storage(str, Enum):
    """Whose a value's memory is."""

    STATE = "state"  # parameters and buffers, where the user has them
    INPUT = "input"
    ACCUMULATOR = "accumulator"
    RESULT = "result"
    MESSAGE = "message"  # that is received; owned by a buffer set
    PLACED = "placed"


IN_PLACE = (Role.PARAMETER, Role.BUFFER)


@dataclass(frozen=True)
class Entry:
    """A value's storage. Live from the call number `start` to the call number `end`, both included.

    `offset` is where a placed value lies; `set` the number of a message's buffer set.
    """

    name: str
    storage: Storage
    spec: Spec
    size: int  # bytes, rounded up to the alignment
    start: int
    end: int
    offset: int = 0
    set: int = 0

    @property
    def block(self) -> Block:
        return Block(self.size, self.start, self.end)


@dataclass(frozen=True)
class MemoryPlan:
    """The storage of one rank. `calls` names what runs, in order."""

    rank: int
    alignment: int
    calls: tuple[str, ...]
    entries: tuple[Entry, ...]

    def of(self, storage: Storage) -> list[Entry]:
        return [entry for entry in self.entries if entry.storage is storage]

    @property
    def sets(self) -> Mapping[Spec, int]:
        """The buffer sets of messages with such a tensor."""
        found: dict[Spec, int] = {}
        for entry in self.of(Storage.MESSAGE):
            found[entry.spec] = max(found.get(entry.spec, 0), entry.set + 1)
        return found

    @property
    def owned(self) -> int:
        """Bytes that are made once, beside parameters and buffers."""
        made = (Storage.INPUT, Storage.ACCUMULATOR, Storage.RESULT)
        messages = {(e.spec, e.set): e.size for e in self.of(Storage.MESSAGE)}
        return sum(e.size for s in made for e in self.of(s)) + sum(messages.values())

    @property
    def placed(self) -> int:
        """Bytes of the block in which the placed values lie."""
        return max((e.offset + e.size for e in self.of(Storage.PLACED)), default=0)

    @property
    def least(self) -> int:
        """The most bytes of placed values that are live at once: no plan takes less."""
        return peak([entry.block for entry in self.of(Storage.PLACED)])

    def __str__(self) -> str:
        state = sum(entry.size for entry in self.of(Storage.STATE))
        ratio = self.placed / self.least if self.least else 1.0
        lines = [
            f"memory plan of rank {self.rank}: bytes, in steps of {self.alignment}",
            "",
            f"owned: {self.owned}, beside {state} of parameters and buffers",
        ]
        owned = [e for e in self.entries if e.storage not in (Storage.STATE, Storage.PLACED)]
        for entry in sorted(owned, key=lambda e: list(Storage).index(e.storage)):
            number = f", set {entry.set}" if entry.storage is Storage.MESSAGE else ""
            lines.append(f"  {entry.size:>8}  {entry.storage.value}{number}: {typed(entry)}")
        lines += ["", f"placed: {self.placed}, live at once: {self.least} ({ratio:.2f})"]
        for entry in sorted(self.of(Storage.PLACED), key=lambda e: (e.start, e.offset)):
            lines.append(
                f"  {entry.size:>8} at {entry.offset:>8}  {typed(entry)}  "
                f"{self.calls[entry.start]} .. {self.calls[entry.end]}"
            )
        return "\n".join(lines)


def typed(entry: Entry) -> str:
    return f"{entry.name}: {format_dtype(entry.spec.dtype)}{list(entry.spec.shape)}"


def plan_memory(program: Program, ran: RankProgram) -> MemoryPlan:
    """The memory plan of a rank program; `program` is that of its first microbatch."""
    lives = lifetimes(program, ran)
    specs = specs_of(ran)
    device = next((spec.device.type for spec in specs.values()), "cpu")
    alignment = ALIGNMENT.get(device, ALIGNMENT["cpu"])
    entries: list[Entry] = []
    for node, (start, end) in lives.items():
        if node in specs:
            size = -(-bytes_of_spec(specs[node]) // alignment) * alignment
            kind = storage_of(node, program, ran)
            entries.append(Entry(node.name, kind, specs[node], size, start, end))
    names = tuple(name_of(node) for node in ran.graph.graph.nodes if is_call(node))
    return MemoryPlan(ran.rank, alignment, names, tuple(located(entries)))


def memory_text(program: Program, ran: RankProgram) -> str:
    return str(plan_memory(program, ran))


def located(entries: Sequence[Entry]) -> list[Entry]:
    """With offsets for what is placed, and buffer sets for messages with tensors alike."""
    placed = [entry for entry in entries if entry.storage is Storage.PLACED]
    offsets = dict(zip((e.name for e in placed), place([e.block for e in placed])))
    sets: dict[str, int] = {}
    messages = [entry for entry in entries if entry.storage is Storage.MESSAGE]
    for spec in dict.fromkeys(entry.spec for entry in messages):
        alike = [entry for entry in messages if entry.spec == spec]
        sets |= zip((e.name for e in alike), colour([e.block for e in alike]))
    return [
        replace(entry, offset=offsets.get(entry.name, 0), set=sets.get(entry.name, 0))
        for entry in entries
    ]


def name_of(call: fx.Node) -> str:
    return str(call.meta.get("action", call.name))


def storage_of(node: fx.Node, program: Program, ran: RankProgram) -> Storage:
    if node.op == "placeholder":
        slot = ran.slots[list(ran.graph.graph.find_nodes(op="placeholder")).index(node) - 1]
        roles = {entry.name: entry.role for entry in program.inputs}
        return Storage.STATE if roles.get(slot.name) in IN_PLACE else Storage.INPUT
    if node.target is instructions.new_accumulator:
        return Storage.ACCUMULATOR
    if node in ran.graph.graph.output_node().all_input_nodes:
        return Storage.RESULT
    if node.args and getattr(node.args[0], "target", None) is instructions.wait:
        return Storage.MESSAGE
    return Storage.PLACED


# Lifetimes.


def lifetimes(program: Program, ran: RankProgram) -> dict[fx.Node, tuple[int, int]]:
    """Of each storage, by the value that makes it: the first and the last call at which it lives.

    A received message lives from the call that posts it. What is sent lives until the send has
    ended: see `end_of_send`. What is owned for the whole step lives for all of it.
    """
    graph = ran.graph.graph
    calls = [node for node in graph.nodes if is_call(node)]
    number = {node: i for i, node in enumerate(calls)}
    last = len(calls) - 1
    shared = storages_of(ran)
    lives: dict[fx.Node, tuple[int, int]] = {
        node: (0, last) for node in graph.find_nodes(op="placeholder") if node.name != "transport"
    }
    posts = {c.args[1]: i for c, i in number.items() if c.target is instructions.post}
    for call, at in number.items():
        received = call.target is instructions.wait
        for _, part in parts_of(call):
            if part not in shared and not is_silent(call):
                lives[part] = (posts[call.args[1]] if received else at, at)
        until = at if call.target is not instructions.send else end_of_send(program, call, number)
        for node in call.all_input_nodes:
            extend(lives, shared.get(node, node), until)
    for node in graph.output_node().all_input_nodes:
        extend(lives, shared.get(node, node), last)
    for node in lives:
        if node.target is instructions.new_accumulator:
            lives[node] = (0, last)
    return lives


def is_silent(call: fx.Node) -> bool:
    """Whether a call gives no value."""
    return call.target in (instructions.send, instructions.post)


def extend(lives: dict[fx.Node, tuple[int, int]], node: fx.Node, until: int) -> None:
    if node in lives:
        start, end = lives[node]
        lives[node] = (start, max(end, until))


def end_of_send(program: Program, send: fx.Node, number: Mapping[fx.Node, int]) -> int:
    """The call by which what is sent has arrived, so that its memory may be used again.

    That is the first wait for a message that its receiver sends after a task that has read what was
    sent. Where there is none the send ends with the step, when its rank waits for all sends.
    """
    proofs = sent_after_reading(program, str(send.args[1]))
    waits = (
        at
        for call, at in number.items()
        if call.target is instructions.wait and at > number[send] and call.args[1] in proofs
    )
    return min(waits, default=max(number.values()))


def sent_after_reading(program: Program, message: str) -> set[str]:
    """The messages that prove to the sender of `message` that it has arrived."""
    try:
        action = parse_step(message)
    except ScheduleError:
        return set()
    if not isinstance(action, Action) or action.kind not in SENDS:
        return set()
    ranks = program.schedule.rank_of
    source = ranks[action.stage, action.microbatch]
    receiver = list(program.schedule.actions(ranks[action.other, action.microbatch]))
    carried = set(program.edges.get(Edge(action.stage, action.other), ()))
    for i, done in enumerate(receiver):
        task = program.tasks.get(Key(done.stage, done.kind))
        read = task is not None and bool(carried.intersection(task.inputs))
        if read and (done.stage, done.microbatch) == (action.other, action.microbatch):
            later = (a for a in receiver[i:] if a.kind in SENDS)
            return {str(a) for a in later if ranks[a.other, a.microbatch] == source}
    return set()

"""A schedule beside the costs of its stages -> what each unit awaits, takes and gives back.

A unit is an action or a pair, as integers (fxpipe.packed). It starts when the unit before it on
its rank has ended and all that it reads has arrived:

    F of a stage     reads F of the stages before it
    I, B             read the stage's own F, and I or B of the stages after it
    W                reads the stage's own I

A message between ranks takes costs.transfer and occupies nobody. Where the schedule has SEND
actions, a message leaves when the SEND is reached, else when its task ends. RECV only posts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from fxpipe.costs import Costs, Edge, per_stage
from fxpipe.packed import (
    FIELD_MASK,
    KIND_B,
    KIND_F,
    KIND_I,
    KIND_W,
    MICROBATCH_SHIFT,
    PEER_SHIFT,
    STAGE_SHIFT,
    kind_of,
    microbatch_of,
    peer_of,
    stage_of,
    units,
)
from fxpipe.schedule import Schedule

_KINDS = ("F", "I", "W", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B")
_SEND_F, _RECV_F, _SEND_B, _RECV_B = range(4, 8)
_MICROBATCH = FIELD_MASK << MICROBATCH_SHIFT
_PAIR_AND_KIND = 15
_STAGE = FIELD_MASK << STAGE_SHIFT

Unit = tuple[int, ...]


class Events:
    """A schedule beside the costs of its stages: what a unit waits for, and how long it takes."""

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        num_stages: int | None = None,
        has_messages: bool | None = None,
    ) -> None:
        """num_stages and has_messages are counted here unless the caller did it faster."""
        self.schedule = schedule
        self.lines = schedule.packed
        self.num_ranks = len(self.lines)
        codes = [code for line in self.lines for code in line] if has_messages is None else []
        if num_stages is None:
            num_stages = 1 + max(map(stage_of, codes), default=-1)
        self.num_stages = num_stages
        if has_messages is None:
            has_messages = any(kind_of(code) > KIND_B for code in codes)
        self.has_messages = has_messages
        self.costs = per_stage(costs, ranks=self.num_ranks, stages=self.num_stages)
        nothing = [0.0] * num_stages
        self._times = (self.costs.F, self.costs.I, self.costs.W, self.costs.B, *[nothing] * 4)
        # Per stage, the stages that its F (its I and B) reads from, with the delay.
        self.forward_sources: list[list[tuple[int, float]]] = [[] for _ in range(self.num_stages)]
        self.backward_sources: list[list[tuple[int, float]]] = [[] for _ in range(self.num_stages)]
        for source, destination in self.costs.edges:
            there, back = (source, destination), (destination, source)
            self.forward_sources[destination].append((source, self.costs.transfer[there]))
            self.backward_sources[source].append((destination, self.costs.transfer[back]))

    @cached_property
    def units(self) -> list[list[Unit]]:
        return [list(units(line)) for line in self.lines]

    @cached_property
    def runner(self) -> dict[int, int]:
        """The rank that runs each action; an I and a B are both found as I."""
        return {result_of(code): rank for rank, line in enumerate(self.lines) for code in line}

    def time(self, unit: Unit) -> float:
        """How long a unit takes; a message keeps nobody busy."""
        if len(unit) == 2 and kind_of(unit[1]) == KIND_B:
            return self.costs.pair_time(stage_of(unit[0]), stage_of(unit[1]))
        return sum(self._times[kind_of(code)][stage_of(code)] for code in unit)

    def awaited(self, unit: Unit, rank: int) -> list[tuple[int, float]]:
        """What a unit reads: the action that must have ended, and the delay after it."""
        needs: list[tuple[int, float]] = []
        for code in unit:
            kind, own = code & 7, code & (_STAGE | _MICROBATCH)
            if kind == KIND_F:
                sources = self.forward_sources[own >> STAGE_SHIFT & FIELD_MASK]
            elif kind in (KIND_I, KIND_B):
                sources = self.backward_sources[own >> STAGE_SHIFT & FIELD_MASK]
                needs.append((own, 0.0))
            else:
                if kind in (KIND_W, _SEND_B):
                    needs.append((own | KIND_I, 0.0))
                elif kind == _SEND_F:
                    needs.append((own, 0.0))
                continue
            result_kind = KIND_F if kind == KIND_F else KIND_I
            for source, delay in sources:
                result = own & _MICROBATCH | source << STAGE_SHIFT | result_kind
                if self.runner.get(result, rank) == rank:
                    needs.append((result, 0.0))
                elif self.has_messages:
                    needs.append((_message(result, stage_of(code)), delay))
                else:
                    needs.append((result, delay))
        return needs

    def reads(self, code: int) -> Iterator[tuple[int, Edge]]:
        """The edges between stages that an action reads, each with the rank that it reads from."""
        kind, stage = kind_of(code), stage_of(code)
        if kind == KIND_F:
            for source, _ in self.forward_sources[stage]:
                yield self.runner[_at(code, source, KIND_F)], (source, stage)
        elif kind in (KIND_I, KIND_B):
            for source, _ in self.backward_sources[stage]:
                yield self.runner[_at(code, source, KIND_I)], (stage, source)

    def memory(self, unit: Unit) -> tuple[float, float]:
        """What a unit takes when it starts, and what it gives back when it ends."""
        costs = self.costs
        taken = freed = costs.pair_temporaries if len(unit) == 2 else 0.0
        for code in unit:
            kind, stage = kind_of(code), stage_of(code)
            if kind == KIND_F:
                taken += costs.activations[stage]
            elif kind == KIND_B:
                freed += costs.activations[stage]
            elif kind == KIND_I:
                freed += costs.activations[stage] - costs.saved_for_w[stage]
            elif kind == KIND_W:
                freed += costs.saved_for_w[stage]
        return taken, freed


def _at(code: int, stage: int, kind: int) -> int:
    """The action of another stage and kind on the same microbatch."""
    return code & _MICROBATCH | stage << STAGE_SHIFT | kind


def _message(result: int, reader: int) -> int:
    """The SEND of a result to the stage that reads it."""
    send = _SEND_F if kind_of(result) == KIND_F else _SEND_B
    return result & ~7 | send | reader + 1 << PEER_SHIFT


def result_of(code: int) -> int:
    """The action as others await it: without its mark of a pair, and B as I."""
    return code & ~_PAIR_AND_KIND | (KIND_I if code & 7 == KIND_B else code & 7)


def text(unit: Unit) -> str:
    """A unit as a schedule writes it."""
    words = []
    for code in unit:
        kind, stage, peer = kind_of(code), stage_of(code), peer_of(code)
        word = f"{stage}{_KINDS[kind]}{microbatch_of(code)}"
        usual = stage + 1 if kind in (_SEND_F, _RECV_B) else stage - 1
        if peer is not None and peer != usual:
            word += f"{'>' if kind in (_SEND_F, _SEND_B) else '<'}{peer}"
        words.append(word)
    return words[0] if len(words) == 1 else f"[{'|'.join(words)}]"

"""V-Half and V-Min: a building block of F0 F1 I1 I0 in fixed slots, repeated for each microbatch.

A slot is one unit of time, as long as F, I or W of a chunk; W runs in the slots left free. The
slots only give the order: ranks run it as early as they can, which closes the gaps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from fxpipe.packed import (
    KIND_F,
    KIND_I,
    KIND_W,
    MICROBATCH_SHIFT,
    F,
    I,
    W,
    kind_of,
    microbatch_of,
    stage_of,
)
from fxpipe.schedules.family import V_SHAPE, family

_INTERVAL = 6
_SOURCE = "Pipeline Parallelism with Controllable Memory (arXiv 2405.15362)"

Slots = dict[int, int]  # the slot of each action


@family(
    "v-half",
    placement=V_SHAPE,
    splits_backward=True,
    flush="(3*p - Piecewise((7, Eq(Mod(p, 2), 0)), (4, True)))/2*F",
    peak="floor((p + 2)/2)",
    messages="4*(p - 1)*m",
    holds="m >= 2*p, p > 2, F = B = W",
    source=_SOURCE,
)
def v_half(p: int, m: int) -> Iterable[list[int]]:
    """Half of 1F1B's memory: both chunks of a rank are short-lived."""
    delay = 3 if p % 2 == 0 else 0
    lines = [
        _repeat((2 * r, 3 * p - 2 - r, 3 * p - 1 + delay + 2 * r, 6 * p - 2 + delay - r), p, m, r)
        for r in range(p)
    ]
    # The steady middle stays: its slack is what takes up unequal times.
    steady = range(lines[0][I(0, 0)], lines[0][F(0, m - 1)] + 1)
    return _in_order(_reorder(lines, fixed=steady))


@family(
    "v-min",
    placement=V_SHAPE,
    splits_backward=True,
    flush="(4*p - Piecewise((7, Eq(Mod(p, 3), 0)), (5, True)))/2*F",
    peak="floor((p + 4)/3)",
    messages="4*(p - 1)*m",
    holds="m >= 2*p, p > 2, F = B = W",
    source=_SOURCE,
)
def v_min(p: int, m: int) -> Iterable[list[int]]:
    """A third of 1F1B's memory; its bubble grows with m where F, I and W take unequal times."""
    delay = 2 if p % 3 == 0 else 0
    lines = [
        _repeat((r, 2 * p - 1 - r, 2 * p + delay + r, 4 * p - 1 + delay - r), p, m, r)
        for r in range(p)
    ]
    return _in_order(_reorder(lines, fixed=range(0)) if delay else lines)


def _repeat(offsets: tuple[int, int, int, int], p: int, m: int, r: int) -> Slots:
    """Rank r's block, F0 F1 I1 I0 of its two chunks, once for each microbatch."""
    places = (F, r), (F, 2 * p - 1 - r), (I, 2 * p - 1 - r), (I, r)
    return {
        make(stage, k): offset + _INTERVAL * k
        for k in range(m)
        for (make, stage), offset in zip(places, offsets, strict=True)
    }


def _in_order(lines: list[Slots]) -> Iterator[list[int]]:
    for line in map(_with_weights, lines):
        yield sorted(line, key=line.__getitem__)


def _with_weights(line: Slots) -> Slots:
    """In every free slot the oldest W that is owed; the rest at the end."""
    taken = {slot: code for code, slot in line.items()}
    filled, owed = dict(line), deque[int]()
    slot, end = 0, max(taken) + 1
    while slot < end or owed:
        code = taken.get(slot)
        if code is None and owed:
            filled[owed.popleft()] = slot
        elif code is not None and kind_of(code) == KIND_I:
            owed.append(W(stage_of(code), microbatch_of(code)))
        slot += 1
    return filled


def _reorder(lines: list[Slots], fixed: range) -> list[Slots]:
    """Move every action outside of the fixed slots to the earliest free one.

    Free is a slot that comes after all that the action needs, and in which it does not raise the
    most that any rank holds.
    """
    memories = [_Memory(line) for line in lines]
    limit = max(max(memory.held) for memory in memories)
    last = 2 * len(lines) - 1
    slots: Slots = {}
    moved: list[Slots] = [{} for _ in lines]
    for slot, rank, code in sorted(
        (slot, rank, code) for rank, line in enumerate(lines) for code, slot in line.items()
    ):
        if slot not in fixed:
            earliest = 1 + max((slots[need] for need in _needs(code, last)), default=-1)
            slot = memories[rank].move(slot, earliest, limit)
        slots[code] = moved[rank][code] = slot
    return moved


def _needs(code: int, last: int) -> Iterator[int]:
    """What must run before an F or I: its neighbour's, and the microbatch before."""
    stage, microbatch = stage_of(code), microbatch_of(code)
    if microbatch > 0:
        yield code - (1 << MICROBATCH_SHIFT)
    if kind_of(code) == KIND_I:
        yield F(stage, microbatch) if stage == last else I(stage + 1, microbatch)
    elif stage > 0:
        yield F(stage - 1, microbatch)


class _Memory:
    """What a rank holds after each slot, when every free slot runs a W that is owed."""

    def __init__(self, line: Slots) -> None:
        size = max(line.values()) + 1
        self.kinds = [KIND_W] * size
        for code, slot in line.items():
            self.kinds[slot] = kind_of(code)
        self.held, self.owed = [0] * size, [0] * size
        self._settle(0, size - 1, size)

    def move(self, slot: int, earliest: int, limit: int) -> int:
        """Move the action at a slot to the earliest that is free and fits; return it."""
        kind = self.kinds[slot]
        self.kinds[slot] = KIND_W
        for free in range(earliest, slot):
            if self.kinds[free] == KIND_W:
                self.kinds[free] = kind
                if self._settle(free, slot, limit):
                    return free
                self.kinds[free] = KIND_W
        self.kinds[slot] = kind
        return slot

    def _settle(self, first: int, last: int, limit: int) -> bool:
        """Count anew from a slot on; past `last`, stop where nothing changes. False: too much."""
        held, owed = (self.held[first - 1], self.owed[first - 1]) if first else (0, 0)
        found: list[tuple[int, int]] = []
        for at in range(first, len(self.kinds)):
            if self.kinds[at] == KIND_F:
                held += 1
            elif self.kinds[at] == KIND_I:
                owed += 1
            elif owed:
                held, owed = held - 1, owed - 1
            if held > limit:
                return False
            if at > last and (held, owed) == (self.held[at], self.owed[at]):
                break
            found.append((held, owed))
        for at, (held, owed) in enumerate(found, first):
            self.held[at], self.owed[at] = held, owed
        return True

"""Pipelines in both directions over the same ranks: Chimera, and Chimera with split backward."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from fxpipe.packed import KIND_F, B, F, I, W, kind_of, microbatch_of, stage_of
from fxpipe.schedules.family import BIDIRECTIONAL, even_ranks, family, multiple_of_ranks
from fxpipe.schedules.times import Times


def _whole_pipes(p: int, stages: int, options: dict[str, Any]) -> str:
    f = options.get("f", 1)
    if problem := even_ranks(p, stages, options):
        return problem
    if f >= 1 and p // 2 % f == 0:
        return ""
    fits = ", ".join(str(n) for n in range(1, p // 2 + 1) if p // 2 % n == 0)
    return f"f={f} does not divide ranks/2={p // 2}; use f from {fits}"


_FACTS: dict[str, Any] = dict(
    placement=BIDIRECTIONAL,
    messages="2*(p - 1)*m",
    weights="2*f",
    constraint="p even, p/2 a multiple of f",
    check=_whole_pipes,
    legal_microbatches=multiple_of_ranks,
)


def _slots(p: int, m: int, f: int) -> list[list[tuple[int, int]]]:
    """Per rank, (slot, code) in order of slots: 2f pipelines that never meet in a slot.

    The k-th microbatch of a pipeline passes stage s forwards at slot 2k + s of its unit of p
    microbatches. Pipelines take the microbatches in turn.
    """
    lines: list[list[tuple[int, int]]] = [[] for _ in range(p)]
    per_unit = p // (2 * f)
    for pipe in range(2 * f):
        for stage in range(p):
            shift = stage if pipe % 2 == 0 else p - 1 - stage
            line = lines[(shift + pipe // 2 * (p // f)) % p]
            for index in range(m // (2 * f)):
                unit, k = divmod(index, per_unit)
                start, microbatch = 2 * p * unit + 2 * k, index * 2 * f + pipe
                line.append((start + stage, F(stage, microbatch)))
                line.append((start + p + (p - 1 - stage), B(stage, microbatch)))
    return [sorted(line) for line in lines]


@family(
    "chimera",
    splits_backward=False,
    flush="(p - 2*f)/f*((B + W) + (m/p - 1)*(B + W - F))",
    peak="p - p/(2*f) + 1 + Min(Mod(r, p/f), p/f - 1 - Mod(r, p/f))",
    holds="m mod p = 0, B + W >= F",
    takes=("f",),
    source="Chimera (arXiv 2107.06925), SC 2021",
    **_FACTS,
)
def chimera(p: int, m: int, f: int = 1) -> Iterator[list[int]]:
    """2f pipelines, half of them from the last rank to the first, fill each other's bubbles."""
    for line in _slots(p, m, f):
        yield [code for _, code in line]


@family(
    "chimera-zb",
    splits_backward=True,
    flush="(p/(2*f) - 1)*(F + B - W)",
    peak="p",
    holds="m mod p = 0, F = B >= W > F/2 (with shorter W it is less)",
    takes=("f", "times", "memory_limit"),
    source="Chimera's order with the backward split after Zero Bubble (arXiv 2401.10241)",
    **_FACTS,
)
def chimera_zb(
    p: int, m: int, f: int = 1, times: Times | None = None, memory_limit: float | None = None
) -> Iterable[list[int]]:
    """Chimera's order with split backward: an owed W runs where a rank would wait for its time.

    No more than p microbatches (or the limit) are in flight on a rank, where an owed W can help.
    """
    orders = []
    for line in _slots(p, m, f):
        codes = (code for _, code in line)
        orders.append(
            [c if kind_of(c) == KIND_F else I(stage_of(c), microbatch_of(c)) for c in codes]
        )
    return fill_with_w(orders, times or Times.equal(p), memory_limit or p)


def fill_with_w(orders: list[list[int]], times: Times, limit: float) -> list[list[int]]:
    """Lines of F and I with each W put where the next of them is not ready for W's time."""
    return _Filler(orders, times, limit).run()


class _Filler:
    def __init__(self, orders: list[list[int]], times: Times, limit: float) -> None:
        self.times, self.limit = times, limit
        self.rest = [deque(order) for order in orders]
        self.owed: list[deque[int]] = [deque() for _ in orders]
        self.lines: list[list[int]] = [[] for _ in orders]
        self.free_at = [0.0] * len(orders)
        self.held = [0] * len(orders)
        self.last = max(stage_of(code) for order in orders for code in order)
        self.ends: dict[int, tuple[float, int]] = {}
        self.clock = [0.0]

    def run(self) -> list[list[int]]:
        while self.clock:
            now = heapq.heappop(self.clock)
            idle = [rank for rank, free in enumerate(self.free_at) if free <= now]
            # First all that is ready: only then is known when the others' next is.
            idle = [rank for rank in idle if not self.start_next(rank, now)]
            for rank in idle:
                if self.owed[rank] and self.has_time(rank, now):
                    code = self.owed[rank].popleft()
                    self.held[rank] -= 1
                    self.run_for(rank, code, now, self.times.W[stage_of(code)])
        return self.lines

    def start_next(self, rank: int, now: float) -> bool:
        ready = self.ready_at(rank)
        if ready is None or ready > now or self.is_full(rank):
            return False
        code = self.rest[rank].popleft()
        stage, microbatch = stage_of(code), microbatch_of(code)
        if kind_of(code) == KIND_F:
            self.held[rank] += 1
            duration = self.times.F[stage]
        else:
            self.owed[rank].append(W(stage, microbatch))
            duration = self.times.I[stage]
        self.run_for(rank, code, now, duration)
        return True

    def run_for(self, rank: int, code: int, now: float, duration: float) -> None:
        self.lines[rank].append(code)
        self.free_at[rank] = now + duration
        self.ends[code] = now + duration, rank
        for time in {now + duration, now + duration + self.times.transfer}:
            heapq.heappush(self.clock, time)

    def ready_at(self, rank: int) -> float | None:
        """When the next F or I of a rank can start; None where that is not known yet."""
        if not self.rest[rank]:
            return None
        code = self.rest[rank][0]
        stage, microbatch = stage_of(code), microbatch_of(code)
        if kind_of(code) == KIND_F:
            need = F(stage - 1, microbatch) if stage else None
        else:
            need = F(stage, microbatch) if stage == self.last else I(stage + 1, microbatch)
        if need is None:
            return 0.0
        if need not in self.ends:
            return None
        end, giver = self.ends[need]
        return end + (self.times.transfer if giver != rank else 0.0)

    def is_full(self, rank: int) -> bool:
        """Whether the next is a forward that an owed W has to make room for."""
        is_forward = kind_of(self.rest[rank][0]) == KIND_F
        return is_forward and bool(self.owed[rank]) and self.held[rank] + 1 > self.limit

    def has_time(self, rank: int, now: float) -> bool:
        ready = self.ready_at(rank)
        if ready is None or self.is_full(rank):
            return True
        return ready >= now + self.times.W[stage_of(self.owed[rank][0])]

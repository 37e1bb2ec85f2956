"""A placement and costs -> an order of F, I and W found by simulating, W filling the gaps.

The rule is that of the zero-bubble heuristic (arXiv 2401.10241, section 3.1): a rank takes the F
or I that can start first; a weight gradient, which nobody awaits, runs when the next of them is
at least about its own length away, or when memory is full; what is left over runs at the end.
"""

from __future__ import annotations

import math
from array import array
from bisect import insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from fxpipe import packed
from fxpipe.costs import Costs, StageCosts, per_stage
from fxpipe.packed import KIND_B, KIND_F, KIND_I, kind_of, microbatch_of, stage_of
from fxpipe.schedule import Schedule

Placement = Mapping[tuple[int, int], int]


@dataclass(frozen=True)
class Policy:
    """How ties and gaps are decided.

    fill: a W runs when the next F or I is at least this many lengths of the W away.
    forward_first: of an F and an I that can start at the same time, the F.
    deep_first: of two forwards, the one of the later stage; else of the earlier one.
    """

    fill: float = 1.0
    forward_first: bool = False
    deep_first: bool = True


POLICIES = tuple(Policy(*choice) for choice in product((1.0, 0.5), (False, True), (True, False)))


def list_schedule(
    placement: Placement,
    costs: Costs,
    memory_limit: float | Sequence[float] | None = None,
    policy: Policy = POLICIES[0],
    order: Schedule | None = None,
) -> Schedule | None:
    """A schedule that holds at most memory_limit activations, one for all or one per rank.

    placement: (stage, microbatch) -> rank. With `order`, each rank keeps that schedule's order of
    F and backward, and only W is placed anew. None where one microbatch alone exceeds the limit,
    or the given order cannot be kept within it.
    """
    stages = 1 + max(stage for stage, _ in placement)
    ranks = 1 + max(placement.values())
    resolved = per_stage(costs, ranks=ranks, stages=stages)
    if memory_limit is None or isinstance(memory_limit, (int, float)):
        memory_limit = [math.inf if memory_limit is None else memory_limit] * ranks
    scheduler = _Scheduler(placement, resolved, memory_limit, policy, order)
    lines = scheduler.run()
    return Schedule.from_packed(lines, "list") if lines is not None else None


@dataclass
class _Rank:
    """What a rank has run, holds, and could run next."""

    limit: float
    clock: float = 0.0
    held: float = 0.0
    line: array[int] = field(default_factory=lambda: array("q"))
    owed: deque[tuple[int, int]] = field(default_factory=deque)
    # Per (kind, stage), the microbatches whose inputs have a known arrival.
    known: dict[tuple[int, int], list[tuple[int, float]]] = field(default_factory=dict)
    # Per microbatch in flight, what its forwards here still have to save.
    lacking: dict[int, float] = field(default_factory=dict)
    order: deque[tuple[int, int, int]] | None = None


_Choice = tuple[float, tuple[int, ...], int, int, int]  # start, preference, kind, stage, microbatch


class _Scheduler:
    def __init__(
        self,
        placement: Placement,
        costs: StageCosts,
        limits: Sequence[float],
        policy: Policy,
        order: Schedule | None,
    ) -> None:
        self.placement, self.costs, self.policy = placement, costs, policy
        self.ranks = [_Rank(limit + 1e-9) for limit in limits]
        self.readers: dict[tuple[int, int], list[tuple[int, float]]] = {}
        self.missing: dict[tuple[int, int, int], int] = {}
        self.arrival: dict[tuple[int, int, int], float] = {}
        # What a microbatch saves on a rank in all.
        self.total: dict[tuple[int, int], float] = {}
        for (stage, microbatch), rank in placement.items():
            key = rank, microbatch
            self.total[key] = self.total.get(key, 0.0) + costs.activations[stage]
        if order is not None:
            for state, line in zip(self.ranks, order.packed, strict=True):
                state.order = deque(_forwards_and_input_grads(line))
        self._connect()

    def _connect(self) -> None:
        """Who reads whose result; what reads nothing is known from the start."""
        stages = len(self.costs.F)
        self.readers = {(kind, stage): [] for kind in (KIND_F, KIND_I) for stage in range(stages)}
        sources = dict.fromkeys(self.readers, 0)
        for source, destination in self.costs.edges:
            there, back = (source, destination), (destination, source)
            self.readers[KIND_F, source].append((destination, self.costs.transfer[there]))
            self.readers[KIND_I, destination].append((source, self.costs.transfer[back]))
            sources[KIND_F, destination] += 1
            sources[KIND_I, source] += 1
        for stage, microbatch in self.placement:
            self.missing[KIND_F, stage, microbatch] = sources[KIND_F, stage]
            self.missing[KIND_I, stage, microbatch] = sources[KIND_I, stage] + 1
            if not sources[KIND_F, stage]:
                self._learn(KIND_F, stage, microbatch, 0.0)

    def run(self) -> list[array[int]] | None:
        if any(total > self.ranks[rank].limit for (rank, _), total in self.total.items()):
            return None
        choices = [self._choose(rank) for rank in self.ranks]
        for _ in range(3 * len(self.placement)):
            first = min(range(len(choices)), key=lambda rank: (choices[rank][0], rank))
            start, _, kind, stage, microbatch = choices[first]
            if math.isinf(start):
                return None
            touched = self._commit(first, start, kind, stage, microbatch)
            for rank in touched:
                choices[rank] = self._choose(self.ranks[rank])
        return [rank.line for rank in self.ranks]

    def _choose(self, rank: _Rank) -> _Choice:
        """What a rank would run next, and when; never (inf) if it can run nothing yet."""
        best: _Choice = (math.inf, (), -1, -1, -1)
        for choice in self._candidates(rank):
            best = min(best, choice)
        if rank.owed:
            stage, microbatch = rank.owed[0]
            if best[0] - rank.clock >= self.policy.fill * self.costs.W[stage] - 1e-12:
                return rank.clock, (), packed.KIND_W, stage, microbatch
        return best

    def _candidates(self, rank: _Rank) -> list[_Choice]:
        found: list[tuple[int, int, int, float]] = []
        if rank.order:
            kind, stage, microbatch = rank.order[0]
            for known, arrival in rank.known.get((kind, stage), ()):
                if known == microbatch:
                    found.append((kind, stage, microbatch, arrival))
        elif rank.order is None:
            for (kind, stage), waiting in rank.known.items():
                if waiting:
                    found.append((kind, stage, *waiting[0]))
        choices: list[_Choice] = []
        for kind, stage, microbatch, arrival in found:
            if kind == KIND_I or self._fits(rank, stage, microbatch):
                preference = self._preference(kind, stage, microbatch)
                start = max(rank.clock, arrival)
                choices.append((start, preference, kind, stage, microbatch))
        return choices

    def _preference(self, kind: int, stage: int, microbatch: int) -> tuple[int, ...]:
        if kind == KIND_I:
            return 1, microbatch, -stage
        side = 0 if self.policy.forward_first else 2
        return (side, -stage, microbatch) if self.policy.deep_first else (side, stage, microbatch)

    def _fits(self, rank: _Rank, stage: int, microbatch: int) -> bool:
        """Whether an F leaves room for the oldest microbatch in flight to finish.

        Without that a rank with several stages could fill up with early forwards for ever.
        """
        free = rank.limit - rank.held - self.costs.activations[stage]
        oldest = min(rank.lacking, default=microbatch)
        if microbatch > oldest:
            return free >= rank.lacking[oldest]
        return free >= 0

    def _learn(self, kind: int, stage: int, microbatch: int, arrival: float) -> int:
        """The last input of an action has a known arrival: it is a candidate."""
        rank = self.placement[stage, microbatch]
        insort(self.ranks[rank].known.setdefault((kind, stage), []), (microbatch, arrival))
        return rank

    def _commit(
        self, number: int, start: float, kind: int, stage: int, microbatch: int
    ) -> set[int]:
        """Run an action; the ranks whose choice may have changed."""
        rank, costs = self.ranks[number], self.costs
        times = (costs.F, costs.I, costs.W)
        rank.clock = end = start + times[kind][stage]
        rank.line.append(kind | packed.F(stage, microbatch))
        if kind == packed.KIND_W:
            rank.owed.popleft()
            rank.held -= costs.saved_for_w[stage]
            return {number}
        known = rank.known[kind, stage]
        known.pop(next(i for i, (other, _) in enumerate(known) if other == microbatch))
        if rank.order is not None:
            rank.order.popleft()
        if kind == KIND_F:
            self._save(rank, number, stage, microbatch)
        else:
            rank.owed.append((stage, microbatch))
            rank.held -= costs.activations[stage] - costs.saved_for_w[stage]
        return {number, *self._spread(number, kind, stage, microbatch, end)}

    def _save(self, rank: _Rank, number: int, stage: int, microbatch: int) -> None:
        saved = self.costs.activations[stage]
        rank.held += saved
        left = rank.lacking.get(microbatch, self.total[number, microbatch]) - saved
        rank.lacking[microbatch] = left
        if left <= 1e-12:
            del rank.lacking[microbatch]

    def _spread(self, number: int, kind: int, stage: int, microbatch: int, end: float) -> list[int]:
        """Tell the readers of a result when it arrives."""
        reached = [(kind, reader, delay) for reader, delay in self.readers[kind, stage]]
        if kind == KIND_F:
            reached.append((KIND_I, stage, 0.0))
        touched = []
        for reader_kind, reader, delay in reached:
            key = reader_kind, reader, microbatch
            if self.placement[reader, microbatch] == number:
                delay = 0.0
            self.arrival[key] = max(self.arrival.get(key, 0.0), end + delay)
            self.missing[key] -= 1
            if not self.missing[key]:
                touched.append(self._learn(*key, self.arrival[key]))
        return touched


def _forwards_and_input_grads(line: Sequence[int]) -> list[tuple[int, int, int]]:
    """A rank's order as (kind, stage, microbatch), B as I, without W, pairs opened."""
    return [
        (KIND_I if kind_of(code) == KIND_B else kind_of(code), stage_of(code), microbatch_of(code))
        for code in line
        if kind_of(code) in (KIND_F, KIND_I, KIND_B)
    ]

"""A wide schedule -> its timeline, all ranks advancing by one unit at a time in numpy.

The meaning is that of fxpipe.events; this is the same for many ranks, as arrays. It takes one
round per unit of the longest chain, so it wins where many ranks work at the same time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fxpipe.costs import Costs, Edge, StageCosts
from fxpipe.events import Events
from fxpipe.packed import (
    FIELD_MASK,
    JOINED,
    KIND_B,
    KIND_F,
    KIND_I,
    KIND_W,
    MICROBATCH_SHIFT,
    STAGE_SHIFT,
)
from fxpipe.schedule import Schedule
from fxpipe.simulator import Timeline, simulate_in_turn

Array = np.ndarray[Any, Any]


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """As fxpipe.simulator.simulate, which gets what has messages, deadlocks or lacks an action."""
    actions = _actions(schedule)
    has_messages = bool((actions.kind > KIND_B).any())
    events = Events(schedule, costs, int(actions.stage.max()) + 1, has_messages)
    if has_messages:
        return simulate_in_turn(events)
    awaited = _await(actions, events)
    spans = awaited and _run(actions, awaited, events.costs)
    if not spans:
        return simulate_in_turn(events)
    return _WideTimeline(events, actions, *spans)


@dataclass(frozen=True)
class _Actions:
    """Every action of every rank, rank after rank; a unit is an action or the two of a pair."""

    kind: Array
    stage: Array
    microbatch: Array
    rank: Array
    first: Array  # whether the action begins a unit
    unit: Array  # the unit it belongs to
    offsets: Array  # per rank its first unit, and the number of units at the end

    @property
    def num_units(self) -> int:
        return int(self.offsets[-1])

    @cached_property
    def num_microbatches(self) -> int:
        return int(self.microbatch.max()) + 1

    @cached_property
    def has_pairs(self) -> bool:
        return not self.first.all()

    @cached_property
    def rank_of_unit(self) -> Array:
        return self.rank[self.first] if self.has_pairs else self.rank

    @cached_property
    def gives_input_grad(self) -> Array:
        return (self.kind == KIND_I) | (self.kind == KIND_B)

    def sum_by_unit(self, values: Array) -> Array:
        return np.bincount(self.unit, values, self.num_units)


def _actions(schedule: Schedule) -> _Actions:
    lines = [np.frombuffer(line, np.int64) for line in schedule.packed]
    codes = np.concatenate(lines)
    first: Array = np.ones(len(codes), bool)
    first[1:] = (codes[:-1] & JOINED) == 0
    rank: Array = np.repeat(np.arange(len(lines), dtype=np.int32), [len(line) for line in lines])
    units = np.bincount(rank[first], minlength=len(lines))
    return _Actions(
        kind=(codes & 7).astype(np.int8),
        stage=(codes >> STAGE_SHIFT & FIELD_MASK).astype(np.int32),
        microbatch=(codes >> MICROBATCH_SHIFT & FIELD_MASK).astype(np.int32),
        rank=rank,
        first=first,
        unit=np.cumsum(first, dtype=np.int32) - np.int32(1),
        offsets=np.concatenate(([0], np.cumsum(units))),
    )


class _Awaited:
    """Columns over the units: a unit awaited (num_units where there is none), and the delay.

    A column holds one source of each unit's first action, or of its second; so F and backward
    share columns, except in pairs.
    """

    def __init__(self, actions: _Actions) -> None:
        self.num_units = actions.num_units
        self.columns: dict[tuple[bool, int], tuple[Array, Array | None]] = {}

    def add(self, key: tuple[bool, int], unit: Array, awaited: Array, delay: Array | None) -> None:
        """Enter what some units await into the column of that key."""
        if key not in self.columns:
            self.columns[key] = np.full(self.num_units, self.num_units, np.int32), None
        column, delays = self.columns[key]
        column[unit] = awaited
        if delay is not None:
            if delays is None:
                delays = np.zeros(self.num_units)
                self.columns[key] = column, delays
            delays[unit] = delay


def _await(actions: _Actions, events: Events) -> _Awaited | None:
    """What each unit awaits of other stages; None where the schedule is one to be refused."""
    forwards = np.flatnonzero(actions.kind == KIND_F)
    backwards = np.flatnonzero(actions.gives_input_grad)
    weight_grads = np.flatnonzero(actions.kind == KIND_W)
    forward_done, backward_done = _table(actions, forwards), _table(actions, backwards)
    if not _own_come_first(actions, backwards, forward_done):
        return None
    if not _own_come_first(actions, weight_grads, backward_done):
        return None
    awaited = _Awaited(actions)
    for chosen, done, sources in (
        (forwards, forward_done, events.forward_sources),
        (backwards, backward_done, events.backward_sources),
    ):
        for number in range(max(map(len, sources))):
            nth = [of_stage[number : number + 1] for of_stage in sources]
            if not _await_nth(actions, chosen, done, nth, awaited, number):
                return None
    return awaited


def _place(actions: _Actions, stage: Array, chosen: Array) -> Array:
    """Where a table over (stage, microbatch), laid flat, has the microbatches of some actions."""
    return stage * np.int64(actions.num_microbatches) + actions.microbatch[chosen]


def _table(actions: _Actions, chosen: Array) -> Array:
    """(stage, microbatch), laid flat -> the unit of the chosen action, -1 where there is none."""
    size = (int(actions.stage.max()) + 1) * actions.num_microbatches
    table: Array = np.full(size, -1, np.int32)
    table[_place(actions, actions.stage[chosen], chosen)] = actions.unit[chosen]
    return table


def _own_come_first(actions: _Actions, chosen: Array, done: Array) -> bool:
    """Whether what the chosen actions read of their own stage is run before, on their rank."""
    own = done[_place(actions, actions.stage[chosen], chosen)]
    if not len(own) or own.min() < 0:
        return not len(own)
    is_before = own < actions.unit[chosen]
    return bool(is_before.all() and (actions.rank_of_unit[own] == actions.rank[chosen]).all())


def _await_nth(
    actions: _Actions,
    chosen: Array,
    done: Array,
    sources: list[list[tuple[int, float]]],
    awaited: _Awaited,
    number: int,
) -> bool:
    """Enter the chosen actions' nth source, if they have it; False where it is never run."""
    source = np.array([pair[0][0] if pair else -1 for pair in sources], np.int32)
    delay = np.array([pair[0][1] if pair else 0.0 for pair in sources])
    chosen = chosen[source[actions.stage[chosen]] >= 0]
    if not len(chosen):
        return True
    stage = actions.stage[chosen]
    results = done[_place(actions, source[stage], chosen)]
    if results.min() < 0:
        return False
    delays = None
    if delay.any():
        delays = delay[stage] * (actions.rank_of_unit[results] != actions.rank[chosen])
    if not actions.has_pairs:
        awaited.add((True, number), actions.unit[chosen], results, delays)
        return True
    is_first = actions.first[chosen]
    for first in (True, False):
        part = is_first == first
        part_delays = delays if delays is None else delays[part]
        awaited.add((first, number), actions.unit[chosen][part], results[part], part_delays)
    return True


def _run(actions: _Actions, awaited: _Awaited, costs: StageCosts) -> tuple[Array, Array] | None:
    """Starts and ends of all units, or None on deadlock."""
    times = _times(actions, costs)
    starts = np.zeros(actions.num_units)
    # What has not ended ends never, for now; a unit that awaits nothing reads the last place.
    ends = np.full(actions.num_units + 1, np.inf)
    ends[-1] = -np.inf
    following = actions.offsets[:-1].copy()
    stop = actions.offsets[1:]
    clock = np.zeros(len(stop))
    columns = list(awaited.columns.values())
    active = np.flatnonzero(following < stop)
    while len(active):
        unit = following[active]
        start = clock[active]
        for column, delays in columns:
            arrival = ends[column[unit]]
            np.maximum(start, arrival if delays is None else arrival + delays[unit], out=start)
        ready = np.flatnonzero(start < np.inf)
        if not len(ready):
            return None
        unit, start, rank = unit[ready], start[ready], active[ready]
        starts[unit] = start
        ends[unit] = clock[rank] = start + times[unit]
        following[rank] += 1
        if (following[rank] == stop[rank]).any():
            active = active[following[active] < stop[active]]
    return starts, ends[:-1]


def _times(actions: _Actions, costs: StageCosts) -> Array:
    per_kind = np.array([costs.F, costs.I, costs.W, costs.B])
    times = actions.sum_by_unit(per_kind[actions.kind, actions.stage])
    backwards = np.flatnonzero(~actions.first & (actions.kind == KIND_B))
    for index in backwards if costs.pair is not None else ():
        stages = int(actions.stage[index - 1]), int(actions.stage[index])
        times[actions.unit[index]] = costs.pair_time(*stages)
    return times


class _WideTimeline(Timeline):
    """A timeline whose sums are taken in numpy."""

    def __init__(self, events: Events, actions: _Actions, starts: Array, ends: Array) -> None:
        inner = actions.offsets[1:-1]
        super().__init__(events, np.split(starts, inner), np.split(ends, inner))
        self._actions = actions

    @cached_property
    def busy(self) -> list[float]:
        return [
            float(np.subtract(ends, starts).sum())
            for starts, ends in zip(self.starts, self.ends, strict=True)
        ]

    @cached_property
    def peak_activations(self) -> list[float]:
        actions, costs = self._actions, self.costs
        saved, left = np.array(costs.activations), np.array(costs.saved_for_w)
        nothing = np.zeros_like(saved)
        stage = actions.stage
        taken = np.array([saved, nothing, nothing, nothing])[actions.kind, stage]
        freed = np.array([nothing, saved - left, left, saved])[actions.kind, stage]
        taken, freed = actions.sum_by_unit(taken), actions.sum_by_unit(freed)
        pairs = actions.unit[~actions.first]
        taken[pairs] += costs.pair_temporaries
        freed[pairs] += costs.pair_temporaries
        peaks = []
        for rank in range(len(actions.offsets) - 1):
            units = slice(actions.offsets[rank], actions.offsets[rank + 1])
            held: Array = np.cumsum(taken[units] - freed[units]) + freed[units]
            peaks.append(round(float(held.max(initial=0.0)), 9))
        return peaks

    @cached_property
    def weights(self) -> list[float]:
        held: Array = np.zeros((len(self.starts), len(self.costs.weights)), bool)
        held[self._actions.rank, self._actions.stage] = True
        return [float(weights) for weights in held @ np.array(self.costs.weights)]

    def _edge_messages(self) -> Counter[tuple[int, int, Edge]]:
        actions, num_ranks = self._actions, np.int64(len(self.starts))
        edges = list(self.costs.edges)
        forwards = actions.kind == KIND_F
        sender: Array = np.full(
            (len(self.costs.F), int(actions.microbatch.max()) + 1), -1, np.int32
        )
        sender[actions.stage[forwards], actions.microbatch[forwards]] = actions.rank[forwards]
        counts: Counter[tuple[int, int, Edge]] = Counter()
        for chosen, reader, read in ((forwards, 1, 0), (actions.gives_input_grad, 0, 1)):
            numbers = np.arange(len(edges))
            while len(numbers):
                # One edge of every reading stage at a time.
                stages, first = np.unique([edges[n][reader] for n in numbers], return_index=True)
                edge_of: Array = np.full(len(self.costs.F), -1, np.int64)
                edge_of[stages] = numbers[first]
                here = np.flatnonzero(chosen & (edge_of[actions.stage] >= 0))
                edge = edge_of[actions.stage[here]]
                source = np.array([e[read] for e in edges])[edge]
                link = sender[source, actions.microbatch[here]] * num_ranks + actions.rank[here]
                keys, sizes = np.unique(edge * num_ranks**2 + link, return_counts=True)
                for key, size in zip(keys.tolist(), sizes.tolist(), strict=True):
                    number, ranks = divmod(key, int(num_ranks) ** 2)
                    from_rank, to_rank = divmod(ranks, int(num_ranks))
                    if from_rank != to_rank:
                        counts[from_rank, to_rank, edges[number]] += size
                numbers = np.delete(numbers, first)
        return counts

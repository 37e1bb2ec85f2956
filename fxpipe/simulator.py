"""A schedule and costs -> when every action runs, what it waits for, and what it holds in memory.

What waits for what is in fxpipe.events. Simulated time is exact: nothing is sampled. Running time
is linear in the number of actions: about 8 microseconds each in plain Python. With numpy all ranks
advance at once (fxpipe.wavefront): about 50 microseconds for each unit of the longest chain, and
0.25 for each action; 1f1b of 1,024 ranks and 4,096 microbatches, 8.4 million actions, takes 4
seconds, and as long again to be built. benchmarks/simulator.py measures it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec

from fxpipe.costs import Costs, Edge, StageCosts
from fxpipe.errors import ScheduleError
from fxpipe.events import Events, result_of, text
from fxpipe.packed import stage_of
from fxpipe.schedule import Schedule

UNIT_COSTS = Costs()

# From so many ranks and actions on, all ranks advance at once in numpy.
_WIDE_RANKS, _WIDE_ACTIONS = 8, 20_000


def simulate(schedule: Schedule, costs: Costs = UNIT_COSTS) -> Timeline:
    """Run a schedule on costs. Raises ScheduleError naming who waits for what on deadlock."""
    lines = schedule.packed
    if len(lines) >= _WIDE_RANKS and sum(map(len, lines)) >= _WIDE_ACTIONS and find_spec("numpy"):
        from fxpipe import wavefront

        return wavefront.simulate(schedule, costs)
    return simulate_in_turn(Events(schedule, costs))


@dataclass(frozen=True)
class Gap:
    """An idle time of a rank, and what it waits for; nothing (None) after its last unit."""

    rank: int
    start: float
    end: float
    unit: str | None
    awaited: str | None
    awaited_rank: int | None

    def __str__(self) -> str:
        cause = f"{self.unit} waits for {self.awaited} of rank {self.awaited_rank}"
        return f"rank {self.rank} idle {self.start:g}..{self.end:g}: " + (
            cause if self.unit else "finished"
        )


@dataclass(frozen=True)
class Link:
    """What one step sends from one rank to another."""

    messages: int
    bytes: float


class Timeline:
    """When each unit of each rank runs, and what follows from it.

    starts, ends: per rank, aligned with `schedule.ranks[rank]`; the step begins at 0.
    """

    def __init__(
        self, events: Events, starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]
    ) -> None:
        self._events = events
        self.schedule = events.schedule
        self.starts = starts
        self.ends = ends

    @property
    def costs(self) -> StageCosts:
        """The costs it was simulated with, written out per stage."""
        return self._events.costs

    @cached_property
    def makespan(self) -> float:
        """The end of the last unit, or of the last reduction of replicated stages."""
        ends = [float(ends[-1]) for ends in self.ends if len(ends)]
        return max([*ends, *self.reduced.values()], default=0.0)

    @cached_property
    def reduced(self) -> dict[int, float]:
        """Replicated stage -> when its gradients are summed; empty if that costs no time."""
        if not any(self.costs.reduce):
            return {}
        ready: dict[int, float] = {}
        for units_of_rank, ends in zip(self._events.units, self.ends, strict=True):
            for unit, end in zip(units_of_rank, ends, strict=True):
                for code in unit:
                    ready[stage_of(code)] = max(ready.get(stage_of(code), 0.0), float(end))
        free = [0.0] * len(self.ends)
        reduced: dict[int, float] = {}
        for stage in sorted(ready, key=lambda stage: (ready[stage], stage)):
            ranks = self.schedule.holders[stage]
            if len(ranks) > 1:
                start = max(ready[stage], *(free[rank] for rank in ranks))
                reduced[stage] = start + self.costs.reduce[stage]
                for rank in ranks:
                    free[rank] = reduced[stage]
        return reduced

    @cached_property
    def busy(self) -> list[float]:
        """Per rank, the time in which it computes."""
        return [
            sum(end - start for start, end in zip(*spans, strict=True))
            for spans in zip(self.starts, self.ends, strict=True)
        ]

    @cached_property
    def work(self) -> float:
        """The computing time of all ranks shared out evenly: m(F + B + W) for equal stages."""
        return sum(self.busy) / max(1, len(self.busy))

    @property
    def bubble_flush_time(self) -> float:
        """makespan - work: the idle time of a rank when every step ends with a barrier."""
        return max(0.0, self.makespan - self.work)

    @property
    def bubble_own_time(self) -> float:
        """The longest span of a rank, from its first unit's start to its last one's end, - work.

        Meaningful where ranks may begin the next step at different times (arXiv 2401.10241).
        """
        spans = [
            float(ends[-1] - starts[0])
            for starts, ends in zip(self.starts, self.ends, strict=True)
            if len(ends)
        ]
        return max(0.0, max(spans, default=0.0) - self.work)

    @property
    def bubble_flush(self) -> float:
        """bubble_flush_time as a part of itself and the work."""
        return _ratio(self.bubble_flush_time, self.work)

    @property
    def bubble_own(self) -> float:
        """bubble_own_time as a part of itself and the work."""
        return _ratio(self.bubble_own_time, self.work)

    @cached_property
    def peak_activations(self) -> list[float]:
        """Per rank, the most that is saved at once, a pair's temporaries included."""
        peaks = []
        for units_of_rank in self._events.units:
            held = peak = 0.0
            for unit in units_of_rank:
                taken, freed = self._events.memory(unit)
                peak = max(peak, held + taken)
                held += taken - freed
            peaks.append(round(peak, 9))
        return peaks

    @cached_property
    def weights(self) -> list[float]:
        """Per rank, the weights of the stages that it holds."""
        holds: list[set[int]] = [set() for _ in self._events.lines]
        for stage, ranks in self.schedule.holders.items():
            for rank in ranks:
                holds[rank].add(stage)
        return [sum(self.costs.weights[stage] for stage in sorted(stages)) for stages in holds]

    @cached_property
    def links(self) -> dict[tuple[int, int], Link]:
        """(source rank, destination rank) -> what one step sends; sorted."""
        counts = self._edge_messages()
        sizes: dict[tuple[int, int], list[float]] = {}
        for (source_rank, rank, edge), count in counts.items():
            link = sizes.setdefault((source_rank, rank), [0, 0.0])
            link[0] += count
            link[1] += count * self.costs.edges[edge]
        return {ranks: Link(int(n), size) for ranks, (n, size) in sorted(sizes.items())}

    def _edge_messages(self) -> Counter[tuple[int, int, Edge]]:
        """How often each (source rank, destination rank, edge of the stages) is used."""
        counts: Counter[tuple[int, int, Edge]] = Counter()
        for rank, line in enumerate(self._events.lines):
            for code in line:
                for sender, edge in self._events.reads(code):
                    if sender != rank:
                        counts[sender, rank, edge] += 1
        return counts

    def messages(self, rank: int) -> int:
        """How many messages a rank sends in a step."""
        return sum(link.messages for (source, _), link in self.links.items() if source == rank)

    def gaps(self, rank: int) -> list[Gap]:
        """The idle times of a rank, in order, each with what it waits for."""
        gaps, clock = [], 0.0
        spans = zip(self._events.units[rank], self.starts[rank], self.ends[rank], strict=True)
        for unit, start, end in spans:
            if start > clock:
                awaited = max(self._events.awaited(unit, rank), key=self._arrival)[0]
                gaps.append(
                    Gap(
                        rank,
                        clock,
                        start,
                        text(unit),
                        text((awaited,)),
                        self._events.runner[awaited],
                    )
                )
            clock = end
        if clock < self.makespan:
            gaps.append(Gap(rank, clock, self.makespan, None, None, None))
        return gaps

    def _arrival(self, need: tuple[int, float]) -> float:
        action, delay = need
        return self._end_of[result_of(action)] + delay

    @cached_property
    def _end_of(self) -> dict[int, float]:
        return {
            result_of(code): end
            for units_of_rank, ends in zip(self._events.units, self.ends, strict=True)
            for unit, end in zip(units_of_rank, ends, strict=True)
            for code in unit
        }


def _ratio(bubble: float, work: float) -> float:
    return bubble / (bubble + work) if bubble + work > 0 else 0.0


def simulate_in_turn(events: Events) -> Timeline:
    """Let every rank run ahead until it waits; whoever ends an awaited action wakes the waiting."""
    starts: list[list[float]] = [[] for _ in events.lines]
    ends: list[list[float]] = [[] for _ in events.lines]
    done: dict[int, float] = {}
    waiting: dict[int, list[int]] = {}
    queue = deque(range(events.num_ranks))
    while queue:
        rank = queue.popleft()
        units_of_rank, ends_of_rank = events.units[rank], ends[rank]
        clock = ends_of_rank[-1] if ends_of_rank else 0.0
        while len(ends_of_rank) < len(units_of_rank):
            unit = units_of_rank[len(ends_of_rank)]
            start, missing = _start(events.awaited(unit, rank), done, clock)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            clock = start + events.time(unit)
            starts[rank].append(start)
            ends_of_rank.append(clock)
            for code in unit:
                result = result_of(code)
                done[result] = clock
                if result in waiting:
                    queue.extend(waiting.pop(result))
    if waiting:
        raise ScheduleError(_deadlock(events, [len(line) for line in ends], waiting))
    return Timeline(events, starts, ends)


def _start(
    needs: list[tuple[int, float]], done: dict[int, float], clock: float
) -> tuple[float, int | None]:
    """When a unit can start from `clock` on, or the action that it still misses."""
    for action, delay in needs:
        if action not in done:
            return clock, action
        clock = max(clock, done[action] + delay)
    return clock, None


def _deadlock(events: Events, positions: list[int], waiting: dict[int, list[int]]) -> str:
    """Who waits at which unit for which action of which rank."""
    waits = []
    for action, ranks in waiting.items():
        for rank in ranks:
            runner = events.runner.get(action)
            whose = "which no rank runs" if runner is None else f"of rank {runner}"
            unit = text(events.units[rank][positions[rank]])
            waits.append((rank, f"rank {rank} waits at {unit} for {text((action,))}, {whose}"))
    lines = [line for _, line in sorted(waits)]
    more = f"; and {len(lines) - 8} more ranks" if len(lines) > 8 else ""
    return f"the schedule {events.schedule.name!r} deadlocks: {'; '.join(lines[:8])}{more}"

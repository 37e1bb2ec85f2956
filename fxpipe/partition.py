"""Costs of items in topological order -> where stages begin, the slowest being fastest."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from fxpipe.errors import OptionError

Limit = float | Sequence[float]


def partition(
    costs: Sequence[float],
    stages: int,
    transfer: Sequence[float] | None = None,
    memory: Sequence[float] | None = None,
    memory_limit: Limit | None = None,
    *,
    ranks: int | None = None,
    names: Sequence[str] | None = None,
) -> list[int]:
    """The index at which each stage begins; stages are contiguous and none is empty.

    costs: time per item, any unit. transfer[i]: what a cut between items i and i + 1 costs the
    stage on either side of it (one sends activations there, the other gradients), same unit.
    memory: per item; a stage holds at most memory_limit (one for all, or one per stage). With
    `ranks` the limit is what a rank may hold, and a stage its part of it, ranks / stages.
    names: of the items, for the error where nothing fits; those without one are "".

    Minimises the time of the slowest stage; among equals the sum of squared times, then the
    earliest begins (an early stage keeps more microbatches alive, so it had better be small).
    Exact dynamic programming: a greedy split bounds the slowest stage and so the begins that are
    worth a look, which leaves about O(items) of them; O(stages * items^2) where it finds none.
    """
    part = ranks / stages if ranks and stages else 1.0
    split = _Split(costs, stages, transfer, memory, memory_limit, part)
    slowest = split.best(bound=split.greedy_bound(), worst=True)
    if slowest is None:
        raise OptionError(split.why_nothing_fits(ranks, names))
    starts = split.best(bound=max(split.times(slowest)), worst=False)
    assert starts is not None
    return starts


def equal_split(num_items: int, stages: int) -> list[int]:
    """The naive split: every stage gets as many items as the next, the first ones one more."""
    _check_stages(num_items, stages)
    size, extra = divmod(num_items, stages)
    return [stage * size + min(stage, extra) for stage in range(stages)]


def stage_times(
    costs: Sequence[float], starts: Sequence[int], transfer: Sequence[float] | None = None
) -> list[float]:
    """The time of each stage under a partition, with the transfers at its two cuts."""
    return _Split(costs, len(starts), transfer).times(list(starts))


class _Split:
    """The checked problem, with prefix sums."""

    def __init__(
        self,
        costs: Sequence[float],
        stages: int,
        transfer: Sequence[float] | None = None,
        memory: Sequence[float] | None = None,
        memory_limit: Limit | None = None,
        part: float = 1.0,
    ) -> None:
        self.num_items = len(costs)
        self.num_stages = stages
        _check_stages(self.num_items, stages)
        _check_numbers("costs", costs, self.num_items)
        self.time = [0.0, *accumulate(costs)]
        if transfer is not None:
            _check_numbers("transfer", transfer, self.num_items - 1)
        self.cut = [0.0, *(transfer or [0.0] * (self.num_items - 1)), 0.0]
        if (memory is None) != (memory_limit is None):
            raise OptionError("memory and memory_limit go together; give both or neither")
        if memory is not None:
            _check_numbers("memory", memory, self.num_items)
        self.memory = list(memory) if memory is not None else [0.0] * self.num_items
        self.held = [0.0, *accumulate(self.memory)]
        self.part = part
        self.limits = [part * limit for limit in _per_stage(memory_limit, stages)]

    def stage_time(self, start: int, end: int) -> float:
        return self.time[end] - self.time[start] + self.cut[start] + self.cut[end]

    def times(self, starts: list[int]) -> list[float]:
        ends = [*starts[1:], self.num_items]
        return [self.stage_time(*edges) for edges in zip(starts, ends, strict=True)]

    def best(self, bound: float, worst: bool) -> list[int] | None:
        """Minimise the slowest stage (`worst`) or the sum of squares, no stage above `bound`.

        Runs from the last stage to the first, so that among equals the earliest begins win.
        """
        items = self.num_items
        value = [math.inf] * items + [0.0]
        choices: list[list[int]] = []
        for stage in reversed(range(self.num_stages)):
            new, choice = [math.inf] * (items + 1), [0] * (items + 1)
            for start in self._begins(stage, bound):
                for end, time in self._ends(stage, start, bound):
                    total = max(time, value[end]) if worst else time * time + value[end]
                    if total < new[start]:
                        new[start], choice[start] = total, end
            value = new
            choices.append(choice)
        if math.isinf(value[0]):
            return None
        starts = [0]
        for choice in reversed(choices[1:]):
            starts.append(choice[starts[-1]])
        return starts

    def greedy_bound(self) -> float:
        """The slowest stage of some split that fits, by bisection; inf where none was found."""
        low, high, found = 0.0, self.time[-1] + 2 * max(self.cut), math.inf
        for _ in range(30):
            bound = (low + high) / 2 if found < math.inf else high
            slowest = self._fill(bound)
            if slowest is None and math.isinf(found):
                return math.inf
            if slowest is None:
                low = bound
            else:
                found, high = min(found, slowest), bound
        return found

    def _fill(self, bound: float) -> float | None:
        """Fill stages one after another up to `bound`; the slowest, or None if items are left."""
        start, slowest = 0, 0.0
        for stage in range(self.num_stages):
            ends = list(self._ends(stage, start, bound))
            if not ends:
                return None
            end, time = ends[-1]
            start, slowest = end, max(slowest, time)
        return slowest if start == self.num_items else None

    def _begins(self, stage: int, bound: float) -> range:
        """Where a stage can begin when no stage takes longer than `bound`."""
        slack = bound * (1 + 1e-9)
        first = bisect_left(self.time, self.time[-1] - (self.num_stages - stage) * slack)
        last = bisect_right(self.time, stage * slack) if bound < math.inf else self.num_items
        return range(max(stage, first), min(self.num_items, last))

    def _ends(self, stage: int, start: int, bound: float) -> Iterator[tuple[int, float]]:
        """The ends that keep a stage within its memory and `bound`, with its time."""
        last = self.num_items - (self.num_stages - 1 - stage)
        for end in range(start + 1, last + 1):
            if self.held[end] - self.held[start] > self.limits[stage]:
                return
            if self.time[end] - self.time[start] > bound:
                return
            time = self.stage_time(start, end)
            if time <= bound:
                yield end, time

    def why_nothing_fits(self, ranks: int | None, names: Sequence[str] | None) -> str:
        """What is too large, and the least limit that would do, as the user gave it."""
        largest = max(range(self.num_items), key=lambda item: self.memory[item])
        need = max(stage_times(self.memory, partition(self.memory, self.num_stages)))
        asked, limit = f"stages={self.num_stages}", ""
        times = math.ceil(100 * need / max(min(self.limits), 1e-9)) / 100
        more, raised = "stages", f"to {times:g} times what it is"
        if ranks is not None:
            asked += f" on ranks={ranks}"
            limit = f"={_brief([limit / self.part for limit in self.limits])}"
            more, raised = "ranks", f"to at least {math.ceil(need / self.part)}"
        problem = (
            f"no split into {asked} keeps every stage within memory_limit{limit}: a stage may hold "
            f"{_brief(self.limits)}, but "
        )
        if self.memory[largest] > max(self.limits):
            name = names[largest] if names else ""
            what = f"{name!r}" if name else f"part {largest + 1} of {self.num_items} in their order"
            return (
                f"{problem}{what} alone needs {_plain(self.memory[largest])}; raise the limit "
                f"{raised}, as more stages do not divide it"
            )
        return (
            f"{problem}the largest of the most even split needs {_plain(need)}; raise the limit "
            f"{raised}, or use more {more}"
        )


def _plain(number: float) -> str:
    return f"{number:.0f}" if float(number).is_integer() else f"{number:g}"


def _brief(limits: Sequence[float]) -> str:
    same = len(set(limits)) == 1
    return _plain(limits[0]) if same else f"[{', '.join(map(_plain, limits))}]"


def _per_stage(limit: Limit | None, stages: int) -> list[float]:
    if limit is None:
        return [math.inf] * stages
    if isinstance(limit, (int, float)):
        return [float(limit)] * stages
    if len(limit) != stages:
        raise OptionError(
            f"memory_limit has {len(limit)} values for stages={stages}; give one, or one per stage"
        )
    return [float(x) for x in limit]


def _check_stages(num_items: int, stages: int) -> None:
    if not 1 <= stages <= num_items:
        raise OptionError(
            f"stages={stages} cannot be cut from {num_items} items; expected 1 to {num_items}"
        )


def _check_numbers(name: str, numbers: Sequence[float], expected: int) -> None:
    if len(numbers) != expected:
        raise OptionError(f"{name} has {len(numbers)} values, expected {expected}")
    for index, number in enumerate(numbers):
        if not (math.isfinite(number) and number >= 0):
            raise OptionError(f"{name}[{index}]={number} is no finite number of at least 0")

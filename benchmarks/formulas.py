"""The times of a step's tasks to what the schedule makes of them: bubbles, messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from replay import Span

from fxpipe.costs import Costs
from fxpipe.program import Key
from fxpipe.schedule import Kind, Schedule
from fxpipe.schedules import families


@dataclass
class Seconds:
    """Adds up a task's calls."""

    total: float = 0.0
    count: int = 0

    @property
    def mean(self) -> float:
        return self.total / max(1, self.count)


def costs_of(spans: Sequence[Span], stages: int) -> Costs:
    """The mean times of the tasks in a step."""
    seconds: dict[tuple[Key, ...], Seconds] = {}
    for keys, start, end in spans:
        entry = seconds.setdefault(keys, Seconds())
        entry.total += end - start
        entry.count += 1

    def of(kind: Kind) -> list[float]:
        return [seconds.get((Key(s, kind),), Seconds()).mean for s in range(stages)]

    times = {kind: of(kind) for kind in (Kind.F, Kind.I, Kind.W, Kind.B)}
    for stage in range(stages):
        if not times[Kind.B][stage]:
            times[Kind.B][stage] = times[Kind.I][stage] + times[Kind.W][stage]
    pairs = {
        (keys[0].stage, keys[1].stage): entry.mean
        for keys, entry in seconds.items()
        if len(keys) == 2
    }
    return Costs(times[Kind.F], times[Kind.I], times[Kind.W], times[Kind.B], pair=pairs or None)


def closed_form(schedule: Schedule, costs: Costs) -> float | None:
    """The family's own formula, for ranks whose shares take the same time; None where it has none.

    The letter B is the input gradient's time; for an unsplit backward it is the whole.
    """
    given: dict[str, float] = {}
    for letter, times in (("F", costs.F), ("B", costs.I), ("W", costs.W)):
        assert isinstance(times, list)
        given[letter] = sum(times) / schedule.num_ranks
    if not given["B"] and isinstance(costs.B, list):
        given["B"] = sum(costs.B) / schedule.num_ranks
    bubble = closed_count(schedule, "flush", given)
    if bubble is None:
        return None
    work = schedule.num_microbatches * sum(given.values())
    return bubble / (bubble + work)


def closed_count(
    schedule: Schedule, which: str, given: Mapping[str, float] | None = None
) -> float | None:
    """A formula of the schedule's family, in numbers."""
    family = families().get(schedule.name)
    formula = family.formula(which) if family is not None else None
    if formula is None:
        return None
    sizes = {"p": schedule.num_ranks, "m": schedule.num_microbatches, "v": 1, "f": 1}
    sizes["v"] = max(1, len(schedule.holders) // schedule.num_ranks)
    values = sizes | dict(given or {})
    names = {symbol: values[str(symbol)] for symbol in formula.free_symbols}
    return float(formula.subs(names))

"""A simulated schedule -> the numbers and words that the command line shows of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import isclose
from typing import Any

from fxpipe.schedules import Family
from fxpipe.simulator import Timeline


@dataclass(frozen=True)
class ClosedForm:
    """A family's formula, its value for the numbers given, and whether that is what came out."""

    text: str
    value: float
    holds: bool


@dataclass(frozen=True)
class Report:
    """A timeline under its name. `note` is what else is to be said of it.

    memory_limit: the activations that a rank may hold, in those of its share of a microbatch.
    """

    name: str
    timeline: Timeline
    chunks: float
    family: Family | None = None
    note: str = ""
    memory_limit: float | None = None

    @property
    def title(self) -> str:
        schedule = self.timeline.schedule
        return (
            f"{self.name}: {schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches, "
            f"{schedule.num_stages} stages, flush bubble {100 * self.timeline.bubble_flush:.1f} %"
        )

    @cached_property
    def messages(self) -> list[int]:
        """Per rank, the messages that it sends."""
        return [self.timeline.messages(rank) for rank in range(self.timeline.schedule.num_ranks)]

    @cached_property
    def over_limit(self) -> list[int]:
        """The ranks that hold more activations than the memory limit."""
        if self.memory_limit is None:
            return []
        most = self.memory_limit * (1 + 1e-9)
        return [r for r, peak in enumerate(self.timeline.peak_activations) if peak > most]

    def form(self, which: str) -> ClosedForm | None:
        """The family's closed form of the `flush` or `own` bubble, and its value here."""
        text = getattr(self.family, which) if self.family else ""
        if self.family is None or not text:
            return None
        expression = self.family.formula(which)
        assert expression is not None
        schedule, costs = self.timeline.schedule, self.timeline.costs
        ranks = schedule.num_ranks
        _, _, options = self.name.partition("f=")
        values = {
            "p": ranks,
            "m": schedule.num_microbatches,
            "v": self.chunks,
            "f": int(options or 1),
            "F": sum(costs.F) / ranks,
            "B": sum(costs.I) / ranks,
            "W": sum(costs.W) / ranks,
        }
        here = {symbol: values[str(symbol)] for symbol in expression.free_symbols}
        value = float(expression.subs(here))
        shown = getattr(self.timeline, f"bubble_{which}_time")
        return ClosedForm(text, value, isclose(value, shown, rel_tol=1e-6, abs_tol=1e-9))

    def as_dict(self) -> dict[str, Any]:
        """For JSON: bubbles are ratios, `..._time` in the unit of the times that were given.

        Activations are in units of what one rank's share of the model saves for one microbatch,
        weights in units of that share.
        """
        timeline, schedule = self.timeline, self.timeline.schedule
        return {
            "name": self.name,
            "ranks": schedule.num_ranks,
            "microbatches": schedule.num_microbatches,
            "chunks": self.chunks,
            "stages": schedule.num_stages,
            "makespan": timeline.makespan,
            "work": timeline.work,
            "bubble_flush": timeline.bubble_flush,
            "bubble_own": timeline.bubble_own,
            "bubble_flush_time": timeline.bubble_flush_time,
            "bubble_own_time": timeline.bubble_own_time,
            "peak_activations": timeline.peak_activations,
            "memory_limit": self.memory_limit,
            "ranks_over_limit": self.over_limit,
            "weights": timeline.weights,
            "busy": timeline.busy,
            "messages": self.messages,
            "links": [
                {"from": source, "to": target, "messages": link.messages}
                for (source, target), link in timeline.links.items()
            ],
            "actions": [" ".join(map(str, steps)) for steps in schedule.ranks],
        }

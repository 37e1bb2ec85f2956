"""A simulated schedule -> the numbers and words that the command line shows of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fxpipe.schedules import Family
from fxpipe.simulator import Timeline


@dataclass(frozen=True)
class Report:
    """A timeline under its name. `note` is what else is to be said of it."""

    name: str
    timeline: Timeline
    chunks: float
    family: Family | None = None
    note: str = ""

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
            "weights": timeline.weights,
            "busy": timeline.busy,
            "messages": self.messages,
            "links": [
                {"from": source, "to": target, "messages": link.messages}
                for (source, target), link in timeline.links.items()
            ],
            "actions": [" ".join(map(str, steps)) for steps in schedule.ranks],
        }

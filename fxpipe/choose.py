"""Costs and a memory limit -> the fastest schedule, and why: `schedule="auto"`.

Every family that can be built is simulated; the fastest that fits in memory wins. Then a list
scheduler with W as filler tries to do better on the placements of the best (schedules for unequal
stages gain most), and, where asked for, a solver refines the winner. The same arguments always
give the same choice, so ranks that choose apart agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from fxpipe import schedules
from fxpipe.costs import Costs
from fxpipe.errors import OptionError, ScheduleError
from fxpipe.list_scheduler import POLICIES, Placement, list_schedule
from fxpipe.schedule import Schedule
from fxpipe.simulator import UNIT_COSTS, Timeline, simulate
from fxpipe.views.progress import each

# The list scheduler takes on the placements of so many candidates, if there are few actions.
_PLACEMENTS, _SEARCH_ACTIONS = 4, 20_000

# What the names of schedules that were searched for mean.
_SEARCHED = {
    "list": "list(x): made for these times on the placement of x",
    "refill": "refill(x): x with each weight gradient moved to where its rank would wait",
    "solver": "solver(x): x improved by a solver",
}


@dataclass(frozen=True)
class Units:
    """How the numbers of a choice are written."""

    time: Callable[[float], str] = "{:g}".format
    memory: Callable[[float], str] = "{:g}".format


PLAIN = Units()
SECONDS_AND_BYTES = Units(
    time=lambda seconds: f"{1e3 * seconds:.4g} ms",
    memory=lambda size: f"{size / 1e6:.4g} MB" if size >= 1e5 else f"{size / 1e3:.4g} kB",
)


@dataclass(frozen=True)
class Candidate:
    """A schedule that was considered. `refused` says why it cannot be used, empty if it can.

    `limit` is the memory limit that it exceeds.
    """

    name: str
    timeline: Timeline | None = None
    memory: float = 0.0
    refused: str = ""
    limit: float | None = None

    @property
    def schedule(self) -> Schedule | None:
        return self.timeline.schedule if self.timeline else None

    @property
    def rank_key(self) -> tuple[float, float, float, int]:
        """What is compared: time, then memory, then weights, then messages; less is better."""
        assert self.timeline is not None
        messages = sum(link.messages for link in self.timeline.links.values())
        # Rounded: equal times may differ in the last bit by the order of additions.
        time = float(f"{self.timeline.makespan:.9g}")
        return time, self.memory, max(self.timeline.weights), messages


@dataclass(frozen=True)
class Choice:
    """The schedule taken, its simulation, and all that was considered, the best first."""

    name: str
    schedule: Schedule
    timeline: Timeline
    considered: tuple[Candidate, ...] = field(repr=False)

    @property
    def makespan(self) -> float:
        return self.timeline.makespan

    @property
    def reason(self) -> str:
        """One sentence: what won, and by how much over what."""
        return self._reason(PLAIN)

    def _reason(self, units: Units) -> str:
        fit = [c for c in self.considered if not c.refused]
        start = (
            f"{self.name}: {units.time(self.makespan)} a step, "
            f"bubble {100 * self.timeline.bubble_flush:.1f} %"
        )
        if len(fit) == 1:
            return f"{start}; nothing else of {len(self.considered)} considered fits"
        second = fit[1]
        assert second.timeline is not None
        if slower := self._slower(second.timeline):
            return f"{start}; next is {second.name}, {slower}"
        ahead = ("memory", "weights", "messages", "place in the list")
        pairs = list(zip(fit[0].rank_key, second.rank_key, strict=True))[1:]
        why = next((what for what, (a, b) in zip(ahead, pairs, strict=False) if a < b), ahead[-1])
        return f"{start}; {second.name} takes as long, the {why} decided"

    def _slower(self, timeline: Timeline) -> str:
        """By how much it is slower than what was taken; empty where it is not."""
        percent = 100 * (timeline.makespan / self.makespan - 1)
        if percent <= 5e-7:
            return ""
        return "slower by " + (f"{percent:.1f} %" if percent >= 0.05 else "less than 0.1 %")

    def __str__(self) -> str:
        return self.describe()

    def describe(self, units: Units = PLAIN) -> str:
        """The reason, a line per candidate, the best first, and what the names of some mean."""
        lines = [self._reason(units)]
        for candidate in self.considered:
            lines.append(f"  {candidate.name}: {self._describe(candidate, units)}")
        searched = {candidate.name.partition("(")[0] for candidate in self.considered}
        if meanings := [text for start, text in _SEARCHED.items() if start in searched]:
            lines.append("; ".join(meanings))
        return "\n".join(lines)

    def _describe(self, candidate: Candidate, units: Units) -> str:
        timeline, memory = candidate.timeline, units.memory(candidate.memory)
        if candidate.limit is not None:
            limit = units.memory(candidate.limit)
            return f"refused: needs memory {memory}, more than memory_limit={limit}"
        if candidate.refused or timeline is None:
            return f"refused: {candidate.refused}"
        slower = self._slower(timeline)
        return (
            f"{units.time(timeline.makespan)}, bubble {100 * timeline.bubble_flush:.1f} %, "
            f"memory {memory}" + (f", {slower}" if slower else "")
        )


def choose(
    stages: int,
    microbatches: int,
    ranks: int,
    costs: Costs = UNIT_COSTS,
    memory_limit: float | None = None,
    families: Iterable[str] | None = None,
    *,
    search: bool = True,
    solver_effort: float = 0.0,
) -> Choice:
    """The schedule with the least time per step, transfers included, that keeps the memory limit.

    memory_limit: what a rank may hold, in the unit of costs.activations; costs.weights count too
    where they are given. families: the names to consider, such as "chimera:f=2"; default every
    family with its own defaults. What replicated stages cost is for costs.reduce to say. search:
    try the list scheduler as well. solver_effort: so much deterministic time of CP-SAT on the best
    (fxpipe.solver).

    Raises OptionError where nothing fits, naming the least memory that would do.
    """
    chooser = _Chooser(stages, microbatches, ranks, costs, memory_limit)
    chooser.try_families(list(schedules.families() if families is None else families))
    if not chooser.fits() and not search:
        raise OptionError(chooser.why_nothing_fits())
    if search:
        chooser.try_lists()
    if not chooser.fits():
        raise OptionError(chooser.why_nothing_fits())
    if solver_effort > 0:
        chooser.try_solver(solver_effort)
    return chooser.choice()


class _Chooser:
    def __init__(
        self,
        stages: int,
        microbatches: int,
        ranks: int,
        costs: Costs,
        memory_limit: float | None,
    ) -> None:
        self.stages, self.microbatches, self.ranks = stages, microbatches, ranks
        self.costs, self.memory_limit = costs, memory_limit
        self.candidates: list[Candidate] = []

    def try_families(self, names: Sequence[str]) -> None:
        for name in each("schedules considered", names, len(names)):
            try:
                schedule = schedules.build(
                    name,
                    stages=self.stages,
                    microbatches=self.microbatches,
                    ranks=self.ranks,
                    costs=self.costs,
                    memory_limit=self._limit_in_shares(),
                )
            except ScheduleError as error:
                self.candidates.append(Candidate(name, refused=str(error)))
            else:
                self._consider(name, schedule)

    def _limit_in_shares(self) -> float | None:
        """What is left for activations, in those of one rank's share, as families count it."""
        activations = self.costs.activations
        if self.memory_limit is None or activations is None:
            return self.memory_limit
        if isinstance(activations, (int, float)):
            activations = [activations] * self.stages
        share = sum(activations) / self.ranks
        weights = self.costs.weights
        held = 0.0
        if weights is not None:
            weights = [weights] * self.stages if isinstance(weights, (int, float)) else weights
            held = sum(weights) / self.ranks
        return max(0.0, self.memory_limit - held) / share if share else None

    def _consider(self, name: str, schedule: Schedule) -> Candidate:
        timeline = simulate(replace_name(schedule, name), self.costs)
        memory = max(map(sum, zip(timeline.peak_activations, self._weights(timeline), strict=True)))
        limit, refused = self.memory_limit, ""
        if limit is not None and memory > limit * (1 + 1e-9):
            refused = f"needs memory {memory:g}, more than memory_limit={limit:g}"
        candidate = Candidate(name, timeline, memory, refused, limit if refused else None)
        self.candidates.append(candidate)
        return candidate

    def _weights(self, timeline: Timeline) -> list[float]:
        return [0.0] * self.ranks if self.costs.weights is None else timeline.weights

    def fits(self) -> list[Candidate]:
        """The candidates that can be used, the best first; among equals the first considered."""
        return sorted((c for c in self.candidates if not c.refused), key=lambda c: c.rank_key)

    def try_lists(self) -> None:
        """The list scheduler, and W placed anew, on the placements of the best candidates."""
        simulated = [c for c in self.candidates if c.timeline]
        if not simulated or 3 * self.stages * self.microbatches > _SEARCH_ACTIONS:
            return
        best = sorted(simulated, key=lambda c: (bool(c.refused), c.rank_key))
        placements: dict[tuple[tuple[tuple[int, int], int], ...], Candidate] = {}
        for candidate in best:
            assert candidate.schedule is not None
            placements.setdefault(tuple(sorted(candidate.schedule.rank_of.items())), candidate)
        tried = list(placements.items())[:_PLACEMENTS]
        for placement, candidate in each("placements searched", tried, len(tried)):
            self._try_list(dict(placement), candidate)

    def _try_list(self, placement: Placement, like: Candidate) -> None:
        """The best of all policies and caps on one placement is the candidate."""
        assert like.timeline is not None and like.schedule is not None
        found: list[Candidate] = []
        before = len(self.candidates)
        for limits in self._caps(like.timeline):
            orders = [(POLICIES[0], like.schedule), *((policy, None) for policy in POLICIES)]
            for policy, order in orders:
                schedule = list_schedule(placement, self.costs, limits, policy, order)
                if schedule is not None:
                    name = f"list({like.name})" if order is None else f"refill({like.name})"
                    found.append(self._consider(name, schedule))
        del self.candidates[before:]
        if fit := sorted((c for c in found if not c.refused), key=lambda c: c.rank_key):
            self.candidates.append(fit[0])

    def _caps(self, timeline: Timeline) -> list[list[float]]:
        """Per rank, the activations that a list schedule may hold; several to try."""
        share = sum(timeline.costs.activations) / self.ranks
        weights = self._weights(timeline)
        tight, wide = self.ranks * share, (2 * self.ranks - 1) * share
        peak = max(timeline.peak_activations)
        caps = []
        for cap in dict.fromkeys((tight, wide, peak)):
            if self.memory_limit is None:
                caps.append([cap] * self.ranks)
            else:
                caps.append([min(cap, self.memory_limit - held) for held in weights])
        return [list(cap) for cap in dict.fromkeys(map(tuple, caps))]

    def try_solver(self, effort: float) -> None:
        from fxpipe import solver

        best = self.fits()[0]
        assert best.schedule is not None and best.timeline is not None
        limits = None
        if self.memory_limit is not None:
            limits = [self.memory_limit - held for held in self._weights(best.timeline)]
        refined = solver.refine(best.schedule, self.costs, limits, effort)
        if refined is not None:
            self._consider(f"solver({best.name})", refined)

    def choice(self) -> Choice:
        fit = self.fits()
        refused = [candidate for candidate in self.candidates if candidate.refused]
        timeline = fit[0].timeline
        assert timeline is not None
        return Choice(fit[0].name, timeline.schedule, timeline, (*fit, *refused))

    def why_nothing_fits(self) -> str:
        asked = f"stages={self.stages}, microbatches={self.microbatches}, ranks={self.ranks}"
        sized = [candidate for candidate in self.candidates if candidate.timeline]
        if not sized:
            reasons = "; ".join(candidate.refused for candidate in self.candidates[:3])
            return f"no schedule can be built for {asked}: {reasons or 'no family was named'}"
        least = min(sized, key=lambda candidate: candidate.memory)
        return (
            f"no schedule for {asked} keeps memory_limit={self.memory_limit:g}; the least is "
            f"{least.memory:g} with {least.name}: raise the limit, or use more stages or "
            f"microbatches"
        )


def replace_name(schedule: Schedule, name: str) -> Schedule:
    """The same schedule under another name."""
    return Schedule.from_packed(schedule.packed, name)

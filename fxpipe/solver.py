"""A schedule and its costs -> a faster one by constraint programming (CP-SAT, extra `solver`).

One interval per F, I and W, no two at once on a rank, data dependencies with transfers, memory as
a reservoir; the makespan is minimised from the given schedule on. One worker, a fixed seed and a
deterministic measure of effort: the same arguments give the same schedule on every machine.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fxpipe import packed
from fxpipe.costs import Costs, StageCosts, per_stage
from fxpipe.errors import OptionError
from fxpipe.packed import KIND_B, KIND_F, KIND_I, KIND_W, kind_of, microbatch_of, stage_of
from fxpipe.schedule import Schedule
from fxpipe.simulator import simulate

_Task = tuple[int, int, int]  # kind, stage, microbatch

# Steps into which the longest task is cut where no coarser clock fits all times.
_CLOCK = 1000


def refine(
    schedule: Schedule,
    costs: Costs,
    memory_limit: Sequence[float] | None = None,
    effort: float = 10.0,
) -> Schedule | None:
    """A faster schedule on the same placement, its backward split; None where none was found.

    memory_limit: activations per rank. effort: CP-SAT's deterministic time; a unit is some
    seconds (2 to 8 were measured). Meant for up to about a thousand actions.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise OptionError(
            "solver_effort needs ortools, which is not installed; pip install 'fxpipe[solver]', "
            "or leave it at 0"
        ) from error
    resolved = per_stage(costs, ranks=schedule.num_ranks, stages=schedule.num_stages)
    clock = _clock([*resolved.F, *resolved.I, *resolved.W, *resolved.transfer.values()])
    problem = _Problem(_ordered_tasks(schedule), resolved, clock, cp_model.CpModel())
    problem.connect()
    problem.start_from(_in_clock(schedule, resolved, clock))
    if memory_limit is not None:
        problem.limit_memory(memory_limit)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = effort
    if solver.solve(problem.model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    found = problem.schedule(solver)
    before, after = (simulate(each, costs).makespan for each in (schedule, found))
    return found if after < before * (1 - 1e-9) else None


def _ordered_tasks(schedule: Schedule) -> list[list[_Task]]:
    """Per rank its tasks in order, pairs opened, every B as I then W."""
    ranks = []
    for line in schedule.packed:
        tasks: list[_Task] = []
        for code in line:
            kind, stage, microbatch = kind_of(code), stage_of(code), microbatch_of(code)
            if kind == KIND_B:
                tasks += (KIND_I, stage, microbatch), (KIND_W, stage, microbatch)
            elif kind < KIND_B:
                tasks.append((kind, stage, microbatch))
        ranks.append(tasks)
    return ranks


def _as_schedule(ranks: Iterable[Iterable[_Task]], name: str) -> Schedule:
    lines = [
        array("q", [kind | packed.F(stage, microbatch) for kind, stage, microbatch in tasks])
        for tasks in ranks
    ]
    return Schedule.from_packed(lines, name)


def _clock(times: Sequence[float]) -> float:
    """Ticks per unit of time: few, if all times are whole numbers of them; else by the longest."""
    for ticks in (1, 2, 4, 5, 10, 20, 40, 50, 100):
        if all(abs(time * ticks - round(time * ticks)) < 1e-9 for time in times):
            return ticks
    return _CLOCK / max(times)


def _in_clock(schedule: Schedule, costs: StageCosts, clock: float) -> dict[_Task, int]:
    """When each task starts, in ticks, if the schedule runs with times rounded to ticks."""

    def in_ticks(times: Iterable[float]) -> list[float]:
        return [float(round(time * clock)) for time in times]

    ticks = Costs(
        F=in_ticks(costs.F),
        I=in_ticks(costs.I),
        W=in_ticks(costs.W),
        transfer=dict(zip(costs.transfer, in_ticks(costs.transfer.values()), strict=True)),
        edges=costs.edges,
    )
    ranks = _ordered_tasks(schedule)
    timeline = simulate(_as_schedule(ranks, schedule.name), ticks)
    return {
        task: round(start)
        for tasks, starts in zip(ranks, timeline.starts, strict=True)
        for task, start in zip(tasks, starts, strict=True)
    }


@dataclass
class _Problem:
    """The model, and the start variable of each task."""

    ranks: list[list[_Task]]
    costs: StageCosts
    clock: float
    model: Any

    def __post_init__(self) -> None:
        times = (self.costs.F, self.costs.I, self.costs.W)
        self.time = {
            (kind, stage): round(times[kind][stage] * self.clock)
            for kind in (KIND_F, KIND_I, KIND_W)
            for stage in range(len(self.costs.F))
        }
        tasks = [task for of_rank in self.ranks for task in of_rank]
        self.rank = {task: rank for rank, of_rank in enumerate(self.ranks) for task in of_rank}
        delays = round(sum(self.costs.transfer.values()) * self.clock)
        microbatches = 1 + max(microbatch for _, _, microbatch in tasks)
        horizon = sum(self.time[kind, stage] for kind, stage, _ in tasks) + delays * microbatches
        self.start = {task: self.model.new_int_var(0, horizon, "") for task in tasks}
        self.makespan = self.model.new_int_var(0, horizon, "makespan")

    def end(self, task: _Task) -> Any:
        return self.start[task] + self.time[task[:2]]

    def connect(self) -> None:
        """Data, one task at a time per rank, and the objective."""
        for task in self.start:
            kind, stage, microbatch = task
            if kind == KIND_F:
                self._after_own(task, KIND_I)
            elif kind == KIND_I:
                self._after_own(task, KIND_W)
            self.model.add(self.makespan >= self.end(task))
        for source, destination in self.costs.edges:
            for kind, sender, reader in (
                (KIND_F, source, destination),
                (KIND_I, destination, source),
            ):
                for task in [t for t in self.start if t[:2] == (kind, sender)]:
                    self._send(task, (kind, reader, task[2]))
        for tasks in self.ranks:
            self.model.add_no_overlap(
                self.model.new_fixed_size_interval_var(self.start[t], self.time[t[:2]], "")
                for t in tasks
            )
        self._order_alike()
        self.model.minimize(self.makespan)

    def _after_own(self, task: _Task, kind: int) -> None:
        after = kind, task[1], task[2]
        if after in self.start:
            self.model.add(self.start[after] >= self.end(task))

    def _send(self, task: _Task, reader: _Task) -> None:
        if reader in self.start:
            delay = self.costs.transfer[task[1], reader[1]] * self.clock
            far = self.rank[task] != self.rank[reader]
            self.model.add(self.start[reader] >= self.end(task) + (round(delay) if far else 0))

    def _order_alike(self) -> None:
        """Microbatches that take the same ranks are alike: each task runs in their order.

        Loses nothing for tasks whose order in the given schedule is that already.
        """
        way: dict[int, list[tuple[int, int]]] = {}
        for (kind, stage, microbatch), rank in self.rank.items():
            if kind == KIND_F:
                way.setdefault(microbatch, []).append((stage, rank))
        alike: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for microbatch in sorted(way):
            alike.setdefault(tuple(sorted(way[microbatch])), []).append(microbatch)
        position = {task: i for tasks in self.ranks for i, task in enumerate(tasks)}
        for group in alike.values():
            for kind, stage in self.time:
                tasks = [(kind, stage, microbatch) for microbatch in group]
                for before, after in zip(tasks, tasks[1:], strict=False):
                    if {before, after} <= position.keys() and position[before] < position[after]:
                        self.model.add(self.start[after] >= self.end(before))

    def start_from(self, starts: dict[_Task, int]) -> None:
        for task, start in starts.items():
            self.model.add_hint(self.start[task], start)
        last = max(start + self.time[task[:2]] for task, start in starts.items())
        self.model.add_hint(self.makespan, last)
        self.model.add(self.makespan <= last)

    def limit_memory(self, limits: Sequence[float]) -> None:
        """What a rank holds: F takes at its start, I and W give back at their ends."""
        scale = 10_000 / max(self.costs.activations)
        saved = [round(amount * scale) for amount in self.costs.activations]
        left = [round(amount * scale) for amount in self.costs.saved_for_w]
        for tasks, limit in zip(self.ranks, limits, strict=True):
            times, changes = [], []
            for task in tasks:
                kind, stage, _ = task
                times.append(self.start[task] if kind == KIND_F else self.end(task))
                changes.append(
                    saved[stage]
                    if kind == KIND_F
                    else left[stage] - saved[stage]
                    if kind == KIND_I
                    else -left[stage]
                )
            # Half a step for each number that was rounded.
            self.model.add_reservoir_constraint(
                times, changes, 0, int(limit * scale + len(tasks) / 2)
            )

    def schedule(self, solver: Any) -> Schedule:
        return _as_schedule(
            (sorted(tasks, key=lambda t: (solver.value(self.start[t]), t)) for tasks in self.ranks),
            "solver",
        )

"""The option `schedule` to a checked schedule for the program's stages and microbatches."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fxpipe.checker import check_schedule
from fxpipe.errors import ScheduleError
from fxpipe.program import Program
from fxpipe.schedule import Action, Kind, Pair, Schedule, Step
from fxpipe.schedules import build


@dataclass(frozen=True)
class BuildSchedule:
    """
    schedule="zb-h1" with 2 stages, 2 microbatches

    becomes

    0F0 0F1 0I0 0W0 0I1 0W1
    1F0 1I0 1F1 1I1 1W0 1W1

    A family's name is built; a schedule as text or object is taken as it is. Either is proved
    complete and free of deadlock. With `merge_backward` (the pass split_weight_grads is off) each
    I and its W run as one B. Without gradients only the forwards are kept.
    """

    merge_backward: bool = False

    def __call__(self, program: Program) -> Program:
        schedule = given_or_built(program)
        if self.merge_backward:
            schedule = change_kinds(schedule, {Kind.I: Kind.B, Kind.W: None})
        check_schedule(schedule, program.num_stages, program.num_microbatches)
        if not program.training:
            schedule = change_kinds(schedule, dict.fromkeys((Kind.I, Kind.W, Kind.B)))
        return replace(program, schedule=schedule)


def given_or_built(program: Program) -> Schedule:
    wanted = program.options.schedule
    if isinstance(wanted, str) and not any(c.isspace() for c in wanted.strip()):
        name = "gpipe" if program.loss is None and program.training else wanted
        return build(
            name,
            stages=program.num_stages,
            microbatches=program.num_microbatches,
            ranks=program.num_ranks,
        )
    schedule = Schedule.parse(wanted) if isinstance(wanted, str) else wanted
    if program.num_ranks not in (None, schedule.num_ranks):
        raise ScheduleError(
            f"the schedule is for {schedule.num_ranks} ranks, but {program.num_ranks} run"
        )
    return schedule


def change_kinds(schedule: Schedule, change: dict[Kind, Kind | None]) -> Schedule:
    """The schedule with kinds replaced, or dropped where the new kind is None."""

    def changed(step: Step) -> list[Step]:
        if isinstance(step, Pair):
            backward = changed(step.backward)
            return [Pair(step.forward, backward[0])] if backward else [step.forward]
        kind = change.get(step.kind, step.kind)
        return [] if kind is None else [Action(step.stage, kind, step.microbatch)]

    ranks = tuple(tuple(new for step in steps for new in changed(step)) for steps in schedule.ranks)
    return Schedule(ranks, schedule.name)

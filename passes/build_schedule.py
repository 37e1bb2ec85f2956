"""The option `schedule` to a checked schedule for the program's stages and microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxpipe.errors import ModelError, ScheduleError
from fxpipe.log import logger
from fxpipe.messages import without_messages
from fxpipe.passes._graph import results_of, running_statistics, stage_edges
from fxpipe.program import Program, Role, where
from fxpipe.schedule import Action, Kind, Pair, Schedule, Step
from fxpipe.schedules import first_microbatches, resolve

log = logger(__name__)


@dataclass(frozen=True)
class BuildSchedule:
    """
    schedule="zb-h1" with 2 stages, 2 microbatches

    becomes

    0F0 0F1 0I0 0W0 0I1 0W1
    1F0 1I0 1F1 1I1 1W0 1W1

    A family's name is built; a schedule as text or object is taken as it is. Either is proved
    complete and free of deadlock. With `merge_backward` (the pass split_weight_grads is off) each
    I and its W run as one B. Without gradients only the forwards are kept. A batch of fewer rows
    than the option `microbatches` runs the first of them, so that every batch finds its stages on
    the ranks that hold them: `program.holders`.
    """

    merge_backward: bool = False

    def __call__(self, program: Program) -> Program:
        check_buffers(program)
        microbatches = max(program.num_microbatches, program.options.microbatches)
        schedule = given_or_built(program, microbatches)
        holders = schedule.holders
        if program.num_microbatches < microbatches:
            schedule = first_microbatches(schedule, program.num_microbatches)
        if self.merge_backward:
            schedule = change_kinds(schedule, {Kind.I: Kind.B, Kind.W: None})
        if not program.training:
            schedule = change_kinds(schedule, dict.fromkeys((Kind.I, Kind.W, Kind.B)))
        return replace(program, schedule=without_messages(schedule), holders=holders)


def check_buffers(program: Program) -> None:
    """Several microbatches would write a buffer several times, where eager writes it once.

    What BatchNorm keeps is documented to go so.
    """
    if program.num_microbatches < 2 or program.options.buffers == "microbatch":
        return
    buffers = {i.name: i.path for i in program.inputs if i.role is Role.BUFFER}
    read = [n.name for n in running_statistics(program.joint) if n.name in buffers]
    norms = {buffers[name].rpartition(".")[0] for name in read}
    for value, result in zip(results_of(program.joint), program.results):
        if result.kind != "mutation" or result.target not in buffers:
            continue
        path = buffers[result.target]
        if path.rpartition(".")[0] not in norms:
            raise ModelError(
                f"the buffer {path!r} is written by every one of the {program.num_microbatches} "
                f"microbatches, where plain eager writes it once a step: {where(value)}; use "
                f"microbatches=1, or allow it: options={{'buffers': 'microbatch'}}"
            )


def given_or_built(program: Program, microbatches: int) -> Schedule:
    wanted = program.options.schedule
    backward_later = program.loss is None and program.training
    if backward_later and isinstance(wanted, str):
        log.info(
            "the model returns no scalar loss: forwards run in the call and backwards in "
            "backward(), in the order of gpipe"
        )
        wanted = "gpipe"
    if isinstance(wanted, Schedule):
        check_counts(wanted, program.num_stages, microbatches)
    schedule = resolve(
        wanted,
        stages=program.num_stages,
        microbatches=microbatches,
        ranks=program.num_ranks,
        forward_edges=stage_edges(program.joint),
    )
    if program.num_ranks not in (None, schedule.num_ranks):
        raise ScheduleError(
            f"the schedule is for {schedule.num_ranks} ranks, but {program.num_ranks} run"
        )
    if backward_later:
        check_forwards_first(schedule)
    return schedule


def check_counts(schedule: Schedule, num_stages: int, microbatches: int) -> None:
    """A schedule that the user wrote has to fit the other options."""
    actions = [action for rank in range(schedule.num_ranks) for action in schedule.actions(rank)]
    counts = {
        "microbatches": (1 + max((a.microbatch for a in actions), default=-1), microbatches),
        "stages": (1 + max((a.stage for a in actions), default=-1), num_stages),
    }
    for name, (own, wanted) in counts.items():
        if own != wanted:
            raise ScheduleError(
                f"the schedule {schedule.name!r} has {own} {name}, but the options make {wanted}; "
                f"set {name}={own}, or write a schedule for {wanted}"
            )


def check_forwards_first(schedule: Schedule) -> None:
    for rank in range(schedule.num_ranks):
        kinds = [action.kind for action in schedule.actions(rank)]
        if Kind.F in kinds[kinds.count(Kind.F) :]:
            raise ScheduleError(
                f"the model returns no scalar loss, so backwards start after the call, but rank "
                f"{rank} of schedule {schedule.name!r} has a backward before its last forward; "
                f"return the loss from the model or use schedule='gpipe'"
            )


def change_kinds(schedule: Schedule, change: dict[Kind, Kind | None]) -> Schedule:
    """The schedule with kinds replaced, or dropped where the new kind is None."""

    def changed(action: Action) -> list[Action]:
        kind = change.get(action.kind, action.kind)
        return [] if kind is None else [replace(action, kind=kind)]

    def changed_step(step: Step) -> Sequence[Step]:
        if not isinstance(step, Pair):
            return changed(step)
        backward = changed(step.backward)
        return [Pair(step.forward, backward[0])] if backward else [step.forward]

    ranks = tuple(
        tuple(new for step in steps for new in changed_step(step)) for steps in schedule.ranks
    )
    return Schedule(ranks, schedule.name)

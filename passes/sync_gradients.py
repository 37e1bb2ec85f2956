"""Parameters that several ranks use get one sum of their gradients a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fxpipe.errors import ModelError
from fxpipe.program import Program, Reduction, Role


@dataclass(frozen=True)
class SyncGradients:
    """
    tasks 0W and 3W accumulate acc_head_weight, on ranks 0 and 3

    becomes

    reductions = {head_weight: ranks 0 and 3}

    Each rank adds up its own microbatches; after its last one the ranks exchange and add their
    sums, in rank order, so that every holder has the same bits. A holder that runs none of a small
    batch's microbatches gets the sum nonetheless. The gradient of an argument of the call goes to
    all ranks, since all of them may continue the backward behind it.

    Raises ModelError where several ranks, or several stages, would write their own copy of a
    buffer.
    """

    def __call__(self, program: Program) -> Program:
        refuse_written_copies(program)
        contributors: dict[str, set[int]] = {}
        receivers: dict[str, set[int]] = {}
        for key, task in program.tasks.items():
            for name in task.accumulates:
                running = program.schedule.holders.get(key.stage, ())
                holding = program.holders.get(key.stage, running)
                contributors.setdefault(name, set()).update(running)
                receivers.setdefault(name, set()).update(holding)
                if program.input(name).role is Role.WHOLE:
                    receivers[name].update(range(program.schedule.num_ranks))
        reductions = {
            name: Reduction(tuple(sorted(contributors[name])), tuple(sorted(ranks)))
            for name, ranks in sorted(receivers.items())
            if len(ranks) > 1
        }
        return replace(program, reductions=reductions)


def refuse_written_copies(program: Program) -> None:
    """A written buffer must live in one stage on one rank, or its copies would drift apart."""
    written = {name for task in program.tasks.values() for name in task.writes}
    for name in sorted(written):
        stages = sorted({key.stage for key, task in program.tasks.items() if name in task.inputs})
        ranks = sorted({r for s in stages for r in program.holders.get(s, ())})
        if len(stages) > 1:
            raise ModelError(
                f"stages {stages} all use the buffer {program.input(name).path!r}, which the model "
                f"changes, so each would see its own copy; put what uses it into one stage"
            )
        if len(ranks) > 1:
            raise ModelError(
                f"stage {stages[0]} changes the buffer {program.input(name).path!r} and runs on "
                f"ranks {ranks}, whose copies would drift apart; choose a schedule that runs every "
                f"stage on one rank, such as '1f1b' or 'zb-v', or put that module into eval()"
            )

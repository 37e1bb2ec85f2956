"""Parameters that several ranks use get one sum of their gradients a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fxpipe.program import Program, Reduction, Role


@dataclass(frozen=True)
class SyncGradients:
    """
    tasks 0W and 3W accumulate acc_head_weight, on ranks 0 and 3

    becomes

    reductions = {head_weight: ranks 0 and 3}

    Each rank adds up its own microbatches; after its last one the ranks exchange and add their
    sums, in rank order, so that every holder has the same bits. The gradient of an argument of
    the call goes to all ranks, since all of them may continue the backward behind it.
    """

    def __call__(self, program: Program) -> Program:
        holders: dict[str, set[int]] = {}
        for key, task in program.tasks.items():
            for name in task.accumulates:
                holders.setdefault(name, set()).update(program.schedule.holders[key.stage])
        everyone = tuple(range(program.schedule.num_ranks))
        reductions = {}
        for name, ranks in sorted(holders.items()):
            of_call = program.input(name).role is Role.WHOLE
            reduction = Reduction(
                tuple(sorted(ranks)), everyone if of_call else tuple(sorted(ranks))
            )
            if len(reduction.receivers) > 1:
                reductions[name] = reduction
        return replace(program, reductions=reductions)

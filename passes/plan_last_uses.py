"""When each value that a stage keeps between its tasks may die."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fxpipe.program import Key, Program
from fxpipe.schedule import Kind


@dataclass(frozen=True)
class PlanLastUses:
    """
    1F keeps %h, %mask; 1I reads %h, %mask; 1W reads %h

    becomes

    last uses: 1I frees %mask, 1W frees %h

    Rank programs drop a value after its last use. With this pass off they keep everything to the
    end of the step.
    """

    def __call__(self, program: Program) -> Program:
        kept: dict[int, set[str]] = {}
        for key, task in program.tasks.items():
            kept.setdefault(key.stage, set()).update(task.outputs)
        for edge, names in program.edges.items():
            kept.setdefault(edge.target, set()).update(names)
        last_uses: dict[Key, tuple[str, ...]] = {}
        for key, task in program.tasks.items():
            later = later_reads(program, key)
            last_uses[key] = tuple(
                name
                for name in task.inputs
                if name in kept.get(key.stage, ()) and name not in later
            )
        return replace(program, last_uses=last_uses)


def later_reads(program: Program, key: Key) -> set[str]:
    """What tasks of the same stage read after `key`. B and I are two forms of one backward."""
    order = {Kind.F: 0, Kind.B: 1, Kind.I: 1, Kind.W: 2}
    return {
        name
        for other, task in program.tasks.items()
        if other.stage == key.stage and order[other.kind] > order[key.kind]
        for name in task.inputs
        if key.kind is not Kind.B
    }

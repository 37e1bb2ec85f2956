"""What was decided for a model, kept by its parameters, so that later traces of it agree.

Dynamo traces a model again for evaluation or for sizes of another kind. Parameters are trained by
the ranks that hold them, so wherever they were put first, every later step must find them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fxpipe.program import Program, Role
from fxpipe.schedule import Schedule

_known = WeakTensorKeyDictionary()  # parameter or buffer -> key -> Decisions
_trained = WeakTensorKeyDictionary()  # parameter -> the ranks that have trained it


@dataclass(eq=False)
class Decisions:
    """Of one model under one set of options."""

    stages: dict[str, tuple[int, ...]] = field(default_factory=dict)  # by path
    schedule: Schedule | None = None  # what "auto" took

    def note_stages(self, program: Program) -> None:
        """Remember the stages of the parameters and buffers that are new."""
        paths = {i.name: i.path for i in program.inputs if i.role in (Role.PARAMETER, Role.BUFFER)}
        found: dict[str, set[int]] = {}
        for node in program.joint.graph.find_nodes(op="placeholder"):
            readers = [u for u in node.users if "stage" in u.meta and not u.meta.get("backward")]
            if node.name in paths and readers:
                found[paths[node.name]] = {user.meta["stage"] for user in readers}
        for path, stages in found.items():
            self.stages.setdefault(path, tuple(sorted(stages)))


def decisions_for(tensors: Iterable[torch.Tensor], key: Hashable) -> Decisions:
    """What was decided for the model with these parameters and buffers; new where nothing was."""
    tables: list[dict[Hashable, Decisions]] = [_known.setdefault(t, {}) for t in tensors]
    found = next((table[key] for table in tables if key in table), Decisions())
    for table in tables:
        table.setdefault(key, found)
    return found


def holders_of(program: Program) -> dict[str, set[int]]:
    """Parameter -> the ranks whose stages read it, in the same order in every process."""
    parameters = {i.name for i in program.inputs if i.role is Role.PARAMETER}
    holders: dict[str, set[int]] = {}
    for key, task in program.tasks.items():
        for name in sorted(parameters.intersection(task.inputs)):
            holders.setdefault(name, set()).update(program.holders[key.stage])
    return holders


def with_trained(
    holders: Mapping[str, set[int]], tensors: Mapping[str, torch.Tensor], training: bool
) -> dict[str, set[int]]:
    """Parameter -> its holders and the ranks that have trained it; notes them where they train."""
    both = {}
    for name, ranks in holders.items():
        both[name] = ranks | _trained.get(tensors[name], set())
        if training:
            _trained[tensors[name]] = both[name]
    return both

"""The lines of a legal size become those of the size asked for: stages grouped, the rest dropped.

Dropping what comes last keeps a schedule valid: no stage needs a later one's forward, a backward
that needed a dropped stage's starts from the loss instead, and microbatches need nothing of each
other. Running the stages of a group one after the other as one keeps every order.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from fxpipe.packed import (
    JOINED,
    KIND_F,
    MICROBATCH_SHIFT,
    STAGE_SHIFT,
    kind_of,
    microbatch_of,
    stage_of,
    units,
)
from fxpipe.schedule import Schedule


def group_stages(stages: int, slots: int) -> list[range]:
    """Which stages each slot of a pipeline holds: one each, or consecutive ones in even groups."""
    if stages <= slots:
        return [range(s, min(s + 1, stages)) for s in range(slots)]
    return [range(s * stages // slots, (s + 1) * stages // slots) for s in range(slots)]


def first_microbatches(schedule: Schedule, microbatches: int) -> Schedule:
    """The schedule without the microbatches from number `microbatches` on."""
    stages = [range(s, s + 1) for s in range(schedule.num_stages)]
    lines = [fit_line(line, stages, microbatches) for line in schedule.packed]
    return Schedule.from_packed(lines, schedule.name)


def fit_line(line: Iterable[int], groups: list[range], microbatches: int) -> array[int]:
    """The line with each slot's stages in place of the slot, without what does not exist."""
    codes = line if isinstance(line, array) else array("q", line)
    if all(len(group) == 1 for group in groups):
        end = microbatches << MICROBATCH_SHIFT
        if max(codes, default=0) < end:
            return codes
    fitted = array("q")
    for unit in units(codes):
        parts = [_expand(code & ~JOINED, groups, microbatches) for code in unit]
        fitted.extend(parts[0] if len(parts) == 1 else _zip(*parts))
    return fitted


def _expand(code: int, groups: list[range], microbatches: int) -> list[int]:
    if microbatch_of(code) >= microbatches:
        return []
    slot = stage_of(code)
    group = groups[slot] if kind_of(code) == KIND_F else reversed(groups[slot])
    return [code + (stage - slot << STAGE_SHIFT) for stage in group]


def _zip(forwards: list[int], backwards: list[int]) -> list[int]:
    both = min(len(forwards), len(backwards))
    line: list[int] = []
    for forward, backward in zip(forwards, backwards):  # noqa: B905 - the rest runs alone
        line += forward | JOINED, backward
    return line + forwards[both:] + backwards[both:]

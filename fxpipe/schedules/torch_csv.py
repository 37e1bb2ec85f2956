"""PyTorch's CSV of a pipeline schedule, compute-only or with communication, to a Schedule and back.

A row is a rank, a cell an action as torch.distributed.pipelining writes it: `2F5`, `2I5`, `2W5`,
`2B5`, `2SEND_F5`, a pair as `(2F5;3B1)OVERLAP_F_B`, an empty cell an idle slot.
"""

from __future__ import annotations

import csv
import io
import re

from fxpipe.errors import ScheduleError
from fxpipe.schedule import Action, Kind, Pair, Schedule, Step

# What FSDP does around the tasks; a schedule here says nothing of it.
_FSDP = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")
_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")
_NEIGHBOURS = {Kind.SEND_F: 1, Kind.RECV_F: -1, Kind.SEND_B: -1, Kind.RECV_B: 1}


def from_csv(text: str, name: str = "custom") -> Schedule:
    """Read PyTorch's CSV. UNSHARD, RESHARD, REDUCE_GRAD and idle slots are left out."""
    ranks: list[tuple[Step, ...]] = []
    for number, row in enumerate(csv.reader(io.StringIO(text))):
        cells = [cell.strip() for cell in row]
        try:
            ranks.append(tuple(_read(c) for c in cells if c and not _FSDP.fullmatch(c)))
        except ScheduleError as error:
            raise ScheduleError(f"row {number + 1} of the CSV: {error}") from None
    if not ranks:
        raise ScheduleError("the CSV is empty; expected one row of actions per rank")
    return Schedule(tuple(ranks), name)


def _read(cell: str) -> Step:
    match = _PAIR.fullmatch(cell)
    if not match:
        return Action.parse(cell)
    actions = [Action.parse(part.strip()) for part in match.groups()]
    if actions[0].kind is not Kind.F:
        actions.reverse()
    return Pair(*actions)


def to_csv(schedule: Schedule) -> str:
    """Write PyTorch's CSV, with communication where the schedule has it."""
    text = io.StringIO()
    writer = csv.writer(text)
    for steps in schedule.ranks:
        writer.writerow([_write(step) for step in steps])
    return text.getvalue()


def _write(step: Step) -> str:
    if isinstance(step, Pair):
        return f"({step.forward};{step.backward})OVERLAP_F_B"
    if step.peer is not None and step.peer != step.stage + _NEIGHBOURS[step.kind]:
        raise ScheduleError(
            f"{step} goes past a neighbour, expected messages between stages s and s + 1 alone; "
            f"PyTorch's CSV has no others, write the text form"
        )
    return str(step)

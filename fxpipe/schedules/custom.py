"""Schedules that the user writes: as text, as a file, or as a function under a name."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fxpipe.checker import check_schedule
from fxpipe.errors import ScheduleError
from fxpipe.schedule import Schedule, is_directives
from fxpipe.schedules.family import FAMILIES
from fxpipe.schedules.torch_csv import from_csv, to_csv
from fxpipe.text_grid import Edges

Written = Schedule | str | Sequence[str]
_Function = TypeVar("_Function", bound=Callable[..., Written])

REGISTERED: dict[str, Callable[..., Written]] = {}


def register(name: str) -> Callable[[_Function], _Function]:
    """Give a Python function a schedule's name.

        @register("forward-then-back")
        def forward_then_back(stages, microbatches, ranks):
            return [
                " ".join([f"{s}F{i}" for i in range(microbatches)]
                         + [f"{s}B{i}" for i in range(microbatches)])
                for s in range(stages)
            ]

    It is called by keyword with `stages`, `microbatches`, `ranks` and the options that the user
    gives, and returns a line per rank, their text, or a Schedule. What it returns is checked.
    """
    if not name or name in FAMILIES or set(name) & set(":,= \n"):
        raise ScheduleError(
            f"{name!r} cannot be registered; choose a name that no family has, without blanks "
            f"and ':,='"
        )

    def enter(function: _Function) -> _Function:
        REGISTERED[name] = function
        return function

    return enter


def call_registered(
    name: str,
    *,
    stages: int,
    microbatches: int,
    ranks: int,
    forward_edges: Edges | None,
    **options: Any,
) -> Schedule:
    """The checked schedule of a registered function."""
    written = REGISTERED[name](stages=stages, microbatches=microbatches, ranks=ranks, **options)
    if not isinstance(written, Schedule):
        written = Schedule.parse(written, name)
    check_schedule(written, stages, microbatches, forward_edges)
    return written


def load(
    path: str | os.PathLike[str], *, check: bool = True, forward_edges: Edges | None = None
) -> Schedule:
    """Read a schedule from a file: PyTorch's CSV if its name ends in .csv, else text.

    The text is actions, a line per rank, or directives (fxpipe.directives), which begin with
    `stages` or another of their words. It is checked against a chain of stages, or
    `forward_edges`, unless `check` is off; what directives give is checked always. Reading runs
    no code.
    """
    path = Path(path)
    text = path.read_text(encoding="utf-8")
    try:
        schedule = _read(text, path, forward_edges)
    except ScheduleError as error:
        raise ScheduleError(f"{path.name}: {error}") from None
    if check:
        check_schedule(schedule, forward_edges=forward_edges)
    return schedule


def _read(text: str, path: Path, forward_edges: Edges | None) -> Schedule:
    if path.suffix.lower() == ".csv":
        return from_csv(text, path.stem)
    if not is_directives(text):
        return Schedule.parse(text, path.stem)
    from fxpipe import directives  # which builds on this package

    found = directives.parse(text)
    if forward_edges is not None:
        # Edges of stages that the directives lack are for the check of their number to find.
        found.forward_edges = {edge for edge in forward_edges if max(edge) < found.stages}
    return found.schedule(path.stem)


def save(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Write a schedule to a file: PyTorch's CSV if its name ends in .csv, else the text form."""
    path = Path(path)
    text = to_csv(schedule) if path.suffix.lower() == ".csv" else f"{schedule}\n"
    path.write_text(text, encoding="utf-8", newline="")

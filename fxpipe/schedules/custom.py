"""Schedules that the user writes: as text, as a file, or as a function under a name."""

from __future__ import annotations

import inspect
import logging
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fxpipe.checker import check_schedule
from fxpipe.errors import FxpipeError, ScheduleError
from fxpipe.schedule import Schedule, is_directives
from fxpipe.schedules.family import FAMILIES
from fxpipe.schedules.torch_csv import from_csv, to_csv
from fxpipe.text_grid import Edges

Written = Schedule | str | Sequence[str]
_Function = TypeVar("_Function", bound=Callable[..., Written])

log = logging.getLogger(__name__)  # fxpipe.log would import torch

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
    gives, and returns a line per rank, their text, or a Schedule. What it returns is checked. Of
    functions that are registered under one name the last one counts, and a warning says so.
    """
    if not name or name in FAMILIES or set(name) & set(":,= \n"):
        raise ScheduleError(
            f"{name!r} cannot be registered; choose a name that no family has, without blanks "
            f"and ':,='"
        )

    def enter(function: _Function) -> _Function:
        known = REGISTERED.get(name)
        if known is not None and known is not function:
            log.warning(
                "the schedule %r is now %s; before it was %s", name, shown(function), shown(known)
            )
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
    given = {"stages": stages, "microbatches": microbatches, "ranks": ranks, **options}
    written = call(name, given)
    if not isinstance(written, Schedule):
        written = Schedule.parse(written, name)
    check_schedule(written, stages, microbatches, forward_edges)
    return written


def call(name: str, given: Mapping[str, Any]) -> Written:
    """What a registered function returns; ScheduleError where that is no schedule, or it raises."""
    function = REGISTERED[name]
    of = f"the schedule {name!r}, {shown(function)},"
    try:
        inspect.signature(function).bind(**given)
    except TypeError as error:
        raise ScheduleError(
            f"{of} cannot be called with {', '.join(given)} by keyword ({error}); write "
            f"def my_schedule({', '.join(given)})"
        ) from error
    except ValueError:  # a function without a signature
        pass
    try:
        written: object = function(**given)
    except FxpipeError:
        raise
    except Exception as error:
        called = ", ".join(f"{key}={value}" for key, value in given.items())
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise ScheduleError(
            f"{of} failed for {called} with {type(error).__name__}: {error}, at "
            f"{frame.filename}:{frame.lineno}: {frame.line}; it has to return a line per rank for "
            f"any stages, microbatches and ranks, or to raise a ScheduleError that says which"
        ) from error
    lines = written if isinstance(written, (list, tuple)) else [written]
    if isinstance(written, Schedule) or lines and all(isinstance(line, str) for line in lines):
        return written  # type: ignore[return-value]
    kinds = sorted({type(line).__name__ for line in lines})
    what = f"a {type(written).__name__} of {' and '.join(kinds) or 'nothing'}"
    raise ScheduleError(
        f"{of} returned {what if lines is written else repr(written)}; expected a list of one line "
        f"per rank such as ['0F0 0B0', '1F0 1B0'], their text, or a fxpipe.Schedule"
    )


def shown(function: Callable[..., Any]) -> str:
    """`my_order of train.py:12`"""
    plain = inspect.unwrap(getattr(function, "func", function))
    code = getattr(plain, "__code__", None)
    name = getattr(plain, "__name__", type(plain).__name__)
    return f"{name} of {code.co_filename}:{code.co_firstlineno}" if code else name


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
    text = _text_of(path)
    try:
        schedule = _read(text, path, forward_edges)
    except ScheduleError as error:
        raise ScheduleError(f"{path.name}: {error}") from None
    if check:
        check_schedule(schedule, forward_edges=forward_edges)
    return schedule


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ScheduleError(
            f"the schedule cannot be read from {path}: {error.strerror}; name a file that is "
            f"there, seen from {Path.cwd()}, or a schedule, whose name does not end in .txt or .csv"
        ) from error
    except UnicodeDecodeError as error:
        raise ScheduleError(
            f"the schedule {str(path)!r} is no text in UTF-8 (byte {error.start}); write actions, "
            f"a line per rank, or a .csv as PyTorch does"
        ) from error


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

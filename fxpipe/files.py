"""Text and JSON to files that are whole or absent at any time, and JSON back from them."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fxpipe.errors import OptionError

T = TypeVar("T")
D = TypeVar("D")


def make_folder(folder: str | Path, what: str, how: str) -> Path:
    """The folder, made if it is not there.

    what: what goes there, `the dump`; how: where it was named, `the option dump`. Raises
    OptionError where it cannot be made.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        raise OptionError(
            f"{what} cannot go to {str(folder)!r}: {reason}; name in {how} a folder that can be "
            f"made"
        ) from error
    return path


def write_text(path: Path, text: str) -> None:
    """Write a file beside its place and move it there: who reads it sees all or nothing of it.

    Raises OptionError where it cannot be written.
    """
    # What is no file, such as /dev/stdout, is written to and not replaced.
    in_place = path.exists() and not path.is_file()
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        (path if in_place else part).write_text(text, encoding="utf-8")
        if not in_place:
            os.replace(part, path.resolve() if path.is_symlink() else path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise OptionError(
            f"the file {str(path)!r} cannot be written: {error.strerror}; name another place, or "
            f"make room and allow writing there"
        ) from error


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, separators=(",", ":")) + "\n")


def read_text(path: Path) -> str | None:
    """None where there is no such file: another process may have removed it."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def read_json(path: Path, build: Callable[[Any], T], default: D) -> T | D:
    """What `build` makes of a file's JSON; `default` where there is no file.

    Raises OptionError for a file that is no JSON, and for one that `build` cannot take.
    """
    text = read_text(path)
    if text is None:
        return default
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise OptionError(
            f"{str(path)!r} is no whole JSON, from character {error.pos} of {len(text)} on; remove "
            f"the file, or let the run write it again"
        ) from error
    try:
        return build(value)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        reason = f"no entry {error}" if isinstance(error, KeyError) else str(error)
        raise OptionError(
            f"{str(path)!r} does not hold what fxpipe writes there ({reason}), but {brief(value)}; "
            f"remove the file, or let the run write it again"
        ) from error


def object_of(*keys: str) -> Callable[[Any], dict[str, Any]]:
    """For `read_json`: takes an object that has these keys."""

    def build(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise TypeError("expected an object")
        if missing := [key for key in keys if key not in value]:
            raise ValueError(f"expected {', '.join(map(repr, missing))} in the object")
        return value

    return build


def list_of_objects(value: Any) -> list[dict[str, Any]]:
    """For `read_json`: takes a list of objects."""
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise TypeError("expected a list of objects")
    return value


def brief(value: Any, most: int = 60) -> str:
    """The beginning of a value's JSON."""
    text = json.dumps(value)
    return text if len(text) <= most else f"{text[:most]}..."

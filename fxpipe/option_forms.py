"""The forms that a value of an option may have: a value -> the same in its final form, or Unfit."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from fxpipe.schedule import Schedule


class Unfit(Exception):
    """A value fits no form of its option."""


def whole(value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise Unfit
    return value


def index(value: Any) -> int:
    return whole(value, least=0)


def number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Unfit
    if not (math.isfinite(value) and value > 0):
        raise Unfit
    return value


def text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise Unfit
    return value


def switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Unfit
    return value


def off(value: Any) -> bool:
    if value is not False:
        raise Unfit
    return False


def folder(value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)):
        raise Unfit
    return text(os.fspath(value))


def paths(value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise Unfit
    if len(set(map(text, value))) < len(value):
        raise Unfit
    return tuple(value)


def schedule(value: Any) -> str | Schedule:
    """A family's name stays text; lines, or text that starts with an action, are parsed."""
    if isinstance(value, Schedule):
        return value
    value = text(value).strip()
    is_actions = "\n" in value or re.match(r"\[?\d+[A-Z_]+\d+\b", value)
    return Schedule.parse(value) if is_actions else value


def word(*words: str) -> Callable[[Any], str]:
    def accept(value: Any) -> str:
        if value not in words:
            raise Unfit
        return str(value)

    return accept


def mapping(accept: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    def accept_all(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise Unfit
        return {text(key): accept(item) for key, item in value.items()}

    return accept_all


PLACES = ("before", "after")


def insertions(value: Any) -> tuple[tuple[str, str, Callable[[Any], Any]], ...]:
    """Passes of the user's: ("after", the name of a pass, what is called)."""
    if not isinstance(value, (list, tuple)):
        raise Unfit
    found = []
    for entry in value:
        if not isinstance(entry, (list, tuple)) or len(entry) != 3:
            raise Unfit
        place, name, called = entry
        if not callable(called) or isinstance(called, type):
            raise Unfit
        found.append((word(*PLACES)(place), text(name), called))
    return tuple(found)


class Shown:
    """Stands for a function of the user's in the text of an error."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, value: Any) -> Any:
        return value

    def __repr__(self) -> str:
        return self.__name__


def either(*forms: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def accept(value: Any) -> Any:
        for form in forms:
            try:
                return form(value)
            except Unfit:
                continue
        raise Unfit

    return accept


def nothing(value: Any) -> None:
    if value is not None:
        raise Unfit

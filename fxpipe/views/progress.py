"""Bars on standard error for what takes long, where somebody has asked to be told (rich)."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from typing import Any, TypeVar

from fxpipe.options import log_level

Item = TypeVar("Item")
Advance = Callable[[], None]

_by_command = False
_bars: list[object] = []


@contextlib.contextmanager
def shown_by_command() -> Iterator[None]:
    """In this block a command of fxpipe's runs: whoever typed it wants to see that it works."""
    global _by_command
    before, _by_command = _by_command, True
    try:
        yield
    finally:
        _by_command = before


def is_wanted() -> bool:
    """Whether a command runs or FXPIPE_LOG is info or more; on a terminal; on the lowest rank."""
    level = log_level()
    asked = _by_command or (level is not None and level <= logging.INFO)
    if not asked or sys.stderr is None or not sys.stderr.isatty() or find_spec("rich") is None:
        return False
    # Commands about schedules do without torch, and then there are no ranks.
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        return True
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


@contextlib.contextmanager
def progress(label: str, total: int | None = None) -> Iterator[Advance]:
    """A bar that the function it gives moves by one of `total`; nothing where none is wanted.

    One at a time: inside of another bar there is none.
    """
    if _bars or not is_wanted():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    plain = sys.stderr
    columns = (
        TextColumn("fxpipe: {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        _bars.append(bar)
        with _logs_above(plain):
            try:
                yield lambda: bar.advance(task)
            finally:
                _bars.remove(bar)


def each(label: str, items: Iterable[Item], total: int) -> Iterator[Item]:
    """The items, with a bar that moves with them."""
    with progress(label, total) as advance:
        for item in items:
            yield item
            advance()


@contextlib.contextmanager
def _logs_above(plain: Any) -> Iterator[None]:
    """Lines of log go through what rich has put in the place of standard error, above the bar."""
    handlers = [
        handler
        for handler in logging.getLogger("fxpipe").handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream is plain
    ]
    for handler in handlers:
        handler.setStream(sys.stderr)
    try:
        yield
    finally:
        for handler in handlers:
            handler.setStream(plain)

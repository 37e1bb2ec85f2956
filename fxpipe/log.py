"""Log lines of fxpipe: each names its rank; their level comes from FXPIPE_LOG."""

from __future__ import annotations

import functools
import logging

import torch

from fxpipe.options import log_level

ROOT = "fxpipe"


def logger(name: str) -> logging.Logger:
    """The logger of a module: `logger(__name__)`; other names are put under `fxpipe.`.

    Without FXPIPE_LOG no handler and no level is set, as fits a library: the program that uses
    fxpipe decides. With it, lines go to standard error.
    """
    _configure()
    if name != ROOT and not name.startswith(f"{ROOT}."):
        name = f"{ROOT}.{name}"
    log = logging.getLogger(name)
    if _name_rank not in log.filters:
        log.addFilter(_name_rank)
    return log


@functools.cache
def _configure() -> None:
    level = log_level()
    if level is None:
        return
    root = logging.getLogger(ROOT)
    root.setLevel(level)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root.addHandler(handler)
    # A handler of the program's own root logger would print every line once more.
    root.propagate = False


def _name_rank(record: logging.LogRecord) -> bool:
    """Put `rank 1: ` before the message, looked up now: the group may be younger than the logger.

    In one process there is no rank to name: all are in it.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        record.msg = f"rank {torch.distributed.get_rank()}: {record.msg}"
    return True


_warned: set[str] = set()


def warn_once(log: logging.Logger, message: str, *args: object) -> None:
    """Log a warning, unless this process has logged the same one before."""
    text = f"{log.name}: {message % args if args else message}"
    if text not in _warned:
        _warned.add(text)
        log.warning(message, *args)

"""What a rank is doing: written by the one who does it, told to the other ranks, put into words."""

from __future__ import annotations

import time
from typing import NamedTuple

from fxpipe.errors import ScheduleError
from fxpipe.schedule import Action, Pair, actions_of, parse_step


class Status:
    """Plain attributes, since the executor writes `action` before every call it makes."""

    __slots__ = ("step", "action", "message", "since", "limit", "compiling", "waited")

    def __init__(self) -> None:
        self.step = 0  # how many were begun
        self.action = ""  # empty: none, the rank is outside a step
        self.message = ""  # that is waited for; empty: none
        self.since = 0.0  # when the wait began
        self.limit = 60.0  # seconds after which the wait is given up
        self.compiling = False
        self.waited = 0.0  # seconds, in this step

    def wait(self, message: str, limit: float) -> None:
        """A wait begins; `message = ""` ends it."""
        self.since, self.limit, self.message = time.monotonic(), limit, message

    def report(self) -> Report:
        message = self.message
        seconds = time.monotonic() - self.since if message else 0.0
        return Report(self.step, self.action, message, round(seconds, 1), self.compiling)


class Report(NamedTuple):
    """A status at one moment."""

    step: int = 0
    action: str = ""
    awaited: str = ""
    seconds: float = 0.0  # of the wait
    compiling: bool = False

    @property
    def place(self) -> tuple[int, str, str, bool]:
        """What changes whenever the rank goes on."""
        return self.step, self.action, self.awaited, self.compiling

    def __str__(self) -> str:
        if self.awaited:
            return f"waiting for {self.awaited} for {self.seconds:.1f} s"
        return f"{self.where}"

    @property
    def where(self) -> str:
        """The action, with its stage and microbatch; or what else the rank is at."""
        if self.compiling:
            return "compiling"
        if self.action:
            return f"in {about(self.action)}"
        return f"outside a step (it began {self.step})"


def about(action: str) -> str:
    """`send 1SEND_F3` -> `send 1SEND_F3 (stage 1, microbatch 3)`; other texts stay as they are."""
    text = action.rpartition(" ")[2]
    try:
        step = parse_step(text)
    except ScheduleError:
        return action
    if action.startswith(("wait for ", "post ")) and isinstance(step, Action):
        return f"{action} (stage {step.other}, microbatch {step.microbatch})"
    if isinstance(step, Pair):
        sides = " and ".join(
            f"stage {a.stage}, microbatch {a.microbatch}" for a in actions_of(step)
        )
        return f"{action} ({sides})"
    return f"{action} (stage {step.stage}, microbatch {step.microbatch})"

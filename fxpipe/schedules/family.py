"""A schedule family: a rule that gives the actions of each rank, and what is known about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fxpipe.errors import ScheduleError

if TYPE_CHECKING:
    import sympy

Lines = Iterable[Iterable[int]]

# The letters of the closed forms: ranks, microbatches, chunks per rank, replicas / 2, the rank, and
# the times of one rank's share of the model for one microbatch (B is the input gradient's alone).
SYMBOLS = ("p", "m", "v", "f", "r", "F", "B", "W")

LINEAR, LOOPED, V_SHAPE, ZIG_ZAG = "linear", "looped", "V", "zig-zag"
BIDIRECTIONAL, BIDIRECTIONAL_V = "bidirectional", "bidirectional V"

# How many chunks a rank holds of one pipeline; None: any number.
_CHUNKS = {LINEAR: 1, LOOPED: None, V_SHAPE: 2, ZIG_ZAG: None, BIDIRECTIONAL: 1, BIDIRECTIONAL_V: 2}


def any_microbatches(p: int, m: int) -> int:
    return m


def multiple_of_ranks(p: int, m: int) -> int:
    return -(-m // p) * p


@dataclass(frozen=True)
class Family:
    """A rule and its closed forms, which are sympy expressions in SYMBOLS, written as text.

    `flush` and `own` are bubbles in units of time, `peak` is the most activations that rank r
    holds in units of one rank's share for one microbatch, `messages` are all that ranks send in
    a step, `weights` is in units of one rank's share. A form is empty where none is known.
    """

    name: str
    lines: Callable[..., Lines]
    placement: str
    splits_backward: bool
    source: str
    flush: str = ""
    own: str = ""
    peak: str = ""
    messages: str = ""
    weights: str = "1"
    holds: str = "always"
    constraint: str = "none"
    check: Callable[[int, int, dict[str, Any]], str] = lambda p, stages, options: ""
    legal_microbatches: Callable[[int, int], int] = any_microbatches
    takes: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """What the family is, in one sentence."""
        return (self.lines.__doc__ or self.name).strip().splitlines()[0]

    def formula(self, which: str) -> sympy.Expr | None:
        """`flush`, `own`, `peak`, `messages` or `weights` in sympy; None where none is known."""
        import sympy

        text = getattr(self, which) or (self.flush if which == "own" else "")
        symbols = {name: sympy.Symbol(name, positive=True) for name in SYMBOLS if name != "r"}
        symbols["r"] = sympy.Symbol("r", nonnegative=True)
        return sympy.sympify(text, locals=symbols) if text else None

    def default_ranks(self, stages: int) -> int:
        """How many ranks `stages` stages are put on unless the user says."""
        if self.placement in (LINEAR, BIDIRECTIONAL):
            return stages
        if self.placement == LOOPED:
            return stages // 2 if stages > 1 and stages % 2 == 0 else stages
        return -(-stages // 2)

    def chunks(self, stages: int, ranks: int) -> int:
        """How many chunks a rank holds so that there are at least as many as stages, if it may."""
        per_rank = -(-stages // ranks)
        if self.placement == ZIG_ZAG:
            return max(2, per_rank + per_rank % 2)
        return _CHUNKS[self.placement] or per_rank

    @property
    def options(self) -> tuple[str, ...]:
        """What the user may say besides sizes, costs and memory limit."""
        return tuple(name for name in self.takes if name not in ("times", "memory_limit"))

    @property
    def has_chunks(self) -> bool:
        """Whether the rule takes the number of chunks per rank."""
        return _CHUNKS[self.placement] is None

    def refuse(self, ranks: int, stages: int, options: dict[str, Any]) -> None:
        """Raise ScheduleError where the rule has no schedule for this many ranks."""
        if problem := self.check(ranks, stages, options):
            raise ScheduleError(f"schedule {self.name!r}: {problem}")


FAMILIES: dict[str, Family] = {}


def family(name: str, **facts: Any) -> Callable[[Callable[..., Lines]], Callable[..., Lines]]:
    """Enter the decorated rule in the table of families; `facts` are the fields of Family."""

    def enter(lines: Callable[..., Lines]) -> Callable[..., Lines]:
        FAMILIES[name] = Family(name, lines, **facts)
        return lines

    return enter


def even_ranks(p: int, stages: int, options: dict[str, Any]) -> str:
    if p % 2 == 0:
        return ""
    fits = [str(n) for n in (p - 1, p + 1) if 1 < n <= stages]
    advice = f"use ranks={' or '.join(fits)}" if fits else "use at least 2 stages on 2 ranks"
    return f"ranks={p} is odd, expected an even number; {advice}"

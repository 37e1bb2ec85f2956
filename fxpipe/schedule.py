"""What each rank does, in which order, as text: `0F0 0F1 1I0 1W0`.

An action is written `<stage><kind><microbatch>`:

    2F5            forward of stage 2 for microbatch 5
    2I5, 2W5       its backward: input gradients, weight gradients
    2B5            I and W as one task
    [2F5|3B1]      a pair: a forward and a backward run as one unit
    2SEND_F5       send what stage 3 needs of stage 2's forward   (to another stage: 2SEND_F5>4)
    3RECV_F5       receive it                                     (from another stage: 4RECV_F5<2)
    2SEND_B5       send what stage 1 needs of stage 2's backward  (to another stage: 2SEND_B5>0)
    1RECV_B5       receive it                                     (from another stage: 0RECV_B5<2)

A schedule is a tuple of such actions per rank. Where a stage lives follows from its actions: a
stage whose microbatches are spread over two ranks is replicated.
"""

from __future__ import annotations

import gc
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import chain
from typing import Any

from fxpipe import packed
from fxpipe.errors import ScheduleError


class Kind(str, Enum):
    """The kind of an action."""

    F = "F"
    I = "I"  # noqa: E741 - the field's name for the input gradient
    W = "W"
    B = "B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"

    def __str__(self) -> str:
        return self.value

    @property
    def is_compute(self) -> bool:
        return self in COMPUTE


COMPUTE = frozenset({Kind.F, Kind.I, Kind.W, Kind.B})
BACKWARD = frozenset({Kind.I, Kind.W, Kind.B})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})

# The stage at the other end when the text names none: the neighbour in the chain.
_NEIGHBOUR = {Kind.SEND_F: 1, Kind.RECV_F: -1, Kind.SEND_B: -1, Kind.RECV_B: 1}
_ACTION = re.compile(r"(\d+)(F|I|W|B|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)(?:([<>])(\d+))?")


@dataclass(frozen=True, slots=True)
class Action:
    """One task on one microbatch, or one message. `peer` is the stage at a message's other end."""

    stage: int
    kind: Kind
    microbatch: int
    peer: int | None = None

    def __post_init__(self) -> None:
        if not self.kind.is_compute and self.peer is None:
            object.__setattr__(self, "peer", self.stage + _NEIGHBOUR[self.kind])

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind.value}{self.microbatch}"
        if self.peer is None or self.peer == self.stage + _NEIGHBOUR[self.kind]:
            return text
        return f"{text}{'>' if self.kind in SENDS else '<'}{self.peer}"

    @property
    def other(self) -> int:
        """The stage at a message's other end."""
        assert self.peer is not None
        return self.peer

    @staticmethod
    def parse(text: str) -> Action:
        """Read one action. Raises ScheduleError where the text is none."""
        match = _ACTION.fullmatch(text)
        if not match:
            raise ScheduleError(
                f"{_short(text)!r} is no action; expected <stage><kind><microbatch> such as 2F5, "
                f"2I5, 2W5, 2B5, 2SEND_F5 or a pair such as [2F5|3B1]"
            )
        stage, kind, microbatch, arrow, peer = match.groups()
        action = Action(int(stage), Kind(kind), int(microbatch), int(peer) if peer else None)
        if arrow and (action.kind.is_compute or (arrow == ">") != (action.kind in SENDS)):
            raise ScheduleError(
                f"{text!r}: '>' names the stage that a SEND goes to, '<' the one a RECV is from"
            )
        return action


@dataclass(frozen=True, slots=True)
class Pair:
    """A forward and a backward of different microbatches, run as one unit."""

    forward: Action
    backward: Action

    def __post_init__(self) -> None:
        if self.forward.kind is not Kind.F or self.backward.kind not in BACKWARD:
            raise ScheduleError(f"{self} pairs no F with a B, I or W; write it as [2F5|3B1]")

    def __str__(self) -> str:
        return f"[{self.forward}|{self.backward}]"


Step = Action | Pair


def parse_step(text: str) -> Step:
    """Read an action or a pair."""
    if not text.startswith("["):
        return Action.parse(text)
    forward, bar, backward = text.removeprefix("[").removesuffix("]").partition("|")
    if not (bar and text.endswith("]")):
        raise ScheduleError(f"{_short(text)!r} is no pair; expected the form [2F5|3B1]")
    return Pair(Action.parse(forward), Action.parse(backward))


def actions_of(step: Step) -> tuple[Action, ...]:
    """The actions of a step: one, or the two of a pair."""
    return (step.forward, step.backward) if isinstance(step, Pair) else (step,)


@dataclass(frozen=True)
class Schedule:
    """Per rank, the steps that it runs strictly in order."""

    ranks: tuple[tuple[Step, ...], ...]
    name: str = field(default="custom", compare=False)

    @staticmethod
    def parse(text: str | Sequence[str], name: str = "custom") -> Schedule:
        """Read one line per rank, actions separated by blanks.

        A `#` starts a comment; a line may begin with `rank 3:`, which must then be its number; a
        lone `.` is an idle slot and is skipped. Raises ScheduleError naming the line and its rank.
        """
        lines = text.splitlines() if isinstance(text, str) else list(text)
        ranks: list[tuple[Step, ...]] = []
        for number, line in enumerate(lines, 1):
            line = line.partition("#")[0].strip()
            if not line:
                continue
            try:
                ranks.append(_parse_line(line, len(ranks)))
            except ScheduleError as error:
                where = f"line {number} (rank {len(ranks)})"
                raise ScheduleError(f"{where}: {error}") from None
        if not ranks:
            raise ScheduleError("the schedule is empty; expected one line of actions per rank")
        return Schedule(tuple(ranks), name)

    @staticmethod
    def from_packed(lines: Sequence[array[int]], name: str = "custom") -> Schedule:
        """The schedule of integer lines (see fxpipe.packed); its steps are made when first read."""
        schedule = object.__new__(Schedule)
        schedule.__dict__.update(packed=tuple(lines), name=name)
        return schedule

    def __getattr__(self, attribute: str) -> Any:
        if attribute != "ranks" or "packed" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {attribute!r}")
        collecting = gc.isenabled()
        gc.disable()  # else the collector walks millions of new actions again and again
        try:
            ranks = tuple(map(_unpack, self.packed))
        finally:
            if collecting:
                gc.enable()
        self.__dict__["ranks"] = ranks
        return ranks

    @cached_property
    def packed(self) -> tuple[array[int], ...]:
        """Per rank the actions as integers, for code that reads millions of them."""
        return tuple(map(_pack, self.ranks))

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, steps)) or "." for steps in self.ranks)

    def actions(self, rank: int) -> Iterator[Action]:
        """The actions of a rank in order, pairs opened: forward, then backward."""
        for step in self.ranks[rank]:
            yield from actions_of(step)

    @property
    def num_ranks(self) -> int:
        return len(self.packed if "packed" in self.__dict__ else self.ranks)

    @cached_property
    def num_stages(self) -> int:
        return 1 + max(map(packed.stage_of, chain.from_iterable(self.packed)), default=-1)

    @cached_property
    def num_microbatches(self) -> int:
        codes = chain.from_iterable(self.packed)
        return 1 + max(map(packed.microbatch_of, codes), default=-1)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether some backward runs as I and W apart."""
        codes = chain.from_iterable(self.packed)
        return packed.KIND_I in map(packed.kind_of, codes)

    @cached_property
    def rank_of(self) -> Mapping[tuple[int, int], int]:
        """(stage, microbatch) -> the rank that runs its forward."""
        return {
            (packed.stage_of(code), packed.microbatch_of(code)): rank
            for rank, codes in enumerate(self.packed)
            for code in codes
            if packed.kind_of(code) == packed.KIND_F
        }

    @cached_property
    def holders(self) -> Mapping[int, tuple[int, ...]]:
        """stage -> the ranks that run it, ascending; more than one where it is replicated."""
        found: dict[int, set[int]] = {}
        for (stage, _), rank in self.rank_of.items():
            found.setdefault(stage, set()).add(rank)
        return {stage: tuple(sorted(ranks)) for stage, ranks in sorted(found.items())}

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank runs, ascending."""
        return tuple(stage for stage, ranks in self.holders.items() if rank in ranks)


# What begins a line that belongs to something else: a grid's head, its rows, directives.
_GRID = re.compile(r"step\s+rank\s|(>\s*)?\d+\s+(>?\[?\d+[FIWBSR]|\.)")
_DIRECTIVE = re.compile(r"(stages|microbatches|annotation|place|replicate|split|order)\b")


def is_directives(text: str) -> bool:
    """Whether a text says directives (fxpipe.directives) and no actions, by its first word."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return bool(_DIRECTIVE.match(next(filter(None, lines), "")))


def _parse_line(line: str, rank: int) -> tuple[Step, ...]:
    if _GRID.match(line):
        raise ScheduleError(
            "this is a grid, which has a row per step and a column per rank, expected a line of "
            "actions per rank; paste what print(schedule) shows, or let fxpipe.schedules.save "
            "write the file"
        )
    if _DIRECTIVE.match(line):
        raise ScheduleError(
            f"{_short(line)!r} is a directive, expected a rank's actions; read directives by "
            f"fxpipe.directives.parse(text).schedule(), or by fxpipe.schedules.load from a file"
        )
    if label := re.match(r"rank\s+(\d+)\s*:", line):
        if int(label[1]) != rank:
            raise ScheduleError(
                f"{_short(line)!r} is labelled rank {label[1]}, expected rank {rank}"
            )
        line = line[label.end() :]
    for word in line.split():
        if "," in word:
            raise ScheduleError(
                f"{_short(word)!r} has a comma; separate actions by blanks, or give PyTorch's "
                f"CSV as a file whose name ends in .csv"
            )
    return tuple(parse_step(word) for word in line.split() if word != ".")


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."


_KINDS = tuple(Kind)
_KIND_CODES = {kind: code for code, kind in enumerate(_KINDS)}
_new_action = object.__new__
_set_stage, _set_kind, _set_microbatch, _set_peer = (
    getattr(Action, name).__set__ for name in ("stage", "kind", "microbatch", "peer")
)


def _pack(steps: Sequence[Step]) -> array[int]:
    codes = array("q")
    for step in steps:
        for action in actions_of(step):
            if not 0 <= max(action.stage, action.microbatch, action.peer or 0) <= packed.LIMIT:
                raise ScheduleError(
                    f"{action} is too large; stages and microbatches go up to {packed.LIMIT}"
                )
            code = _KIND_CODES[action.kind] | action.stage << packed.STAGE_SHIFT
            code |= action.microbatch << packed.MICROBATCH_SHIFT
            if action.peer is not None:
                code |= action.peer + 1 << packed.PEER_SHIFT
            codes.append(code)
        if isinstance(step, Pair):
            codes[-2] |= packed.JOINED
    return codes


def _unpack(codes: array[int]) -> tuple[Step, ...]:
    actions = _unpack_actions(codes)
    if not any(code & packed.JOINED for code in codes):
        return tuple(actions)
    steps: list[Step] = []
    for unit in packed.units(codes):
        steps.append(Pair(next(actions), next(actions)) if len(unit) == 2 else next(actions))
    return tuple(steps)


def _unpack_actions(codes: array[int]) -> Iterator[Action]:
    # Past the frozen dataclass's __init__: twice as fast, and there are millions of them.
    for code in codes:
        action: Action = _new_action(Action)
        _set_stage(action, code >> packed.STAGE_SHIFT & packed.FIELD_MASK)
        _set_kind(action, _KINDS[code & 7])
        _set_microbatch(action, code >> packed.MICROBATCH_SHIFT & packed.FIELD_MASK)
        _set_peer(action, packed.peer_of(code))
        yield action

"""The frame that passes run in: order, time, checks, dumps and errors."""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from fxpipe.dump import Dump
from fxpipe.errors import FxpipeError, OptionError, PassError
from fxpipe.log import logger
from fxpipe.options import Options
from fxpipe.program import Program
from fxpipe.verify import verify

log = logger(__name__)
Pass = Callable[[Program], Program]


def name_of(pass_: Pass) -> str:
    """`split_weight_grads` of a SplitWeightGrads."""
    name = getattr(pass_, "__name__", type(pass_).__name__)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def shown(pass_: Pass) -> str:
    """`AssignStages()`, or the name of a function, whose own text holds an address."""
    text = repr(pass_)
    return name_of(pass_) if text.startswith("<") else text


def blame(extra: Iterable[str]) -> str:
    """The end of a message about a fault after these passes of the user's; empty without any."""
    names = list(extra)
    if not names:
        return ""
    off = ", ".join(f"{name!r}: False" for name in names)
    return (
        f"; before it ran what extra_passes adds, {', '.join(names)}, which may be the cause: try "
        f"passes={{{off}}}"
    )


def is_any(pass_: Pass, passes: Sequence[Pass]) -> bool:
    return any(pass_ is other for other in passes)


@dataclass(frozen=True)
class Pipeline:
    """Passes in order. Calling it takes a program through all that are switched on.

    `optional` names the passes that may be switched off; the others are what makes a pipeline.
    `extra` names the user's own, after which the program is checked always.
    What comes before the pass BuildSchedule depends on the sizes of a microbatch alone, so callers
    may keep the `front` of a program and try several schedules on it.
    """

    passes: tuple[Pass, ...]
    optional: frozenset[str]
    options: Options
    extra: frozenset[str] = frozenset()

    @staticmethod
    def with_extra(passes: Sequence[Pass], optional: frozenset[str], options: Options) -> Pipeline:
        """The passes with those of `options.extra_passes` in their places; these are optional.

        Several at one place run in the order in which they are given. Raises OptionError for a
        place that does not exist, and for a pass without a name of its own.
        """
        own = [name_of(p) for p in passes]
        ordered, added = list(passes), list[Pass]()
        for place, name, pass_ in options.extra_passes:
            names = [name_of(p) for p in ordered]
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
                raise OptionError(
                    f"extra_passes puts {shown(pass_)} {place} {name!r}, which is no pass; did you "
                    f"mean {near!r}?"
                )
            if not name_of(pass_).isidentifier() or name_of(pass_) in names:
                why = "no name" if not name_of(pass_).isidentifier() else "the name of another one"
                raise OptionError(
                    f"extra_passes has {shown(pass_)} {place} {name!r}, a pass with {why}; write a "
                    f"def or a class whose name is not among {', '.join(own)}"
                )
            index = names.index(name) + (place == "after")
            while place == "after" and index < len(ordered) and is_any(ordered[index], added):
                index += 1
            ordered.insert(index, pass_)
            added.append(pass_)
        extra = frozenset(map(name_of, added))
        return Pipeline(tuple(ordered), optional | extra, options, extra)

    def __post_init__(self) -> None:
        names = [name_of(p) for p in self.passes]
        for name, on in self.options.passes.items():
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
                raise OptionError(
                    f"passes names {name!r}, which is no pass; did you mean {near!r}?"
                )
            if not on and name not in self.optional:
                raise OptionError(
                    f"the pass {name!r} cannot be switched off: no program runs without it; these "
                    f"can: {', '.join(sorted(self.optional))}"
                )
        stop = self.options.stop_after
        if stop is not None and stop not in names:
            near = difflib.get_close_matches(stop, names, n=1, cutoff=0.0)[0]
            raise OptionError(f"stop_after={stop!r} is no pass; did you mean {near!r}?")

    def __str__(self) -> str:
        return "\n".join(
            f"{i:>2} {shown(p)}{'' if self.is_on(p) else '   (off)'}"
            for i, p in enumerate(self.passes, 1)
        )

    def is_on(self, pass_: Pass) -> bool:
        return self.options.passes.get(name_of(pass_), True)

    def __call__(self, program: Program) -> Program:
        return self.back(self.front(program))

    def front(self, program: Program) -> Program:
        """The passes that look at the sizes of a microbatch alone: up to the schedule."""
        passes = tuple((name_of(p), self.is_on(p)) for p in self.passes)
        program = replace(program, passes=passes)
        dump = Dump(self.options, program)
        dump.clear()
        dump.passes()
        dump.program(0, "input", program, 0.0)
        return self.run_passes(program, 0, self.split)

    def back(self, program: Program) -> Program:
        """The passes from the schedule on."""
        program = self.run_passes(program, self.split, len(self.passes))
        Dump(program.options, program).page()
        return program

    @property
    def split(self) -> int:
        names = [name_of(p) for p in self.passes]
        return names.index("build_schedule") if "build_schedule" in names else len(names)

    def run_passes(self, program: Program, first: int, end: int) -> Program:
        for number, pass_ in enumerate(self.passes[first:end], first + 1):
            if self.is_on(pass_):
                program = self.run_timed(number, pass_, program)
        return program

    def run_timed(self, number: int, pass_: Pass, program: Program) -> Program:
        start = time.perf_counter()
        try:
            program = self.run(number, pass_, program)
        except Exception:
            Dump(program.options, program).page()  # what there is up to here
            raise
        seconds = time.perf_counter() - start
        log.debug(
            "pass %d/%d %s took %.0f ms", number, len(self.passes), shown(pass_), seconds * 1e3
        )
        dump = Dump(program.options, program)
        dump.program(number, name_of(pass_), program, seconds, shown(pass_))
        if name_of(pass_) == self.options.stop_after:
            dump.page()
            place = f"in {dump.folder}" if dump.folder else "shown where FXPIPE_DUMP names a folder"
            raise PassError(
                f"stopped after {name_of(pass_)}, as stop_after asks; the program is {place}"
            )
        return program

    def run(self, number: int, pass_: Pass, program: Program) -> Program:
        check = self.options.check or name_of(pass_) in self.extra
        earlier = self.extra_before(number)
        before = str(program) if check else None
        try:
            changed = pass_(program)
        except FxpipeError:
            raise
        except Exception as error:
            raise PassError(
                f"pass {number}/{len(self.passes)} {shown(pass_)} failed: "
                f"{type(error).__name__}: {error}{earlier}"
            ) from error
        if not isinstance(changed, Program):
            raise PassError(
                f"{shown(pass_)} returned {type(changed).__name__}, expected a Program; return the "
                f"one that it was given, or a new one"
            )
        if check:
            if str(program) != before:
                raise PassError(
                    f"{shown(pass_)} changed the program that it was given; return a new one"
                )
            verify(changed, name_of(pass_), earlier)
        return changed

    def extra_before(self, number: int) -> str:
        """Says which of the user's passes ran before one of fxpipe's own that finds a fault."""
        if name_of(self.passes[number - 1]) in self.extra:
            return ""
        ran = [p for p in self.passes[: number - 1] if name_of(p) in self.extra and self.is_on(p)]
        return blame(map(name_of, ran))

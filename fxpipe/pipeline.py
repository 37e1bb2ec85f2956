"""The frame that passes run in: order, time, checks, dumps and errors."""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Pipeline:
    """Passes in order. Calling it takes a program through all that are switched on.

    `optional` names the passes that may be switched off; the others are what makes a pipeline.
    What comes before the pass BuildSchedule depends on the sizes of a microbatch alone, so callers
    may keep the `front` of a program and try several schedules on it.
    """

    passes: tuple[Pass, ...]
    optional: frozenset[str]
    options: Options

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
        shown = (
            f"{i:>2} {p!r}{'' if self.is_on(p) else '   (off)'}"
            for i, p in enumerate(self.passes, 1)
        )
        return "\n".join(shown)

    def is_on(self, pass_: Pass) -> bool:
        return self.options.passes.get(name_of(pass_), True)

    def __call__(self, program: Program) -> Program:
        return self.back(self.front(program))

    def front(self, program: Program) -> Program:
        """The passes that look at the sizes of a microbatch alone: up to the schedule."""
        dump = Dump(self.options, program)
        dump.clear()
        dump.program(0, "input", program, 0.0)
        return self.run_passes(program, 0, self.split)

    def back(self, program: Program) -> Program:
        """The passes from the schedule on."""
        return self.run_passes(program, self.split, len(self.passes))

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
        program = self.run(number, pass_, program)
        seconds = time.perf_counter() - start
        log.debug("pass %d/%d %r took %.0f ms", number, len(self.passes), pass_, seconds * 1e3)
        dump = Dump(program.options, program)
        dump.program(number, name_of(pass_), program, seconds)
        if name_of(pass_) == self.options.stop_after:
            place = f"in {dump.folder}" if dump.folder else "shown where FXPIPE_DUMP names a folder"
            raise PassError(
                f"stopped after {name_of(pass_)}, as stop_after asks; the program is {place}"
            )
        return program

    def run(self, number: int, pass_: Pass, program: Program) -> Program:
        before = str(program) if self.options.check else None
        try:
            changed = pass_(program)
        except FxpipeError:
            raise
        except Exception as error:
            raise PassError(
                f"pass {number}/{len(self.passes)} {pass_!r} failed: "
                f"{type(error).__name__}: {error}"
            ) from error
        if self.options.check:
            if str(program) != before:
                raise PassError(
                    f"{pass_!r} changed the program that it was given; return a new one"
                )
            verify(changed, name_of(pass_))
        return changed

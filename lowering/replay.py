"""A static program -> a Python function without a look-up, and its steps.

    v7, v8 = f3(v1, v2, v5)
    del v5

One line per call; values are local variables, and die after their last use. What runs in a line is
told from the line's number where it fails, so that nothing has to be noted while it works.
"""

from __future__ import annotations

import itertools
import linecache
import traceback
import weakref
from collections.abc import Callable, Generator, Sequence
from types import FrameType
from typing import Any

from fxpipe.errors import FxpipeError, RankError
from fxpipe.lowering.executor import Executor, Instruction, Paused
from fxpipe.lowering.instructions import Transport
from fxpipe.lowering.static import Call, Place, StaticProgram, make_static
from fxpipe.lowering.status import about

numbers = itertools.count()


class Replay:
    """Runs the static program of a process's ranks; takes the place of their executors."""

    def __init__(self, executors: Sequence[Executor], free: bool = True) -> None:
        self.executors = executors
        self.made = [executor.instructions for executor in executors]
        self.program = make_static([executor.program for executor in executors], free=free)
        self.function = Function(self.program)

    def is_current(self, executors: Sequence[Executor]) -> bool:
        """Whether these run what this was made from; else somebody watches their calls."""
        found = [executor.instructions for executor in executors]
        return len(found) == len(self.made) and all(a is b for a, b in zip(found, self.made))

    def run(
        self,
        transport: Transport,
        values: Sequence[Any],
        recorded: Sequence[Instruction] | None = None,
    ) -> Generator[Paused | str, tuple[Any, ...] | None, tuple[Any, ...]]:
        """A step, as `Executor.run` gives it. `values` fill the slots of `program`."""
        try:
            arguments = [transport, *values]
            del values  # the batch's parts die after their last use
            results = self.function(arguments)
            if self.program.pause is not None:
                results = yield from results
        except (FxpipeError, GeneratorExit):
            raise
        except Exception as error:
            raise self.failure(error) from error
        return tuple(results)

    def failure(self, error: Exception) -> RankError:
        call = self.function.call_of(error)
        if call is None:
            return RankError(f"a step failed: {type(error).__name__}: {error}")
        given = self.function.arguments_of(error)
        line = next(
            e.line_of(error, call.name, given)
            for e in self.executors
            if e.program.rank == call.rank
        )
        return RankError(
            f"rank {call.rank} failed in {about(call.name)}{line}: {type(error).__name__}: {error}"
        )


class Function:
    """The calls of a static program as one Python function of a list: places 0, 1, ...

    Where the program pauses it is a generator function.
    """

    def __init__(self, program: StaticProgram) -> None:
        self.file = f"<fxpipe step {next(numbers)}>"
        self.names: dict[str, Any] = {"Paused": Paused}
        self.calls: dict[int, Call] = {}
        self.known: dict[int, str] = {}
        self.source = "\n".join(self.lines(program)) + "\n"
        exec(compile(self.source, self.file, "exec"), self.names)
        linecache.cache[self.file] = (len(self.source), None, self.source.splitlines(True), "")
        weakref.finalize(self, linecache.cache.pop, self.file, None)
        self.step: Callable[..., Any] = self.names["step"]

    def __call__(self, values: list[Any]) -> Any:
        """Empties the list."""
        return self.step(values)

    def lines(self, program: StaticProgram) -> list[str]:
        inputs = ", ".join(f"v{i}" for i in range(len(program.slots) + 1))
        lines = ["def step(values):", f"    {inputs}, = values", "    values.clear()"]
        for i, call in enumerate(program.calls):
            if i == program.pause:
                lines += self.pause(program)
            lines.append(f"    {self.line(call)}")
            self.calls[len(lines)] = call
            if call.frees:
                lines.append(f"    del {', '.join(map(repr, call.frees))}")
        if program.pause == len(program.calls):
            lines += self.pause(program)
        return [*lines, f"    return {self.written(list(program.results))}"]

    def pause(self, program: StaticProgram) -> list[str]:
        given = self.written(list(program.given))
        call = f"yield Paused(tuple({self.written(list(program.paused))}))"
        return [f"    {given} = {call}" if program.given else f"    {call}"]

    def line(self, call: Call) -> str:
        name = self.name_of(call.function)
        text = f"{name}({', '.join(map(self.written, call.arguments))})"
        if not call.results:
            return text if call.whole else f"() = {text}"
        made = ", ".join(map(repr, call.results))
        return f"{made} = {text}" if call.whole else f"{made}, = {text}"

    def written(self, value: Any) -> str:
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self.written, value))}]"
        plain = isinstance(value, (Place, str, int)) or value is None
        return repr(value) if plain else self.name_of(value)

    def name_of(self, value: Any) -> str:
        if id(value) not in self.known:
            self.known[id(value)] = f"f{len(self.known)}"
            self.names[self.known[id(value)]] = value
        return self.known[id(value)]

    def call_of(self, error: BaseException) -> Call | None:
        """The call in which an error arose."""
        frame, line = self.frame_of(error)
        return self.calls.get(line) if frame is not None else None

    def arguments_of(self, error: BaseException) -> list[Any]:
        """What that call was given."""
        call, (frame, _) = self.call_of(error), self.frame_of(error)
        if call is None or frame is None:
            return []
        known = frame.f_locals
        return [known.get(repr(a)) if isinstance(a, Place) else a for a in call.arguments]

    def frame_of(self, error: BaseException) -> tuple[FrameType | None, int]:
        """The frame of the step in an error's traceback, and its line."""
        found: tuple[FrameType | None, int] = (None, 0)
        for frame, line in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_filename == self.file:
                found = frame, line
        return found

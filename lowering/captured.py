"""A static program -> its steps on memory that stays where it is: captured once, then replayed.

What changes from step to step is copied into place at the start: the batch's parts, seeds, values
of the prologue. Parameters and buffers are read where the user has them: where one has moved, the
step is captured again. Gradients are summed in accumulators that belong to the program, are zeroed
by it, and are handed out, like all results, as copies: what a user keeps never changes.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxpipe.errors import OptionError, RankError
from fxpipe.log import logger, warn_once
from fxpipe.lowering import instructions
from fxpipe.lowering.captures import Capture, StepCapture, TaskCapture, Uncaptured
from fxpipe.lowering.devices import Device, make_device
from fxpipe.lowering.executor import Executor, Instruction, Paused
from fxpipe.lowering.instructions import Transport
from fxpipe.lowering.memory_plan import IN_PLACE
from fxpipe.lowering.plan import Plan
from fxpipe.lowering.replay import Function, Replay
from fxpipe.lowering.rules import breaches_of
from fxpipe.lowering.static import StaticProgram
from fxpipe.options import Options
from fxpipe.torch_private import copy_all

log = logger(__name__)

# Steps that run before one is captured: libraries set themselves up in their first calls.
WARM_UP = 2
# Captures of all plans of a trace: each holds memory for as long as the compiled model lives.
MOST_CAPTURES = 8

Address = tuple[int, ...]


@dataclass
class Budget:
    """How many more captures a trace may make."""

    left: int = MOST_CAPTURES


def replay_of(plan: Plan, options: Options, budget: Budget) -> Replay | None:
    """What runs the ranks of this process as one, where something does."""
    free = bool(plan.program.last_uses)
    if not options.cuda_graphs:
        return Replay(plan.executors, free) if plan.timeout is None else None
    mode = str(options.cuda_graphs)
    if plan.timeout is not None:
        raise OptionError(
            f"cuda_graphs={mode!r} captures the ranks of one process, and here every rank has its "
            f"own; leave the option out under torchrun"
        )
    values = (n.meta.get("val") for n in plan.program.joint.graph.find_nodes(op="placeholder"))
    found = (value.device for value in values if isinstance(value, torch.Tensor) and value.dim())
    device = make_device(mode, next(found, None))
    states = {entry.name for entry in plan.program.inputs if entry.role in IN_PLACE}
    check = bool(options.check)
    return Captured(plan.executors, states, mode, device, budget, free, check)


class Captured(Replay):
    """Runs the ranks of a process as `Replay` does, on memory of its own, and captures the steps.

    states: the names of the inputs that are read in place. mode: "step" (a graph for all that runs
    before a pause, or after it) or "task" (a graph for each call of a task). Without a device
    nothing is captured, and all else is the same. A step that begins while another one waits for
    its backward runs as a plain one: the memory is taken.
    """

    def __init__(
        self,
        executors: Sequence[Executor],
        states: Collection[str],
        mode: str = "step",
        device: Device | None = None,
        budget: Budget | None = None,
        free: bool = True,
        check: bool = False,
    ) -> None:
        super().__init__(executors, free)
        self.plain = Replay(executors, free)
        self.program = with_own_accumulators(self.program)
        self.function = Function(self.program)
        self.states = [slot.name in states for slot in self.program.slots]
        self.mode, self.device, self.budget, self.check = mode, device, budget or Budget(), check
        self.captures: dict[tuple[Address, ...], Capture] = {}
        self.inputs: list[torch.Tensor] = []
        self.given: list[torch.Tensor] = []
        self.fixed: list[int] = []
        self.ran = 0
        self.busy = False
        breach = next(breaches_of([e.program for e in executors]), None) if device else None
        if breach is not None:
            warn_once(log, "the step runs without CUDA graphs: %s", breach)
            self.device = None

    def run(
        self,
        transport: Transport,
        values: Sequence[Any],
        recorded: Sequence[Instruction] | None = None,
    ) -> Generator[Paused | str, tuple[Any, ...] | None, tuple[Any, ...]]:
        if self.busy:
            return (yield from self.plain.run(transport, values))
        self.busy = True
        try:
            return (yield from self.run_in_place(transport, values))
        finally:
            self.busy = False

    def run_in_place(
        self, transport: Transport, values: Sequence[Any]
    ) -> Generator[Paused | str, tuple[Any, ...] | None, tuple[Any, ...]]:
        capture = self.capture_for(values)
        arguments = [transport, *self.copy_in(values)]
        del values
        if self.check:
            self.check_addresses()
        result = self.guarded(capture, arguments, 0)
        if isinstance(result, Paused):
            given = yield Paused(copies(result.outputs))
            self.given = self.given or [torch.empty_like(tensor) for tensor in given or ()]
            copy_in_place(self.given, given or ())
            result = self.guarded(capture, self.given, 1)
        self.ran += 1
        return copies(result)

    def guarded(self, capture: Capture, values: list[Any], part: int) -> Any:
        try:
            return capture.run(part, values)
        except Exception as error:
            raise self.failure(error) from error

    def capture_for(self, values: Sequence[Any]) -> Capture:
        """What runs this step: the capture for where its parameters are, or none."""
        state = [value for value, is_state in zip(values, self.states) if is_state]
        key = tuple((t.data_ptr(), *t.stride()) for t in state)
        if key in self.captures:
            return self.captures[key]
        if self.device is None or self.ran < WARM_UP:
            return Uncaptured(self.device, self.function, self.is_paused)
        if self.budget.left <= 0:
            warn_once(
                log,
                "sizes or addresses of parameters have changed more than %d times: what is new "
                "runs without CUDA graphs",
                MOST_CAPTURES,
            )
            return Uncaptured(self.device, self.function, self.is_paused)
        self.budget.left -= 1
        if self.mode == "task":
            self.captures[key] = TaskCapture(self.device, self.program)
        else:
            self.captures[key] = StepCapture(self.device, self.function, self.is_paused)
        return self.captures[key]

    @property
    def is_paused(self) -> bool:
        return self.program.pause is not None

    # Memory of its own.

    def copy_in(self, values: Sequence[Any]) -> list[Any]:
        """What fills the slots: parameters and buffers themselves, own copies of the rest."""
        changing = [value for value, is_state in zip(values, self.states) if not is_state]
        if not self.inputs:
            self.inputs = [like(value) for value in changing]
        copy_in_place(self.inputs, changing)
        own = iter(self.inputs)
        return [value if s else next(own) for value, s in zip(values, self.states)]

    def check_addresses(self) -> None:
        """Raise where memory that must stay has moved."""
        found = [tensor.data_ptr() for tensor in (*self.inputs, *self.accumulators)]
        if self.fixed and found != self.fixed[: len(found)]:
            raise RankError("an input or accumulator of the captured step has moved in memory")
        if self.ran:
            self.fixed = found

    @property
    def accumulators(self) -> list[torch.Tensor]:
        functions = (call.function for call in self.program.calls)
        owned = (f.tensor for f in functions if isinstance(f, Accumulator))
        return [tensor for tensor in owned if tensor is not None]

    def close(self) -> None:
        """Give all memory back. The next step begins anew."""
        for capture in self.captures.values():
            capture.close()
        self.captures.clear()
        self.inputs, self.given, self.fixed, self.ran = [], [], [], 0
        for call in self.program.calls:
            if isinstance(call.function, Accumulator):
                call.function.tensor = None


class Accumulator:
    """Takes the place of `new_accumulator`: the same tensor each time, zeroed."""

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None

    def __call__(self, parameter: torch.Tensor) -> torch.Tensor:
        if self.tensor is None:
            self.tensor = torch.zeros_like(parameter)
            return self.tensor
        return self.tensor.zero_()


def with_own_accumulators(program: StaticProgram) -> StaticProgram:
    calls = tuple(
        call._replace(function=Accumulator())
        if call.function is instructions.new_accumulator
        else call
        for call in program.calls
    )
    return replace(program, calls=calls)


def like(value: torch.Tensor) -> torch.Tensor:
    """Memory for such a tensor, laid out as tasks expect it."""
    if any(stride == 0 and size > 1 for size, stride in zip(value.shape, value.stride())):
        return torch.empty_like(value)
    return torch.empty_strided(
        value.shape, value.stride(), dtype=value.dtype, device=value.device
    )  # fmt: skip


def copies(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    made = [torch.empty_like(tensor) for tensor in tensors]
    copy_in_place(made, tensors)
    return tuple(made)


def copy_in_place(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    if targets:
        copy_all(list(targets), list(sources))

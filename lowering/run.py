"""One execution of a plan: the ranks of this process, step by step, and its place in autograd."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

from fxpipe.errors import ModelError, RankError
from fxpipe.log import logger, warn_once
from fxpipe.lowering.executor import Instruction, Paused
from fxpipe.lowering.packing import lay_out
from fxpipe.lowering.plan import Metered, Plan
from fxpipe.lowering.rank_program import RankProgram
from fxpipe.lowering.static import StaticProgram
from fxpipe.lowering.transport import GroupTransport, LocalTransport
from fxpipe.lowering.watch import watch
from fxpipe.program import Join, Program, Role
from fxpipe.random import seeds_of_step
from fxpipe.torch_private import autocast_off

log = logger(__name__)
Boxes = dict[str, tuple[torch.Tensor, ...]]


def watched(plan: Plan) -> AbstractContextManager[None]:
    """A block in which an error of this process is one of all processes."""
    return nullcontext() if plan.timeout is None else watch().step()


class Read(NamedTuple):
    """An input of a call, and how often it had been changed by then."""

    path: str
    value: weakref.ref[torch.Tensor]
    version: int


class Recording(Protocol):
    """One step that is recorded: see fxpipe.lowering.recording."""

    def instructions(self, index: int) -> Sequence[Instruction]:
        """What the executor of this number runs in place of its own."""

    def begin(self) -> None:
        """The first call is about to run."""

    def called(self) -> None:
        """All calls have run; what was sent may still be under way."""

    def end(self) -> None:
        """The step is over."""

    def tell(self) -> None:
        """The step was over some time ago, and the ranks may now talk about it."""


class Run:
    """One execution of a plan: started by the call, finished by it or by `backward`."""

    def __init__(
        self, plan: Plan, inputs: Sequence[Any], seed: int, recording: Recording | None = None
    ) -> None:
        self.plan = plan
        self.recording = recording
        self.seconds = 0.0
        self.inputs = inputs
        self.prologue: Mapping[str, torch.Tensor] = prologue_values(plan.program, inputs)
        self.seeds = seed_values(plan, seed)
        self.transport: GroupTransport | None = None
        self.boxes: Boxes = {}
        self.gradients: dict[str, torch.Tensor] = {}
        self.done: set[int] = set()
        self.read: Sequence[Read] = ()
        self.runners = plan.runners if recording is None else plan.executors
        self.ranks = [
            runner.run(
                self.transport_for(runner.program),
                [fill(self) for fill in plan.fills_of(runner.program)],
                recording.instructions(i) if recording is not None else None,
            )
            for i, runner in enumerate(self.runners)
        ]

    def transport_for(
        self, program: RankProgram | StaticProgram
    ) -> LocalTransport | GroupTransport:
        if self.plan.timeout is None:
            return LocalTransport(self.boxes)
        assert isinstance(program, RankProgram)  # ranks of several processes run one by one
        self.transport = GroupTransport(program, watch(), self.plan.timeout)
        return self.transport

    def start(self) -> tuple[Any, ...]:
        """Run to the end, or to the pause before the backward; the outputs."""
        if self.transport is not None:
            self.transport.status.waited = 0.0
        if self.recording is not None:
            self.recording.begin()
        outputs = self.advance(None)
        if len(self.done) < len(self.ranks):
            self.read = read_later(self.plan.program, self.inputs)
        self.inputs = ()
        return outputs

    def finish(self, gradients: Sequence[torch.Tensor]) -> None:
        """The backward, given the gradients of the outputs."""
        with watched(self.plan):
            refuse_changes(self.read)
            self.advance(self.split_gradients(gradients))
        if self.recording is not None:
            self.recording.tell()

    def advance(self, given: tuple[torch.Tensor, ...] | None) -> tuple[Any, ...]:
        """Every rank in turn until each is done or paused. Ranks that wait let others go on."""
        start = time.perf_counter()
        outputs: dict[int, tuple[Any, ...]] = {}
        active = [i for i in range(len(self.ranks)) if i not in self.done]
        waits: dict[int, str | None] = {}
        while active:
            before = dict(waits)
            for i in active:
                state = self.advance_rank(i, None if i in waits else given)
                waits[i] = state if isinstance(state, str) else None
                if not isinstance(state, str):
                    outputs[i] = state
            active = [i for i in active if waits[i] is not None]
            if active and waits == before:
                raise RankError(f"no rank can go on: they wait for {[waits[i] for i in active]}")
        self.close(start)
        return outputs.get(0, ())

    def close(self, start: float) -> None:
        """No rank can go on: they are done, or paused. `start`: when they began to."""
        if self.recording is not None:
            self.recording.called()
        if self.transport is not None:
            self.transport.finish()
        now = time.perf_counter()
        self.seconds += now - start
        if len(self.done) == len(self.ranks):
            waited = None if self.transport is None else self.transport.status.waited
            self.plan.metered, self.plan.recorded = Metered(now, self.seconds, waited), None
            if self.recording is not None:
                self.recording.end()

    def advance_rank(self, i: int, given: tuple[Any, ...] | None) -> str | tuple[Any, ...]:
        """The message that a rank waits for, or its outputs where it is done or paused."""
        try:
            # The tasks hold the casts of autocast; casting again would undo its exceptions.
            with autocast_off():
                state = self.ranks[i].send(given)
        except StopIteration as stop:
            program = self.runners[i].program
            count = len(program.outputs)
            self.done.add(i)
            for name, gradient in zip(program.gradients, stop.value[count:]):
                self.gradients.setdefault(name, gradient)
            return tuple(stop.value[:count])
        return state.outputs if isinstance(state, Paused) else state

    def split_gradients(self, gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """In the order that a pause returns them: per output, per microbatch."""
        given = dict(zip(self.plan.outputs, gradients))
        parts: list[torch.Tensor] = []
        for number, output in enumerate(self.plan.program.outputs):
            if not output.requires_grad:
                continue
            if output.join is Join.CONCATENATE:
                chunks = given[number].split(list(self.plan.rows), output.dim)
            else:
                chunks = (given[number],) * len(self.plan.rows)
            for chunk, specs in zip(chunks, self.plan.traced):
                spec = specs.get(f"grad_{output.name}")
                if spec is None and chunk.any():
                    raise ModelError(
                        f"output {number} of the model is a view of another output, and its "
                        f"gradient has no place of its own in what torch traces; return a copy, "
                        f"such as x.clone(), or make the view outside of the model"
                    )
                parts.append(chunk if spec is None else lay_out(chunk, spec))
        return tuple(parts)


def pipelined(plan: Plan, inputs: Sequence[Any], seed: int, recording: Recording | None) -> Any:
    """A step's outputs, linked by autograd to the inputs whose gradients this process computes.

    Others would cost microseconds each. A rank that computes none still has a backward.
    """
    trained = [inputs[number] for number in plan.trained] or [
        value for value in inputs if isinstance(value, torch.Tensor) and value.requires_grad
    ][:1]
    return PipelinedStep.apply(plan, inputs, seed, recording, *trained)


class PipelinedStep(torch.autograd.Function):
    """The step as one node of autograd: `loss.backward()` hands out the finished gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        inputs: Sequence[Any],
        seed: int,
        recording: Recording | None,
        *trained: torch.Tensor,
    ) -> tuple[Any, ...]:
        ctx.run = Run(plan, inputs, seed, recording)
        ctx.plan = plan
        outputs: tuple[Any, ...] = ctx.run.start()
        described = [plan.program.outputs[number] for number in plan.outputs]
        ctx.mark_non_differentiable(
            *(
                output
                for output, about in zip(outputs, described)
                if not about.requires_grad and not about.detached
            )
        )
        # So that an output that took part in no loss of the caller's can be told from one that did.
        ctx.set_materialize_grads(plan.program.loss is None)
        return outputs

    @staticmethod
    def backward(ctx: Any, *output_gradients: torch.Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise ModelError(
                "the gradients of a pipelined step cannot be differentiated again "
                "(create_graph=True); compute such a penalty on the plain model"
            )
        run, plan = ctx.run, ctx.plan
        if run is None:
            raise ModelError(
                "backward was already called on this step and its values are gone; call the model "
                "again before the next backward"
            )
        ctx.run = None
        if plan.program.loss is None:
            run.finish(output_gradients)
            gradients = run.gradients
        else:
            by = loss_gradient(plan, output_gradients)
            refuse_late_scale(plan, by)
            gradients = scaled(run.gradients, by)
        found = [gradients.get(plan.program.inputs[number].name) for number in plan.trained]
        return (None, None, None, None, *(found or [None]))


def loss_gradient(plan: Plan, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """What the loss is given. Raises ModelError where another output is given something."""
    by_number = dict(zip(plan.outputs, gradients))
    assert plan.program.loss is not None
    by = by_number.pop(plan.program.loss)
    given = [number for number, gradient in by_number.items() if gradient is not None]
    if by is None or given:
        raise ModelError(
            f"output {given[0] if given else plan.program.loss} of the model was used in what "
            f"backward() was called on, but the backward of its loss, output "
            f"{plan.program.loss}, has run in the call, without it; add it to the loss inside of "
            f"the model, detach it, or return no scalar loss, so that backward() starts it"
        )
    return by


def read_later(program: Program, inputs: Sequence[Any]) -> list[Read]:
    """What the backward of a paused step may read: arguments and parameters, as they are now."""
    return [
        Read(entry.path, weakref.ref(value), value._version)
        for entry, value in zip(program.inputs, inputs)
        if isinstance(value, torch.Tensor)
        and entry.role is not Role.BUFFER  # which the model may write itself
        and not value.is_inference()  # of which torch counts no changes
    ]


def refuse_changes(read: Sequence[Read]) -> None:
    for path, reference, version in read:
        value = reference()
        if value is not None and value._version != version:
            raise ModelError(
                f"{path!r} was changed in place between the call and its backward(), which reads "
                f"it as it was; call backward() before it is changed, or let the compiled model "
                f"return the loss"
            )


def refuse_late_scale(plan: Plan, by: torch.Tensor) -> None:
    """A loss scale is there to keep gradients in float16 from vanishing: here it comes too late."""
    if by.item() != 1.0 and plan.has_own_backward:
        warn_once(
            log,
            "the model has an autograd.Function of its own, whose backward ran before the loss was "
            "multiplied by %g: gradients are right if that backward is linear",
            by.item(),
        )
    if not plan.computes_in_float16 or by.item() <= 1.0:
        return
    raise ModelError(
        f"the loss is scaled by {by.item():g} before backward(), but the model computes in float16 "
        f"and its backward has run by then, unscaled: small gradients are lost; use bfloat16, or "
        f"return the logits and compute the loss outside of the compiled model"
    )


def scaled(gradients: Mapping[str, torch.Tensor], by: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Gradients of the loss times the gradient that the loss is given, mostly 1."""
    if by.device.type == "cpu" and by.item() == 1.0:
        return gradients
    return {name: gradient * by.to(gradient.dtype) for name, gradient in gradients.items()}


def prologue_values(program: Program, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
    """What is computed once a step from the whole batch."""
    if program.prologue is None:
        return {}
    names = [entry.name for entry in program.inputs if entry.role is Role.PROLOGUE]
    with torch.no_grad():
        values = program.prologue.forward(*inputs)
    return {name: torch.as_tensor(value) for name, value in zip(names, values)}


def seed_values(plan: Plan, seed: int) -> Mapping[torch.device, Sequence[tuple[torch.Tensor, ...]]]:
    """device -> rows as `seeds_of_step` has them -> a seed for each place in the model."""
    if not plan.seeds:
        return {}
    table = seeds_of_step(seed, len(plan.rows), len(plan.seeds))
    devices = {device for _, device in plan.seeds.values()}
    return {device: [row.unbind() for row in table.to(device)] for device in devices}

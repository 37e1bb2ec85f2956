"""A captured model to a callable: per call, the plan for the batch's sizes, executed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from fxpipe import ownership
from fxpipe.capture import Capture
from fxpipe.dump import Dump
from fxpipe.errors import FxpipeError, ModelError, RankError
from fxpipe.log import logger
from fxpipe.lowering.executor import Executor, Paused
from fxpipe.lowering.group import agree, digest
from fxpipe.lowering.lower import lower
from fxpipe.lowering.rank_program import RankProgram
from fxpipe.lowering.tasks import TaskCompiler
from fxpipe.lowering.transport import GroupTransport, LocalTransport
from fxpipe.options import Options
from fxpipe.program import Join, Program, Role
from fxpipe.text_grid import grid
from fxpipe.torch_private import expression

log = logger(__name__)
BuildProgram = Callable[[Program], Program]


@dataclass
class Plan:
    """Everything for one combination of sizes."""

    programs: tuple[Program, ...]  # one per microbatch
    rows: tuple[int, ...]  # of each microbatch
    executors: tuple[Executor, ...]  # of the ranks in this process
    text: str
    digest: int
    shares: tuple[torch.Tensor, ...]


class Step:
    """What torch.compile calls: the whole pipelined step."""

    def __init__(
        self, capture: Capture, options: Options, build: BuildProgram, world_size: int
    ) -> None:
        self.capture = capture
        self.options = options
        self.build = build
        self.world_size = world_size
        self.num_ranks = world_size if world_size > 1 else options.ranks
        self.compile = TaskCompiler(options.lowering)
        self.programs: dict[Any, Program] = {}
        self.plans: dict[Any, Plan] = {}
        self.bindings = bind_symbols(capture)
        self.numbers = {entry.name: i for i, entry in enumerate(capture.inputs)}

    def __call__(self, *inputs: Any) -> list[Any]:
        plan = self.plan_together(inputs)
        if self.capture.training:
            tensors = PipelinedStep.apply(self, plan, *inputs)
        else:
            with torch.no_grad():
                run = Run(self, plan, inputs)
                tensors = run.start()
        return self.complete(plan, inputs, tensors)

    def complete(self, plan: Plan, inputs: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
        """The model's outputs: those computed, integers, constants, and inputs as they are."""
        program = plan.programs[0]
        computed = dict(zip(plan.executors[0].program.outputs, tensors))
        symbols = self.symbols(inputs)
        returned = list(self.capture.model.graph.output_node().args[0])
        outputs: list[Any] = []
        for number, output in enumerate(program.outputs):
            if number in computed:
                outputs.append(computed[number])
            elif output.join is Join.SIZE:
                assert output.size is not None
                outputs.append(int(output.size.subs(symbols)))
            elif number in program.returns:
                outputs.append(self.input_value(program, plan, inputs, program.returns[number][1]))
            else:
                outputs.append(returned[number])
        return outputs

    def input_value(self, program: Program, plan: Plan, inputs: Sequence[Any], name: str) -> Any:
        """An output that is an input of the model, or a value of the prologue."""
        if name in self.numbers:
            return inputs[self.numbers[name]]
        return prologue_values(program, inputs)[name]

    # Plans.

    def plan_together(self, inputs: Sequence[Any]) -> Plan:
        """The plan for these inputs, compared with the other ranks' before anything is sent."""
        if self.world_size == 1:
            return self.plan(inputs)
        device = next(
            (v.device for v in inputs if isinstance(v, torch.Tensor)), torch.device("cpu")
        )
        try:
            plan = self.plan(inputs)
        except Exception as error:
            agree("", 0, device, failure=error)
            raise
        agree(plan.text, plan.digest, device)
        return plan

    def plan(self, inputs: Sequence[Any]) -> Plan:
        symbols = self.symbols(inputs)
        key = tuple(symbols.values())
        if key not in self.plans:
            self.plans[key] = self.make_plan(symbols)
            self.record_ownership(self.plans[key], inputs)
        return self.plans[key]

    def symbols(self, inputs: Sequence[Any]) -> dict[sympy.Symbol, int]:
        """The value of every symbol of the trace in this call."""
        return {symbol: read(inputs) for symbol, read in self.bindings.items()}

    def make_plan(self, symbols: Mapping[sympy.Symbol, int]) -> Plan:
        rows = self.split_batch(symbols)
        programs = tuple(self.program(symbols, count, len(rows)) for count in rows)
        first = programs[0]
        assert first.schedule is not None
        listeners = None if self.world_size > 1 else (0,)
        ranks = self.own_ranks(first.schedule.num_ranks)
        lowered = [lower(programs, rank, self.compile, listeners) for rank in ranks]
        dump = Dump(self.options, first)
        dump.schedule(lambda: grid(first.schedule))
        for rank_program in lowered:
            dump.rank(rank_program.rank, lambda code=str(rank_program): code)
        executors = tuple(Executor(r, free=bool(first.last_uses)) for r in lowered)
        text = describe_plan(programs, rows)
        total = sum(rows) or 1
        shares = tuple(torch.tensor(count / total, dtype=torch.float64) for count in rows)
        return Plan(programs, rows, executors, text, digest(text), shares)

    def own_ranks(self, num_ranks: int) -> Sequence[int]:
        if self.world_size == 1:
            return range(num_ranks)
        if num_ranks != self.world_size:
            raise RankError(
                f"the schedule is for {num_ranks} ranks, but torchrun started {self.world_size}; "
                f"change --nproc-per-node or the stages"
            )
        return (torch.distributed.get_rank(),)

    def split_batch(self, symbols: Mapping[sympy.Symbol, int]) -> tuple[int, ...]:
        """Rows of each microbatch: as equal as can be, larger ones first, none empty."""
        wanted = self.options.microbatches
        if self.capture.batch_symbol is None:
            if wanted > 1:
                log.info("no input has a batch of more than one row to split: one microbatch")
            return (0,)
        batch = symbols[self.capture.batch_symbol]
        count = min(wanted, batch)
        least, larger = divmod(batch, count)
        return tuple(least + (k < larger) for k in range(count))

    def program(self, symbols: Mapping[sympy.Symbol, int], rows: int, count: int) -> Program:
        sizes = dict(symbols)
        if self.capture.batch_symbol is not None:
            sizes[self.capture.batch_symbol] = rows
        key = (tuple(sizes.values()), count)
        if key not in self.programs:
            program = self.capture.program(self.options, sizes, count, self.num_ranks)
            self.programs[key] = self.build(program)
        return self.programs[key]

    def record_ownership(self, plan: Plan, inputs: Sequence[Any]) -> None:
        used = {slot.name for executor in plan.executors for slot in executor.program.slots}
        for entry, value in zip(self.capture.inputs, inputs):
            if entry.role in (Role.PARAMETER, Role.BUFFER):
                ownership.record(value, self, entry.name in used)


class Run:
    """One execution of a plan: started by the call, finished by it or by `backward`."""

    def __init__(self, step: Step, plan: Plan, inputs: Sequence[Any]) -> None:
        self.step = step
        self.plan = plan
        self.inputs = inputs
        program = plan.programs[0]
        self.prologue = prologue_values(program, inputs)
        self.transport: GroupTransport | None = None
        self.gradients: dict[str, torch.Tensor] = {}
        self.results: dict[int, tuple[Any, ...]] = {}
        self.steps = [
            executor.run(self.transport_for(executor.program), self.values(executor.program))
            for executor in self.executors()
        ]

    def executors(self) -> tuple[Executor, ...]:
        return self.plan.executors

    def transport_for(self, program: RankProgram) -> Any:
        if self.step.world_size == 1:
            if not hasattr(self, "boxes"):
                self.boxes: dict[str, tuple[torch.Tensor, ...]] = {}
            return LocalTransport(self.boxes)
        self.transport = GroupTransport(program.rank, program.messages, self.step.options.timeout)
        return self.transport

    def values(self, program: RankProgram) -> list[Any]:
        return [self.value(name, microbatch) for name, microbatch in program.slots]

    def value(self, name: str, microbatch: int | None) -> Any:
        if name in self.prologue:
            return self.prologue[name]
        if name == "share" and name not in self.step.numbers:
            assert microbatch is not None
            return self.plan.shares[microbatch]
        value = self.inputs[self.step.numbers[name]]
        entry = self.step.capture.inputs[self.step.numbers[name]]
        if microbatch is None or entry.batch_dim is None:
            return value
        start = sum(self.plan.rows[:microbatch])
        return value.narrow(entry.batch_dim, start, self.plan.rows[microbatch]).contiguous()

    def start(self) -> tuple[Any, ...]:
        """Run to the end, or to the pause before the backward; the outputs."""
        outputs = self.advance({})
        self.inputs = ()
        return outputs

    def finish(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """The backward, given the gradients of the outputs."""
        parts = self.split_gradients(gradients)
        self.advance(dict.fromkeys(range(len(self.steps)), parts))

    def advance(self, given: dict[int, tuple[Any, ...] | None]) -> tuple[Any, ...]:
        """Every rank in turn until each is done or paused. Ranks that wait let others go on."""
        outputs: dict[int, tuple[Any, ...]] = {}
        active = [i for i in range(len(self.steps)) if i not in self.results]
        waiting: dict[int, str] = {}
        while active:
            still, moved = [], False
            for i in active:
                state = self.advance_rank(i, given.pop(i, None))
                if isinstance(state, str):
                    still.append(i)
                    moved |= waiting.get(i) != state
                    waiting[i] = state
                else:
                    outputs[i], moved = state, True
            if not moved:
                raise RankError(f"no rank can go on: they wait for {sorted(waiting.values())}")
            active = still
        if self.transport is not None:
            self.transport.finish()
        return outputs.get(0, ())

    def advance_rank(self, i: int, given: tuple[Any, ...] | None) -> str | tuple[Any, ...]:
        """The message that a rank waits for, or its outputs where it is done or paused."""
        try:
            state = self.steps[i].send(given)
        except StopIteration as stop:
            results = stop.value
            program = self.plan.executors[i].program
            count = len(program.outputs)
            self.results[i] = results
            for name, gradient in zip(program.gradients, results[count:]):
                self.gradients.setdefault(name, gradient)
            return tuple(results[:count])
        return state.outputs if isinstance(state, Paused) else state

    def split_gradients(self, gradients: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
        """In the order that a pause returns them: per output, per microbatch."""
        program = self.plan.programs[0]
        numbers = self.plan.executors[0].program.outputs
        by_number = dict(zip(numbers, gradients))
        parts: list[Any] = []
        for number, output in enumerate(program.outputs):
            if not output.requires_grad:
                continue
            gradient = by_number[number]
            assert gradient is not None
            start = 0
            for rows in self.plan.rows:
                if output.join is Join.CONCATENATE:
                    assert output.dim is not None
                    parts.append(gradient.narrow(output.dim, start, rows).contiguous())
                else:
                    parts.append(gradient)
                start += rows
        return tuple(parts)


class PipelinedStep(torch.autograd.Function):
    """The step as one node of autograd: `loss.backward()` hands out the finished gradients."""

    @staticmethod
    def forward(ctx: Any, step: Step, plan: Plan, *inputs: Any) -> tuple[Any, ...]:
        run = Run(step, plan, inputs)
        outputs = run.start()
        program = plan.programs[0]
        numbers = plan.executors[0].program.outputs
        ctx.run, ctx.step, ctx.plan = run, step, plan
        ctx.loss = numbers.index(program.loss) if program.loss is not None else None
        ctx.mark_non_differentiable(
            *(o for n, o in zip(numbers, outputs) if not program.outputs[n].requires_grad)
        )
        ctx.set_materialize_grads(True)
        return outputs

    @staticmethod
    def backward(ctx: Any, *output_gradients: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise ModelError(
                "the gradients of a pipelined step cannot be differentiated again "
                "(create_graph=True); compute such a penalty on the plain model"
            )
        run: Run | None = ctx.run
        if run is None:
            raise ModelError(
                "backward was already called on this step and its values are gone; call the model "
                "again before the next backward"
            )
        ctx.run = None
        if ctx.loss is None:
            run.finish(output_gradients)
            gradients = run.gradients
        else:
            gradients = scaled(run.gradients, output_gradients[ctx.loss])
        names = [entry.name for entry in ctx.step.capture.inputs]
        return (None, None, *(gradients.get(name) for name in names))


def scaled(gradients: Mapping[str, torch.Tensor], by: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of the loss times the gradient that the loss is given, mostly 1."""
    if by.device.type == "cpu" and by.item() == 1.0:
        return dict(gradients)
    return {name: gradient * by.to(gradient.dtype) for name, gradient in gradients.items()}


def prologue_values(program: Program, inputs: Sequence[Any]) -> dict[str, Any]:
    """What is computed once a step from the whole batch."""
    if program.prologue is None:
        return {}
    names = [entry.name for entry in program.inputs if entry.role is Role.PROLOGUE]
    with torch.no_grad():
        values = program.prologue(*inputs)
    return {name: torch.as_tensor(value) for name, value in zip(names, values)}


def bind_symbols(capture: Capture) -> dict[sympy.Symbol, Callable[[Sequence[Any]], int]]:
    """How to read each symbol of the trace off the inputs of a call."""
    found: dict[sympy.Symbol, Callable[[Sequence[Any]], int]] = {}
    placeholders = capture.model.graph.find_nodes(op="placeholder")
    for i, (entry, node) in enumerate(zip(capture.inputs, placeholders)):
        if isinstance(entry.size, sympy.Symbol):
            found.setdefault(entry.size, lambda inputs, i=i: int(inputs[i]))
        for dim, size in enumerate(getattr(node.meta.get("example_value"), "shape", ())):
            symbol = expression(size)
            if isinstance(symbol, sympy.Symbol):
                found.setdefault(symbol, lambda inputs, i=i, dim=dim: int(inputs[i].shape[dim]))
    missing = [symbol for symbol in capture.symbols if symbol not in found]
    if missing:
        raise FxpipeError(f"the sizes {missing} of the trace cannot be read off the inputs")
    return found


def describe_plan(programs: Sequence[Program], rows: Sequence[int]) -> str:
    """The text that ranks compare: sizes, schedule, tasks and edges."""
    distinct = list(dict.fromkeys(programs))
    parts = [f"microbatches of {' '.join(map(str, rows))} rows", *map(str, distinct)]
    return "\n".join(parts)

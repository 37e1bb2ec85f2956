"""A captured model to a callable: per call, the plan for the batch's sizes, executed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import sympy
import torch

from fxpipe import ownership
from fxpipe.capture import Capture
from fxpipe.choose import Choice
from fxpipe.dump import Dump
from fxpipe.errors import FxpipeError, RankError
from fxpipe.log import logger
from fxpipe.lowering.auto import choose_schedule, probe_schedule
from fxpipe.lowering.executor import Executor
from fxpipe.lowering.group import agree, digest
from fxpipe.lowering.lower import lower
from fxpipe.lowering.run import PipelinedStep, Plan, Run, prologue_values
from fxpipe.lowering.tasks import TaskCompiler
from fxpipe.options import Options
from fxpipe.pipeline import Pipeline
from fxpipe.program import Join, Program, Role
from fxpipe.schedule import Schedule
from fxpipe.text_grid import grid
from fxpipe.torch_private import expression

log = logger(__name__)


class Step:
    """What torch.compile calls: the whole pipelined step."""

    def __init__(
        self, capture: Capture, options: Options, pipeline: Pipeline, world_size: int
    ) -> None:
        self.capture = capture
        self.options = options
        self.pipeline = pipeline
        self.world_size = world_size
        self.num_ranks = world_size if world_size > 1 else options.ranks
        self.compile = TaskCompiler(options.lowering)
        self.fronts: dict[Any, Program] = {}
        self.programs: dict[Any, Program] = {}
        self.plans: dict[Any, Plan] = {}
        self.choices: dict[int, Choice] = {}
        self.bindings = bind_symbols(capture)
        self.numbers = {entry.name: i for i, entry in enumerate(capture.inputs)}

    def __call__(self, *inputs: Any) -> list[Any]:
        plan = self.plan_together(inputs)
        if self.capture.training:
            tensors = PipelinedStep.apply(plan, *inputs)
        else:
            with torch.no_grad():
                tensors = Run(plan, inputs).start()
        return self.complete(plan, inputs, tensors)

    def complete(self, plan: Plan, inputs: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
        """The model's outputs: those computed, integers, constants, and inputs as they are."""
        program = plan.program
        computed = dict(zip(plan.outputs, tensors))
        symbols = self.symbols(inputs)
        returned = list(self.capture.model.graph.output_node().args[0])
        outputs: list[Any] = []
        for number, output in enumerate(program.outputs):
            if number in computed:
                outputs.append(computed[number])
            elif output.join is Join.SIZE:
                outputs.append(int(output.size.subs(symbols)))
            elif number in program.returns:
                outputs.append(self.input_value(program, inputs, program.returns[number][1]))
            else:
                outputs.append(returned[number])
        return outputs

    def input_value(self, program: Program, inputs: Sequence[Any], name: str) -> Any:
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
        listeners = None if self.world_size > 1 else (0,)
        ranks = self.own_ranks(first.schedule.num_ranks)
        lowered = [lower(programs, rank, self.compile, listeners) for rank in ranks]
        dump = Dump(self.options, first)
        dump.schedule(lambda: grid(first.schedule))
        for rank_program in lowered:
            dump.rank(rank_program.rank, partial(str, rank_program))
        executors = tuple(Executor(r, free=bool(first.last_uses)) for r in lowered)
        text = describe_plan(programs, rows)
        total = sum(rows) or 1
        shares = tuple(torch.tensor(count / total, dtype=torch.float64) for count in rows)
        timeout = self.options.timeout if self.world_size > 1 else None
        return Plan(programs, rows, executors, text, digest(text), shares, timeout)

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
            front = self.front(sizes)
            options = replace(self.options, schedule=self.decide_schedule(front, count))
            program = replace(front, options=options, num_microbatches=count)
            self.programs[key] = self.pipeline.back(program)
        return self.programs[key]

    def front(self, sizes: Mapping[sympy.Symbol, int]) -> Program:
        """The program with a joint graph and stages, which every schedule shares."""
        key = tuple(sizes.values())
        if key not in self.fronts:
            program = self.capture.program(self.options, sizes, 0, self.num_ranks)
            self.fronts[key] = self.pipeline.front(program)
        return self.fronts[key]

    def decide_schedule(self, front: Program, count: int) -> str | Schedule:
        """The option `schedule`, "auto" replaced by what is best for so many microbatches."""
        if self.options.schedule != "auto":
            return self.options.schedule
        if not self.capture.training or front.loss is None:
            return "gpipe"
        if count not in self.choices:
            probe = replace(self.options, schedule=probe_schedule(front.num_stages), dump=None)
            program = replace(front, options=probe, num_microbatches=2, num_ranks=None)
            ranks = self.num_ranks or front.num_stages
            self.choices[count] = choose_schedule(
                self.pipeline.back(program), self.compile, ranks, count
            )
        schedule = self.choices[count].schedule
        assert schedule is not None
        return schedule

    def record_ownership(self, plan: Plan, inputs: Sequence[Any]) -> None:
        used = {slot.name for executor in plan.executors for slot in executor.program.slots}
        for entry, value in zip(self.capture.inputs, inputs):
            if entry.role in (Role.PARAMETER, Role.BUFFER):
                ownership.record(value, self, entry.name in used)


def bind_symbols(capture: Capture) -> dict[sympy.Symbol, Callable[[Sequence[Any]], int]]:
    """How to read each symbol of the trace off the inputs of a call."""
    found: dict[sympy.Symbol, Callable[[Sequence[Any]], int]] = {}
    placeholders = capture.model.graph.find_nodes(op="placeholder")
    for i, (entry, node) in enumerate(zip(capture.inputs, placeholders)):
        if isinstance(entry.size, sympy.Symbol):
            found.setdefault(entry.size, partial(read_integer, i))
        for dim, size in enumerate(getattr(node.meta.get("example_value"), "shape", ())):
            symbol = expression(size)
            if isinstance(symbol, sympy.Symbol):
                found.setdefault(symbol, partial(read_size, i, dim))
    missing = [symbol for symbol in capture.symbols if symbol not in found]
    if missing:
        raise FxpipeError(f"the sizes {missing} of the trace cannot be read off the inputs")
    return found


def read_integer(number: int, inputs: Sequence[Any]) -> int:
    return int(inputs[number])


def read_size(number: int, dim: int, inputs: Sequence[Any]) -> int:
    return int(inputs[number].shape[dim])


def describe_plan(programs: Sequence[Program], rows: Sequence[int]) -> str:
    """The text that ranks compare: sizes, schedule, tasks and edges."""
    distinct = list(dict.fromkeys(programs))
    parts = [f"microbatches of {' '.join(map(str, rows))} rows", *map(str, distinct)]
    return "\n".join(parts)

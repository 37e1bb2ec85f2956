"""A captured model to a callable: per call, the plan for the batch's sizes, executed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import sympy
import torch

from fxpipe import ownership
from fxpipe.capture import Capture
from fxpipe.construction import initialise
from fxpipe.dump import Dump
from fxpipe.errors import FxpipeError, ModelError, RankError
from fxpipe.log import logger
from fxpipe.lowering.auto import choose_schedule, probe_schedule
from fxpipe.lowering.captured import Budget, replay_of
from fxpipe.lowering.compiled_line import compiled_line, counted
from fxpipe.lowering.decisions import Decisions, decisions_for, holders_of, with_trained
from fxpipe.lowering.executor import Executor
from fxpipe.lowering.group import (
    agree,
    compare_batch,
    compare_parameters,
    compiling,
    digest,
    open_mailboxes,
)
from fxpipe.lowering.lower import lower
from fxpipe.lowering.memory_plan import memory_text
from fxpipe.lowering.metrics import register
from fxpipe.lowering.parity import find_difference, refuse_difference
from fxpipe.lowering.plan import Plan
from fxpipe.lowering.rank_program import RankProgram
from fxpipe.lowering.run import Run, pipelined, prologue_values, watched
from fxpipe.lowering.tasks import TaskCompiler
from fxpipe.lowering.tracing import FirstSteps, begin_recording
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
        self.budget = Budget()
        self.fronts: dict[Any, Program] = {}
        self.programs: dict[Any, Program] = {}
        self.plans: dict[Any, Plan] = {}
        self.decisions: Decisions | None = None
        self.schedule: Schedule | None = None
        self.node_places: dict[str, tuple[int, ...]] = {}
        self.checked = False
        self.first_steps = FirstSteps(options.trace) if options.trace is not None else None
        self.bindings = bind_symbols(capture)
        self.numbers = {entry.name: i for i, entry in enumerate(capture.inputs)}

    def __call__(self, *inputs: Any) -> list[Any]:
        plan, seed = self.plan_together(inputs)
        if self.options.check == "first" and not self.checked:
            self.check_first(plan, inputs, seed)
        recording = begin_recording(plan, self.first_steps)
        with watched(plan):
            if self.capture.training:
                tensors = pipelined(plan, inputs, seed, recording)
            else:
                with torch.no_grad():
                    tensors = Run(plan, inputs, seed, recording).start()
        if recording is not None:
            recording.tell()
        return self.complete(plan, inputs, tensors)

    def check_first(self, plan: Plan, inputs: Sequence[Any], seed: int) -> None:
        """Raises ParityError where this step, run on copies, differs from plain eager."""
        with watched(plan):
            found = find_difference(self.capture, plan, inputs, seed)
        refuse_difference(found, self.world_size, self.options.timeout)
        self.checked = True

    def complete(self, plan: Plan, inputs: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
        """The model's outputs: those computed, integers, constants, inputs and views of them."""
        program = plan.program
        computed = dict(zip(plan.outputs, tensors))
        if self.capture.aliases is not None:
            computed |= self.capture.aliases(inputs)
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

    def plan_together(self, inputs: Sequence[Any]) -> tuple[Plan, int]:
        """The plan for these inputs, compared with the other ranks' before anything is sent.

        Also the step's seed of random numbers: every rank draws one, rank 0's is everybody's.
        """
        if self.world_size == 1:
            plan = self.plan(inputs)
            return plan, plan.draw_seed()
        limit = self.options.timeout
        try:
            with compiling(self.world_size):
                plan = self.plan(inputs)
        except Exception as error:
            agree("", 0, limit, failure=error)
            raise
        seed = agree(plan.text, plan.digest, limit, seed=plan.draw_seed())
        if not plan.compared:
            self.compare_parameters(plan.program, inputs)
            self.compare_batch(inputs)
            open_mailboxes(senders_to(plan.executors[0].program), limit)
            plan.compared = True
        return plan, seed

    def compare_parameters(self, program: Program, inputs: Sequence[Any]) -> None:
        """Before the first step of a plan: ranks that share a parameter must agree on it."""
        tensors = {name: inputs[self.numbers[name]] for name in holders_of(program)}
        users = {program.input(name).path: ranks for name, ranks in holders_of(program).items()}
        sharing = with_trained(holders_of(program), tensors, program.training)
        copies = {
            program.input(name).path: (tensors[name], ranks)
            for name, ranks in sharing.items()
            if len(ranks) > 1
        }
        compare_parameters(copies, users, self.options.timeout)

    def compare_batch(self, inputs: Sequence[Any]) -> None:
        """Before the first step of a plan: every rank must be called with the same batch."""
        given = {
            entry.path: value
            for entry, value in zip(self.capture.inputs, inputs)
            if entry.role in (Role.BATCH, Role.WHOLE) and isinstance(value, torch.Tensor)
        }
        compare_batch(given, self.options.timeout)

    def plan(self, inputs: Sequence[Any]) -> Plan:
        symbols = self.symbols(inputs)
        key = tuple(symbols.values())
        if self.decisions is None:
            self.decisions = self.find_decisions(inputs)
        if self.schedule is not self.decisions.schedule:
            # An evaluation came first; "auto" has chosen a schedule since, and moved the stages.
            self.plans.clear()
            self.programs.clear()
            self.schedule = self.decisions.schedule
        if key not in self.plans:
            start = time.perf_counter()
            self.plans[key] = self.make_plan(symbols)
            if log.isEnabledFor(logging.INFO):
                seconds = time.perf_counter() - start
                log.info("%s", compiled_line(self.plans[key], seconds, len(self.plans)))
            self.record_ownership(self.plans[key], inputs)
        return self.plans[key]

    def find_decisions(self, inputs: Sequence[Any]) -> Decisions:
        given = self.options
        key = given.stages, given.schedule, given.microbatches, given.memory_limit, self.num_ranks
        tensors = (
            value
            for entry, value in zip(self.capture.inputs, inputs)
            if entry.role in (Role.PARAMETER, Role.BUFFER)
        )
        return decisions_for(tensors, key)

    def symbols(self, inputs: Sequence[Any]) -> dict[sympy.Symbol, int]:
        """The value of every symbol of the trace in this call."""
        return {symbol: read(inputs) for symbol, read in self.bindings.items()}

    def make_plan(self, symbols: Mapping[sympy.Symbol, int]) -> Plan:
        rows = self.split_batch(symbols)
        programs = tuple(self.program(symbols, count, len(rows)) for count in rows)
        first = programs[0]
        check_places(programs)
        ranks = self.own_ranks(first.schedule.num_ranks)
        lowered = self.lower(programs, ranks)
        dump = Dump(self.options, first)
        dump.schedule(lambda: grid(first.schedule))
        for rank_program in lowered:
            dump.memory(rank_program.rank, partial(memory_text, first, rank_program))
            dump.rank(rank_program.rank, partial(str, rank_program))
        executors = tuple(Executor(r, free=bool(first.last_uses)) for r in lowered)
        text = describe_plan(programs, rows)
        total = sum(rows) or 1
        shares = tuple(torch.tensor(count / total, dtype=torch.float64) for count in rows)
        timeout = self.options.timeout if self.world_size > 1 else None
        plan = Plan(programs, rows, executors, text, digest(text), shares, timeout)
        plan.replay = replay_of(plan, self.options, self.budget)
        return plan

    def lower(self, programs: Sequence[Program], ranks: Sequence[int]) -> list[RankProgram]:
        listeners = None if self.world_size > 1 else (0,)
        with counted(self.compile, programs, ranks) as compile_graph:
            return [lower(programs, rank, compile_graph, listeners) for rank in ranks]

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
        if self.capture.batch_symbol is None:
            return (0,)
        batch = symbols[self.capture.batch_symbol]
        count = min(self.options.microbatches, batch)
        least, larger = divmod(batch, count)
        return tuple(least + (k < larger) for k in range(count))

    def program(self, symbols: Mapping[sympy.Symbol, int], rows: int, count: int) -> Program:
        sizes = dict(symbols)
        if self.capture.batch_symbol is not None:
            sizes[self.capture.batch_symbol] = rows
        key = (tuple(sizes.values()), count)
        if key not in self.programs:
            front = self.front(sizes)
            options = replace(self.options, schedule=self.decide_schedule(front))
            program = replace(front, options=options, num_microbatches=count)
            self.programs[key] = self.pipeline.back(program)
        return self.programs[key]

    def front(self, sizes: Mapping[sympy.Symbol, int]) -> Program:
        """The program with a joint graph and stages, which every schedule shares.

        Sizes that come later are cut where the first were: parameters stay in their stages.
        """
        key = tuple(sizes.values())
        if key not in self.fronts:
            program = self.capture.program(self.options, sizes, 0, self.num_ranks)
            program = self.pipeline.front(replace(program, places=self.places()))
            self.fronts[key] = program
            if self.decisions is not None:
                self.decisions.note_stages(program)
            if not self.node_places:
                self.node_places = {
                    node.name: (node.meta["stage"],)
                    for node in program.joint.graph.nodes
                    if "stage" in node.meta and not node.meta.get("backward")
                }
        return self.fronts[key]

    def places(self) -> dict[str, tuple[int, ...]]:
        """Where parameters, buffers and nodes are, as far as an earlier trace has decided."""
        known = self.decisions.stages if self.decisions is not None else {}
        inputs = {i.name: known[i.path] for i in self.capture.inputs if i.path in known}
        return self.node_places | inputs

    def decide_schedule(self, front: Program) -> str | Schedule:
        """The option `schedule`, with "auto" replaced by what was measured to be the best."""
        if self.options.schedule != "auto":
            return self.options.schedule
        if self.schedule is not None:
            return self.schedule
        if not self.capture.training or front.loss is None:
            return "gpipe"
        probe = replace(
            self.options, schedule=probe_schedule(front.num_stages), microbatches=2, dump=None
        )  # fmt: skip
        program = replace(front, options=probe, num_microbatches=2, num_ranks=None)
        ranks = self.num_ranks or front.num_stages
        self.schedule = choose_schedule(
            self.pipeline.back(program), self.compile, ranks, self.options
        )  # fmt: skip
        if self.decisions is not None:
            self.decisions.schedule = self.schedule
        return self.schedule

    def record_ownership(self, plan: Plan, inputs: Sequence[Any]) -> None:
        """Note what this rank uses. What no rank uses is as if this step had not seen it."""
        used = {slot.name for executor in plan.executors for slot in executor.program.slots}
        used |= self.read_by_prologue(plan.program)
        anywhere = used.union(*(task.inputs for task in plan.program.tasks.values()))
        state = {
            entry.name: value
            for entry, value in zip(self.capture.inputs, inputs)
            if entry.role in (Role.PARAMETER, Role.BUFFER) and entry.name in anywhere
        }
        for name, value in state.items():
            ownership.record(value, self, name in used)
        register(self, state.values())
        first = self.world_size == 1 or torch.distributed.get_rank() == 0
        initialise((state[name] for name in used & state.keys()), state.values(), others=first)

    def read_by_prologue(self, program: Program) -> set[str]:
        """What every rank reads once a step, and no rank trains."""
        if program.prologue is None:
            return set()
        placeholders = program.prologue.graph.find_nodes(op="placeholder")
        return {
            entry.name
            for entry, node in zip(self.capture.inputs, placeholders)
            if node.users and not entry.requires_grad
        }


def senders_to(program: RankProgram) -> set[int]:
    return {m.source for m in program.messages.values() if m.target == program.rank}


def check_places(programs: Sequence[Program]) -> None:
    """Microbatches of different sizes must find each parameter on the same ranks."""
    for program in programs[1:]:
        other, first = holders_of(program), holders_of(programs[0])
        moved = [name for name in first if other.get(name) != first[name]]
        if moved:
            raise ModelError(
                f"microbatches of {programs[0].microbatch_size} and of {program.microbatch_size} "
                f"rows read the parameter {first_path(program, moved)!r} on different ranks; name "
                f"the stages by module path, stages=['...'], or choose a number of microbatches "
                f"that divides the batch"
            )


def first_path(program: Program, names: Sequence[str]) -> str:
    return min(program.input(name).path for name in names)


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

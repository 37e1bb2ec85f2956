"""A step beside plain eager and the joint graph run unsplit: what differs, and where first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from fxpipe.capture import Capture
from fxpipe.compare import (
    BATCH_NORM,
    FLOOR,
    RANDOM,
    REDUCED,
    Compared,
    compare_named,
    compared,
    norm,
)
from fxpipe.errors import ParityError
from fxpipe.log import logger
from fxpipe.lowering.executor import Executor, Slots
from fxpipe.lowering.group import gather_objects
from fxpipe.lowering.plan import Plan
from fxpipe.lowering.rank_program import Slot
from fxpipe.lowering.run import Run
from fxpipe.lowering.status import about
from fxpipe.pipeline import blame, name_of
from fxpipe.program import Key, Program, Role, where
from fxpipe.schedule import Action, actions_of
from fxpipe.torch_private import autocast_off

log = logger(__name__)

ROWS = 10  # of the table of what differs
ELSEWHERE = (
    "every task gives what the joint graph gives, so the difference comes from what made that "
    "graph: the trace, or how the batch or its loss was split"
)
PER_MICROBATCH = (Role.BATCH, Role.SHARE, Role.SEED)

Tensors = Mapping[str, torch.Tensor]


class Difference(NamedTuple):
    """What one rank found: the number of the node of the joint graph where it begins, in words."""

    number: float
    text: str


@dataclass(frozen=True)
class Recorded:
    """A value that a task gave."""

    action: Action
    name: str
    value: Any


def find_difference(
    capture: Capture, plan: Plan, inputs: Sequence[Any], seed: int
) -> Difference | None:
    """Run a step on copies, and plain eager beside it; what this rank has that differs.

    Where plain eager gives other numbers by contract (see `differs_by_contract`) the joint graph of
    each microbatch takes its place. Every rank calls this, since a step needs all of them.
    """
    refuse_missing_storage(plan, inputs)
    with torch.no_grad():
        ours = Pipelined(plan, copies(plan, inputs), seed)
        joint = Unsplit(plan, ours.run, copies(plan, inputs), ours.output_gradients)
    reason = differs_by_contract(plan)
    reference = "its joint graph run unsplit" if reason else "plain eager"
    if reason:
        log.info("compared with the joint graph, not with plain eager: %s", reason)
        rows = compare_inputs("gradient of", plan, ours.run.gradients, joint.gradients)
    else:
        theirs = Eager(capture, plan, copies(plan, inputs))
        rows = compare_inputs("gradient of", plan, ours.run.gradients, theirs.gradients)
        rows += compare_inputs("buffer", plan, ours.buffers, theirs.buffers)
        rows += compare_outputs(plan, ours.outputs, theirs.outputs)
    different = [row for row in rows if not row.agrees]
    place = first_difference(plan, ours.recorded, joint.values)
    if different or place:
        number, text = place or (math.inf, ELSEWHERE)
        text = f"{text}{blame(extra_passes(plan.program, of_tasks=place is not None))}"
        return Difference(number, describe(different, text, reference))
    worst = max(rows, key=lambda row: row.error, default=None)
    log.info("the first step agrees with %s; furthest from it: %s", reference, worst)
    return None


def refuse_difference(own: Difference | None, world_size: int, timeout: float) -> None:
    """Raise the ParityError of the rank where the first difference arises, on every rank."""
    parts = [own]
    if world_size > 1:
        parts = gather_objects("the check of the first step", own, timeout)
    found = [part for part in parts if part is not None]
    if found:
        raise ParityError(min(found).text)


def extra_passes(program: Program, of_tasks: bool) -> list[str]:
    """The user's passes that ran on the tasks, or before there were any: on the joint graph."""
    order = [name for name, _ in program.passes]
    extra = {name_of(pass_) for _, _, pass_ in program.options.extra_passes}
    split = order.index("split_tasks") if "split_tasks" in order else len(order)
    return [
        name
        for index, (name, on) in enumerate(program.passes)
        if on and name in extra and (index > split) == of_tasks
    ]


def differs_by_contract(plan: Plan) -> str:
    """Why plain eager gives other numbers than microbatches do, if it does."""
    if plan.seeds:
        return RANDOM
    if plan.program.options.loss_reduction is not None:
        return REDUCED
    names = (str(node.target) for node in plan.program.joint.graph.nodes)
    if any("batch_norm" in name and "no_training" not in name for name in names):
        return BATCH_NORM
    return ""


def refuse_missing_storage(plan: Plan, inputs: Sequence[Any]) -> None:
    for entry, value in zip(plan.program.inputs, inputs):
        if isinstance(value, torch.Tensor) and value.numel():
            if value.is_meta or value.untyped_storage().size() == 0:
                raise ParityError(
                    f"check='first' needs the whole model on every rank, and {entry.path!r} has no "
                    f"storage here; check before fxpipe.free_unowned, on a model small enough"
                )


def copies(plan: Plan, inputs: Sequence[Any]) -> list[Any]:
    """Inputs that a step may write to. Parameters are read alone."""
    roles = [entry.role for entry in plan.program.inputs]
    return [
        value.detach().clone()
        if isinstance(value, torch.Tensor) and role is not Role.PARAMETER
        else value
        for role, value in zip(roles, inputs)
    ]


# The three ways to run a step.


class Pipelined:
    """A step on the ranks of this process, with the values of its tasks kept."""

    def __init__(self, plan: Plan, inputs: Sequence[Any], seed: int) -> None:
        self.recorded: list[Recorded] = []
        executors = tuple(Executor(e.program, free=False) for e in plan.executors)
        for executor in executors:
            executor.observe(self.recorder(plan, executor))
        self.run = Run(replace(plan, executors=executors), inputs, seed)
        outputs = self.run.start()
        self.output_gradients: dict[Slot, torch.Tensor] = {}
        if plan.program.training and plan.program.loss is None:
            ones = self.run.split_gradients([torch.ones_like(output) for output in outputs])
            names = [o.name for o in plan.program.outputs if o.requires_grad]
            slots = [Slot(f"grad_{name}", k) for name in names for k in range(len(plan.rows))]
            self.output_gradients = dict(zip(slots, ones))
            self.run.advance(ones)
        self.outputs = dict(zip(plan.outputs, outputs))
        used = {slot.name for executor in executors for slot in executor.program.slots}
        self.buffers = {name: b for name, b in buffers_of(plan, inputs).items() if name in used}

    def recorder(self, plan: Plan, executor: Executor) -> Callable[[str, Slots], None]:
        places = dict(results_of_tasks(plan, executor))

        def record(instruction: str, slots: Slots) -> None:
            for action, name, number in places.get(instruction, ()):
                self.recorded.append(Recorded(action, name, slots[number]))

        return record


def results_of_tasks(
    plan: Plan, executor: Executor
) -> Iterator[tuple[str, list[tuple[Action, str, int]]]]:
    """Of each task's call: its results, by action and name, and the slots that they are in."""
    for call in executor.program.graph.graph.find_nodes(op="call_module"):
        unit = call.meta["action"]
        actions = list(actions_of(unit))
        program = plan.programs[actions[0].microbatch]
        keys = [Key(action.stage, action.kind) for action in actions]
        if len(actions) == 1:
            names = [(0, name) for name in program.tasks[keys[0]].outputs]
        else:
            names = list(program.pairs[keys[0], keys[1]].outputs)
        found = []
        for part in call.users:
            if part.target is getitem:
                side, name = names[part.args[1]]
                found.append((actions[side], name, executor.number[part]))
        yield str(unit), found


class Unsplit:
    """The joint graph of every microbatch, node after node.

    values[k][name]: what the nodes give for microbatch k. gradients: summed over the microbatches.
    """

    def __init__(
        self, plan: Plan, run: Run, inputs: Sequence[Any], given: Mapping[Slot, torch.Tensor]
    ) -> None:
        self.run, self.given = run, given
        run.inputs = inputs
        self.written: dict[str, torch.Tensor] = {}
        self.values: list[dict[str, Any]] = []
        self.gradients: dict[str, torch.Tensor] = {}
        for microbatch, program in enumerate(plan.programs):
            self.add(program, microbatch)
        run.inputs = ()

    def add(self, program: Program, microbatch: int) -> None:
        interpreter = fx.Interpreter(program.joint, garbage_collect_values=False)
        names = [node.name for node in program.joint.graph.find_nodes(op="placeholder")]
        with autocast_off():
            results = interpreter.run(*[self.value(program, name, microbatch) for name in names])
        self.values.append({node.name: value for node, value in interpreter.env.items()})
        for result, value in zip(program.results, results):
            name = str(result.target)
            if result.kind == "mutation":
                self.written[name] = value
            elif result.kind == "gradient" and program.input(name).role is Role.PARAMETER:
                known = self.gradients.get(name)
                self.gradients[name] = value if known is None else known + value

    def value(self, program: Program, name: str, microbatch: int) -> Any:
        if Slot(name, microbatch) in self.given:
            return self.given[Slot(name, microbatch)]
        if name in self.written:
            return self.written[name]
        entry = program.input(name)
        if entry.role is Role.SIZE:
            return int(entry.size.subs(program.sizes))
        slot = Slot(name, microbatch if entry.role in PER_MICROBATCH else None)
        return self.run.plan.fill(slot)(self.run)


class Eager:
    """The graph that Dynamo captured, on the whole batch, with autograd."""

    def __init__(self, capture: Capture, plan: Plan, inputs: Sequence[Any]) -> None:
        entries = plan.program.inputs
        leaves = [
            value.detach().requires_grad_(entry.requires_grad)
            if isinstance(value, torch.Tensor)
            else value
            for entry, value in zip(entries, inputs)
        ]
        with torch.set_grad_enabled(plan.program.training):
            outputs = capture.model(*leaves)
            differentiable = [o for o in outputs if getattr(o, "requires_grad", False)]
            if plan.program.loss is not None:
                differentiable = [outputs[plan.program.loss]]
            if plan.program.training:
                torch.autograd.backward(
                    differentiable, [torch.ones_like(o) for o in differentiable]
                )
        self.outputs = dict(enumerate(outputs))
        self.gradients = {
            entry.name: leaf.grad
            for entry, leaf in zip(entries, leaves)
            if isinstance(leaf, torch.Tensor) and leaf.grad is not None
        }
        self.buffers = buffers_of(plan, leaves)


def buffers_of(plan: Plan, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
    return {
        entry.name: value
        for entry, value in zip(plan.program.inputs, inputs)
        if entry.role is Role.BUFFER and isinstance(value, torch.Tensor)
    }


# Comparison.


def compare_inputs(what: str, plan: Plan, ours: Tensors, theirs: Tensors) -> list[Compared]:
    """What is known of inputs by name, as far as this rank has it, under the user's names."""
    both = [name for name in ours if name in theirs]
    paths = {name: plan.program.input(name).path for name in both}
    sides = ({paths[name]: side[name] for name in both} for side in (ours, theirs))
    return compare_named(what, *sides)


def compare_outputs(
    plan: Plan, ours: Mapping[int, Any], theirs: Mapping[int, Any]
) -> list[Compared]:
    names = {i: o.name for i, o in enumerate(plan.program.outputs)}
    return [
        compared("loss" if i == plan.program.loss else f"output {names[i]}", value, theirs[i])
        for i, value in ours.items()
        if isinstance(theirs[i], torch.Tensor)
    ]


def first_difference(
    plan: Plan, recorded: Sequence[Recorded], values: Sequence[Mapping[str, Any]]
) -> tuple[int, str] | None:
    """The number of the first node that a task gives otherwise than the joint graph, in words."""
    # Microbatches of different sizes have joint graphs of their own, with names of their own.
    orders = {
        id(program): {node.name: (i, node) for i, node in enumerate(program.joint.graph.nodes)}
        for program in plan.programs
    }

    def place(found: Recorded) -> tuple[int, fx.Node]:
        return orders[id(plan.programs[found.action.microbatch])][found.name]

    for found in sorted(recorded, key=lambda r: (place(r)[0], r.action.microbatch)):
        theirs = values[found.action.microbatch][found.name]
        peers = [r.value for r in recorded if r.action == found.action and is_real(r.value)]
        floor = FLOOR * max(map(norm, peers), default=0.0)
        row = compared(found.name, found.value, theirs, floor)
        if not row.agrees:
            number, node = place(found)
            return number, (
                f"{about(str(found.action))} gives {found.name} with an error of {row.error:.1e} "
                f"(limit {row.limit:.1e}) beside the joint graph run unsplit: {where(node)}"
            )
    return None


def is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def describe(different: Sequence[Compared], place: str, reference: str) -> str:
    """One sentence, then the values that differ, the worst ones first."""
    worst = sorted(different, key=lambda row: -row.error)
    said = f"the {worst[0].what} is off by {worst[0].error:.1e}; " if worst else ""
    rows = [f"  {row}" for row in worst[:ROWS]]
    if len(worst) > ROWS:
        rows.append(f"  and {len(worst) - ROWS} more")
    return "\n".join([f"the pipelined step differs from {reference}: {said}{place}", *rows])

"""What a step is made of, for one combination of sizes: its programs, and how slots are filled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch

from fxpipe.lowering.executor import Executor
from fxpipe.lowering.packing import Spec
from fxpipe.lowering.rank_program import RankProgram, Slot
from fxpipe.lowering.replay import Replay
from fxpipe.lowering.static import StaticProgram
from fxpipe.program import Input, Program, Role
from fxpipe.random import draw_seed


class Values(Protocol):
    """What a run has at its start."""

    inputs: Sequence[Any]  # of the call
    prologue: Mapping[str, torch.Tensor]
    seeds: Mapping[torch.device, Sequence[tuple[torch.Tensor, ...]]]  # see fxpipe.random


Fill = Callable[[Values], Any]


class Metered(NamedTuple):
    """What is known of a step that has run, on this process, without recording it."""

    ended: float  # time.perf_counter()
    seconds: float  # without those between a pause and the backward
    waited: float | None  # seconds of them in waits for messages; None where ranks share a thread


@dataclass
class Plan:
    """Everything for one combination of sizes."""

    programs: tuple[Program, ...]  # one per microbatch
    rows: tuple[int, ...]  # of each microbatch
    executors: tuple[Executor, ...]  # of the ranks in this process
    text: str
    digest: int
    shares: tuple[torch.Tensor, ...]
    timeout: float | None  # seconds; None where all ranks are in this process
    replay: Replay | None = None  # of all ranks of this process, in place of the executors
    compared: bool = False  # whether ranks have compared the parameters that they share
    metered: Metered | None = None  # the last step that has run to its end
    recorded: Any = None  # of the same step, where it was: fxpipe.lowering.recording.Recorded
    fills: dict[int, tuple[Any, tuple[Fill, ...]]] = field(default_factory=dict)  # see fills_of

    @cached_property
    def inputs(self) -> Mapping[str, tuple[int, Input]]:
        """name -> (number, entry); those made by passes come after those of the call."""
        return {entry.name: (i, entry) for i, entry in enumerate(self.program.inputs)}

    @cached_property
    def traced(self) -> Sequence[Mapping[str, Spec]]:
        """Per microbatch, name of an output's gradient -> how it was traced."""
        names = {f"grad_{output.name}" for output in self.program.outputs if output.requires_grad}
        return [
            {n.name: Spec.of(n.meta["val"]) for n in inputs if n.name in names}
            for inputs in (p.joint.graph.find_nodes(op="placeholder") for p in self.programs)
        ]

    @cached_property
    def seeds(self) -> Mapping[str, tuple[int, torch.device]]:
        """name of an input that random numbers are drawn from -> (place in the model, device)."""
        roles = (Role.SEED, Role.WHOLE_SEED)
        names = [entry.name for entry in self.program.inputs if entry.role in roles]
        nodes = {n.name: n for n in self.program.joint.graph.find_nodes(op="placeholder")}
        return {name: (i, nodes[name].meta["val"].device) for i, name in enumerate(names)}

    @cached_property
    def scratch(self) -> Mapping[str, torch.Tensor]:
        """name of an input that is zeros at the start of a step -> the fake tensor like it."""
        nodes = {n.name: n for n in self.program.joint.graph.find_nodes(op="placeholder")}
        return {
            entry.name: nodes[entry.name].meta["val"]
            for entry in self.program.inputs
            if entry.role is Role.SCRATCH
        }

    @cached_property
    def has_own_backward(self) -> bool:
        nodes = self.program.model.graph.nodes
        return any(getattr(n.target, "__name__", "") == "autograd_function_apply" for n in nodes)

    @cached_property
    def computes_in_float16(self) -> bool:
        values = (node.meta.get("val") for node in self.program.joint.graph.nodes)
        return any(getattr(value, "dtype", None) is torch.float16 for value in values)

    def draw_seed(self) -> int:
        """The seed of the next step; a model without random operators draws none."""
        return draw_seed() if self.seeds else 0

    @property
    def program(self) -> Program:
        """The program of the first microbatch; the others differ in sizes alone."""
        return self.programs[0]

    @property
    def runners(self) -> Sequence[Executor | Replay]:
        """What runs a step: one for each rank of this process, or one for all of them."""
        if self.replay is not None and self.replay.is_current(self.executors):
            return (self.replay,)
        return self.executors

    @property
    def outputs(self) -> tuple[int, ...]:
        """The numbers of the outputs that a run computes, in its order."""
        return self.executors[0].program.outputs

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """The numbers of the inputs whose gradients this process computes."""
        names = {name for executor in self.executors for name in executor.program.gradients}
        return tuple(number for number, entry in self.inputs.values() if entry.name in names)

    def fills_of(self, program: RankProgram | StaticProgram) -> tuple[Fill, ...]:
        """What fills the slots of a program at the start of a run; found once, as it is needed."""
        if id(program) not in self.fills:
            self.fills[id(program)] = program, tuple(map(self.fill, program.slots))
        return self.fills[id(program)][1]

    def fill(self, slot: Slot) -> Fill:
        number, entry = self.inputs[slot.name]
        if entry.role is Role.PROLOGUE:
            return lambda of: of.prologue[slot.name]
        if slot.name in self.seeds:
            place, device = self.seeds[slot.name]
            row = 0 if slot.microbatch is None else 1 + slot.microbatch
            return lambda of: of.seeds[device][row][place]
        if entry.role is Role.SCRATCH:
            like = self.scratch[slot.name]
            return lambda of: torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        if entry.role is Role.SNAPSHOT:
            source = self.inputs[entry.source][0]
            return lambda of: of.inputs[source].clone()
        if slot.microbatch is None:
            return lambda of: of.inputs[number]
        if entry.role is Role.SHARE:
            share = self.shares[slot.microbatch]
            return lambda of: share
        start, rows = sum(self.rows[: slot.microbatch]), self.rows[slot.microbatch]
        dim = entry.batch_dim
        return lambda of: of.inputs[number].narrow(dim, start, rows).contiguous()

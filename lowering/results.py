"""The end of a rank program: gradients summed over ranks, outputs joined and handed to all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch

from fxpipe.lowering import instructions
from fxpipe.lowering.packing import Spec
from fxpipe.lowering.rank_program import Message
from fxpipe.program import Join, Output

if TYPE_CHECKING:
    from fxpipe.lowering.lower import RankBuilder


class Results:
    """Adds to the rank program that `builder` makes what gives its results."""

    def __init__(self, builder: RankBuilder) -> None:
        self.builder = builder
        self.program = builder.programs[0]
        self.rank = builder.rank

    # Gradients.

    def send_sum(self, name: str) -> None:
        """After its last accumulation: this rank's sum of a gradient to the others."""
        reduction = self.program.reductions[name]
        for other in reduction.receivers:
            if other != self.rank:
                message = self.message_of_sum(name, self.rank, other)
                self.builder.send(message, [self.builder.accumulators[name]])
        if self.rank in reduction.receivers:
            self.post_sums(name)

    def post_sums(self, name: str) -> None:
        for other in self.program.reductions[name].contributors:
            if other != self.rank:
                self.builder.post(self.message_of_sum(name, other, self.rank))

    def message_of_sum(self, name: str, source: int, target: int) -> str:
        message = f"SUM {name} {source}>{target}"
        dense = torch.empty_like(self.builder.value_of(0, name))
        self.builder.messages[message] = Message(source, target, (Spec.of(dense),))
        return message

    def summed_gradients(self) -> dict[str, Any]:
        builder = self.builder
        gradients: dict[str, Any] = dict(builder.accumulators)
        for name, reduction in self.program.reductions.items():
            if self.rank not in reduction.receivers:
                continue
            if self.rank not in reduction.contributors:
                self.post_sums(name)
            parts = []
            for contributor in reduction.contributors:
                if contributor == self.rank:
                    parts.append(builder.accumulators[name])
                else:
                    received = builder.receive(f"SUM {name} {contributor}>{self.rank}")
                    parts.append(builder.call(getitem, received, 0))
            gradients[name] = builder.call(instructions.total, parts, name=f"summed_{name}")
        return gradients

    def input_gradients(self) -> dict[str, Any]:
        """Gradients of the call's batch arguments, joined from the microbatches'."""
        found = {}
        for name in self.program.input_gradients:
            places = [program.input_gradients[name] for program in self.builder.programs]
            output = Output(name, Join.CONCATENATE, dim=self.program.input(name).batch_dim)
            found[name] = self.gather(f"GRADIENT {name}", places, output)
        return {name: value for name, value in found.items() if value is not None}

    # Outputs.

    def outputs(self) -> dict[int, Any]:
        """The model's outputs that are computed, by number, on the ranks that get them."""
        found: dict[int, Any] = {}
        for number, output in enumerate(self.program.outputs):
            if number in self.program.returns and not self.is_input(number):
                places = [program.returns[number] for program in self.builder.programs]
                found[number] = self.gather(f"OUTPUT {number}", places, output)
        return {number: value for number, value in found.items() if value is not None}

    def is_input(self, number: int) -> bool:
        """Whether an output is an input as it is, which the runtime returns itself."""
        _, name = self.program.returns[number]
        return any(entry.name == name for entry in self.program.inputs)

    def gather(self, label: str, places: Sequence[tuple[int, str]], output: Output) -> Any:
        """An output of the whole batch from its parts, which several ranks may have."""
        builder = self.builder
        if output.join is Join.FIRST:
            places = places[:1]
        owners: dict[int, list[int]] = {}
        for microbatch, (stage, _) in enumerate(places):
            owner = builder.schedule.rank_of[stage, microbatch]
            owners.setdefault(owner, []).append(microbatch)
        parts: dict[int, Any] = {}
        for owner, microbatches in sorted(owners.items()):
            own = {}
            if owner == self.rank:
                own = {k: builder.values[places[k][0], k][places[k][1]] for k in microbatches}
            parts |= self.spread(f"{label} {owner}", owner, microbatches, own, places, output)
        if self.rank not in builder.listeners:
            return None
        ordered = [parts[k] for k in sorted(parts)]
        if len(ordered) == 1:
            return ordered[0]
        if output.join is Join.SUM:
            return builder.call(instructions.total, ordered, name=f"whole_{label}")
        return builder.call(instructions.join, ordered, output.dim, name=f"whole_{label}")

    def spread(
        self,
        label: str,
        owner: int,
        microbatches: Sequence[int],
        own: Mapping[int, Any],
        places: Sequence[tuple[int, str]],
        output: Output,
    ) -> dict[int, Any]:
        """The parts of one owner, on it and on the listeners. A sum travels as one part."""
        builder = self.builder
        if output.join is Join.SUM:
            if own:
                summed = builder.call(instructions.total, list(own.values()), name=f"own_{label}")
                own = {microbatches[0]: summed}
            microbatches = microbatches[:1]
        specs = tuple(Spec.of(builder.value_of(k, places[k][1])) for k in microbatches)
        for other in builder.listeners:
            if other != owner and self.rank in (owner, other):
                builder.messages[f"{label}>{other}"] = Message(owner, other, specs)
                if self.rank == owner:
                    builder.send(f"{label}>{other}", list(own.values()))
        if owner == self.rank:
            return dict(own)
        if self.rank not in builder.listeners:
            return {}
        message = f"{label}>{self.rank}"
        builder.post(message)
        received = builder.receive(message)
        return {k: builder.call(getitem, received, i) for i, k in enumerate(microbatches)}

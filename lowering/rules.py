"""A rank program -> what keeps it from being captured: the node, the reason, the model's line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.fx as fx

from fxpipe.lowering.rank_program import RankProgram
from fxpipe.lowering.values import task_of
from fxpipe.program import tensors_of, where

aten = torch.ops.aten
# Operators that are given a count instead of reading it from a tensor.
COUNTED = {aten.repeat_interleave.Tensor: "output_size"}
READS = (aten._local_scalar_dense.default, aten.item.default, aten.equal.default)
MOVES = (aten._to_copy.default, aten.copy_.default, aten.copy.default)
CONTROL = ("cond", "while_loop")


class Breach(NamedTuple):
    """A node that a captured program cannot hold, and why."""

    node: fx.Node
    reason: str

    def __str__(self) -> str:
        return f"{self.node.name} {self.reason}: {where(self.node)}"


def breaches_of(programs: Sequence[RankProgram]) -> Iterator[Breach]:
    """Every breach of the rules for what is captured, in the tasks of some ranks; each once.

    A captured program makes the same launches at each replay. So no Python value is read from a
    tensor, which would also let the host wait; no shape depends on values; nothing is copied
    between host and device; random numbers come from seeds, which are inputs (seed_randomness).
    """
    seen: set[str] = set()
    for program in programs:
        for call in program.graph.graph.find_nodes(op="call_module"):
            if str(call.target) not in seen:
                seen.add(str(call.target))
                yield from breaches_in(task_of(program, call))


def breaches_in(graph: fx.Graph) -> Iterator[Breach]:
    for node in graph.nodes:
        if node.op == "call_function" and (reason := reason_of(node)):
            yield Breach(node, reason)


def reason_of(node: fx.Node) -> str:
    target, tags = node.target, getattr(node.target, "tags", ())
    if target in READS or torch.Tag.data_dependent_output in tags:
        return "reads a Python value from a tensor, so that the host waits for the device"
    if torch.Tag.dynamic_output_shape in tags:
        counted = COUNTED.get(target)
        if counted is None or node.kwargs.get(counted) is None:
            return "has a shape that depends on values"
    if torch.Tag.nondeterministic_seeded in tags and not drops_nothing(node):
        return "draws random numbers from the generator, and not from a seed that is an input"
    if getattr(target, "namespace", "") == "higher_order" and str(target) in CONTROL:
        return "chooses what to run by a value that the host reads"
    return reason_of_devices(node)


def drops_nothing(node: fx.Node) -> bool:
    """Fused attention and recurrent layers are tagged whether they drop anything or not."""
    arguments = node.target._schema.arguments
    for place, argument in enumerate(arguments):
        if argument.name in ("dropout_p", "dropout"):
            given = node.args[place] if place < len(node.args) else argument.default_value
            return node.kwargs.get(argument.name, given) == 0.0
    return False


def reason_of_devices(node: fx.Node) -> str:
    """A tensor without dimensions may stay on the host: a microbatch's share, which is constant."""
    sources = [value for n in node.all_input_nodes for value in tensors_of(n.meta.get("val"))]
    results = tensors_of(node.meta.get("val"))
    moves = node.target in MOVES
    kinds = {v.device.type for v in (*sources, *results) if v.dim() or moves}
    return f"copies between {' and '.join(sorted(kinds))}" if len(kinds) > 1 else ""

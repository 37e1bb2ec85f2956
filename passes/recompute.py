"""What `torch.utils.checkpoint` encloses to values that backward computes again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from fxpipe.passes._graph import BATCH_NORM, BATCH_NORM_BACKWARD, aten, copy_graph, is_view
from fxpipe.program import Program

AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
OUTPUT_AND_STATISTICS = 3  # results of a BatchNorm, before those that replace its buffers


@dataclass(frozen=True)
class Recompute:
    """
    %a = linear(%x); %b = tanh(%a); %c = linear(%b)      inside of one checkpoint(...)
    %g = tanh_backward(%grad, %b)

    becomes

    %a = linear(%x); %b = tanh(%a); %c = linear(%b)
    %a_again = linear(%x); %b_again = tanh(%a_again); %g = tanh_backward(%grad, %b_again)

    so that a stage keeps %x, what the region takes, from F to backward, and not what is inside.
    The copies belong to the backward of their stage and stand before their first reader. Under a
    split backward each is computed once: in I where I needs it, which hands it to W if W reads it
    too; otherwise in W. Random operators are functions of seeds by now, which the copies read, so
    they draw the same again. A value of a region that an operator outside of it keeps for its own
    backward, or from which another region starts, is kept. What a region says it saves
    (`context_fn` of selective checkpointing) is kept.

    What reads a buffer that the model changes is not computed again: the buffer may have moved on.
    BatchNorm in training is, without its buffers, which it does not read then.

    The rematerialization of Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).
    """

    def __call__(self, program: Program) -> Program:
        if not any(map(is_tagged, program.joint.graph.nodes)):
            return program
        joint, _ = copy_graph(program.joint)
        written = {str(r.target) for r in program.results if r.kind == "mutation"}
        cut_running_statistics(joint)
        _Copier(joint, Regions(joint, written)).run()
        joint.graph.eliminate_dead_code()
        joint.recompile()
        return replace(program, joint=joint)


def is_tagged(node: fx.Node) -> bool:
    return node.meta.get("recompute") in AGAIN and not node.meta.get("backward")


def cut_running_statistics(joint: fx.GraphModule) -> None:
    """The backward of a BatchNorm in training takes running statistics and does not read them."""
    for node in joint.graph.find_nodes(op="call_function", target=BATCH_NORM_BACKWARD):
        if node.args[7]:
            node.args = (*node.args[:3], None, None, *node.args[5:])


class Regions:
    """Which values are computed again: `again`."""

    def __init__(self, joint: fx.GraphModule, written: set[str]) -> None:
        fixed = reading_changed_buffers(joint, written)
        self.number = {
            node: node.meta.get("ac_graph_id")
            for node in joint.graph.nodes
            if is_tagged(node) and node not in fixed
        }
        self.of_operator: dict[int, set[Any]] = {}
        for node in joint.graph.nodes:
            if "seq_nr" in node.meta and not node.meta.get("backward"):
                found = self.of_operator.setdefault(node.meta["seq_nr"], set())
                found.add(node.meta.get("ac_graph_id"))
        kept = {v for v in self.number if any(self.is_outside(b, v) for b in self.readers(v))}
        self.again: set[fx.Node] = set()
        size = -1
        while len(kept) > size:
            size = len(kept)
            self.again = self.closure(kept)

    def readers(self, value: fx.Node) -> Iterator[fx.Node]:
        """The backward nodes of its stage that read a value."""
        stage = value.meta.get("stage")
        for user in value.users:
            if user.op == "call_function" and user.meta.get("backward"):
                if stage in (None, user.meta.get("stage", stage)):
                    yield user

    def is_outside(self, reader: fx.Node, value: fx.Node) -> bool:
        """Whether a backward node is that of an operator outside of the value's region."""
        regions = self.of_operator.get(reader.meta.get("seq_nr", -1), set())
        return bool(regions) and self.number[value] not in regions

    def closure(self, kept: set[fx.Node]) -> set[fx.Node]:
        """What backward reads and all that it is made of in its region; adds to `kept`."""
        found: set[fx.Node] = set()
        stack = [v for v in self.number if v not in kept and any(True for _ in self.readers(v))]
        while stack:
            node = stack.pop()
            if node in found:
                continue
            found.add(node)
            for source in node.all_input_nodes:
                if source not in self.number or source in kept:
                    continue
                if self.number[source] == self.number[node]:
                    if source.meta.get("stage") in (None, node.meta.get("stage")):
                        stack.append(source)
                elif (base := base_of(source)) in self.number:
                    kept.add(base)
        return found


def base_of(node: fx.Node) -> fx.Node:
    """What a view is of, through other views."""
    while is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def reading_changed_buffers(joint: fx.GraphModule, written: set[str]) -> set[fx.Node]:
    """What is computed from a buffer that the model changes, as later microbatches leave it."""
    changed = {n for n in joint.graph.find_nodes(op="placeholder") if n.name in written}
    found: set[fx.Node] = set()
    for node in joint.graph.nodes:
        if node.target is BATCH_NORM and node.args[5]:
            found |= {user for user in node.users if user.args[1] >= OUTPUT_AND_STATISTICS}
        elif changed.intersection(node.all_input_nodes) and node.op != "output":
            found.add(node)
            if is_view(node):
                changed.add(node)
    return found


@dataclass
class _Copier:
    joint: fx.GraphModule
    regions: Regions
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def run(self) -> None:
        readers = {b for v in self.regions.again for b in self.regions.readers(v)}
        for node in list(self.joint.graph.nodes):
            if node in readers:
                for value in node.all_input_nodes:
                    if value in self.regions.again and node in set(self.regions.readers(value)):
                        node.replace_input_with(value, self.copy(value, node))

    def copy(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """`node` computed again; placed before the first node that reads it."""
        if node not in self.copies:
            taken = {n: self.copy(n, before) for n in self.again_of(node)}
            target, args = node.target, fx.node.map_arg(node.args, lambda n: taken.get(n, n))
            kwargs = fx.node.map_arg(node.kwargs, lambda n: taken.get(n, n))
            value = node.meta["val"]
            if target is BATCH_NORM:
                source, weight, bias, _, _, *rest = args
                target, args = aten._native_batch_norm_legit.no_stats, (source, weight, bias, *rest)
                value = value[:OUTPUT_AND_STATISTICS]
            with self.joint.graph.inserting_before(before):
                made = self.joint.graph.create_node(
                    node.op, target, args, kwargs, name=f"{node.name}_again"
                )
            made.meta = {**node.meta, "val": value, "backward": True}
            for mark in ("recompute", "ac_graph_id"):
                made.meta.pop(mark, None)
            self.copies[node] = made
        return self.copies[node]

    def again_of(self, node: fx.Node) -> list[fx.Node]:
        """The inputs of a copy that are copies."""
        stages = (None, node.meta.get("stage"))
        return [
            source
            for source in node.all_input_nodes
            if source in self.regions.again
            and self.regions.number[source] == self.regions.number[node]
            and source.meta.get("stage") in stages
        ]

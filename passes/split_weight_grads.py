"""Backward to input gradients (I) and weight gradients (W)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import getitem

import torch.fx as fx

from fxpipe.passes._graph import aten, copy_graph, getitem_of, results_of
from fxpipe.program import Program, Role
from fxpipe.schedule import Kind


@dataclass(frozen=True)
class SplitWeightGrads:
    """
    B(saved, grads_in) -> input_grads, weight_grads

    becomes

    I(saved, grads_in) -> input_grads, live
    W(live, saved)     -> weight_grads

    by marking each backward node with meta["kind"]: I if it is on the way to a value that another
    stage needs (or to the gradient of an argument of the call), W otherwise. `live` is what W
    reads and I has; nothing is computed twice. A convolution's backward, one operator, becomes one
    for the input and one for weight and bias. A stage that no other waits for has W alone.

    The split of Qi et al., "Zero Bubble Pipeline Parallelism" (2024), section 2, on the graph.
    """

    def __call__(self, program: Program) -> Program:
        joint, _ = copy_graph(program.joint)
        if program.schedule.splits_backward:
            for node in joint.graph.find_nodes(
                op="call_function", target=aten.convolution_backward.default
            ):
                split_convolution(joint, node)
        mark(program, joint)
        joint.recompile()
        return replace(program, joint=joint)


def split_convolution(joint: fx.GraphModule, node: fx.Node) -> None:
    """One convolution_backward with all gradients to one for the input, one for the weights."""
    *args, mask = node.args
    parts = {user.args[1]: user for user in node.users}
    if 0 not in parts or not (1 in parts or 2 in parts):
        return
    with joint.graph.inserting_after(node):
        weights = joint.graph.call_function(node.target, (*args, [False, 1 in parts, 2 in parts]))
    with joint.graph.inserting_after(node):
        of_input = joint.graph.call_function(node.target, (*args, [True, False, False]))
    value = node.meta["val"]
    weights.meta = {**node.meta, "val": (None, *value[1:])}
    of_input.meta = {**node.meta, "val": (value[0], None, None)}
    for index, user in parts.items():
        user.replace_input_with(node, of_input if index == 0 else weights)
        assert user.target is getitem
    joint.graph.erase_node(node)
    del mask


def mark(program: Program, joint: fx.GraphModule) -> None:
    """Set meta["kind"] of every node that has a stage."""
    ends = set()
    split_of_batch = {i.name for i in program.inputs if i.role is Role.BATCH}
    for value, result in zip(results_of(joint), program.results):
        if result.kind == "output" or result.target in split_of_batch:
            ends.add(value)
    for node in reversed(joint.graph.nodes):
        if "stage" not in node.meta or node.op == "output":
            continue
        if not node.meta.get("backward"):
            node.meta["kind"] = Kind.F
            continue
        stage = node.meta["stage"]
        awaited = node in ends or any(
            user.meta.get("stage", stage) != stage or user.meta.get("kind") is Kind.I
            for user in node.users
            if user.op != "output"
        )
        node.meta["kind"] = Kind.I if awaited else Kind.W
    for node in joint.graph.nodes:
        if getitem_of(node) and "kind" in node.meta:
            node.meta["kind"] = node.args[0].meta["kind"]
            node.meta["stage"] = node.args[0].meta["stage"]

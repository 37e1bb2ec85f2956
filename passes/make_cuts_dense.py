"""Values that cross stages in memory with gaps or overlaps get a contiguous copy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.fx as fx

from fxpipe.passes._graph import aten, copy_graph
from fxpipe.program import Program, is_dense


@dataclass(frozen=True)
class MakeCutsDense:
    """
    %e = expand(%x)        stage 0, used in stage 1

    becomes

    %e = expand(%x); %c = clone(%e, contiguous)        stage 0; stage 1 uses %c

    since a message is one dense block. A permuted block is dense: it travels as it lies, and the
    receiver restores its strides.
    """

    def __call__(self, program: Program) -> Program:
        joint, _ = copy_graph(program.joint)
        for node in list(joint.graph.nodes):
            users = [user for user in node.users if crosses(node, user)]
            if users and not is_dense(node.meta["val"]):
                make_dense(joint, node, users)
        joint.recompile()
        return replace(program, joint=joint)


def crosses(node: fx.Node, user: fx.Node) -> bool:
    if node.op in ("placeholder", "get_attr") or user.op == "output":
        return False
    stage = node.meta.get("stage")
    return stage is not None and user.meta.get("stage", stage) != stage


def make_dense(joint: fx.GraphModule, node: fx.Node, users: list[fx.Node]) -> None:
    with joint.graph.inserting_after(node):
        copy = joint.graph.call_function(
            aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
        )
    value = node.meta["val"]
    copy.meta = {**node.meta, "val": value.new_empty(value.shape)}
    for user in users:
        user.replace_input_with(node, copy)

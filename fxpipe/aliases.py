"""Outputs that are views of the call's arguments: out of the model, and made of the arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from fxpipe.program import Input, Role, ancestors
from fxpipe.torch_private import storage_number

# What gives a view, or its argument itself, and changes nothing.
VIEWS = frozenset(
    "view view_as reshape reshape_as flatten unflatten squeeze unsqueeze transpose t permute "
    "swapaxes swapdims movedim moveaxis getitem select narrow split chunk tensor_split unbind "
    "expand expand_as detach contiguous to type alias real imag diagonal unfold getattr".split()
)


@dataclass(frozen=True)
class Aliases:
    """The graph of the model's inputs that gives the outputs with these numbers."""

    graph: fx.GraphModule
    numbers: tuple[int, ...]
    differentiable: tuple[bool, ...]

    def __call__(self, inputs: Sequence[Any]) -> dict[int, torch.Tensor]:
        """The outputs as eager gives them: what is written to one is written to its argument."""
        made = self.graph(*inputs)
        return {
            number: value if differentiable else value.detach()
            for number, value, differentiable in zip(self.numbers, made, self.differentiable)
        }


def take_aliases(
    model: fx.GraphModule, inputs: Sequence[Input]
) -> tuple[fx.GraphModule, Aliases | None]:
    """The model with None in the place of outputs that are views of arguments, and these apart.

    Microbatches would make a copy of such a view, joined of parts, and what the caller writes to it
    would be lost to the argument.
    """
    found = {
        i: node
        for i, node in enumerate(model.graph.output_node().args[0])
        if isinstance(node, fx.Node) and is_alias(node, model.graph, inputs)
    }
    if not found:
        return model, None
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    needed = ancestors(found.values())
    for node in model.graph.nodes:
        if node.op == "placeholder" or node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in found.values()))
    values = [node.meta["example_value"] for node in found.values()]
    aliases = Aliases(
        fx.GraphModule(model, graph), tuple(found), tuple(bool(v.requires_grad) for v in values)
    )
    rest = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    returned = rest.graph_copy(model.graph, copied)
    assert isinstance(returned, (tuple, list))
    rest.output(tuple(None if i in found else value for i, value in enumerate(returned)))
    return fx.GraphModule(model, rest), aliases


def is_alias(node: fx.Node, graph: fx.Graph, inputs: Sequence[Input]) -> bool:
    value = node.meta.get("example_value")
    if node.op == "placeholder" or not isinstance(value, torch.Tensor):
        return False
    arguments = {
        storage_number(source.meta["example_value"])
        for source, entry in zip(graph.find_nodes(op="placeholder"), inputs)
        if entry.role in (Role.BATCH, Role.WHOLE)
    }
    return storage_number(value) in arguments and all(map(changes_nothing, ancestors([node])))


def changes_nothing(node: fx.Node) -> bool:
    """Whether a node gives a view, or a number such as a size."""
    value = node.meta.get("example_value")
    values = value if isinstance(value, (tuple, list)) else [value]
    if node.op == "placeholder" or not any(isinstance(v, torch.Tensor) for v in values):
        return True
    return str(getattr(node.target, "__name__", node.target)) in VIEWS

"""A task's graph to a function: as it is, or compiled by Inductor. Equal graphs compile once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from fxpipe.lowering.lean import lean
from fxpipe.text import format_value
from fxpipe.torch_private import inductor_compile

Compiled = Callable[..., tuple[torch.Tensor, ...]]


class TaskCompiler:
    """Compiles tasks with one lowering; keeps what it compiled, by structure."""

    def __init__(self, lowering: str) -> None:
        self.lowering = lowering
        self.compiled: dict[str, Compiled] = {}
        self.codes: dict[str, str | None] = {}  # the file with the code of each

    def __call__(self, graph: fx.GraphModule) -> Compiled:
        if self.lowering == "eager":
            return graph.forward
        structure = structure_of(graph)
        if structure not in self.compiled:
            self.compiled[structure] = self.compile(graph)
            self.codes[structure] = graph.meta.get("output_code")
        graph.meta["output_code"] = self.codes[structure]
        return self.compiled[structure]

    def compile(self, graph: fx.GraphModule) -> Compiled:
        inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
        return lean(*inductor_compile(graph, inputs))


def structure_of(graph: fx.GraphModule) -> str:
    """A text that is equal for graphs that compute the same, whatever their values are called."""
    number = {node: f"v{i}" for i, node in enumerate(graph.graph.nodes)}
    lines = []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            lines.append(describe(node.meta["val"]))
        elif node.op == "get_attr":
            # A constant is a value of its own: graphs with different ones differ.
            lines.append(f"{node.target} {id(graph)}")
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: Name(number[n]))
            lines.append(f"{node.op} {node.target} {format_value(args)} {format_value(kwargs)}")
    return "\n".join(lines)


class Name(str):
    """A value's number in place of its name."""


def describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}"

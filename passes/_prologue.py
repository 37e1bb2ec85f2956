"""What is computed once a step from the whole batch, and given to every microbatch."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from fxpipe.passes._batch import Batch
from fxpipe.passes._graph import copy_graph
from fxpipe.program import Input, Role


class Prologue:
    """Moves values of the model graph into a graph of their own.

    The model graph gets an input for each; `source` is a copy of the graph as it was, from which
    the prologue is cut out in the end.
    """

    def __init__(self, model: fx.GraphModule, batch: Batch) -> None:
        self.batch = batch
        self.model = model
        self.source, self.origin = copy_graph(model)
        self.moved: dict[fx.Node, fx.Node] = {}  # node of the source -> the model's new input
        self.tensors: dict[fx.Node, fx.Node] = {}  # a size or number of the source, as a tensor
        self.names: dict[str, str] = {}

    def move(self, node: fx.Node) -> fx.Node:
        """The input that stands for a node of the model graph: a tensor, or a size or number."""
        value = node.meta.get("example_value")
        source = self.origin[node]
        if isinstance(value, torch.Tensor):
            return self.give(source, value, node.name)
        dtype = torch.int64 if isinstance(value, (int, torch.SymInt)) else torch.float64
        if source not in self.tensors:
            graph = self.source.graph
            with graph.inserting_after(source):
                made = graph.call_function(torch.scalar_tensor, (source,), {"dtype": dtype})
            self.tensors[source] = made
        return self.give(self.tensors[source], torch.empty((), dtype=dtype), node.name)

    def give(self, source: fx.Node, value: Any, name: str) -> fx.Node:
        """The input that stands for a node of the source."""
        if source not in self.moved:
            graph = self.model.graph
            with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
                made = graph.placeholder(f"prologue_{len(self.moved)}")
            made.meta["example_value"] = value
            self.moved[source] = made
            self.names[made.name] = name
        return self.moved[source]

    def drop_unused(self) -> None:
        """Forget what was moved for a value that has moved itself since."""
        for source, made in list(self.moved.items()):
            if not made.users:
                self.model.graph.erase_node(made)
                del self.moved[source], self.names[made.name]

    def input_of(self, node: fx.Node) -> Input | None:
        """The description of an input of the model graph that the prologue gives."""
        if node.name not in self.names:
            return None
        return Input(node.name, Role.PROLOGUE, self.names[node.name])

    def graph(self) -> fx.GraphModule | None:
        """Captured inputs to what was moved, in the order of the model's new inputs."""
        if not self.moved:
            return None
        ordered = [n for n in self.model.graph.find_nodes(op="placeholder") if n.name in self.names]
        sources = {made: source for source, made in self.moved.items()}
        needed = self.needed()
        graph = fx.Graph()
        environment: dict[fx.Node, fx.Node] = {}
        for node in self.source.graph.nodes:
            if node.op == "placeholder" or node in needed:
                environment[node] = graph.node_copy(node, environment.__getitem__)
        graph.output(tuple(environment[sources[node]] for node in ordered))
        return fx.GraphModule(self.source, graph)

    def needed(self) -> set[fx.Node]:
        """The nodes of the source that the prologue consists of."""
        model_node = {source: node for node, source in self.origin.items()}
        found: set[fx.Node] = set()
        stack = list(self.moved)
        while stack:
            node = stack.pop()
            if node in found:
                continue
            found.add(node)
            stack.extend(node.all_input_nodes)
            root = self.batch.roots.get(model_node.get(node, node), node)
            stack.extend(self.origin[writer] for writer in self.batch.writers.get(root, ()))
        return found

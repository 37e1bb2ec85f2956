"""FX helpers that several passes share. No pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import getitem
from typing import Any

import torch
import torch.fx as fx

from fxpipe.program import ancestors

aten = torch.ops.aten
OpOverload = type(aten.mm.default)
# Results: output, mean, 1 / deviation; where the buffers are replaced, mean and variance for them.
# Whether in training is argument 5, and 7 of the backward.
BATCH_NORM = aten._native_batch_norm_legit_functional.default
BATCH_NORM_BACKWARD = aten.native_batch_norm_backward.default
# Functions and methods, as Dynamo's graphs call them, that draw random numbers.
RANDOM_FUNCTIONS = frozenset(
    "rand randn randint randperm rand_like randn_like randint_like bernoulli normal poisson "
    "binomial multinomial uniform exponential cauchy geometric log_normal random dropout dropout1d "
    "dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout native_dropout rrelu "
    "gumbel_softmax scaled_dot_product_attention multi_head_attention_forward "
    "fractional_max_pool2d fractional_max_pool3d "
    "fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices".split()
)


def copy_graph(
    gm: fx.GraphModule, edit: Callable[[fx.Graph, dict[fx.Node, fx.Node]], None] | None = None
) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """A copy of the graph that shares `gm`'s attributes, and the map from old nodes to new."""
    graph = fx.Graph()
    environment: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(gm.graph, environment)
    old = gm.graph.output_node()
    environment[old] = graph.output(output)
    environment[old].meta = dict(old.meta)
    copy = fx.GraphModule(gm, graph)
    copy.meta = dict(gm.meta)  # what a checkpoint's graph saves is said there
    return copy, environment


def results_of(gm: fx.GraphModule) -> list[Any]:
    """The values that a graph returns: nodes, or constants such as None."""
    returned = gm.graph.output_node().args[0]
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]


def is_view(node: fx.Node) -> bool:
    """Whether a node's value shares its first input's storage, so that it costs nothing to redo."""
    target = node.target
    if target is getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_view(source)
    # _unsafe_view is a view by another name: autograd's bookkeeping alone tells them apart.
    if target in (aten._unsafe_view.default, aten._reshape_alias.default):
        return True
    return isinstance(target, OpOverload) and bool(target.is_view)


def getitem_of(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is getitem


def is_random(node: fx.Node) -> bool:
    """Whether a node may draw random numbers, so that computing it twice gives two values."""
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return True
    if getattr(node.target, "namespace", None) == "higher_order":
        return any(is_random(inner) for inner in inner_nodes(node))
    name = str(getattr(node.target, "__name__", node.target)).rstrip("_")
    return node.op in ("call_function", "call_method") and name in RANDOM_FUNCTIONS


def inner_nodes(node: fx.Node) -> Iterable[fx.Node]:
    """The nodes of the graphs that are a node's arguments."""
    for source in node.all_input_nodes:
        inner = getattr(source.graph.owning_module, str(source.target), None)
        if source.op == "get_attr" and isinstance(inner, fx.GraphModule):
            yield from inner.graph.nodes


def stage_edges(joint: fx.GraphModule) -> set[tuple[int, int]]:
    """(lower stage, higher stage) of every value that crosses stages, either way."""
    edges = set()
    for node in joint.graph.nodes:
        source = node.meta.get("stage")
        for user in node.users:
            target = user.meta.get("stage")
            if source is not None and target is not None and source != target:
                edges.add((min(source, target), max(source, target)))
    return edges


def batch_norms(joint: fx.GraphModule) -> list[fx.Node]:
    """The BatchNorms in training that keep running statistics."""
    nodes = joint.graph.find_nodes(op="call_function", target=BATCH_NORM)
    return [node for node in nodes if node.args[5]]


def running_statistics(joint: fx.GraphModule) -> list[fx.Node]:
    """The buffers that norms in training read and write their statistics in."""
    read = ancestors(
        n for norm in batch_norms(joint) for n in norm.args[3:5] if isinstance(n, fx.Node)
    )
    return [node for node in joint.graph.find_nodes(op="placeholder") if node in read]


def copy_in(
    graph: fx.Graph, before: fx.Node, body: fx.Graph, operands: Sequence[Any], meta: dict[str, Any]
) -> dict[fx.Node, Any]:
    """The nodes of `body` before a node, as copies with this meta: node of body -> its copy.

    What `body` takes are the operands.
    """
    taken = iter(operands)
    copies: dict[fx.Node, Any] = {}
    for inner in body.nodes:
        if inner.op == "placeholder":
            copies[inner] = next(taken)
        elif inner.op != "output":
            with graph.inserting_before(before):
                copies[inner] = graph.node_copy(inner, copies.__getitem__)
            copies[inner].meta = {**meta, "val": inner.meta["val"]}
    return copies

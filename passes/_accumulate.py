"""A gradient's addition to its accumulator, made by the kernel that makes the gradient. No pass."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import torch.fx as fx

from fxpipe.passes._graph import aten


def accumulate(graph: fx.Graph, accumulator: fx.Node, value: fx.Node, kept: Set[fx.Node]) -> None:
    """Add `value` in place to `accumulator`, both of a task's graph. `kept` is read later on.

    A matrix product that nothing else reads is added as it is made, and a sum term by term: the
    gradient of a weight is then never written on its own, to be read again and added. Of an
    embedding's table only the rows that were looked up are touched.
    """
    value = without_transposes(graph, value, kept)
    is_alone = value not in kept and not value.users
    if is_alone and value.target is aten.add.Tensor and not value.kwargs:
        first, second = value.args
        if first is not second and is_alike(accumulator, first, second):
            graph.erase_node(value)
            accumulate(graph, accumulator, first, kept)
            accumulate(graph, accumulator, second, kept)
            return
    if is_alone and value.target is aten.mm.default and is_alike(accumulator, value):
        value.target, value.args = aten.addmm_.default, (accumulator, *value.args)
        return
    if is_alone and is_of_embedding(value) and is_alike(accumulator, value):
        value.target, value.args = add_rows(graph, accumulator, value)
        return
    # An addition follows its value at once, so that the value dies there.
    place = last_placeholder(graph) if value.op == "placeholder" else value
    with graph.inserting_after(place):
        added = graph.call_function(aten.add_.Tensor, (accumulator, value))
    added.meta = {**value.meta, "val": accumulator.meta["val"]}


def is_of_embedding(value: fx.Node) -> bool:
    """Whether a gradient is a table's, whose rows count as often as they were looked up."""
    return value.target is aten.embedding_dense_backward.default and not value.args[4]


def add_rows(graph: fx.Graph, table: fx.Node, value: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """What adds rows to a table in place of `value`. The row for padding has no gradient."""
    rows, indices, _, padding, _ = value.args
    if padding >= 0:
        with graph.inserting_before(value):
            is_padding = call(graph, aten.eq.Scalar, indices, padding)
            is_padding = call(graph, aten.unsqueeze.default, is_padding, -1)
            rows = call(graph, aten.masked_fill.Scalar, rows, is_padding, 0)
    return aten.index_put_.default, (table, [indices], rows, True)


def call(graph: fx.Graph, target: Callable[..., Any], *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*fx.node.map_arg(args, lambda n: n.meta["val"]))
    return node


def without_transposes(graph: fx.Graph, value: fx.Node, kept: Set[fx.Node]) -> fx.Node:
    """The matrix product that `value` is a transpose of a transpose of; else `value` itself.

    Autograd makes the gradient of `linear`'s weight so.
    """
    chain = [value]
    while chain[-1].target is aten.t.default and not kept & set(chain):
        source = chain[-1].args[0]
        if not isinstance(source, fx.Node) or list(source.users) != [chain[-1]]:
            return value
        chain.append(source)
    if len(chain) % 2 == 0 or chain[-1].target is not aten.mm.default or value.users:
        return value
    for node in chain[:-1]:
        graph.erase_node(node)
    return chain[-1]


def is_alike(accumulator: fx.Node, *values: object) -> bool:
    """Whether values can be added one by one as their sum is: nothing is cast or broadcast."""
    own = accumulator.meta["val"]
    return all(
        isinstance(value, fx.Node)
        and value.meta["val"].shape == own.shape
        and value.meta["val"].dtype == own.dtype
        for value in values
    )


def last_placeholder(graph: fx.Graph) -> fx.Node:
    return graph.find_nodes(op="placeholder")[-1]

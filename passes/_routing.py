"""Rows in the order of a sort, as mixtures of experts group their tokens, and back in their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.fx as fx

from fxpipe.errors import ModelError
from fxpipe.passes._batch import (
    Batch,
    argument,
    is_in_place,
    is_one_of_several,
    is_tensor,
    name_of,
    operand,
    shared_with,
    values_of,
)
from fxpipe.passes._layout import Layout, is_count
from fxpipe.passes._mixing import counts_from_zero, dims_along, is_elementwise
from fxpipe.program import where
from fxpipe.torch_private import expression, grouped_products

# out[j] = x[j] @ weights[g] for the entries j of group g, which end at offs[g].
GROUPED_PRODUCTS = grouped_products()
GROUPED_PRODUCTS_BY_NAME = (
    "transformers.grouped_mm_fallback",
    "transformers.grouped_mm_fallback.default",
)
ALONG = frozenset("softmax log_softmax chunk split unbind sum mean layer_norm rms_norm".split())
# Functions that find which of a static number of entries is best.
CHOICES = frozenset("topk argmax argmin max min sort argsort".split())
SAME = frozenset(
    "to long int float type contiguous clone detach view reshape flatten squeeze ravel".split()
)


@dataclass(frozen=True, eq=False)
class Order:
    """One sort over the batch: where it is, what it sorts by, how rows lay there before."""

    sort: fx.Node
    size: sympy.Expr
    within: sympy.Expr
    num_groups: int | None  # keys are 0 to num_groups - 1, as far as is known


@dataclass(frozen=True)
class Sorted:
    """What a value is to an order.

    "pair": a sort's result; "keys": the sorted keys; "rows": values in this order; "entries": at
    each place the number of the entry there, divided by `divisor`; "blank": empty, for "inverse":
    at each entry its place; "counts": the groups' sizes; "ends": where groups end.
    """

    order: Order
    what: str
    divisor: int = 1


class Routing:
    """
    A sort over the batch mixes rows, but not where its order is undone:

    keys, entries = sort(experts)     experts: of every token, 0 to n - 1
    y = grouped(x[entries // k])      elementwise, or along other dimensions, or matrix products
                                      with the weights of a group, whose sizes are counted
    y[inverse(entries)]               each token's own again

    Whatever else is done in between is refused.
    """

    def __init__(self, batch: Batch, layout: Layout) -> None:
        self.batch = batch
        self.layout = layout
        self.found: dict[fx.Node, Sorted] = {}

    @property
    def counts(self) -> set[fx.Node]:
        return {node for node, sorted_ in self.found.items() if sorted_.what in ("counts", "ends")}

    def check(self, node: fx.Node) -> bool:
        """Whether an operator has to do with an order. ModelError where it does not undo it."""
        sources = [source for source in node.all_input_nodes if source in self.found]
        if not sources:
            order = self.begins(node)
            if order is not None:
                what = "entries" if name_of(node) == "argsort" else "pair"
                self.found[node] = Sorted(order, what)
            return order is not None
        if not is_tensor(node) and name_of(node) != "setitem":
            return True
        name = name_of(node)
        if self.undoes(node, name):
            return True
        result = self.result(node, name)
        if result is not None and is_in_place(node) and result.what != "rows":
            result = None
        if result is not None and result.what == "rows":
            kept = all(sizes_of(value)[:1] == [result.order.size] for value in values_of(node))
            result = result if kept else None
        if result is None:
            raise self.error(node, self.found[sources[0]].order)
        self.found[node] = result
        return True

    def check_output(self, end: fx.Node) -> None:
        for node in end.all_input_nodes:
            if node in self.found:
                raise self.error(node, self.found[node].order)

    def error(self, node: fx.Node, order: Order) -> ModelError:
        return ModelError(
            f"{name_of(order.sort)} along the batch dimension mixes microbatches, at "
            f"{where(order.sort)}, as {name_of(node)} at {where(node)} does not keep its order; "
            f"put rows back into their own order before they meet others, or use one microbatch"
        )

    def begins(self, node: fx.Node) -> Order | None:
        """The order that a sort of one number for each entry makes."""
        source = operand(node)
        if name_of(node) not in ("sort", "argsort") or not is_tensor(source):
            return None
        size, within = self.layout.size(source), self.layout.within.get(source)
        flags = [argument(node, 2, "descending"), argument(node, 1, "dim") not in (None, 0, -1)]
        if size is None or within is None or values_of(source)[0].dim() != 1 or any(flags):
            return None
        return Order(node, size, within, self.num_choices(source))

    def num_choices(self, node: Any) -> int | None:
        """n where a value is made of numbers from 0 to n - 1: the indices of topk, of argmax."""
        while isinstance(node, fx.Node):
            if is_changed(node):
                return None
            source, name = operand(node), name_of(node)
            if name in SAME and not values_of(node)[0].dtype.is_floating_point:
                node = source
                continue
            if name in ("getitem", "getattr") and name_of(source) in CHOICES:
                if node.args[1] not in (1, "indices"):
                    return None
                node, name = source, name_of(source)
            elif name not in ("argmax", "argmin", "argsort"):
                return None
            place = 2 if name == "topk" else 1
            given = argument(node, place, "dim")
            dim = -1 if given is None and name in ("topk", "sort", "argsort") else given
            source = operand(node)
            size = values_of(source)[0].shape[dim] if isinstance(dim, int) else None
            return size if isinstance(size, int) else None
        return None

    # What undoes an order.

    def undoes(self, node: fx.Node, name: str) -> bool:
        """A value whose rows are in their own order again, or the change of one."""
        first = self.found.get(operand(node))
        if name == "setitem":
            return self.fills_inverse(node, first)
        if name == "getitem" and first is not None and first.what == "rows":
            index = self.found.get(alone(node.args[1]))
            if index is None or index.what != "inverse" or index.order is not first.order:
                return False
        elif name == "index_add" and self.adds_to_own_rows(node):
            entries = self.found[argument(node, 2, "index")]
            within = entries.order.within / entries.divisor
            self.layout.within[node] = self.layout.within[operand(node)] = within
            return True
        else:
            return False
        self.layout.within[node] = first.order.within
        return True

    def fills_inverse(self, node: fx.Node, blank: Sorted | None) -> bool:
        """inverse[entries] = arange(size)"""
        target, index, value = node.args
        entries = self.found.get(alone(index))
        if blank is None or entries is None or blank.order is not entries.order:
            return False
        shape = self.batch.sizes(value)
        if (blank.what, entries.what, entries.divisor) != ("blank", "entries", 1):
            return False
        if not isinstance(value, fx.Node) or not counts_from_zero(value):
            return False
        if shape != [blank.order.size]:
            return False
        self.found[target] = Sorted(blank.order, "inverse")
        return True

    def adds_to_own_rows(self, node: fx.Node) -> bool:
        """base.index_add(0, entries // k, rows) with an entry of `base` for each k entries."""
        base, dim = operand(node), argument(node, 1, "dim")
        entries = self.found.get(argument(node, 2, "index"))
        rows = self.found.get(argument(node, 3, "source"))
        if entries is None or rows is None or base in self.found or dim != 0:
            return False
        if (entries.what, rows.what) != ("entries", "rows") or entries.order is not rows.order:
            return False
        return self.has_entries_of(base, entries, blank=True)

    # What keeps an order.

    def result(self, node: fx.Node, name: str) -> Sorted | None:
        """What an operator's value is to the order of its operands; None where it mixes rows."""
        source = operand(node)
        first = self.found.get(source)
        if name in ("getitem", "getattr") and first is not None and first.what == "pair":
            what = "keys" if node.args[1] in (0, "values") else "entries"
            return Sorted(first.order, what)
        if name == "getitem" and first is None:
            return self.picked(node, source, self.found.get(alone(node.args[1])))
        if first is not None and first.what in ("entries", "blank", "inverse"):
            return self.of_entries(node, name, first)
        if first is not None and first.what in ("counts", "ends"):
            return self.of_counts(node, name, first)
        if first is not None and first.what == "keys":
            if name == "histc" and self.counts_groups(node, first.order):
                return Sorted(first.order, "counts")
            if name in ("to", "float", "int", "long", "contiguous", "clone", "detach"):
                exact = (torch.int32, torch.int64, torch.float32, torch.float64)
                what = "keys" if values_of(node)[0].dtype in exact else "rows"
                return Sorted(first.order, what)
        if node.target in GROUPED_PRODUCTS or str(node.target) in GROUPED_PRODUCTS_BY_NAME:
            return self.grouped_product(node)
        return self.of_rows(node, name)

    def picked(self, node: fx.Node, source: Any, index: Sorted | None) -> Sorted | None:
        """A value's entries in an order; or those of a table, by the keys or values in it."""
        if index is None or not is_tensor(source):
            return None
        if index.what == "entries" and self.has_entries_of(source, index):
            return Sorted(index.order, "rows")
        if index.what in ("keys", "rows") and source not in self.batch.varying:
            return Sorted(index.order, "rows")
        return None

    def has_entries_of(self, node: Any, entries: Sorted, blank: bool = False) -> bool:
        """Whether a value's first dimension has an entry for each `divisor` entries of an order."""
        size, within = self.layout.size(node), self.layout.within.get(node)
        if size is None or self.batch.dims(node)[0] != 0:
            return False
        same = within is not None and within * entries.divisor == entries.order.within
        return size * entries.divisor == entries.order.size and (same or (blank and within is None))

    def of_entries(self, node: fx.Node, name: str, first: Sorted) -> Sorted | None:
        wide = all(value.dtype in (torch.int32, torch.int64) for value in values_of(node))
        if first.what == "blank" or not wide:
            return None
        if name in ("to", "long", "int", "contiguous", "clone", "detach"):
            return first
        if first.what != "entries":
            return None
        if name in ("floordiv", "floor_divide") or is_floor_division(node, name):
            by = node.args[1]
            if isinstance(by, int) and is_count(first.order.within / (first.divisor * by)):
                return Sorted(first.order, "entries", first.divisor * by)
        if first.divisor == 1 and name in ("empty_like", "zeros_like"):
            return Sorted(first.order, "blank")
        ascending = not argument(node, 2, "descending")
        if first.divisor == 1 and name == "argsort" and ascending:
            return Sorted(first.order, "inverse")
        return None

    def counts_groups(self, node: fx.Node, order: Order) -> bool:
        if is_changed(operand(node)):
            return False
        bins, low, high = (argument(node, i, n) for i, n in enumerate(("bins", "min", "max"), 1))
        return order.num_groups is not None and (bins, low, high) == (
            order.num_groups,
            0,
            order.num_groups - 1,
        )

    def of_counts(self, node: fx.Node, name: str, first: Sorted) -> Sorted | None:
        if name in ("to", "int", "long"):
            return first
        sums = name == "cumsum" and first.what == "counts" and argument(node, 1, "dim") in (0, -1)
        return Sorted(first.order, "ends") if sums else None

    def grouped_product(self, node: fx.Node) -> Sorted | None:
        rows, weights, ends = operand(node), node.args[1], argument(node, 2, "offs")
        x, offsets = self.found.get(rows), self.found.get(ends)
        if x is None or offsets is None or x.order is not offsets.order:
            return None
        others = [n for n in node.all_input_nodes if n not in (rows, ends)]
        if (x.what, offsets.what) != ("rows", "ends") or len(others) != 1:
            return None
        if weights in self.batch.varying or values_of(weights)[0].dim() != 3:
            return None
        return x if values_of(weights)[0].shape[0] == x.order.num_groups else None

    def of_rows(self, node: fx.Node, name: str) -> Sorted | None:
        """What is computed for each entry by itself."""
        given = [self.found[n] for n in node.all_input_nodes if n in self.found]
        order = given[0].order
        if any(s.what not in ("rows", "keys") or s.order is not order for s in given):
            return None
        others = [n for n in node.all_input_nodes if n not in self.found]
        if any(n in self.batch.varying and is_tensor(n) for n in others):
            return None
        source = operand(node)
        if name in ("linear", "matmul", "mm"):
            weights = node.args[1] if len(node.args) > 1 else None
            plain = weights in others and values_of(weights)[0].dim() == 2
            return Sorted(order, "rows") if source in self.found and plain else None
        if name in ("unsqueeze", "squeeze") and argument(node, 1, "dim") not in (None, 0):
            return Sorted(order, "rows")
        if name == "getitem" and takes_all_entries(node):
            return Sorted(order, "rows")
        if name in ALONG and source in self.found:
            rank = values_of(source)[0].dim()
            dims = argument(node, 2 if name in ("chunk", "split") else 1, "dim")
            dims = dims_along(node, name, rank) if "norm" in name else dims
            given_dims = list(dims) if isinstance(dims, (tuple, list, range)) else [dims]
            if all(isinstance(d, int) and d % rank != 0 for d in given_dims):
                return Sorted(order, "rows")
            return None
        return Sorted(order, "rows") if is_elementwise(name) else None


def sizes_of(value: Any) -> list[sympy.Expr]:
    return [expression(size) for size in value.shape]


def is_changed(node: fx.Node) -> bool:
    """Whether anything in its graph is written to a value, or to what shares its storage."""
    root = root_of(node)
    return any(is_in_place(other) and root_of(other) is root for other in node.graph.nodes)


def root_of(node: fx.Node) -> fx.Node:
    while (source := shared_with(node)) is not None:
        if is_one_of_several(node):
            same = [n for n in source.users if n.args == node.args and n.target == node.target]
            return same[0]
        node = source
    return node


def alone(index: Any) -> Any:
    """The one item of an index, if it is a value of the graph."""
    item = index[0] if isinstance(index, (tuple, list)) and len(index) == 1 else index
    return item if isinstance(item, fx.Node) else None


def is_floor_division(node: fx.Node, name: str) -> bool:
    return name == "div" and node.kwargs.get("rounding_mode") in ("floor", "trunc")


def takes_all_entries(node: fx.Node) -> bool:
    """Whether an index leaves the first dimension as it is, or takes one of several results."""
    source, index = node.args[:2]
    if isinstance(index, int):
        return len(values_of(source)) > 1
    return isinstance(index, tuple) and index[0] in (Ellipsis, slice(None)) and len(index) > 1 and (
        all(isinstance(i, (int, slice, type(None))) for i in index[1:])
    )  # fmt: skip

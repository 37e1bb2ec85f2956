"""How a value's rows lie in the dimension that holds the batch, alone or joined with others."""

from __future__ import annotations

from typing import Any

import sympy
import torch.fx as fx

from fxpipe.errors import ModelError
from fxpipe.passes._batch import Batch, argument, is_tensor, name_of, operand, values_of
from fxpipe.passes._mixing import CUTS, RESHAPES, SPREADS
from fxpipe.program import where
from fxpipe.torch_private import expression

ONE = sympy.Integer(1)
JOINS = frozenset("cat concat concatenate hstack vstack dstack column_stack stack".split())


class Layout:
    """The dimension of a value that holds the batch has `size` entries.

    Entry e belongs to row (e // within) mod rows: `x.view(-1)` of x [rows, 4] has within=4, and
    `cat([x, x])` has within=1. It is None where a value has the same entries everywhere (zeros),
    and a number of its own where it is not known. A value with one entry a row has within=1.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.within: dict[fx.Node, sympy.Expr | None] = {}
        self.results: dict[fx.Node, list[Any]] = {}  # what the inner graph of a node returns

    def enter(self, node: fx.Node, outer: fx.Node | None) -> None:
        """An input of the graph, or of an inner graph, where it is another node's value."""
        size = self.size(node)
        if outer is not None and outer in self.within and self.size(outer) == size:
            self.within[node] = self.within[outer]
        elif size is not None:
            self.within[node] = ONE if size == self.batch.symbol else unknown()

    def size(self, node: Any) -> sympy.Expr | None:
        """The size of the dimension that holds the batch; None where none does."""
        values = values_of(node)
        return self.batch.of_value(values[0]) if values else None

    def inside(self, node: fx.Node) -> sympy.Expr:
        """The number of elements from one entry to the next."""
        sizes = [expression(size) for size in values_of(node)[0].shape]
        dim = next(d for d, size in enumerate(sizes) if self.batch.holds_batch(size))
        return sympy.Mul(*sizes[dim + 1 :])

    def is_whole(self, node: Any, count: sympy.Expr, blank: bool = False) -> bool:
        """Whether so many entries of a value are those of whole batches.

        With `blank`: also of a value that has the same entries everywhere.
        """
        within, symbol = self.within.get(node), self.batch.symbol
        if within is None:
            return blank and is_count(count / symbol, symbol)
        return is_count(count / (symbol * within), symbol)

    def follow(self, node: fx.Node) -> None:
        """Note how rows lie, and that none is torn apart or meets another."""
        size = self.size(node)
        if name_of(node) == "setitem":
            self.follow_write(node)
        elif size is None:
            return
        elif operand(node) in self.results and name_of(node) == "getitem":
            self.within[node] = self.returned(self.results[node.args[0]][node.args[1]], size)
        elif node in self.results:
            self.within[node] = self.returned(self.results[node][0], size)
        elif name_of(node) in RESHAPES:
            self.within[node] = self.reshaped(node, size)
        elif name_of(node) in ("repeat", "tile", "repeat_interleave"):
            self.within[node] = self.repeated(node, size)
        else:
            known = self.known(node, size)
            self.within[node] = ONE if size == self.batch.symbol else known

    def returned(self, inner: Any, size: sympy.Expr) -> sympy.Expr | None:
        """What is known of a value that an inner graph returns."""
        if size == self.batch.symbol:
            return ONE
        same = isinstance(inner, fx.Node) and self.size(inner) == size
        return self.within.get(inner) if same else unknown()

    def reshaped(self, node: fx.Node, size: sympy.Expr) -> sympy.Expr | None:
        source = operand(node)
        if not is_tensor(source) or self.size(source) is None:
            return None
        step = self.within.get(source)
        if step is None or self.batch.sizes(source) == self.batch.sizes(node):
            return step
        within = step * self.inside(source) / self.inside(node)
        symbol = self.batch.symbol
        if not (is_count(within, symbol) and is_count(size / symbol / within, symbol)):
            raise ModelError(
                f"{name_of(node)} mixes the rows of the batch, at {where(node)}; keep the "
                f"batch as a dimension of its own, or next to the one that it is joined with"
            )
        return within

    def repeated(self, node: fx.Node, size: sympy.Expr) -> sympy.Expr | None:
        if size == self.batch.symbol:
            return ONE
        source = operand(node)
        before = self.size(source)
        if name_of(node) == "repeat_interleave":
            times = argument(node, 1, "repeats")
            if before is None:  # each entry of a table as often as there are rows
                return ONE
            within = self.within.get(source)
            if within is None or not isinstance(times, int):
                return None if within is None else unknown()
            return within * size / before
        if before is None:  # a table once for every row
            return size / self.batch.symbol
        return self.within.get(source)

    def known(self, node: fx.Node, size: sympy.Expr) -> sympy.Expr | None:
        """What operands say, which must be the same."""
        name, source = name_of(node), operand(node)
        batched = [given for given in node.all_input_nodes if self.batch.is_batched(given)]
        equal = [given for given in batched if self.size(given) == size]
        if name in JOINS:
            equal = batched
        elif name in CUTS or (name == "getitem" and not equal):
            equal = [source]
        found = {self.within.get(given) for given in equal} - {None}
        if size == self.batch.symbol and name not in JOINS:
            return ONE
        if name == "arange" or (batched and not equal and name not in SPREADS):
            return unknown()
        if len(found) > 1:
            raise self.different(node)
        return found.pop() if found else None

    def follow_write(self, node: fx.Node) -> None:
        """What is written into a value has its rows where that value has them."""
        target, _, value = node.args
        size = self.size(target)
        if size in (None, self.batch.symbol) or not self.batch.is_batched(value):
            return
        if self.within.get(target) is None:
            assert isinstance(target, fx.Node) and isinstance(value, fx.Node)
            self.within[target] = self.within.get(value)
        elif self.within.get(value) not in (None, self.within[target]):
            raise self.different(node)

    def different(self, node: fx.Node) -> ModelError:
        return ModelError(
            f"{name_of(node)} takes values whose rows lie in different orders, at {where(node)}, "
            f"so that rows of the batch meet others; repeat rows the same way"
        )


def unknown() -> sympy.Expr:
    """A number that equals no other and of which nothing is known."""
    return sympy.Dummy("within")


def is_count(value: sympy.Expr, symbol: sympy.Symbol | None = None) -> bool:
    """Whether an expression is a whole number of at least 1, whatever the batch's size is."""
    value = sympy.cancel(sympy.sympify(value))
    whole = value.is_integer and value.is_positive and value.is_polynomial()
    return bool(whole) and symbol not in value.free_symbols

"""What a model graph's values have to do with the batch: which hold it, which vary with it."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import sympy
import torch
import torch.fx as fx

from fxpipe.passes._graph import is_random
from fxpipe.program import Program, Role, tensors_of
from fxpipe.torch_private import expression

# Operators whose value may share the storage of their first argument.
VIEWS = frozenset(
    "view view_as reshape reshape_as flatten unflatten squeeze unsqueeze permute transpose t "
    "swapaxes movedim expand expand_as getitem getattr select narrow split chunk unbind diagonal "
    "tensor_split unfold detach get_data_attr alias to type float double half bfloat16 "
    "contiguous".split()
)
IN_PLACE_OPERATORS = frozenset(
    "setitem iadd isub imul itruediv ifloordiv imod ipow iand ior ixor imatmul".split()
)

# Functions and methods that draw random numbers, which carry no tag that says so.
RANDOM = frozenset(
    "rand randn randint randperm rand_like randn_like randint_like bernoulli multinomial normal "
    "poisson uniform random exponential geometric log_normal cauchy dropout dropout1d dropout2d "
    "dropout3d alpha_dropout feature_dropout feature_alpha_dropout rrelu gumbel_softmax".split()
)

# Functions that may write running statistics, which makes them count where their value does not.
STATEFUL = frozenset("batch_norm instance_norm".split())


class Batch:
    """Facts about every value of a model graph, as Dynamo made it.

    `varying`: differs between microbatches. `fixed`: made of arguments and buffers alone, without
    gradient, so that it can be computed before the step. `order`: position in the graph.
    `writers`: the in-place operations on a value or on a view of it, by the value's `root`.
    """

    def __init__(self, program: Program, graph: fx.Graph) -> None:
        assert program.batch_symbol is not None
        self.symbol: sympy.Symbol = program.batch_symbol
        self.inputs = dict(zip(graph.find_nodes(op="placeholder"), program.inputs))
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.varying: set[fx.Node] = set()
        self.fixed: set[fx.Node] = set()
        self.same_at_first: set[fx.Node] = set()  # does not vary until something is written to it
        self.roots: dict[fx.Node, fx.Node] = {}
        self.writers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in graph.nodes:
            self.classify(node)

    def classify(self, node: fx.Node) -> None:
        if node in self.inputs:
            entry = self.inputs[node]
            of_batch = entry.size is not None and self.symbol in entry.size.free_symbols
            if entry.role is Role.BATCH or of_batch:
                self.varying.add(node)
            if entry.role is not Role.PARAMETER and not entry.requires_grad:
                self.fixed.add(node)
        elif node.op in ("call_function", "call_method"):
            if any(source in self.varying for source in node.all_input_nodes):
                self.varying.add(node)
            if all(n in self.fixed for n in node.all_input_nodes) and not draws(node):
                self.fixed.add(node)
        if node not in self.varying:
            self.same_at_first.add(node)
        source = shared_with(node)
        if source is None:
            self.roots[node] = node
        elif is_one_of_several(node):
            # The same element, however often it is taken out, is one value.
            same = (n for n in source.users if n.args == node.args and n.target == node.target)
            self.roots[node] = min(same, key=self.order.__getitem__)
        else:
            self.roots[node] = self.roots[source]
        if is_in_place(node):
            self.write(node)

    def write(self, node: fx.Node) -> None:
        """What is written to a value holds for it and for all views of it."""
        root = self.roots[node]
        self.writers[root].append(node)
        family = {other for other, its_root in self.roots.items() if its_root is root}
        if node in self.varying:
            self.varying |= family
        if node not in self.fixed:
            self.fixed -= family

    def stands_for(self, new: fx.Node, old: fx.Node) -> None:
        """A node made later is what an old one is."""
        self.order[new], self.roots[new] = self.order[old], self.roots[old]
        for facts in (self.varying, self.fixed):
            if old in facts:
                facts.add(new)

    def sizes(self, node: Any) -> list[sympy.Expr]:
        """The shape of a tensor; of all tensors after one another where there are several."""
        return [expression(size) for value in values_of(node) for size in value.shape]

    def holds_batch(self, size: sympy.Expr) -> bool:
        return self.symbol in size.free_symbols

    def dims(self, node: Any) -> list[int]:
        """The dimensions of a tensor that hold the batch."""
        return [d for d, size in enumerate(self.sizes(node)) if self.holds_batch(size)]

    def of_value(self, value: Any) -> sympy.Expr | None:
        """The size of the first dimension of a tensor that holds the batch."""
        sizes = map(expression, value.shape)
        return next((size for size in sizes if self.holds_batch(size)), None)

    def is_batched(self, node: Any) -> bool:
        return any(map(self.holds_batch, self.sizes(node)))

    def is_constant(self, node: Any, user: fx.Node | None = None) -> bool:
        """Whether a value is the same for every microbatch, once the prologue has run.

        With `user`: as that node sees it, whatever is written to it afterwards.
        """
        if not isinstance(node, fx.Node) or node not in self.varying:
            return True
        if node in self.fixed and not self.is_batched(node):
            return True
        unchanged = user is not None and self.changed_between(node, node, user) is None
        return unchanged and node in self.same_at_first

    def changed_between(self, node: fx.Node, start: fx.Node, end: fx.Node) -> fx.Node | None:
        """The first in-place operation on a value after `start` and before `end`, if any."""
        for writer in self.writers.get(self.roots.get(node, node), ()):
            if self.order[start] < self.order.get(writer, -1) < self.order[end]:
                return writer
        return None

    def with_writers(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """The nodes, all that they are computed from, and what changed any of it before its use."""
        needed: set[fx.Node] = set()
        stack = list(nodes)
        while stack:
            node = stack.pop()
            if node in needed:
                continue
            needed.add(node)
            for source in node.all_input_nodes:
                stack.append(source)
                writers = self.writers.get(self.roots.get(source, source), ())
                stack.extend(w for w in writers if self.order[w] < self.order.get(node, -1))
        return needed

    def remove_dead(self, graph: fx.Graph) -> None:
        """FX's own removal would drop an in-place operation on what is still read."""
        kept = (
            n
            for n in graph.nodes
            if (n.is_impure() and not is_in_place(n) and not draws(n)) or name_of(n) in STATEFUL
        )
        of_inputs = (w for root, ws in self.writers.items() if root.op == "placeholder" for w in ws)
        alive = self.with_writers([*kept, *of_inputs])
        for node in reversed(graph.nodes):
            if node not in alive:
                graph.erase_node(node)


def name_of(node: fx.Node) -> str:
    """`add` for torch.add, Tensor.add and Tensor.add_ alike; `iadd` for operator.iadd."""
    if node.op == "call_method":
        return str(node.target).rstrip("_")
    if node.op != "call_function":
        return ""
    return getattr(node.target, "__name__", str(node.target)).strip("_")


def argument(node: fx.Node, position: int, *names: str) -> Any:
    """An argument given by position or by one of its names; None where it is not given."""
    if len(node.args) > position:
        return node.args[position]
    return next((node.kwargs[name] for name in names if name in node.kwargs), None)


def operand(node: fx.Node) -> Any:
    """The first argument: the tensor that an operator works on."""
    return argument(node, 0, "input", "self")


def draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers, so that computing it twice gives two values."""
    return is_random(node) or name_of(node) in RANDOM


def takes_graph(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", None) == "higher_order"


def values_of(node: Any) -> list[Any]:
    return tensors_of(node.meta.get("example_value")) if isinstance(node, fx.Node) else []


def is_tensor(node: Any) -> bool:
    return bool(values_of(node))


def is_floating(node: fx.Node) -> bool:
    return all(value.dtype.is_floating_point for value in values_of(node))


def shared_with(node: fx.Node) -> fx.Node | None:
    """The argument whose storage a node's value may share."""
    if node.op not in ("call_function", "call_method") or not node.args:
        return None
    source = node.args[0]
    if isinstance(source, fx.Node) and (is_in_place(node) or name_of(node) in VIEWS):
        return source
    return None


def is_one_of_several(node: fx.Node) -> bool:
    """Whether a node takes out one of several results, each with a storage of its own: topk."""
    source = node.args[0]
    own = isinstance(source, fx.Node) and source.op != "placeholder" and shared_with(source) is None
    value = source.meta.get("example_value") if own else None
    return name_of(node) == "getitem" and isinstance(value, (tuple, list))


def is_in_place(node: fx.Node) -> bool:
    """Whether a node changes its first argument."""
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    if node.op != "call_function" or not (node.args and is_tensor(node.args[0])):
        return False
    name = getattr(node.target, "__name__", "")
    if getattr(node.target, "__module__", "") == "_operator":  # where and_ only avoids a keyword
        return name in IN_PLACE_OPERATORS
    if name.endswith("_") and not name.endswith("__"):
        return True
    return bool(argument(node, place_of_inplace(node.target), "inplace"))


@cache
def place_of_inplace(target: Any) -> int:
    """Where a function of torch.nn.functional takes `inplace`; a place past the end if nowhere."""
    if getattr(target, "__module__", "") != torch.nn.functional.__name__:
        return 1000
    names: Sequence[str] = list(inspect.signature(target).parameters)
    return names.index("inplace") if "inplace" in names else 1000

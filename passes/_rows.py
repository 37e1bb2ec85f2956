"""Whether a model keeps the rows of its batch apart, so that each microbatch computes its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
import torch.fx as fx

from fxpipe.errors import ModelError
from fxpipe.passes._batch import (
    RANDOM,
    Batch,
    argument,
    is_in_place,
    is_tensor,
    name_of,
    operand,
    takes_graph,
    values_of,
)
from fxpipe.passes._graph import results_of
from fxpipe.passes._layout import Layout, is_count
from fxpipe.passes._mixing import (
    BROADCAST_LOSSES,
    CUTS,
    IN_ORDER,
    INDEXED,
    OTHER_OPERANDS,
    ROW_BY_ROW,
    SPREADS,
    TAKE_SIZES,
    counts_from_zero,
    dims_along,
    is_known,
    letters,
    places_of,
)
from fxpipe.passes._routing import Routing
from fxpipe.program import Role, where
from fxpipe.torch_private import expression

ADVICE = "options={'loss_reduction': 'mean'} (or 'sum') says that microbatch losses may be averaged"
INSTEAD = "compute it outside of the model, or use one microbatch"

POSITIONS = frozenset(
    "arange range linspace logspace randperm tril_indices triu_indices eye".split()
)
KEEPS_POSITIONS = frozenset(
    "unsqueeze squeeze view reshape flatten expand expand_as to long int clone contiguous detach "
    "getattr".split()
)

# What adds up over rows, and over the microbatches then; and what leaves a sum one.
SUMS = frozenset("sum matmul mm bmm einsum addmm linear tensordot dot sum_to_size".split())
KEEPS_SUMS = frozenset(
    "view reshape t transpose permute unsqueeze squeeze contiguous clone neg to".split()
)


def check_rows_stay_apart(gm: fx.GraphModule, batch: Batch) -> frozenset[fx.Node]:
    """Raise ModelError, with the model's line, at the first operator that mixes rows.

    What makes a value without rows of its own, a reduction, is left to the pass, but for those
    that are returned: sizes of groups that a microbatch has to count among its own rows.
    """
    rows = _Rows(batch)
    rows.check_graph(gm)
    return frozenset(rows.routing.counts)


class _Rows:
    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.layout = Layout(batch)
        self.routing = Routing(batch, self.layout)
        # What numbers the rows, and how many there are.
        self.positions: dict[fx.Node, sympy.Expr] = {}

    def check_graph(self, gm: fx.GraphModule) -> None:
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                self.check_input(node)
            elif node.op in ("call_function", "call_method"):
                self.check_inner_graphs(gm, node)
                self.check(node)
            elif node.op == "output":
                self.routing.check_output(node)
                self.check_returned(node)

    def check_returned(self, end: fx.Node) -> None:
        for node in end.all_input_nodes:
            if node in self.positions:
                raise self.position_as_number(node)

    def check_inner_graphs(self, gm: fx.GraphModule, call: fx.Node) -> None:
        """The bodies of a checkpoint or another operator that takes graphs, the first one first."""
        given = [source for source in call.args if isinstance(source, fx.Node)]
        graphs = {n: getattr(gm, str(n.target), None) for n in given if n.op == "get_attr"}
        bodies = [inner for inner in graphs.values() if isinstance(inner, fx.GraphModule)]
        values = [n for n in given if not isinstance(graphs.get(n), fx.GraphModule)]
        for inner in bodies:
            inputs = inner.graph.find_nodes(op="placeholder")
            same = inner is bodies[0] and len(values) == len(inputs)
            for i, node in enumerate(inputs):
                self.layout.enter(node, values[i] if same else None)
            for node in inner.graph.nodes:
                if node.op in ("call_function", "call_method"):
                    self.check_inner_graphs(inner, node)
                    adds = name_of(call) == "autograd_function_apply" and inner is not bodies[0]
                    self.check_inside(node, adds)
            self.routing.check_output(inner.graph.output_node())
            self.layout.results.setdefault(call, results_of(inner))

    def check_inside(self, node: fx.Node, adds: bool) -> None:
        """`adds`: what has no rows is a gradient, which is added up over the microbatches."""
        self.check_size_is_no_number(node)
        self.check(node)
        if adds and name_of(node) in SUMS and self.ends_as_a_sum(node):
            return
        if is_tensor(node) and any(map(self.batch.is_batched, node.all_input_nodes)):
            if not self.batch.is_batched(node):
                raise ModelError(
                    f"a reduction over the batch inside of a checkpoint or another nested graph, "
                    f"at {where(node)}, cannot be split; move it out, or {ADVICE}"
                )

    def check_size_is_no_number(self, node: fx.Node) -> None:
        """A batch's size in a nested graph is the microbatch's, where it is more than a size."""
        given = [fill_value(node)] if name_of(node) in TAKE_SIZES else node.all_input_nodes
        if is_tensor(node) and any(self.batch.holds_batch(number_of(n)) for n in given):
            raise ModelError(
                f"the batch size is used as a number inside of a checkpoint or another nested "
                f"graph, at {where(node)}, where it would be the microbatch's; use it outside, or "
                f"use one microbatch"
            )

    def ends_as_a_sum(self, node: fx.Node) -> bool:
        """Whether a sum over rows only changes its shape until it is returned."""
        return all(
            user.op == "output"
            or name_of(user) in KEEPS_SUMS
            and len(user.all_input_nodes) == 1
            and self.ends_as_a_sum(user)
            for user in node.users
        )

    def check_input(self, node: fx.Node) -> None:
        entry = self.batch.inputs[node]
        found = self.batch.dims(node)
        expected = [entry.batch_dim] if entry.role is Role.BATCH else []
        if found != expected:
            raise ModelError(
                f"argument {entry.path!r} has the size of the batch in dimensions {found}, "
                f"expected one, by default the first; {INSTEAD}, or name another with "
                f"options={{'batch_dims': {{{entry.path!r}: {found[-1]}}}}}"
            )
        self.layout.enter(node, None)

    def check(self, node: fx.Node) -> None:
        if not is_tensor(node) and name_of(node) != "setitem":
            return
        for value in values_of(node):
            self.check_shape(node, [expression(size) for size in value.shape])
        if self.routing.check(node):
            return
        name = name_of(node)
        self.check_known(node, name)
        self.check_along(node, name)
        self.check_operands(node, name)
        if name in BROADCAST_LOSSES:
            self.check_broadcast(node)
        if name == "embedding":
            self.check_embedding(node)
        if name in ("getitem", "setitem"):
            self.check_index(node)
        elif name in INDEXED or name in IN_ORDER:
            self.check_indexed(node, name)
        elif name in CUTS:
            self.check_cut(node)
        self.check_positions(node, name)
        self.layout.follow(node)

    def mixes(self, node: fx.Node, what: str) -> ModelError:
        return ModelError(
            f"{what} along the batch dimension mixes microbatches, at {where(node)}; {INSTEAD}"
        )

    def check_shape(self, node: fx.Node, shape: Sequence[sympy.Expr]) -> None:
        held = [size for size in shape if self.batch.holds_batch(size)]
        if len(held) > 1:
            raise ModelError(
                f"a value compares every row of the batch with every other, at {where(node)}, so "
                f"the batch cannot be split; {ADVICE}"
            )
        if held and not is_count(held[0] / self.batch.symbol, self.batch.symbol):
            raise ModelError(
                f"a value has {held[0]} rows where the batch has {self.batch.symbol}, at "
                f"{where(node)}, so it is no sum of the microbatches' rows; {INSTEAD}"
            )

    def check_known(self, node: fx.Node, name: str) -> None:
        """Rows come from rows, by operators that are known to keep them apart."""
        if not self.batch.is_batched(node):
            return
        tensors = [source for source in node.all_input_nodes if is_tensor(source)]
        if not any(map(self.batch.is_batched, tensors)):
            known = SPREADS | RANDOM | (frozenset() if tensors else POSITIONS)
            if name not in known and not takes_graph(node):
                raise self.position_as_number(node)
        elif not is_known(node):
            raise ModelError(
                f"{name}, at {where(node)}, is not known to keep the rows of the batch apart; "
                f"write it with other operators, use one microbatch, or {ADVICE}"
            )

    def check_along(self, node: fx.Node, name: str) -> None:
        source = operand(node)
        if not is_tensor(source) or not self.batch.is_batched(source):
            return
        rank = values_of(source)[0].dim()
        along = dims_along(node, name, rank)
        if set(self.batch.dims(source)) & {d % rank for d in along if -rank <= d < rank}:
            raise self.mixes(node, name)

    def check_operands(self, node: fx.Node, name: str) -> None:
        """Rows of one operand that meet all rows of another, and leave no trace in the shape."""
        if name == "einsum" and len(letters(node, self.batch)) > 1:
            raise self.mixes(node, "an einsum of several operands")
        for place, key in OTHER_OPERANDS.get(name, ()):
            other = argument(node, place, key)
            if not is_tensor(other) or not self.batch.is_batched(other):
                continue
            rank = values_of(other)[0].dim()
            along = dims_along(node, name, rank) if name != "embedding" else range(rank)
            if set(self.batch.dims(other)) & {d % rank for d in along if -rank <= d < rank}:
                raise self.mixes(node, f"{name} ({key})")

    def check_broadcast(self, node: fx.Node) -> None:
        """A loss of [rows, 1] against [rows] compares all with all."""
        places = {
            d - value.dim()
            for source in node.all_input_nodes
            for value in values_of(source)
            for d in self.batch.dims(source)
        }
        if len(places) > 1:
            raise ModelError(
                f"{name_of(node)} broadcasts its arguments so that every row of the batch meets "
                f"every other, at {where(node)}; give both the same shape"
            )

    def check_embedding(self, node: fx.Node) -> None:
        """What an embedding counts, or changes in its table, is of all rows that it looks up."""
        for place, option in ((3, "max_norm"), (5, "scale_grad_by_freq")):
            if self.batch.is_batched(node) and argument(node, place, option):
                raise ModelError(
                    f"an embedding with {option} depends on all rows of the batch, at "
                    f"{where(node)}, and microbatches look up fewer; leave {option} out"
                )

    def check_cut(self, node: fx.Node) -> None:
        """Pieces along the batch's dimension consist of whole batches."""
        source = operand(node)
        before, after = self.layout.size(source), self.layout.size(node)
        if before is not None and before != after:
            pieces = [self.batch.of_value(value) for value in values_of(node)]
            if not all(size is not None and self.layout.is_whole(source, size) for size in pieces):
                raise self.mixes(node, name_of(node))

    # Indices.

    def check_index(self, node: fx.Node) -> None:
        source, index, *written = node.args
        if not isinstance(source.meta.get("example_value"), torch.Tensor):
            return
        if any(value in self.positions for value in written if isinstance(value, fx.Node)):
            raise self.position_as_number(node)
        self.check_written_by_mask(node)
        held = self.batch.dims(source)
        for dim, count, item in places_of(index, values_of(source)[0].dim()):
            covers = any(dim <= d < dim + count for d in held)
            if isinstance(item, fx.Node) and is_tensor(item):
                self.check_index_tensor(node, item, self.batch.sizes(source)[dim], covers)
            elif covers and not self.takes_whole_rows(node, item):
                raise self.mixes(node, "an index or slice")

    def check_index_tensor(
        self, node: fx.Node, item: fx.Node, size: sympy.Expr, covers: bool
    ) -> None:
        is_mask = values_of(item)[0].dtype == torch.bool
        if covers and not is_mask and self.positions.get(item) != size:
            raise self.mixes(node, "an index tensor")
        if not covers and item in self.positions:
            raise self.position_as_number(node)

    def check_written_by_mask(self, node: fx.Node) -> None:
        """`h[mask] = values` deals its values out to the rows in turn; one for all it may have."""
        source, index, *written = node.args
        items = index if isinstance(index, tuple) else (index,)
        masks = [v for item in items for v in values_of(item) if v.dtype == torch.bool]
        if not masks or not self.batch.is_batched(source):
            return
        left = values_of(source)[0].dim() - sum(mask.dim() for mask in masks)
        if any(
            value.dim() > left and value.numel() != 1 for v in written for value in values_of(v)
        ):
            raise self.mixes(node, "a mask that deals values out")

    def takes_whole_rows(self, node: fx.Node, item: Any) -> bool:
        """Whether a slice is of whole batches. A row's number may pick from arguments alone."""
        if isinstance(item, slice):
            bounds = [bound for bound in (item.start, item.stop) if bound not in (None, 0)]
            source, writes = node.args[0], name_of(node) == "setitem"
            whole = all(self.layout.is_whole(source, size_of(bound), writes) for bound in bounds)
            return whole and item.step in (None, 1)
        read_only = name_of(node) == "getitem" and not any(map(is_in_place, node.users))
        return read_only and node in self.batch.fixed

    def check_indexed(self, node: fx.Node, name: str) -> None:
        source = operand(node)
        if not is_tensor(source):
            return
        dim = argument(node, 2 if name == "take_along_dim" else 1, "dim")
        rank = values_of(source)[0].dim()
        every = name in IN_ORDER or not isinstance(dim, int)
        if set(self.batch.dims(source)) & set(range(rank) if every else [dim % max(rank, 1)]):
            raise self.mixes(node, name)
        others = [n for n in node.all_input_nodes if n is not source and is_tensor(n)]
        if any(other in self.positions for other in others):
            raise self.position_as_number(node)
        if name in ROW_BY_ROW and self.batch.is_batched(source):
            if not all(map(self.batch.is_batched, others)):
                raise self.mixes(node, f"{name} of only so many rows")
        picked = {self.layout.size(other) for other in others} - {None}
        if picked - {self.layout.size(source)} and name not in ("index_select", "narrow"):
            raise self.position_as_number(node)

    # The number of a row in its batch.

    def check_positions(self, node: fx.Node, name: str) -> None:
        """`arange(batch)` may pick each row's own entries; as a number it would start over."""
        if name in POSITIONS and self.batch.is_batched(node):
            if not counts_from_zero(node):
                raise self.position_as_number(node)
            self.positions[node] = self.batch.sizes(node)[0]
        if not any(source in self.positions for source in node.all_input_nodes):
            return
        source = operand(node)
        if source in self.positions and (
            name in KEEPS_POSITIONS or (name == "getitem" and self.batch.is_batched(node))
        ):
            self.positions[node] = self.positions[source]
        elif name not in ("getitem", "setitem"):
            raise self.position_as_number(node)

    def position_as_number(self, node: fx.Node) -> ModelError:
        return ModelError(
            f"the row's position in the batch is used as a number, at {where(node)}, which "
            f"differs inside a microbatch; pass the positions as an argument"
        )


def fill_value(node: fx.Node) -> Any:
    """What a value is filled with, for operators that take sizes beside it."""
    place = {"full": 1, "new_full": 2, "tensor": 0, "scalar_tensor": 0}.get(name_of(node))
    return None if place is None else argument(node, place, "fill_value", "data", "s")


def number_of(given: Any) -> sympy.Expr:
    """The number that a node of the graph stands for; 0 for all else."""
    value = given.meta.get("example_value") if isinstance(given, fx.Node) else None
    if value is None or not isinstance(value, (torch.SymInt, torch.SymFloat)):
        return sympy.Integer(0)
    return expression(value)


def size_of(bound: Any) -> sympy.Expr:
    if isinstance(bound, fx.Node):
        bound = bound.meta.get("example_value")
    return expression(bound)

"""Whether a model keeps the rows of its batch apart, so that each microbatch computes its own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import sympy
import torch
import torch.fx as fx

from fxpipe.errors import ModelError
from fxpipe.passes._batch import (
    Batch,
    argument,
    is_in_place,
    is_tensor,
    name_of,
    operand,
    values_of,
)
from fxpipe.program import Role, where
from fxpipe.torch_private import expression

ADVICE = "options={'loss_reduction': 'mean'} (or 'sum') says that microbatch losses may be averaged"
INSTEAD = "compute it outside of the model, or use one microbatch"

# Operators that mix what lies along their `dim`: its place among the arguments, and its default
# (None: all dimensions).
ALONG_DIM: dict[str, tuple[int, tuple[int, ...] | None]] = {
    **dict.fromkeys(
        "softmax log_softmax softmin cumsum cumprod cummax cummin logcumsumexp flip median std var "
        "std_mean var_mean".split(),
        (1, None),
    ),
    **dict.fromkeys("sort argsort mode glu".split(), (1, (-1,))),
    **dict.fromkeys("topk kthvalue diff fft_fft fft_ifft fft_rfft fft_irfft".split(), (2, (-1,))),
    **dict.fromkeys("fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2".split(), (2, (-2, -1))),
    **dict.fromkeys("fft_fftn fft_ifftn fft_rfftn fft_irfftn roll".split(), (2, None)),
    "normalize": (2, (1,)),
}
# Operators that mix, or count, along dimensions that are always the same.
ALONG_FIXED = {
    "flipud": (0,),
    "fliplr": (1,),
    "rot90": (0, 1),
    "cross_entropy": (1,),
    "nll_loss": (1,),
    **dict.fromkeys(("triu", "tril", "scaled_dot_product_attention"), (-2, -1)),
}
WINDOWED = re.compile(r"(conv|conv_transpose|\w*pool)(\d)d(?:_with_indices)?")
RESHAPES = frozenset("view view_as reshape reshape_as flatten unflatten ravel".split())
# Losses that broadcast their arguments and return one number, so that the shape hides it.
BROADCAST_LOSSES = frozenset(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div poisson_nll_loss "
    "binary_cross_entropy_with_logits hinge_embedding_loss margin_ranking_loss "
    "soft_margin_loss".split()
)
POSITIONS = frozenset("arange range linspace logspace randperm tril_indices triu_indices".split())
KEEPS_POSITIONS = frozenset(
    "unsqueeze squeeze view reshape flatten expand expand_as to long int clone contiguous detach "
    "getattr".split()
)
INDEXED = frozenset(
    "gather index_select take_along_dim index_add index_copy index_fill scatter scatter_add "
    "scatter_reduce narrow".split()
)
IN_ORDER = frozenset("take put masked_scatter".split())


def check_rows_stay_apart(gm: fx.GraphModule, batch: Batch) -> None:
    """Raise ModelError, with the model's line, at the first operator that mixes rows.

    What makes a value without rows of its own, a reduction, is left to the pass.
    """
    rows = _Rows(batch)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            rows.check_input(node)
        elif node.op in ("call_function", "call_method"):
            rows.check(node)
        elif node.op == "get_attr":
            check_inner_graph(getattr(gm, str(node.target), None), rows)


def check_inner_graph(inner: Any, rows: _Rows) -> None:
    """The body of a checkpoint or another operator that takes a graph."""
    if not isinstance(inner, fx.GraphModule):
        return
    for node in inner.graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        rows.check(node)
        if is_tensor(node) and any(map(rows.batch.is_batched, node.all_input_nodes)):
            if not rows.batch.is_batched(node):
                raise ModelError(
                    f"a reduction over the batch inside of a checkpoint or another nested graph, "
                    f"at {where(node)}, cannot be split; move it out, or {ADVICE}"
                )


class _Rows:
    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.positions: set[fx.Node] = set()
        # How many elements further the same element of the next row lies, in a value's own order.
        self.steps: dict[fx.Node, sympy.Expr | None] = {}

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
        self.follow_rows(node)

    def check(self, node: fx.Node) -> None:
        if not is_tensor(node) and name_of(node) != "setitem":
            return
        for value in values_of(node):
            self.check_shape(node, [expression(size) for size in value.shape])
        name = name_of(node)
        self.check_along(node, name)
        if name in BROADCAST_LOSSES:
            self.check_broadcast(node)
        if name in ("getitem", "setitem"):
            self.check_index(node)
        elif name in INDEXED or name in IN_ORDER:
            self.check_indexed(node, name)
        self.check_positions(node, name)
        self.follow_rows(node)

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
        if held and not self.is_times_batch(held[0]):
            raise ModelError(
                f"a value has {held[0]} rows where the batch has {self.batch.symbol}, at "
                f"{where(node)}, so it is no sum of the microbatches' rows; {INSTEAD}"
            )

    def is_times_batch(self, size: sympy.Expr) -> bool:
        times = sympy.cancel(size / self.batch.symbol)
        return is_count(times) and not self.batch.holds_batch(times)

    def check_along(self, node: fx.Node, name: str) -> None:
        source = operand(node)
        if not is_tensor(source) or not self.batch.is_batched(source):
            return
        rank = values_of(source)[0].dim()
        along = dims_along(node, name, rank)
        if set(self.batch.dims(source)) & {d % rank for d in along if -rank <= d < rank}:
            raise self.mixes(node, name)

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

    # Reshapes.

    def follow_rows(self, node: fx.Node) -> None:
        """Note how far apart rows lie, and that a reshape leaves each row in one piece."""
        dims = self.batch.dims(node)
        if not dims or len(values_of(node)) > 1:
            return
        sizes = self.batch.sizes(node)
        inside = sympy.prod(sizes[dims[0] + 1 :])
        times = sizes[dims[0]] / self.batch.symbol  # the batch's dimension holds so much besides
        source = operand(node)
        if name_of(node) in RESHAPES:
            step = self.steps.get(source)
            if step is None:
                return
            within = step / inside
            if not (is_count(within) and is_count(times / within)):
                raise ModelError(
                    f"{name_of(node)} mixes the rows of the batch, at {where(node)}; keep the "
                    f"batch as a dimension of its own, or next to the one that it is joined with"
                )
            self.steps[node] = step
        elif sympy.simplify(times - 1) == 0:
            self.steps[node] = inside
        else:
            within = self.rows_within(node, sizes[dims[0]])
            self.steps[node] = None if within is None else within * inside

    def rows_within(self, node: fx.Node, size: sympy.Expr) -> sympy.Expr | None:
        """What is joined with the batch on its inner side; None where it is not known."""
        if name_of(node) == "repeat_interleave":
            return None
        for source in node.all_input_nodes:
            step, dims = self.steps.get(source), self.batch.dims(source)
            if step is not None and len(values_of(source)) == 1:
                sizes = self.batch.sizes(source)
                if sizes[dims[0]] == size or name_of(node) in ("cat", "concat", "repeat", "tile"):
                    return step / sympy.prod(sizes[dims[0] + 1 :])
        return None

    # Indices.

    def check_index(self, node: fx.Node) -> None:
        source, index, *written = node.args
        if not isinstance(source.meta.get("example_value"), torch.Tensor):
            return
        if self.positions.intersection(n for n in written if isinstance(n, fx.Node)):
            raise self.position_as_number(node)
        held = self.batch.dims(source)
        for dim, count, item in places_of(index, values_of(source)[0].dim()):
            covers = any(dim <= d < dim + count for d in held)
            if isinstance(item, fx.Node) and is_tensor(item):
                self.check_index_tensor(node, item, covers)
            elif covers and not self.takes_whole_rows(node, item):
                raise self.mixes(node, "an index or slice")
        if self.batch.is_batched(node) and not any(
            self.batch.is_batched(n) for n in node.all_input_nodes
        ):
            raise self.position_as_number(node)

    def check_index_tensor(self, node: fx.Node, item: fx.Node, covers: bool) -> None:
        is_mask = values_of(item)[0].dtype == torch.bool
        if covers and not is_mask and item not in self.positions:
            raise self.mixes(node, "an index tensor")
        if not covers and item in self.positions:
            raise self.position_as_number(node)

    def takes_whole_rows(self, node: fx.Node, item: Any) -> bool:
        """Whether a slice is of whole batches. A row's number may pick from arguments alone."""
        if isinstance(item, slice):
            bounds = [bound for bound in (item.start, item.stop) if bound not in (None, 0)]
            whole = all(self.is_times_batch(self.as_expression(bound)) for bound in bounds)
            return whole and item.step in (None, 1)
        read_only = name_of(node) == "getitem" and not any(map(is_in_place, node.users))
        return read_only and node in self.batch.fixed

    def as_expression(self, bound: Any) -> sympy.Expr:
        if isinstance(bound, fx.Node):
            bound = bound.meta.get("example_value")
        return expression(bound)

    def check_indexed(self, node: fx.Node, name: str) -> None:
        source = operand(node)
        if not is_tensor(source):
            return
        dim = argument(node, 2 if name == "take_along_dim" else 1, "dim")
        rank = values_of(source)[0].dim()
        every = name in IN_ORDER or not isinstance(dim, int)
        if set(self.batch.dims(source)) & set(range(rank) if every else [dim % max(rank, 1)]):
            raise self.mixes(node, name)
        if self.positions.intersection(node.all_input_nodes):
            raise self.position_as_number(node)

    # The number of a row in its batch.

    def check_positions(self, node: fx.Node, name: str) -> None:
        """`arange(batch)` may pick each row's own entries; as a number it would start over."""
        if name in POSITIONS and self.batch.is_batched(node):
            if not counts_from_zero(node):
                raise self.position_as_number(node)
            self.positions.add(node)
        if not self.positions.intersection(node.all_input_nodes):
            return
        if operand(node) in self.positions and (
            name in KEEPS_POSITIONS or (name == "getitem" and self.batch.is_batched(node))
        ):
            self.positions.add(node)
        elif name not in ("getitem", "setitem"):
            raise self.position_as_number(node)

    def position_as_number(self, node: fx.Node) -> ModelError:
        return ModelError(
            f"the row's position in the batch is used as a number, at {where(node)}, which "
            f"differs inside a microbatch; pass the positions as an argument"
        )


def is_count(value: sympy.Expr) -> bool:
    """Whether an expression is a whole number of at least 1 whatever its symbols are."""
    value = sympy.cancel(value)
    return bool(value.is_integer and value.is_positive and value.is_polynomial())


def counts_from_zero(node: fx.Node) -> bool:
    """Whether an arange is 0, 1, 2, ..."""
    if name_of(node) != "arange":
        return False
    if len(node.args) < 2 and "end" not in node.kwargs:
        return True
    first = argument(node, 0, "start") or 0
    step = argument(node, 2, "step")
    return first == 0 and step in (None, 1)


def dims_along(node: fx.Node, name: str, rank: int) -> Iterable[int]:
    """The dimensions of its first argument along which an operator mixes."""
    if name in ALONG_DIM:
        position, default = ALONG_DIM[name]
        given = argument(node, position, "dim", "dims")
        if given is None:
            return range(rank) if default is None else default
        if name == "flip" and isinstance(given, int):
            given = node.args[1:] or (given,)
        given = given if isinstance(given, (tuple, list)) else [given]
        return [d for d in given if isinstance(d, int)]
    if name in ALONG_FIXED:
        return ALONG_FIXED[name] if rank > 1 else range(rank)
    if name in ("layer_norm", "rms_norm"):
        return range(-len(argument(node, 1, "normalized_shape") or ()), 0)
    if name == "group_norm":
        return range(1, rank)
    if match := WINDOWED.fullmatch(name):
        return range(-int(match[2]) - ("pool" not in match[1]), 0)
    return ()


def places_of(index: Any, rank: int) -> list[tuple[int, int, Any]]:
    """(first dimension, number of dimensions, item) of each item of an index."""
    items = list(index) if isinstance(index, (tuple, list)) else [index]
    counts = [consumed(item) for item in items]
    rest = rank - sum(counts)
    places, dim = [], 0
    for item, count in zip(items, counts):
        if item is Ellipsis:
            dim += rest
            continue
        if count:
            places.append((dim, count, item))
        dim += count
    return places


def consumed(item: Any) -> int:
    """How many dimensions an item of an index takes."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    values = values_of(item)
    return int(values[0].dim()) if values and values[0].dtype == torch.bool else 1

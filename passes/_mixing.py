"""Which operators keep the rows of a batch apart, and along which dimensions the others mix."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import torch.fx as fx

from fxpipe.passes._batch import Batch, argument, name_of, takes_graph, values_of
from fxpipe.passes._graph import OpOverload, aten

# Operators that mix what lies along their `dim`: its place among the arguments, and its default
# (None: all dimensions).
ALONG_DIM: dict[str, tuple[int, tuple[int, ...] | None]] = {
    **dict.fromkeys(
        "softmax log_softmax softmin special_softmax special_log_softmax cumsum cumprod cummax "
        "cummin logcumsumexp flip median std var std_mean var_mean".split(),
        (1, None),
    ),
    **dict.fromkeys("sort argsort mode glu".split(), (1, (-1,))),
    **dict.fromkeys("topk kthvalue diff fft_fft fft_ifft fft_rfft fft_irfft".split(), (2, (-1,))),
    **dict.fromkeys("fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2".split(), (2, (-2, -1))),
    **dict.fromkeys("fft_fftn fft_ifftn fft_rfftn fft_irfftn roll".split(), (2, None)),
    "normalize": (2, (1,)),
    "gumbel_softmax": (4, (-1,)),
}
# Operators that mix, or count, along dimensions that are always the same.
ALONG_FIXED = {
    "flipud": (0,),
    "fliplr": (1,),
    "rot90": (0, 1),
    "multi_head_attention_forward": (0,),
    "cross_entropy": (1,),
    "nll_loss": (1,),
    **dict.fromkeys(("triu", "tril", "scaled_dot_product_attention"), (-2, -1)),
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle"), (-3, -2, -1)),
    # Losses of vectors, which are what the last dimension holds.
    **dict.fromkeys(
        "triplet_margin_loss triplet_margin_with_distance_loss cosine_embedding_loss "
        "multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss".split(),
        (-1,),
    ),
}
# Operators that mix along all dimensions from this one on.
ALONG_REST = {
    "group_norm": 1,
    "local_response_norm": 1,
    "instance_norm": 2,
    **dict.fromkeys("interpolate upsample upsample_bilinear upsample_nearest".split(), 2),
    "grid_sample": 1,
    # Of evaluation without gradients, where the batch comes first.
    **dict.fromkeys(("transformer_encoder_layer_fwd", "native_multi_head_attention"), 1),
}
# Arguments beside the first along which an operator mixes: (place, name).
OTHER_OPERANDS = {
    "scaled_dot_product_attention": ((1, "key"), (2, "value")),
    "multi_head_attention_forward": ((1, "key"), (2, "value")),
    "native_multi_head_attention": ((1, "key"), (2, "value")),
    "embedding": ((1, "weight"),),
}
WINDOWED = re.compile(r"(conv|conv_transpose|\w*pool)(\d)d(?:_with_indices)?")
RESHAPES = frozenset("view view_as reshape reshape_as flatten unflatten ravel".split())
CUTS = frozenset("chunk split split_with_sizes tensor_split".split())
# Losses that broadcast their arguments and return one number, so that the shape hides it.
BROADCAST_LOSSES = frozenset(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div poisson_nll_loss "
    "binary_cross_entropy_with_logits hinge_embedding_loss margin_ranking_loss "
    "soft_margin_loss".split()
)
INDEXED = frozenset(
    "gather index_select take_along_dim index_add index_copy index_fill scatter scatter_add "
    "scatter_reduce narrow".split()
)
# Of these the operand has as many rows, or more, which are left as they are.
ROW_BY_ROW = frozenset("gather scatter scatter_add scatter_reduce".split())
IN_ORDER = frozenset("take put masked_scatter".split())
# Operators that give every row the same value, whatever it was made of.
SPREADS = frozenset(
    "expand expand_as broadcast_to broadcast_tensors repeat tile repeat_interleave zeros_like "
    "new_zeros new_ones new_empty new_full full zeros ones empty rand randn".split()
)

# Operators that take sizes as sizes or places. To all others a size is a number.
TAKE_SIZES = frozenset(
    "view reshape expand repeat tile broadcast_to flatten unflatten narrow select split chunk "
    "tensor_split getitem setitem unfold as_strided repeat_interleave pad interpolate one_hot "
    "zeros ones empty full new_zeros new_ones new_empty new_full rand randn randint randperm "
    "arange range linspace eye tril_indices triu_indices layer_norm rms_norm sum_to_size topk "
    "tensor scalar_tensor".split()
)

# What computes each element from those at its own place; more are found by torch's own tag.
ELEMENTWISE = frozenset(
    "truediv itruediv floordiv ifloordiv mod not iadd isub imul imod ipow iand ior ixor lshift "
    "rshift invert and or xor pos divide multiply subtract negative absolute hardswish log_sigmoid "
    "logsigmoid tanhshrink softsign prelu floor_divide complex polar real imag conj bernoulli "
    "fill zero copy isclose dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout "
    "feature_alpha_dropout to type type_as float double half bfloat16 int long bool short byte "
    "char cpu cuda clone detach contiguous alias identity uniform normal exponential random "
    "masked_fill zeros_like ones_like full_like empty_like rand_like randn_like randint_like "
    "requires_grad get_data_attr relu6 threshold rrelu imatmul".split()
)
# What moves whole dimensions, or takes elements from places that do not depend on values.
MOVES = frozenset(
    "squeeze unsqueeze permute transpose t swapaxes swapdims movedim moveaxis adjoint expand "
    "expand_as broadcast_to broadcast_tensors getattr getitem setitem select unbind cat concat "
    "concatenate stack hstack vstack dstack column_stack repeat tile repeat_interleave new_zeros "
    "new_ones new_full new_empty new_tensor view_as_real view_as_complex pad diagonal "
    "atleast_1d atleast_2d atleast_3d".split()
)
# What multiplies along dimensions that its result does not have, or has no trace of.
PRODUCTS = frozenset(
    "matmul mm bmm mv dot inner outer addmm addmv baddbmm addbmm linear bilinear einsum tensordot "
    "cdist pairwise_distance cosine_similarity".split()
)
REDUCES = frozenset(
    "sum mean prod amax amin max min argmax argmin norm vector_norm linalg_vector_norm "
    "matrix_norm linalg_norm all any logsumexp count_nonzero nansum nanmean nanmedian aminmax "
    "quantile".split()
)
NORMS = frozenset("layer_norm rms_norm batch_norm sync_batch_norm".split())
LOSSES = frozenset(
    "gaussian_nll_loss cosine_embedding_loss multi_margin_loss multilabel_margin_loss ctc_loss "
    "multilabel_soft_margin_loss triplet_margin_loss triplet_margin_with_distance_loss".split()
)
CELLS = frozenset("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell".split())
OTHERS = frozenset("embedding one_hot multinomial affine_grid unfold".split()) | CELLS
BY_NAME = frozenset().union(
    ALONG_DIM, ALONG_FIXED, ALONG_REST, RESHAPES, CUTS, BROADCAST_LOSSES, INDEXED, IN_ORDER,
    ELEMENTWISE, MOVES, PRODUCTS, REDUCES, NORMS, LOSSES, OTHERS,
)  # fmt: skip
# Operators on a graph of their own, which is checked like the model's.
GRAPHS = re.compile(r"tag_activation_checkpoint|wrap\w*|checkpoint|autograd_function_apply")


def is_known(node: fx.Node) -> bool:
    """Whether what an operator does with rows can be read off its name and arguments."""
    if takes_graph(node):
        return bool(GRAPHS.fullmatch(name_of(node)))
    name = name_of(node)
    if isinstance(node.target, (OpOverload, type(aten.mm))):  # an operator of a library's own
        if not str(node.target).startswith("aten."):
            return False
        name = name.partition(".")[0]
    return name in BY_NAME or is_elementwise(name) or bool(WINDOWED.fullmatch(name))


@cache
def is_elementwise(name: str) -> bool:
    if name in ELEMENTWISE:
        return True
    packet = getattr(aten, name, None) if name.isidentifier() else None
    if not isinstance(packet, type(aten.mm)):
        return False
    tags = [getattr(packet, overload).tags for overload in packet.overloads()]
    return any(torch.Tag.pointwise in each for each in tags)


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
    if name in ALONG_REST:
        return range(ALONG_REST[name], rank)
    if name == "pad":
        return range(-(len(argument(node, 1, "pad") or ()) // 2), 0)
    if name == "unfold":  # a tensor's own is along one dimension, that of torch.nn along images
        given = argument(node, 1, "dimension")
        return [given] if node.op == "call_method" and isinstance(given, int) else range(1, rank)
    if match := WINDOWED.fullmatch(name):
        return range(-int(match[2]) - ("pool" not in match[1]), 0)
    return ()


def letters(node: fx.Node, batch: Batch) -> set[Any]:
    """What an einsum calls the batch in its operands: one letter where rows stay apart."""
    equation, *operands = node.args
    if operands and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if isinstance(equation, str):
        terms: Any = equation.replace(" ", "").partition("->")[0].split(",")
    else:  # operand, list of numbers, operand, ...
        operands, terms = list(node.args[::2]), node.args[1::2]
    return {
        letter_of(term, dim, values_of(value)[0].dim())
        for value, term in zip(operands, terms)
        for dim in batch.dims(value)
    }


def letter_of(term: Any, dim: int, rank: int) -> Any:
    """The letter, or number, of a dimension in a term of an einsum: `...b` counts from the end."""
    if isinstance(term, str):
        term = [Ellipsis if part == "..." else part for part in re.findall(r"\.\.\.|.", term)]
    if Ellipsis not in term:
        return term[dim]
    before = term.index(Ellipsis)
    after = len(term) - before - 1
    if dim < before:
        return term[dim]
    return term[dim - rank] if dim >= rank - after else ("...", dim - (rank - after))


def counts_from_zero(node: fx.Node) -> bool:
    """Whether an arange is 0, 1, 2, ..."""
    if name_of(node) != "arange":
        return False
    if len(node.args) < 2 and "end" not in node.kwargs:
        return True
    first = argument(node, 0, "start") or 0
    step = argument(node, 2, "step")
    return first == 0 and step in (None, 1)


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

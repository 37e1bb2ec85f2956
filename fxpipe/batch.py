"""The arguments of a call, and the option `batch_dims` -> the dimension of each that is split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
import torch.fx as fx

from fxpipe.errors import OptionError
from fxpipe.log import logger, warn_once
from fxpipe.options import Options
from fxpipe.program import Input, Role
from fxpipe.torch_private import expression

log = logger(__name__)


def batch_dim(path: str, options: Options) -> int | None:
    """The dimension that may hold the batch: 0 unless `batch_dims` says otherwise."""
    name = governing_name(path, options)
    return 0 if name is None else options.batch_dims[name]


def governing_name(path: str, options: Options) -> str | None:
    """The most precise name in `batch_dims` for an argument: `batch.x` before `batch`."""
    names = [name for name in options.batch_dims if is_within(path, name)]
    return max(names, key=len, default=None)


def is_within(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")


def batch_sizes(
    arguments: Mapping[str, torch.Tensor], options: Options
) -> dict[str, tuple[int, int]]:
    """Path of an argument -> the dimension that may hold the batch, and its size."""
    dims = {path: batch_dim(path, options) for path in arguments}
    return {
        path: (dim, int(arguments[path].shape[dim]))
        for path, dim in dims.items()
        if dim is not None and dim < arguments[path].dim()
    }


# What the user wrote.


def check_range(arguments: Mapping[str, torch.Tensor], options: Options) -> None:
    """Raises OptionError for a dimension that no argument of that name has."""
    for name, dim in options.batch_dims.items():
        paths = [path for path in arguments if governing_name(path, options) == name]
        if dim is None or not paths or any(dim < arguments[path].dim() for path in paths):
            continue
        count = arguments[paths[0]].dim()
        known = (
            "no dimension, as a scalar has none"
            if not count
            else (f"{count} dimension{'s' * (count > 1)} (0{f' to {count - 1}' * (count > 1)})")
        )
        raise OptionError(
            f"batch_dims[{name!r}] is {dim}, but {paths[0]!r} has {known}; write the dimension "
            f"that holds the batch, or None where it is not split"
        )


def check_names(inputs: Sequence[Input], options: Options) -> None:
    paths = [i.path for i in inputs if i.role is Role.WHOLE]
    for name in options.batch_dims:
        if not any(is_within(path, name) for path in paths):
            raise OptionError(
                f"batch_dims names {name!r}, which is no tensor argument of the call; "
                f"the tensor arguments are {', '.join(paths) or 'none'}"
            )


def find_batch_symbol(
    placeholders: Sequence[fx.Node], inputs: Sequence[Input], options: Options
) -> sympy.Symbol | None:
    """The symbol that most arguments have in their batch dimension; the first of equals."""
    votes: Counter[sympy.Symbol] = Counter()
    for node, entry in zip(placeholders, inputs):
        size = leading_size(node, entry, options)
        if isinstance(size, sympy.Symbol):
            votes[size] += 1
    return votes.most_common(1)[0][0] if votes else None


def leading_size(node: fx.Node, entry: Input, options: Options) -> sympy.Expr | None:
    if entry.role is not Role.WHOLE:
        return None
    shape = node.meta["example_value"].shape
    dim = batch_dim(entry.path, options)
    if dim is None or dim >= len(shape):
        return None
    return expression(shape[dim])


def mark_batch(
    node: fx.Node, entry: Input, batch_symbol: sympy.Symbol | None, options: Options
) -> Input:
    if batch_symbol is None or leading_size(node, entry, options) != batch_symbol:
        return entry
    return replace(entry, role=Role.BATCH, batch_dim=batch_dim(entry.path, options))


# What the trace made of it.


def check_found(
    placeholders: Sequence[fx.Node],
    inputs: Sequence[Input],
    values: Sequence[Any],
    batch_symbol: sympy.Symbol | None,
    options: Options,
) -> None:
    """More than one microbatch is asked for: raise or warn where there is no batch to split.

    A call of one row, or of none, has nothing to split and is as good as it is.
    """
    if options.microbatches < 2:
        return
    if batch_symbol is not None:
        for node, entry in zip(placeholders, inputs):
            check_other_dims(node, entry, batch_symbol, options)
        return
    arguments = {i.path: v for i, v in zip(inputs, values) if i.role is Role.WHOLE}
    sizes = batch_sizes(arguments, options)
    fixed = {path: found for path, found in sizes.items() if found[1] > 1}
    if sizes and not fixed:
        log.info("no input has a batch of more than one row to split: one microbatch")
    elif not fixed:
        warn_once(
            log, "%d microbatches are asked for, but no argument of the call has a dimension to "
            "split%s, so the step runs as one microbatch; set microbatches=1 if that is meant",
            options.microbatches, " by batch_dims" if options.batch_dims else "",
        )  # fmt: skip
    elif options.batch_dims and len(fixed) == len(sizes):
        raise OptionError(
            f"batch_dims={dict(options.batch_dims)} leaves nothing that can be split into "
            f"{options.microbatches} microbatches: the model takes {listed(fixed)} as fixed, as it "
            f"must beside a size that is not split; name the dimension that holds the batch in "
            f"every argument, or use microbatches=1"
        )
    else:
        warn_once(
            log, "%d microbatches are asked for, but the step runs as one: the model takes %s as "
            "fixed; write it as x.shape[0] or -1 in the model, name the dimension that holds the "
            "batch with batch_dims, or set microbatches=1 if that is meant",
            options.microbatches, listed(fixed),
        )  # fmt: skip


def listed(sizes: Mapping[str, tuple[int, int]]) -> str:
    """`the size 6 of dimension 0 of 'x' and 'y'`, sizes apart."""
    places: dict[tuple[int, int], list[str]] = {}
    for path, found in sizes.items():
        places.setdefault(found, []).append(repr(path))
    return " and ".join(
        f"the size {size} of dimension {dim} of {' and '.join(paths)}"
        for (dim, size), paths in places.items()
    )


def check_other_dims(
    node: fx.Node, entry: Input, batch_symbol: sympy.Symbol, options: Options
) -> None:
    """`batch_dims` names one dimension of an argument, and the batch is in another."""
    name = governing_name(entry.path, options)
    if entry.role is not Role.WHOLE or name is None:
        return
    shape = node.meta["example_value"].shape
    found = [d for d, size in enumerate(shape) if expression(size) == batch_symbol]
    if found and options.batch_dims[name] not in found:
        raise OptionError(
            f"batch_dims[{name!r}] is {options.batch_dims[name]}, but the model makes dimension "
            f"{found[0]} of {entry.path!r} as long as the batch; write "
            f"options={{'batch_dims': {{{name!r}: {found[0]}}}}}, name the dimension that holds "
            f"the batch in every argument, or use microbatches=1"
        )

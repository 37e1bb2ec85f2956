"""What the table of operators says of rows, tried on numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor

from fxpipe.passes._batch import RANDOM, name_of
from fxpipe.passes._mixing import dims_along, is_known

PLACES = (torch, F, Tensor, torch.linalg, torch.special, torch.fft)
ARGUMENTS: tuple[tuple[Any, ...], ...] = ((), (0,), (1,), (-1,), (2,), (2.0,), ("x",), ("x", "x"))
ORDER = torch.tensor([3, 1, 5, 0, 2, 4])
DRAWN = RANDOM | {"randn_like", "rand_like", "randint_like", "empty_like"}


def functions() -> Iterator[Callable[..., Any]]:
    for place in PLACES:
        for name in dir(place):
            function = getattr(place, name)
            if not name.startswith("_") and callable(function) and not isinstance(function, type):
                yield function


def node_of(function: Callable[..., Any], arguments: tuple[Any, ...]) -> fx.Node:
    graph = fx.Graph()
    x = graph.placeholder("x")
    return graph.call_function(function, (x, *(x if a == "x" else a for a in arguments)))


def results(function: Callable[..., Any], arguments: tuple[Any, ...], x: Tensor) -> list[Tensor]:
    """The results with as many rows as x; none where the function does not take such arguments."""
    try:
        made = function(x.clone(), *(x.clone() if a == "x" else a for a in arguments))
    except Exception:
        return []
    values = made if isinstance(made, (tuple, list)) else [made]
    return [v for v in values if isinstance(v, Tensor) and v.dim() > 1 and v.shape[0] == x.shape[0]]


def test_known_operators_mix_rows_along_named_dimensions_alone() -> None:
    torch.manual_seed(0)
    x = torch.rand(6, 4, dtype=torch.float64) / 2 + 0.1
    tried, mixing = 0, []
    for function in functions():
        for arguments in ARGUMENTS:
            node = node_of(function, arguments)
            if name_of(node) in DRAWN or not is_known(node):
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                whole, part = (results(function, arguments, rows) for rows in (x, x[:3]))
                moved = results(function, arguments, x[ORDER])
            same = all(
                torch.allclose(a[:3].double(), b.double(), equal_nan=True)
                and torch.allclose(a[ORDER].double(), c.double(), equal_nan=True)
                for a, b, c in zip(whole, part, moved)
                if a.shape[1:] == b.shape[1:] and a.shape == c.shape
            )
            tried += bool(whole)
            if not same and 0 not in [d % 2 for d in dims_along(node, name_of(node), 2)]:
                mixing.append((name_of(node), arguments))
    assert mixing == []
    assert tried > 500


@pytest.mark.parametrize("function", [torch.msort, torch.linalg.pinv, torch.isin, torch.gradient])
def test_operator_that_mixes_without_a_dimension_is_unknown(function: Callable[..., Any]) -> None:
    assert not is_known(node_of(function, ()))


def test_padding_and_images_mix_along_their_last_dimensions() -> None:
    x = fx.Graph().placeholder("x")
    graph = x.graph
    assert list(dims_along(graph.call_function(F.pad, (x, (1, -1))), "pad", 4)) == [-1]
    assert list(dims_along(graph.call_function(F.unfold, (x, 3)), "unfold", 4)) == [1, 2, 3]
    assert list(dims_along(graph.call_method("unfold", (x, 0, 2, 1)), "unfold", 4)) == [0]

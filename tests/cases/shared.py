"""What the tests of cases share: a model beside its twin in eager, its program, its lines."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.program import Program
from tests.helpers import captured, run_until
from tests.numerics.models import assert_close, assert_same_gradients, pipelined, seeded


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def check(
    build: Callable[[], nn.Module], *batches: Sequence[Any], **options: Any
) -> tuple[Any, nn.Module]:
    """Step on each batch in turn beside eager, without zeroing gradients: all numbers are equal.

    Returns the pipelined step and its model.
    """
    model = seeded(build)
    twin, step = copy.deepcopy(model), pipelined(model, **options)
    for inputs in batches:
        check_step(step, model, twin, *inputs)
    return step, model


def check_step(step: Any, model: nn.Module, twin: nn.Module, *args: Any, **kwargs: Any) -> None:
    loss, expected = step(*args, **kwargs), twin(*args, **kwargs)
    loss.backward()
    expected.backward()
    assert_close(loss, expected, 1e-10, "loss")
    assert_same_gradients(model, twin)


def program_of(
    model: nn.Module, *inputs: Any, rows: int = 2, last: str = "split_tasks", **options: Any
) -> Program:
    """The program of a model for two microbatches of `rows` rows, after the pass named `last`."""
    return run_until(captured(model, *inputs, **options).program(rows), last)


def line_of(found: Any, text: str) -> str:
    """`test_boundaries.py:12` for the line of a class's or function's source that holds a text."""
    lines, first = inspect.getsourcelines(found)
    file = (inspect.getsourcefile(found) or "").rpartition("/")[2]
    return f"{file}:{next(i for i, line in enumerate(lines, first) if text in line)}"

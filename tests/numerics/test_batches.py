"""Which arguments are split, and batches of any size."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn as nn
import torch.nn.functional as F
from torch.fx.experimental import _config as symbolic_shapes

from fxpipe.backend import fxpipe
from fxpipe.errors import CaptureError, OptionError
from tests.numerics.models import (
    GPT,
    MLP,
    assert_close,
    assert_same_gradients,
    pipelined,
    seeded,
)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def assert_equals_eager(model: nn.Module, step: Any, *args: Any, **kwargs: Any) -> None:
    """One step of each, from zero gradients."""
    twin = copy.deepcopy(model)
    for module in (model, twin):
        module.zero_grad()
    loss, expected = step(*args, **kwargs), twin(*args, **kwargs)
    loss.backward()
    expected.backward()
    assert_close(loss, expected, 1e-10, "loss")
    assert_same_gradients(model, twin)


class Counting:
    """The backend, counting how often Dynamo calls it."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any], *, options: Any) -> Any:
        self.calls += 1
        return fxpipe(gm, inputs, options=options)


class ShallowGPT(GPT):
    def __init__(self) -> None:
        super().__init__(depth=1)


@pytest.mark.parametrize("build", [MLP, ShallowGPT])
def test_batches_of_any_size_need_no_new_trace(build: Any) -> None:
    assert count_traces(build, (8, 5, 3, 2, 13, 8)) == 1


def test_a_batch_of_one_row_is_one_more_trace() -> None:
    # Dynamo takes a size of 1 for a constant, even where it was told to keep it symbolic.
    assert count_traces(MLP, (8, 5, 1, 3, 1)) == 2


def count_traces(build: Any, sizes: Sequence[int]) -> int:
    """How many of the calls with so many rows made Dynamo trace. All are compared with eager."""
    model, backend = seeded(build), Counting()
    options = {"stages": 2, "microbatches": 3, "lowering": "eager"}
    step = torch.compile(model, backend=backend, options=options)
    traces, called = 0, 0
    for rows in sizes:
        tokens = torch.arange(rows * 5).view(rows, 5) * 7 % 11
        inputs = tokens, tokens.roll(1, 0)
        assert_equals_eager(
            model, step, *(inputs if build is ShallowGPT else (normal(rows, 6), normal(rows, 6)))
        )
        traces += backend.calls > called
        called = backend.calls
    return traces


def test_a_first_batch_of_one_row_runs_and_larger_ones_after_it() -> None:
    model = seeded(MLP)
    step = pipelined(model)
    for rows in (1, 4, 1, 7):
        assert_equals_eager(model, step, normal(rows, 6), normal(rows, 6, seed=1))


def test_a_batch_smaller_than_the_microbatches_is_split_into_rows() -> None:
    model = seeded(MLP)
    step = pipelined(model, stages=4, microbatches=8, schedule="zb-h1")
    for rows in (3, 2):
        assert_equals_eager(model, step, normal(rows, 6), normal(rows, 6, seed=1))


def test_a_batch_that_is_not_contiguous_is_split() -> None:
    model = seeded(MLP)
    x, y = normal(6, 16).T[::2], normal(8, 12)[:, ::2]
    assert_equals_eager(model, pipelined(model), x, y)


class Attending(nn.Module):
    """Takes what models take beside the batch: a mask of one row, positions, a scale, flags."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(8, 4), nn.Linear(4, 4)
        self.register_buffer("table", torch.randn(8, 4))

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        scale: torch.Tensor,
        causal: bool = False,
        mode: str = "sum",
        bias: torch.Tensor | None = None,
        power: int = 2,
    ) -> torch.Tensor:
        x = x + self.embed(positions) + self.table
        if causal:
            x = x.cumsum(1)
        x = self.out(x * mask) * scale
        if bias is not None:
            x = x + bias
        return x.pow(power).mean() if mode == "mean" else x.pow(power).sum()


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "mode": "mean"},
        {"mode": "sum", "power": 3},
        {"bias": normal(4)},
        {"bias": normal(8, 4), "causal": True},
    ],
)
def test_arguments_without_a_batch_are_given_to_every_microbatch(options: dict[str, Any]) -> None:
    model = seeded(Attending)
    mask = (normal(1, 8, 1) > 0).double()
    scale = torch.tensor(0.3, dtype=torch.float64)
    # The table, the positions and the bias have as many rows as the batch, by chance.
    step = pipelined(model)
    for rows in (8, 3):
        x = normal(rows, 8, 4, seed=rows)
        assert_equals_eager(model, step, x, mask, torch.arange(8), scale, **options)


def test_a_mask_with_the_batch_is_split_and_one_without_is_not() -> None:
    model = seeded(Attending)
    step = pipelined(model)
    scale = torch.tensor(2.0, dtype=torch.float64)
    for rows in (4, 7):
        mask = (normal(rows, 8, 1, seed=3) > 0).double()
        assert_equals_eager(model, step, normal(rows, 8, 4), mask, torch.arange(8), scale)


class Weighted(nn.Module):
    """A loss over the targets that count: sums over the whole batch's mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        errors = self.second(self.first(x).tanh()).squeeze(-1).square()
        return (errors * weight).sum() / weight.sum()


def test_a_loss_weighted_over_the_whole_batch_is_exact() -> None:
    model = seeded(Weighted)
    step = pipelined(model)
    for rows in (8, 5):
        weight = torch.arange(rows, dtype=torch.float64).square()
        assert_equals_eager(model, step, normal(rows, 4), weight)


class TimeMajor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = torch.zeros_like(x[0])
        for part in x.unbind(0):
            h = torch.tanh(self.cell(part + h))
        return F.mse_loss(self.out(h), y)


def test_batch_dims_splits_a_time_major_input_along_its_second_dimension() -> None:
    model = seeded(TimeMajor)
    step = pipelined(model, batch_dims={"x": 1})
    for rows in (6, 4):
        assert_equals_eager(model, step, normal(3, rows, 4), normal(rows, 2))


@dataclass
class Batch:
    x: torch.Tensor
    table: torch.Tensor


class TakesBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, batch: Any) -> torch.Tensor:
        x, table = (
            (batch["x"], batch["table"]) if isinstance(batch, dict) else (batch.x, batch.table)
        )
        return (self.second(self.first(x).tanh()) @ table).square().mean()


@pytest.mark.parametrize("make", [Batch, lambda x, table: {"x": x, "table": table}])
def test_batch_dims_keeps_a_nested_input_whole(make: Any) -> None:
    model = seeded(TakesBatch)
    step = pipelined(model, batch_dims={"batch.table": None})
    for rows in (4, 7):
        assert_equals_eager(model, step, make(normal(rows, 4), normal(4, 4, seed=1)))


def test_batch_dims_names_an_argument_or_is_refused() -> None:
    step = pipelined(seeded(MLP), batch_dims={"z": 1})
    with pytest.raises(OptionError, match="batch_dims names 'z', .*the tensor arguments are x, y"):
        step(normal(4, 6), normal(4, 6))


NO_SUCH_DIMENSION = r"batch_dims\['x'\] is 5, but 'x' has 2 dimensions \(0 to 1\); write the "
FIXED = r"takes the size 6 of dimension 0 of 'y' as fixed"
WRONG_DIMS = {
    "no such dimension": ({"x": 5}, NO_SUCH_DIMENSION),
    "nor in the other": ({"x": 5, "y": 5}, NO_SUCH_DIMENSION),
    "rows beside a whole": ({"x": None}, FIXED),
    "rows beside columns": ({"x": 1}, r"takes the size 7 of dimension 1 of 'x' and the size 6 of "),
}


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("name", WRONG_DIMS)
def test_wrong_batch_dims_are_refused_whatever_ran_before(name: str, before: bool) -> None:
    dims, told = WRONG_DIMS[name]
    x, y = normal(6, 7), normal(6, 7, seed=1)
    if before:
        pipelined(seeded(lambda: MLP(7)))(x, y).backward()
        torch.compiler.reset()
    with pytest.raises(OptionError, match=told):
        pipelined(seeded(lambda: MLP(7)), batch_dims=dims)(x, y)


def test_wrong_batch_dims_are_refused_where_dynamo_knows_other_sizes() -> None:
    pipelined(seeded(lambda: MLP(7)))(normal(4, 7), normal(4, 7))
    pipelined(seeded(lambda: MLP(7)))(normal(5, 7), normal(5, 7))
    with pytest.raises(OptionError, match="batch_dims.*'x'.* is None|takes the size 6 of"):
        pipelined(seeded(lambda: MLP(7)), batch_dims={"x": None})(normal(6, 7), normal(6, 7))


def test_arguments_and_duck_shapes_are_left_as_they_were() -> None:
    x, y = normal(6, 6), normal(6, 6)
    torch._dynamo.maybe_mark_dynamic(y, 1)
    marks = copy.deepcopy(y.__dict__)
    pipelined(seeded(MLP))(x, y).backward()
    assert x.__dict__ == {} and y.__dict__ == marks == y.__dict__ | {
        "_dynamo_weak_dynamic_indices": {1}
    }
    with pytest.raises(CaptureError):
        pipelined(seeded(lambda: Fixed(print)))(x)
    assert x.__dict__ == {} and symbolic_shapes.use_duck_shape


class Fixed(nn.Module):
    """A batch of six rows, written as a number."""

    def __init__(self, then: Callable[..., object] = abs) -> None:
        super().__init__()
        self.first, self.second, self.then = nn.Linear(6, 6), nn.Linear(6, 6), then

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).view(6, 2, 3).flatten(1)
        self.then(x)
        return self.second(x).square().mean()


def test_a_batch_that_is_a_number_in_the_model_runs_as_one_and_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxpipe.log._warned", set())
    model = seeded(Fixed)
    step = pipelined(model)
    for _ in range(2):
        assert_equals_eager(model, step, normal(6, 6))
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 1, told
    assert told[0].startswith("3 microbatches are asked for, but the step runs as one: the model ")
    assert "the size 6 of dimension 0 of 'x' as fixed" in told[0]


@pytest.mark.parametrize(("rows", "dims", "told"), [(1, {}, 0), (6, {"x": None, "y": None}, 1)])
def test_one_row_is_no_warning_and_nothing_to_split_is_one(
    rows: int,
    dims: dict[str, None],
    told: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fxpipe.log._warned", set())
    model = seeded(MLP)
    assert_equals_eager(model, pipelined(model, batch_dims=dims), normal(rows, 6), normal(rows, 6))
    assert caplog.text.count("no argument of the call has a dimension to split") == told
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == told


def test_an_empty_batch_is_named() -> None:
    with pytest.raises(CaptureError, match="the argument 'x' has a batch of 0 rows, of which"):
        pipelined(seeded(MLP))(normal(0, 6), normal(0, 6))


def test_keyword_arguments_are_split_like_others() -> None:
    model = seeded(MLP)
    assert_equals_eager(model, pipelined(model), y=normal(5, 6), x=normal(5, 6, seed=1))


class WritesByMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = self.first(x).clone()
        h[mask] = 0
        return self.last(h).square().mean()


@pytest.mark.parametrize("shape", [(), (4,)])
def test_a_mask_that_is_written_through_is_split_with_the_rows(shape: tuple[int, ...]) -> None:
    model = seeded(WritesByMask)
    step = pipelined(model)
    for rows in (6, 7):
        assert_equals_eager(model, step, normal(rows, 6), normal(rows, *shape, seed=1) > 0)

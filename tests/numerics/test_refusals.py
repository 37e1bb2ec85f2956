"""What cannot be pipelined with the same numbers is refused in one sentence, at the first call."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import fxpipe
from fxpipe.errors import CaptureError, ModelError, OptionError, ScheduleError
from tests.numerics.models import MLP, assert_same_gradients, pipelined, seeded

X = torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6)


class Body(nn.Module):
    """Two layers; subclasses say what the loss is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


def line_of(module: type[nn.Module], text: str) -> str:
    """`test_refusals.py:12` for the line of a module's source that holds a text."""
    lines, first = inspect.getsourcelines(module)
    return f"test_refusals.py:{next(i for i, line in enumerate(lines, first) if text in line)}"


class Printing(Body):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        print("half way")
        return x.square().mean()


def test_a_graph_break_is_refused_with_its_line() -> None:
    with pytest.raises(CaptureError, match="not one graph") as caught:
        pipelined(seeded(Printing))(X)
    assert line_of(Printing, "print(") in str(caught.value)


class DependingOnData(Body):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        if x.sum() > 0:
            x = x * 2
        return x.square().mean()


def test_a_branch_on_data_is_refused_with_its_line() -> None:
    with pytest.raises(CaptureError, match="not one graph") as caught:
        pipelined(seeded(DependingOnData))(X)
    assert line_of(DependingOnData, "if x.sum()") in str(caught.value)


class TwoLosses(Body):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.body(x)
        return x.mean(), x.square().mean()


def test_two_losses_are_refused_with_their_lines() -> None:
    with pytest.raises(OptionError, match="returns 2 differentiable scalars") as caught:
        pipelined(seeded(TwoLosses))(X)
    assert line_of(TwoLosses, "return") in str(caught.value)
    assert "{'loss': 0}" in str(caught.value)


class ChangingItsInput(Body):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return self.body(x).square().mean()


def test_a_change_of_an_argument_in_place_is_refused() -> None:
    with pytest.raises(ModelError, match="changes its batch 'x' in place.*work on a clone"):
        pipelined(seeded(ChangingItsInput))(X.clone())


class Standardizing(Body):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        return ((x - x.mean(0)) / x.std()).square().mean()


def test_statistics_of_the_batch_before_the_loss_are_refused_with_their_line() -> None:
    with pytest.raises(ModelError) as caught:
        pipelined(seeded(Standardizing))(X)
    assert line_of(Standardizing, "x.mean(0)") in str(caught.value)


class RootOfMean(Body):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean().sqrt()


def test_a_loss_that_is_no_sum_over_rows_is_refused_with_the_way_out() -> None:
    with pytest.raises(ModelError, match="loss_reduction") as caught:
        pipelined(seeded(RootOfMean))(X)
    assert line_of(RootOfMean, "sqrt()") in str(caught.value)


class Contrasting(Body):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        return F.cross_entropy(x @ x.T, torch.arange(x.shape[0]))


def test_comparing_rows_is_refused_without_a_word_about_the_loss() -> None:
    with pytest.raises(ModelError, match="every row of the batch with every other") as caught:
        pipelined(seeded(Contrasting))(X)
    assert line_of(Contrasting, "x @ x.T") in str(caught.value)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"stagess": 2}, OptionError, "'stagess' is unknown.*did you mean 'stages'"),
        ({"microbatches": "3"}, OptionError, "'microbatches' is '3'"),
        ({"schedule": "1f2b"}, ScheduleError, "no schedule '1f2b'; did you mean '1f1b'"),
        ({"stages": ["layers.9"]}, OptionError, "'layers.9', which is no module.*did you mean"),
        ({"stages": 90}, OptionError, "stages=90.*use fewer stages"),
        ({"passes": {"normalise": False}}, OptionError, "did you mean 'normalize'"),
        ({"passes": {"split_tasks": False}}, OptionError, "cannot be switched off"),
        ({"loss": 2}, OptionError, "loss=2 is out of range"),
        ({"schedule": "0F0 0B0\n1F0 1B0"}, ScheduleError, "set microbatches=1, or write"),
    ],
)
def test_a_wrong_option_is_refused_by_name(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        pipelined(seeded(MLP), **options)(X, X)


def test_an_error_is_raised_by_every_call_and_not_hidden() -> None:
    step = pipelined(seeded(MLP), microbatches=0)
    torch._dynamo.config.suppress_errors = True
    try:
        for _ in range(2):
            with pytest.raises(OptionError, match="microbatches"):
                step(X, X)
    finally:
        torch._dynamo.config.suppress_errors = False


class Annotated(nn.Module):
    """Three stages marked by the user, one of them twice; a skip over the middle one."""

    def __init__(self, numbers: tuple[int, int, int] = (0, 1, 2)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.numbers = numbers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.numbers
        with fxpipe.stage(first):
            x = skip = self.layers[0](x).tanh()
        with fxpipe.stage(second):
            x = self.layers[1](x).tanh()
            x = self.layers[2](x)
        with fxpipe.stage(third):
            return self.layers[3](x + skip).square().mean()


def test_annotations_say_what_the_stages_are() -> None:
    model, twin = seeded(Annotated), seeded(Annotated)
    step = pipelined(model, stages=None, schedule="zb-h1")
    for rows in (8, 5):
        step(X[:rows]).backward()
        twin(X[:rows]).backward()
    assert_same_gradients(model, twin)


@pytest.mark.parametrize(
    ("numbers", "stages", "error", "message"),
    [
        ((0, 1, 3), None, ModelError, r"leaves out \[2\]"),
        ((0, 2, 1), None, ModelError, "stage 1 uses a value of stage 2"),
        ((0, 1, 2), 2, OptionError, "stages=2 and .*make 3 stages"),
    ],
)
def test_annotations_that_cannot_be_are_refused(
    numbers: tuple[int, int, int], stages: int | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        pipelined(seeded(lambda: Annotated(numbers)), stages=stages)(X)


def test_module_paths_say_where_stages_begin() -> None:
    model, twin = seeded(MLP), seeded(MLP)
    pipelined(model, stages=["layers.1", "layers.3"])(X, X / 2).backward()
    twin(X, X / 2).backward()
    assert_same_gradients(model, twin)


class Mixing(Body):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mixed(self.body(x)).square().mean()

    def mixed(self, h: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class OtherRowsInEinsum(Mixing):
    def mixed(self, h: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,ci->b", h, h)


class OtherRowsInLists(Mixing):
    def mixed(self, h: torch.Tensor) -> torch.Tensor:
        return torch.einsum(h, [0, 1], h, [2, 1], [0])


class OtherRowsAsKeys(Mixing):
    def mixed(self, h: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(h[:, None], h[None], h[None])


class RowsAsTable(Mixing):
    def mixed(self, h: torch.Tensor) -> torch.Tensor:
        return F.embedding(torch.tensor([0, 1]), h)


class Identity(Mixing):
    def mixed(self, h: torch.Tensor) -> torch.Tensor:
        return h + torch.eye(h.shape[0], 6, dtype=h.dtype)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (OtherRowsInEinsum, "einsum("),
        (OtherRowsInLists, "einsum("),
        (OtherRowsAsKeys, "scaled_dot"),
        (RowsAsTable, "embedding("),
        (Identity, "torch.eye"),
    ],
)
def test_rows_of_one_operand_that_meet_all_of_another_are_refused(
    module: type[nn.Module], text: str
) -> None:
    with pytest.raises(ModelError) as caught:
        pipelined(seeded(module))(X)
    assert line_of(module, text) in str(caught.value)


class SameRowsInEinsum(Mixing):
    def mixed(self, h: torch.Tensor) -> torch.Tensor:
        same = torch.einsum("bi,bi->b", h, h) + torch.einsum("...i,...i->...", h, h)
        return same + torch.einsum(h, [0, 1], h, [0, 1], [0])


def test_rows_of_operands_that_meet_their_own_are_right() -> None:
    model = seeded(SameRowsInEinsum)
    twin = copy.deepcopy(model)
    pipelined(model)(X).backward()
    twin(X).backward()
    assert_same_gradients(model, twin)

"""Outputs beside the loss, outputs without a loss, and their containers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from fxpipe.errors import FxpipeError, ModelError
from tests.numerics.models import assert_close, assert_same_gradients, pipelined, seeded


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor
    rows: int
    extra: Any = None


class Pair(NamedTuple):
    logits: torch.Tensor
    loss: torch.Tensor


Wrap = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]


class Classifier(nn.Module):
    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.wrap = wrap

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.second(self.first(x).tanh())
        return self.wrap(logits, F.cross_entropy(logits, labels), x)


class Logits(nn.Module):
    """No loss: two outputs, of two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x).tanh()
        return self.second(hidden), hidden


def batch(rows: int = 8, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (rows,), generator=generator)


def wrapped(wrap: Wrap) -> tuple[Any, nn.Module, nn.Module]:
    """(pipelined step, its model, the same model for eager)"""
    model = seeded(lambda: Classifier(wrap))
    return pipelined(model), model, copy.deepcopy(model)


def test_a_tuple_comes_back_with_loss_and_logits() -> None:
    step, model, twin = wrapped(lambda logits, loss, x: (loss, logits))
    loss, logits = step(*batch())
    expected_loss, expected_logits = twin(*batch())
    assert_close(loss, expected_loss, 1e-10, "loss")
    assert_close(logits, expected_logits.detach(), 1e-10, "logits")
    loss.backward()
    expected_loss.backward()
    assert_same_gradients(model, twin)


def test_a_dict_comes_back_with_its_keys() -> None:
    def wrap(logits: torch.Tensor, loss: torch.Tensor, x: torch.Tensor) -> dict[str, Any]:
        return {"nested": {"loss": loss}, "logits": [logits, None], "name": "run"}

    step, model, twin = wrapped(wrap)
    output, expected = step(*batch()), twin(*batch())
    assert list(output) == ["nested", "logits", "name"]
    assert output["logits"][1] is None and output["name"] == "run"
    assert_close(output["logits"][0], expected["logits"][0].detach(), 1e-10, "logits")
    output["nested"]["loss"].backward()
    expected["nested"]["loss"].backward()
    assert_same_gradients(model, twin)


def test_a_dataclass_comes_back_with_integers_and_none() -> None:
    step, model, twin = wrapped(lambda logits, loss, x: Output(loss, logits, x.shape[0] * 2))
    for rows in (8, 5):
        output, expected = step(*batch(rows)), twin(*batch(rows))
        assert type(output) is Output
        assert output.rows == 2 * rows and output.extra is None
        assert_close(output.logits, expected.logits.detach(), 1e-10, "logits")
        output.loss.backward()
        expected.loss.backward()
    assert_same_gradients(model, twin)


def test_a_named_tuple_comes_back() -> None:
    step, model, twin = wrapped(lambda logits, loss, x: Pair(logits, loss))
    output = step(*batch())
    assert type(output) is Pair
    output.loss.backward()
    twin(*batch()).loss.backward()
    assert_same_gradients(model, twin)


def test_outputs_without_gradient_are_joined() -> None:
    def wrap(logits: torch.Tensor, loss: torch.Tensor, x: torch.Tensor) -> tuple[Any, ...]:
        right = logits.argmax(1) == 0
        return loss, right, right.sum(), x, logits.detach().T, torch.ones(2)

    step, _, twin = wrapped(wrap)
    x, labels = batch(7)
    actual, expected = step(x, labels), twin(x, labels)
    assert torch.equal(actual[1], expected[1])
    assert torch.equal(actual[2], expected[2])
    assert actual[3] is x
    assert_close(actual[4], expected[4], 1e-10, "transposed logits")
    assert torch.equal(actual[5], expected[5])


def test_the_loss_may_be_chosen_among_several() -> None:
    model = seeded(lambda: Classifier(lambda logits, loss, x: (logits.square().mean(), loss)))
    twin, step = copy.deepcopy(model), pipelined(model, loss=1)
    norm, loss = step(*batch())
    loss.backward()
    expected = twin(*batch())
    expected[1].backward()
    assert_close(norm, expected[0].detach(), 1e-10, "norm")
    assert_same_gradients(model, twin)


def test_a_detached_scalar_beside_the_loss_is_no_second_loss() -> None:
    step, model, twin = wrapped(lambda logits, loss, x: (loss, logits.square().mean().detach()))
    loss, norm = step(*batch())
    expected_loss, expected_norm = twin(*batch())
    assert_close(norm, expected_norm, 1e-10, "norm")
    loss.backward()
    expected_loss.backward()
    assert_same_gradients(model, twin)


@pytest.mark.parametrize("rows", [8, 5, 2])
def test_logits_alone_run_their_backward_with_the_users_loss(rows: int) -> None:
    model = seeded(Logits)
    twin, step = copy.deepcopy(model), pipelined(model, microbatches=3, schedule="zb-h1")
    x, labels = batch(rows)
    for run in (step, twin):
        logits, hidden = run(x)
        (F.cross_entropy(logits, labels) + hidden.square().mean()).backward()
    assert_same_gradients(model, twin)


def test_logits_alone_of_two_calls_keep_their_own_backwards() -> None:
    model = seeded(Logits)
    twin, step = copy.deepcopy(model), pipelined(model)
    for run in (step, twin):
        first, second = run(batch(seed=1)[0])[0], run(batch(seed=2)[0])[1]
        second.square().sum().backward()
        first.exp().sum().backward()
    assert_same_gradients(model, twin)


def test_logits_alone_refuse_a_second_backward() -> None:
    logits, hidden = pipelined(seeded(Logits))(batch()[0])
    logits.sum().backward(retain_graph=True)
    with pytest.raises(ModelError, match="call the model again"):
        hidden.sum().backward()


def test_logits_alone_without_a_backward_cost_nothing_later() -> None:
    model = seeded(Logits)
    twin, step = copy.deepcopy(model), pipelined(model)
    for _ in range(3):
        step(batch()[0])
    step(batch()[0])[0].sum().backward()
    twin(batch()[0])[0].sum().backward()
    assert_same_gradients(model, twin)


class Turned(nn.Module):
    """An output that lies in memory as its transpose; the backward takes views of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh().mT).mT * 2


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_gradient_from_outside_may_lie_in_any_order(lowering: str, turned: bool) -> None:
    model = seeded(Turned)
    plain, x = copy.deepcopy(model), torch.randn(7, 5, 4, dtype=torch.float64)
    step = pipelined(model, lowering=lowering)
    outputs = step(x), plain(x)
    given = torch.randn(7, 5, 6, dtype=torch.float64)
    given = given.mT.contiguous().mT if turned else given
    for output in outputs:
        output.backward(given)
    torch.testing.assert_close(*outputs)
    assert_same_gradients(model, plain)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.encoder(x)
        attended, weights = self.attention(h, h, h)
        return attended + weights.sum(1).mean()


class Encoding(Attending):
    def forward(self, x: torch.Tensor) -> Any:
        h = self.encoder(x)
        return self.attention(h, h, h)


def test_the_fast_paths_of_evaluation_keep_rows_apart() -> None:
    model = seeded(Encoding).eval()
    x = torch.randn(5, 3, 8, dtype=torch.float64)
    with torch.no_grad():
        for mine, other in zip(pipelined(model)(x), model(x), strict=True):
            torch.testing.assert_close(mine, other)


def test_a_mean_over_rows_behind_a_fast_path_is_refused() -> None:
    model = seeded(Attending).eval()
    with torch.no_grad(), pytest.raises(ModelError, match="weights.sum"):
        pipelined(model)(torch.randn(5, 3, 8, dtype=torch.float64))


@pytest.mark.parametrize("with_loss", [True, False])
def test_an_output_beside_the_loss_in_a_loss_of_the_callers_is_refused(with_loss: bool) -> None:
    step, _, _ = wrapped(lambda logits, loss, x: (loss, logits))
    loss, logits = step(*batch())
    with pytest.raises(ModelError, match="output 1 of the model was used"):
        (logits.sum() + (loss if with_loss else 0)).backward()


class Views(Logits):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.second(self.first(x).tanh())
        return scores, scores.t()


def test_an_output_that_is_a_view_of_another_brings_no_gradient_unnoticed() -> None:
    model = seeded(Views)
    twin, (x, _) = copy.deepcopy(model), batch()
    for scores, _ in (pipelined(model)(x), twin(x)):
        scores.sum().backward()
    assert_same_gradients(model, twin)
    scores, turned = pipelined(model)(x)
    with pytest.raises(FxpipeError, match="output 1 of the model is a view of another output"):
        (scores.sum() + turned.square().sum()).backward()

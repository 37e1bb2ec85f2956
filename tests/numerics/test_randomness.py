"""What a step draws depends on the seed, the microbatch and the place in the model alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe.random import chance, draw_seed, fraction, seeds_of_step
from tests.distributed.harness import run_ranks
from tests.numerics.models import Case, Gradients, assert_close, gradients_of, pipelined, seeded
from tests.numerics.shared import SharedCapture

DEPTH, WIDTH, SEED = 4, 6, 7


class Dropping(nn.Module):
    """Residual layers with dropout, and noise that all rows share."""

    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.dropout(torch.tanh(layer(x)), 0.25, self.training)
        if self.training:
            x = x * torch.rand(WIDTH, dtype=x.dtype)
        return F.mse_loss(x, y)


def by_hand(model: Dropping, x: Tensor, y: Tensor, seed: int, rows: list[int]) -> Tensor:
    """The loss of `Dropping` with the masks that a step of this seed must draw."""
    seeds = seeds_of_step(seed, len(rows), len(model.layers) + 1)
    noise = fraction(seeds[0, -1], (WIDTH,), x.dtype)
    total = x.new_zeros(())
    for microbatch, (h, target) in enumerate(zip(x.split(rows), y.split(rows))):
        for place, layer in enumerate(model.layers):
            mask = chance(seeds[1 + microbatch, place], tuple(h.shape), 0.75)
            h = h + torch.tanh(layer(h)) * mask / 0.75
        total = total + F.mse_loss(h * noise, target) * (len(target) / len(y))
    return total


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, rows, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


CASE = Case(Dropping, batch)


@pytest.fixture(scope="module")
def shared() -> Iterator[SharedCapture]:
    yield SharedCapture(CASE)
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def fresh_dynamo(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forget compiled code after a test, but not what the tests of the grid share."""
    yield
    if "shared" not in request.fixturenames:
        torch._dynamo.reset()


def train(step: Any, model: nn.Module, *inputs: Tensor) -> tuple[Tensor, Gradients]:
    """Loss and gradients of the step after `torch.manual_seed(SEED)`."""
    model.zero_grad()
    torch.manual_seed(SEED)
    loss = step(*inputs)
    loss.backward()
    return loss.detach(), gradients_of(model)


def first_seed() -> int:
    torch.manual_seed(SEED)
    return draw_seed()


def assert_by_hand(
    found: tuple[Tensor, Gradients], rows: list[int], *inputs: Tensor, depth: int = DEPTH
) -> None:
    twin = seeded(lambda: Dropping(depth))
    expected = by_hand(twin, *inputs, first_seed(), rows)
    expected.backward()
    assert_close(found[0], expected.detach(), 1e-10, "loss")
    for name, gradient in gradients_of(twin).items():
        assert_close(found[1][name], gradient, 1e-10, f"gradient of {name}")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved-zb"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_step_drops_what_its_seed_says(stages: int, schedule: str, shared: SharedCapture) -> None:
    step = shared.use(stages=stages, microbatches=4, schedule=schedule)
    found = train(step, shared.model, *batch())
    assert_by_hand(found, [2, 2, 2, 2], *batch())


def test_uneven_microbatches_drop_what_their_seed_says() -> None:
    model = seeded(Dropping)
    found = train(pipelined(model, schedule="zb-h1"), model, *batch(7))
    assert_by_hand(found, [3, 2, 2], *batch(7))


def test_tasks_compiled_by_inductor_drop_the_same() -> None:
    model = seeded(lambda: Dropping(1))
    step = pipelined(model, stages=1, microbatches=2, lowering="inductor")
    found = train(step, model, *batch())
    assert_by_hand(found, [4, 4], *batch(), depth=1)


# Seeds and steps.


def test_a_seed_gives_the_same_step_again_and_the_next_step_another() -> None:
    model = seeded(Dropping)
    step = pipelined(model)
    losses = []
    for _ in range(2):
        torch.manual_seed(SEED)  # the first of all steps is traced, the others are not
        losses += [step(*batch()).item(), step(*batch()).item()]
    assert losses[:2] == losses[2:] and losses[0] != losses[1]


def test_the_state_of_the_generator_brings_a_step_back() -> None:
    step = pipelined(seeded(Dropping))
    step(*batch())
    state = torch.get_rng_state()
    first = step(*batch()).item()
    torch.set_rng_state(state)
    assert step(*batch()).item() == first


def test_a_model_that_draws_nothing_leaves_the_generator_alone() -> None:
    model = seeded(Dropping).eval()
    step = pipelined(model)
    state = torch.get_rng_state()
    loss = step(*batch())
    assert torch.equal(torch.get_rng_state(), state)
    assert_close(loss.detach(), model(*batch()).detach(), 1e-10, "loss")


def test_a_forward_without_gradients_draws_as_training_does() -> None:
    model = seeded(Dropping)
    step = pipelined(model)
    loss, _ = train(step, model, *batch())
    torch.manual_seed(SEED)
    with torch.no_grad():
        assert_close(step(*batch()), loss, 1e-12, "loss")


# Masks.


class Masks(nn.Module):
    """What two dropouts keep."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        one = torch.ones_like(x)
        return F.dropout(one), F.dropout(one), torch.rand(50)


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_masks_differ_between_microbatches_and_layers_not_between_lowerings(lowering: str) -> None:
    torch.manual_seed(SEED)
    first, second, whole = pipelined(Masks(), lowering=lowering, stages=1)(torch.zeros(6, 50))
    seeds = seeds_of_step(first_seed(), 3, 3)
    for place, found in enumerate((first, second)):
        expected = [chance(seed, (2, 50), 0.5) * 2.0 for seed in seeds[1:, place]]
        assert torch.equal(found, torch.cat(expected))
    assert torch.equal(whole, fraction(seeds[0, 2], (50,), torch.float32))
    masks = [*first.split(2), *second.split(2)]
    assert not any(torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])


# Everything at once, against the loss itself: a step of one seed is a function of the parameters.


class Sink(nn.Module):
    """Random operators of many kinds, and a block that is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.block = nn.TransformerEncoderLayer(
            WIDTH, 2, 8, dropout=0.2, activation="gelu", batch_first=True
        )

    def redone(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(self.layers[1](x)), 0.3) * torch.rand(WIDTH, dtype=x.dtype)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.dropout(self.layers[0](x), 0.2)
        x = x + checkpoint(self.redone, x, use_reentrant=False)  # type: ignore[operator]
        q = x.view(-1, 1, 2, WIDTH // 2)
        x = x + F.scaled_dot_product_attention(q, q, q, dropout_p=0.3).reshape(-1, WIDTH)
        x = x + self.block(x.view(-1, 2, WIDTH // 2).repeat(1, 1, 2)).mean(1)
        x = x * x.new_empty(x.shape[0], 1).bernoulli_(0.8) / 0.8
        x = F.rrelu(x, training=True) + F.gumbel_softmax(x) + 0.1 * torch.randn_like(x)
        x = F.alpha_dropout(x[:, torch.randperm(WIDTH)], 0.1, True)
        return F.mse_loss(x + torch.normal(0.0, 0.1, (WIDTH,)), y)


def test_gradients_are_those_of_what_was_drawn() -> None:
    model = seeded(Sink)
    step = pipelined(model, stages=3, microbatches=2, schedule="zb-h1")
    inputs = batch(4)
    loss, gradients = train(step, model, *inputs)
    generator = torch.Generator().manual_seed(2)
    directions = {
        name: torch.randn(p.shape, dtype=p.dtype, generator=generator)
        for name, p in model.named_parameters()
    }
    predicted = sum(float((gradients[name] * directions[name]).sum()) for name in gradients)
    measured = (moved(step, model, directions, 1e-6) - moved(step, model, directions, -1e-6)) / 2e-6
    assert abs(measured - predicted) < 1e-6 * abs(predicted)
    unsplit = pipelined(model, stages=1, microbatches=2)
    again, others = train(unsplit, model, *inputs)
    assert_close(again, loss, 1e-12, "loss")
    for name, gradient in gradients.items():
        assert_close(others[name], gradient, 1e-10, f"gradient of {name}")


@torch.no_grad()
def moved(step: Any, model: nn.Module, directions: Gradients, by: float) -> float:
    """The loss with parameters moved, drawn from the same seed."""
    parameters = dict(model.named_parameters())
    for name, direction in directions.items():
        parameters[name].add_(direction, alpha=by)
    torch.manual_seed(SEED)
    loss = float(step(*batch(4)))
    for name, direction in directions.items():
        parameters[name].sub_(direction, alpha=by)
    return loss


# A random value without rows is one value for the batch, a random value with rows is none.


class Masked(nn.Module):
    def __init__(self, mask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.mask = nn.Linear(WIDTH, WIDTH), mask

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = self.mask(x)
        return ((self.layer(x) - y).square() * mask).sum() / mask.sum()


def test_a_loss_over_a_drawn_mask_of_all_rows_is_exact() -> None:
    model = seeded(lambda: Masked(lambda x: torch.rand(WIDTH, dtype=x.dtype).round()))
    torch.manual_seed(SEED)
    loss = pipelined(model)(*batch())
    mask = fraction(seeds_of_step(first_seed(), 3, 1)[0, 0], (WIDTH,), torch.float64).round()
    model.mask = lambda x: mask
    assert_close(loss.detach(), model(*batch()).detach(), 1e-12, "loss")


def test_a_loss_over_the_count_of_a_drawn_mask_is_refused() -> None:
    model = seeded(lambda: Masked(lambda x: torch.rand(x.shape, dtype=x.dtype).round()))
    with pytest.raises(fxpipe.ModelError, match="test_randomness.py:.*mask.sum"):
        pipelined(model)(*batch())


# Ranks.


def on_rank(rank: int, world_size: int) -> tuple[float, dict[str, list[float]], float]:
    """A rank whose generator differs from the others': loss, its gradients, and the next loss."""
    model = seeded(Dropping)
    step = pipelined(model, stages=4, microbatches=4, schedule="interleaved-1f1b")
    torch.manual_seed(SEED + rank)
    loss = step(*batch())
    loss.backward()
    gradients = {name: g.flatten().tolist() for name, g in gradients_of(model).items() if g.any()}
    return loss.item(), gradients, step(*batch()).item()


def test_ranks_draw_what_one_process_draws_with_the_first_ranks_seed(tmp_path: Path) -> None:
    model = seeded(Dropping)
    step = pipelined(model, microbatches=4)
    loss, gradients = train(step, model, *batch())
    following = step(*batch()).item()
    found: set[str] = set()
    for own, parts, after in run_ranks(on_rank, 2, tmp_path):
        assert own == pytest.approx(float(loss), rel=1e-12)
        assert after == pytest.approx(following, rel=1e-12)
        for name, values in parts.items():
            assert values == pytest.approx(gradients[name].flatten().tolist(), rel=1e-9)
        found |= parts.keys()
    assert found == gradients.keys()

"""Ranks that hold the same parameter add up their gradients once a step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxpipe.passes import SyncGradients
from fxpipe.program import Program, Reduction
from tests.helpers import (
    GPT,
    MLP,
    Captured,
    captured,
    gpt_batch,
    microbatches,
    mlp_batch,
    run_tasks,
    run_until,
)


@pytest.fixture(scope="module")
def gpt() -> Captured:
    return captured(GPT(), *gpt_batch(), stages=2)


def sent(given: Captured, ranks: int) -> Program:
    return run_until(given.program(rows=2, ranks=ranks), "insert_communication")


def test_tied_weight_is_summed_over_both_ranks(gpt: Captured) -> None:
    before = sent(gpt, ranks=2)
    after = SyncGradients()(before)
    assert before.reductions == {}
    assert after.reductions == {"tokens_weight": Reduction((0, 1), (0, 1))}
    assert "gradient of %tokens_weight: summed over ranks 0, 1, for ranks 0, 1" in str(after)


def test_one_rank_has_nothing_to_sum(gpt: Captured) -> None:
    text = "0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"
    given = gpt.with_options(stages=2, schedule=text)
    before = sent(given, ranks=1)
    after = SyncGradients()(before)
    assert after.reductions == {}
    assert str(after) == str(before)


def test_parameters_of_one_stage_are_not_exchanged() -> None:
    given = captured(MLP(3, 3, 3), *mlp_batch(), stages=2)
    assert SyncGradients()(sent(given, ranks=2)).reductions == {}


def test_replicated_stage_sums_over_its_ranks() -> None:
    text = "0F0 0B0\n0F1 0B1"
    given = captured(MLP(3, 3), *mlp_batch(), stages=1, schedule=text)
    after = SyncGradients()(sent(given, ranks=2))
    both = Reduction((0, 1), (0, 1))
    assert after.reductions == {"layers_0_bias": both, "layers_0_weight": both}


class Scaled(nn.Module):
    """An argument that is no batch and needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, dtype=torch.float64)
        self.second = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return (self.second(self.first(x).tanh()) * scale).sum()


def test_gradient_of_an_argument_goes_to_every_rank() -> None:
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    given = captured(Scaled(), mlp_batch()[0], scale, stages=2)
    after = SyncGradients()(sent(given, ranks=2))
    assert after.reductions == {"scale": Reduction((1,), (0, 1))}


def test_tasks_and_numbers_are_untouched(gpt: Captured) -> None:
    before = sent(gpt, ranks=2)
    after = SyncGradients()(before)
    values = next(microbatches(gpt, after, (2, 2)))
    torch.testing.assert_close(run_tasks(after, values), run_tasks(before, values), rtol=0, atol=0)


def test_forward_alone_has_no_gradients_to_sum() -> None:
    with torch.no_grad():
        given = captured(GPT(), *gpt_batch(), stages=2)
    assert SyncGradients()(sent(given, ranks=2)).reductions == {}

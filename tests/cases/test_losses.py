"""Losses of any reduction, and what is done with them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases.shared import check, normal
from tests.numerics.models import MLP, assert_close, pipelined, seeded


class Reduced(nn.Module):
    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.reduction = reduction

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.second(self.first(x).tanh()), y, reduction=self.reduction)


@pytest.mark.parametrize("microbatches", [4, 16])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_case_37_the_number_of_microbatches_does_not_scale_gradients(
    reduction: str, microbatches: int
) -> None:
    x = normal(16, 6)
    check(lambda: Reduced(reduction), [x, x.sin()], microbatches=microbatches)


def test_case_43_a_gradient_scaler_skips_and_takes_the_steps_that_eager_does() -> None:
    model = seeded(MLP).float()
    twin, start = copy.deepcopy(model), copy.deepcopy(model)
    x = normal(8, 6).float()
    taken: dict[bool, list[float]] = {}
    for run, module in ((pipelined(model), model), (twin, twin)):
        scaler = torch.amp.GradScaler("cpu", init_scale=3e38, backoff_factor=2.0**-20)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scales = taken.setdefault(module is twin, [])
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(run(x, 100 * x)).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert scales[0] < 3e38 and scales[2] == scales[1]  # one step is skipped, others are taken
    assert taken[False] == taken[True]
    for name, parameter in twin.named_parameters():
        assert_close(model.get_parameter(name), parameter, 1e-5, name)
        assert not torch.equal(parameter, start.get_parameter(name))

"""An error in a task names the model's line, however the task runs."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn as nn

from fxpipe.errors import RankError
from tests.numerics.models import pipelined, seeded


class Tables(nn.Module):
    """Stage 1 looks up ids in one of two tables: only the second one can be too short."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.large, self.small = nn.Embedding(100, 6), nn.Embedding(8, 6)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        x = x + self.large(ids)
        x = x * self.small(ids)
        return self.last(x).square().mean()


def error_of(model: nn.Module, lowering: str, stages: object) -> str:
    step = pipelined(model, stages=stages, microbatches=4, lowering=lowering)
    x, ids = torch.ones(8, 6, dtype=torch.float64), torch.arange(8)
    step(x, ids).backward()
    with pytest.raises(RankError) as raised:
        step(x, torch.where(ids == 5, 9, ids))
    assert raised.value.__cause__ is not None
    return str(raised.value)


def test_task_that_runs_as_a_graph_names_its_line() -> None:
    message = error_of(seeded(Tables), "eager", ["large", "last"])
    assert re.fullmatch(
        r"rank 1 failed in 1F2 \(stage 1, microbatch 2\) at .*test_blame\.py:\d+: "
        r"x = x \* self\.small\(ids\): IndexError: index out of range in self",
        message,
    ), message


def test_compiled_task_names_its_line() -> None:
    message = error_of(seeded(Tables), "inductor", ["large", "last"])
    assert re.fullmatch(
        r"rank 1 failed in 1F2 \(stage 1, microbatch 2\) at .*test_blame\.py:\d+: "
        r"x = x \* self\.small\(ids\) \(as its graph shows, run again without Inductor\): "
        r"RuntimeError: .*index out of bounds.*",
        message,
    ), message

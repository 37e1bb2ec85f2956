"""Parameters and buffers that several places of a model use."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from tests.cases.shared import check, normal, program_of
from tests.numerics.models import seeded

STAGES = ["layers.2", "layers.4"]


class ConstantForAll(nn.Module):
    """One buffer of the root goes to every layer, as a causal mask does."""

    const: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))
        self.register_buffer("const", torch.linspace(-1, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.const
        return x.square().mean()


def test_case_3_a_buffer_that_all_layers_read_is_in_every_stage() -> None:
    _, model = check(ConstantForAll, [normal(8, 6)], stages=STAGES, schedule="zb-h1")
    assert [name for name in model.state_dict() if "const" in name] == ["const"]


def test_case_3_a_buffer_that_all_layers_read_is_in_no_message() -> None:
    model = seeded(ConstantForAll)
    program = program_of(model, normal(4, 6), stages=STAGES, schedule="1f1b")
    assert [len(names) for names in program.edges.values()] == [1, 1, 1, 1]
    readers = [key for key, task in program.tasks.items() if "const" in task.inputs]
    assert {key.stage for key in readers} == {0, 1, 2}


class OneBlockTwice(nn.Module):
    """A looped transformer in small: one block runs at two places of one path."""

    def __init__(self, numbers: tuple[int, int]) -> None:
        super().__init__()
        self.block, self.w = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 6))
        self.numbers = numbers

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.numbers
        with fxpipe.stage(0):
            x = torch.tanh(x @ self.w @ self.w)
        with fxpipe.stage(first):
            x = torch.tanh(self.block(x))
        with fxpipe.stage(second):
            return torch.tanh(self.block(x)).sum()


@pytest.mark.parametrize("numbers", [(1, 1), (0, 1), (1, 2)])
def test_case_4_a_weight_used_twice_on_a_path_is_counted_twice(numbers: tuple[int, int]) -> None:
    check(lambda: OneBlockTwice(numbers), [normal(8, 6)], stages=None, schedule="zb-h1")

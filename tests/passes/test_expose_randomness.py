"""Attention that drops is spelled out; values without rows of the batch are marked."""

from __future__ import annotations

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxpipe import random
from fxpipe.passes import ExposeRandomness
from fxpipe.program import Program, Role
from tests.helpers import captured, run_until


class Attention(nn.Module):
    """One attention that drops and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        dropped = F.scaled_dot_product_attention(h, h, h, dropout_p=0.3, is_causal=True)
        return F.scaled_dot_product_attention(dropped, h, h).square().mean()


class Heads(nn.Module):
    """torch's own layer, whose attention is one function to Dynamo."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0].square().mean()


class Shapes(nn.Module):
    """Draws with rows and without, also inside of a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def inner(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(self.layer(x)), 0.5) * torch.rand(4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + checkpoint(self.inner, x, use_reentrant=False)
        kept = x.new_empty(x.shape[0], 1).bernoulli_(0.8)
        weight = F.dropout(self.layer.weight, 0.5)
        return ((x * kept + torch.randn(4)) @ weight).square().mean()


def program_of(model: nn.Module, *shape: int) -> Program:
    return captured(model, torch.randn(4, *shape)).program(2)


def called(graph: fx.Graph) -> list[object]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def test_attention_that_drops_becomes_its_formula() -> None:
    program = program_of(Attention(), 2, 3, 4)
    exposed = ExposeRandomness()(program)
    assert called(program.model.graph).count(F.scaled_dot_product_attention) == 2
    assert called(exposed.model.graph).count(F.scaled_dot_product_attention) == 1
    assert called(exposed.model.graph).count(random.attention) == 1
    joint = called(run_until(program, "normalize").joint.graph)
    aten = torch.ops.aten
    assert joint.count(aten.native_dropout.default) == 1
    assert joint.count(aten._scaled_dot_product_flash_attention_for_cpu.default) == 1


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_an_attention_layer_that_drops_becomes_its_formula(dropout: float) -> None:
    exposed = ExposeRandomness()(program_of(Heads(dropout), 3, 4))
    spelled = called(exposed.model.graph).count(random.multi_head_attention)
    assert spelled == (dropout > 0)


def test_a_formula_computes_what_attention_computes() -> None:
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    torch.testing.assert_close(
        random.attention(x, x, x, is_causal=True),
        F.scaled_dot_product_attention(x, x, x, is_causal=True),
    )


def test_what_has_no_rows_is_shared_by_microbatches() -> None:
    program = run_until(program_of(Shapes(), 4), "seed_randomness")
    seeds = [(i.path, i.role) for i in program.inputs if i.name.startswith("seed")]
    assert seeds == [
        ("native_dropout", Role.SEED),
        ("rand", Role.WHOLE_SEED),
        ("bernoulli", Role.SEED),
        ("native_dropout_1", Role.WHOLE_SEED),
        ("randn", Role.WHOLE_SEED),
    ]


def test_the_program_that_it_is_given_stays_as_it_was() -> None:
    program = program_of(Shapes(), 4)
    before = str(program)
    ExposeRandomness()(program)
    marks = [node.meta.get("custom") for node in program.model.graph.nodes]
    assert str(program) == before and not any(marks)
    inner = program.model.get_submodule("wrap_body_0")
    assert isinstance(inner, fx.GraphModule)
    assert not any(node.meta.get("custom") for node in inner.graph.nodes)

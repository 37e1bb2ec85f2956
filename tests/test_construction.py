"""Parameters that get their memory where they are used, with the values of a usual build."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import ownership
from fxpipe.construction import initialise
from fxpipe.errors import FxpipeError
from tests.helpers import MLP, mlp_batch


class Net(nn.Module):
    """Every way of making first values that is known from models."""

    norm: Tensor

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(width))
        self.embedding = nn.Embedding(5, width, padding_idx=1)
        layer = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.copies = nn.ModuleList(copy.deepcopy(layer) for _ in range(2))
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))
        self.spare = nn.Linear(width, width)
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("norm", self.spare.weight.detach().norm())
        self.register_buffer("table", torch.tensor([2.0, 3.0]))
        self.blocks.apply(narrow)
        nn.init.orthogonal_(self.spare.weight)
        nn.init.trunc_normal_(self.position)
        with torch.no_grad():
            self.blocks[1].weight.copy_(self.blocks[0].weight).mul_(2)  # type: ignore[operator]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        for layer in self.copies:
            x = layer(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return (self.head(self.normed(x)) * self.norm).square().mean()


def narrow(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)


def build_twice(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """As usual, and deferred; both leave the generator at the same place."""
    torch.manual_seed(3)
    usual = build()
    after = torch.rand(3)
    torch.manual_seed(3)
    model = fxpipe.deferred(build)
    assert torch.equal(torch.rand(3), after)
    return usual, model


def memory_of(model: nn.Module) -> int:
    return sum(p.untyped_storage().size() for p in model.parameters())


def plan(model: nn.Module, own: Callable[[str], bool], first: bool = True) -> None:
    """What a step does on the rank that uses the parameters and buffers whose names fit."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in named.items():
        if not name.startswith("spare"):
            ownership.record(tensor, plan, own(name))
    seen = [tensor for name, tensor in named.items() if not name.startswith("spare")]
    initialise([t for name, t in named.items() if own(name)], seen, others=first)


def test_nothing_has_memory_before_the_first_step() -> None:
    usual, model = build_twice(Net)
    assert memory_of(model) == 0
    assert [(n, p.shape) for n, p in model.named_parameters()] == [
        (n, p.shape) for n, p in usual.named_parameters()
    ]
    assert model.get_parameter("head.weight") is model.get_parameter("embedding.weight")
    assert torch.equal(model.get_buffer("table"), torch.tensor([2.0, 3.0]))


def test_first_step_gives_the_values_of_a_usual_build() -> None:
    usual, model = build_twice(Net)
    options: dict[str, Any] = {"stages": 2, "lowering": "eager"}
    step = cast(nn.Module, torch.compile(model, backend="fxpipe", options=options))
    tokens = torch.randint(0, 5, (4, 3))
    identities = {name: id(p) for name, p in model.named_parameters()}
    before = torch.get_rng_state()
    loss = step(tokens)
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(loss, usual(tokens))
    expected = usual.state_dict()
    for name, value in fxpipe.state_dict(step).items():
        assert torch.equal(value, expected[name]), name
    assert {name: id(p) for name, p in model.named_parameters()} == identities


@pytest.mark.parametrize("prefix", ["blocks.1", "copies.1", "normed", "embedding", "position"])
def test_a_rank_gets_the_values_of_its_own_part_alone(prefix: str) -> None:
    usual, model = build_twice(Net)
    plan(model, lambda name: name.startswith(prefix), first=False)
    for name, parameter in model.named_parameters():
        assert ownership.is_freed(parameter) != name.startswith(prefix), name
        if name.startswith(prefix):
            assert torch.equal(parameter, usual.get_parameter(name)), name


def test_what_no_rank_uses_is_made_on_the_first() -> None:
    usual, model = build_twice(Net)
    plan(model, lambda name: name.startswith("blocks"))
    weight = model.get_parameter("spare.weight")
    assert torch.equal(weight, usual.get_parameter("spare.weight"))


def test_a_buffer_made_from_a_parameter_is_made_with_it() -> None:
    usual, model = build_twice(Net)
    plan(model, lambda name: name == "norm", first=False)
    assert torch.equal(model.get_buffer("norm"), usual.get_buffer("norm"))
    assert memory_of(model) == 0


def test_a_build_holds_one_module_beside_what_is_kept() -> None:
    """Each of ten layers has 4 KB; the peak is measured after each layer is made."""
    peaks: list[int] = []
    weights: list[Tensor] = []

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList()
            for _ in range(10):
                layer = nn.Linear(32, 32, bias=False)
                weights.append(layer.weight.detach())
                peaks.append(sum(w.untyped_storage().size() for w in weights))
                self.layers.append(layer)

    model = fxpipe.deferred(Deep)
    assert max(peaks) == 4096
    peaks.clear(), weights.clear()
    plan(model, lambda name: name in ("layers.2.weight", "layers.7.weight"), first=False)
    assert max(peaks) == 3 * 4096
    assert memory_of(model) == 2 * 4096


def test_a_later_step_that_uses_more_gets_the_first_values_of_it() -> None:
    usual, model = build_twice(lambda: MLP(3, 3, 3))
    plan(model, lambda name: name.startswith("layers.0"))
    with torch.no_grad():
        model.get_parameter("layers.0.weight").fill_(5)
    plan(model, lambda name: True)
    assert (model.get_parameter("layers.0.weight") == 5).all()
    assert torch.equal(
        model.get_parameter("layers.1.weight"), usual.get_parameter("layers.1.weight")
    )


def test_settings_of_the_first_call_hold_for_the_second() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        usual, model = build_twice(lambda: nn.Linear(3, 3))
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        plan(model, lambda name: True)
    assert torch.equal(model.get_parameter("weight"), usual.get_parameter("weight"))
    assert model.get_parameter("weight").requires_grad


def test_state_before_the_first_step_is_refused() -> None:
    model = fxpipe.deferred(MLP, 3, 3, 3)
    state = MLP(3, 3, 3).state_dict()
    for call in (
        lambda: fxpipe.load_state_dict(model, state),
        lambda: fxpipe.owned_state_dict(model),
    ):
        with pytest.raises(FxpipeError, match="has no memory yet, .* call the step once"):
            call()
    with pytest.raises(FxpipeError, match="comes with the first step"):
        fxpipe.state_dict(model)


def test_a_state_loads_where_another_rank_has_what_no_stage_uses() -> None:
    usual, model = build_twice(Net)
    plan(model, lambda name: name.startswith("blocks"), first=False)
    state = {name: value + 1 for name, value in usual.state_dict().items()}
    fxpipe.load_state_dict(model, state)
    assert torch.equal(model.get_parameter("blocks.2.bias"), state["blocks.2.bias"])
    assert ownership.is_freed(model.get_parameter("spare.weight"))
    assert {name.split(".")[0] for name in fxpipe.owned_state_dict(model)} == {"blocks"}


def test_a_build_that_looks_at_a_value_is_refused() -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            if self.layer.weight.sum() > 0:
                self.other = nn.Linear(2, 2)

    with pytest.raises(FxpipeError, match=r"Looking decides by the value .* shape \[\]"):
        fxpipe.deferred(Looking)


def test_a_build_that_does_another_thing_the_second_time_is_refused() -> None:
    widths = iter((3, 4))
    model = fxpipe.deferred(lambda: nn.Sequential(nn.Linear(2, next(widths))))
    with pytest.raises(FxpipeError, match="the second call of <lambda> made another '0.bias'"):
        plan(model, lambda name: True)


def test_an_error_in_a_build_leaves_nothing_behind() -> None:
    with pytest.raises(TypeError):
        fxpipe.deferred(MLP, "wide", "narrow")
    module = nn.Sequential(nn.Linear(2, 2))
    assert memory_of(module) > 0
    assert memory_of(copy.deepcopy(module)) > 0


def test_batches_run_through_a_deferred_model_without_gradients_first() -> None:
    usual, model = build_twice(lambda: MLP(3, 3, 3))
    options: dict[str, Any] = {"stages": 2, "lowering": "eager"}
    step = cast(nn.Module, torch.compile(model, backend="fxpipe", options=options))
    with torch.no_grad():
        step(*mlp_batch())
    optimizer = torch.optim.SGD(fxpipe.owned_parameters(model).values(), lr=0.1)
    theirs = torch.optim.SGD(usual.parameters(), lr=0.1)
    for net, update in ((step, optimizer), (usual, theirs)):
        net(*mlp_batch()).backward()
        update.step()
    for mine, expected in zip(model.parameters(), usual.parameters()):
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=0)

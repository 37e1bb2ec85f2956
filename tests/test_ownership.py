"""Which parameters a rank uses, and what it may free."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import ownership
from fxpipe.errors import FxpipeError
from tests.helpers import MLP, mlp_batch


class Spare(MLP):
    """An MLP with a layer and a buffer that no call uses."""

    noise: Tensor

    def __init__(self) -> None:
        super().__init__(3, 3, 3)
        self.spare = nn.Linear(3, 3, dtype=torch.float64)
        self.register_buffer("noise", torch.ones(4, dtype=torch.float64))


def compiled(model: nn.Module) -> nn.Module:
    options: dict[str, Any] = {"stages": 2, "microbatches": 2, "lowering": "eager"}
    return cast(nn.Module, torch.compile(model, backend="fxpipe", options=options))


USED = ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]


def test_one_process_owns_what_the_model_uses() -> None:
    model = Spare()
    step = compiled(model)
    step(*mlp_batch())
    assert sorted(fxpipe.owned_parameters(model)) == sorted(USED)
    assert fxpipe.owned_parameters(step).keys() == fxpipe.owned_parameters(model).keys()
    owned = fxpipe.owned_parameters(model)
    assert all(owned[name] is model.get_parameter(name) for name in USED)


def test_before_the_first_step_nothing_is_known() -> None:
    for function in (ownership.owned_parameters, ownership.free_unowned):
        with pytest.raises(FxpipeError, match="no step of this model has run .* call it once"):
            function(compiled(Spare()))


def test_unused_tensors_that_no_step_saw_are_kept() -> None:
    """The step never saw the spare layer, so another model may still use it."""
    model = Spare()
    step = compiled(model)
    loss = step(*mlp_batch())
    assert ownership.free_unowned(step) == 0
    assert model.spare.weight.untyped_storage().size() > 0
    torch.testing.assert_close(step(*mlp_batch()), loss, rtol=0, atol=0)


class Rank:
    """Stands for the compiled step of a rank."""


def test_what_other_ranks_use_is_freed_but_its_shape_stays() -> None:
    model, rank = MLP(3, 3, 3), Rank()
    for name, parameter in model.named_parameters():
        ownership.record(parameter, rank, name.startswith("layers.1"))
    assert sorted(fxpipe.owned_parameters(model)) == ["layers.1.bias", "layers.1.weight"]
    assert ownership.free_unowned(model) == (9 + 3) * 8
    freed = model.get_parameter("layers.0.weight")
    assert freed.shape == (3, 3)
    assert freed.untyped_storage().size() == 0
    assert model.get_parameter("layers.1.weight").abs().sum() > 0
    assert ownership.free_unowned(model) == 0


def test_a_state_that_would_hold_freed_tensors_is_refused() -> None:
    model, rank = MLP(3, 3, 3), Rank()
    for name, parameter in model.named_parameters():
        ownership.record(parameter, rank, name.startswith("layers.1"))
    assert len(model.state_dict()) == 4
    ownership.free_unowned(model)
    with pytest.raises(FxpipeError, match="'layers.0.weight', whose memory .* fxpipe.state_dict"):
        model.state_dict()
    assert len(model.state_dict(keep_vars=True)) == 4


def test_storage_that_an_owned_tensor_shares_is_kept() -> None:
    model, rank = nn.Module(), Rank()
    whole = torch.ones(6)
    model.first = nn.Parameter(whole[:3])
    model.second = nn.Parameter(whole[3:])
    ownership.record(model.first, rank, False)
    ownership.record(model.second, rank, True)
    assert ownership.free_unowned(model) == 0
    assert model.first.sum() == 3


def test_once_used_by_a_plan_of_a_step_a_tensor_stays_owned() -> None:
    """A step has a plan for each size of the batch; all of them must keep running."""
    parameter, rank = nn.Parameter(torch.ones(2)), Rank()
    for used in (False, True, False):
        ownership.record(parameter, rank, used)
    assert ownership.is_owned(parameter, False)


def test_the_newest_step_says_what_is_owned() -> None:
    """A model compiled anew with other stages."""
    parameter = nn.Parameter(torch.ones(2))
    first, second = Rank(), Rank()
    ownership.record(parameter, first, True)
    ownership.record(parameter, second, False)
    assert not ownership.is_owned(parameter, True)


def test_tensor_that_no_step_saw_is_as_the_caller_says() -> None:
    tensor = torch.ones(2)
    assert ownership.is_owned(tensor, True) and not ownership.is_owned(tensor, False)

"""State, clipping and scaling in one process, and what a rank's part of a state is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

import fxpipe
from fxpipe import ownership
from fxpipe.errors import FxpipeError
from tests.helpers import MLP, mlp_batch


class Rank:
    """Stands for the compiled step of a rank."""


def compiled(model: nn.Module, **options: Any) -> nn.Module:
    usual = {"stages": 2, "microbatches": 2, "lowering": "eager"}
    return cast(nn.Module, torch.compile(model, backend="fxpipe", options=usual | options))


def on_a_rank(model: nn.Module, own: str) -> nn.Module:
    """The model as it is on a rank that uses the layer `own` and has freed the others."""
    rank = Rank()
    for name, parameter in model.named_parameters():
        ownership.record(parameter, rank, name.startswith(own))
    fxpipe.free_unowned(model)
    return model


def trained(
    make: Callable[[Any], torch.optim.Optimizer],
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = MLP(3, 3, 3)
    optimizer = make(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(*mlp_batch()).backward()
        optimizer.step()
    return model, optimizer


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.125)


def assert_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


# State.


def test_state_has_the_modules_names_before_and_after_a_step() -> None:
    model = MLP(3, 3, 3)
    step = compiled(model)
    for given in (step, model):
        assert_equal(fxpipe.state_dict(given), model.state_dict())
    step(*mlp_batch()).backward()
    for given in (step, model):
        assert_equal(fxpipe.state_dict(given), model.state_dict())
        assert_equal(fxpipe.owned_state_dict(given), model.state_dict())
    assert list(step.state_dict())[0].startswith("_orig_mod.")


def test_state_is_the_models_own_memory_as_in_torch() -> None:
    model = MLP(3, 3, 3)
    found = fxpipe.state_dict(model)["layers.0.weight"]
    assert found.data_ptr() == model.get_parameter("layers.0.weight").data_ptr()
    assert not found.requires_grad


def test_extra_state_and_buffers_come_along() -> None:
    class Counting(MLP):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.register_buffer("count", torch.tensor(7))
            self.register_buffer("scratch", torch.ones(2), persistent=False)

        def get_extra_state(self) -> Any:
            return {"version": 2}

        def set_extra_state(self, state: Any) -> None:
            self.version = state["version"]

    state = fxpipe.state_dict(Counting())
    assert state["count"] == 7 and state["_extra_state"] == {"version": 2}
    assert "scratch" not in state
    model = Counting()
    fxpipe.load_state_dict(compiled(model), state)
    assert model.version == 2


def test_a_loaded_state_reaches_the_step() -> None:
    model, twin = MLP(3, 3, 3), MLP(3, 3, 3)
    step = compiled(model)
    step(*mlp_batch())
    with torch.no_grad():
        twin.get_parameter("layers.1.bias").add_(1)
    fxpipe.load_state_dict(step, twin.state_dict())
    torch.testing.assert_close(step(*mlp_batch()), twin(*mlp_batch()), rtol=1e-12, atol=0)


def test_unknown_and_missing_names_are_told_as_torch_does() -> None:
    model = MLP(3, 3)
    with pytest.raises(RuntimeError, match="Missing key"):
        fxpipe.load_state_dict(model, {})
    keys = fxpipe.load_state_dict(model, {"other": torch.ones(1)}, strict=False)
    assert keys.unexpected_keys == ["other"] and len(keys.missing_keys) == 2


def test_a_load_fills_what_the_rank_has_and_leaves_freed_memory_freed() -> None:
    model, source = on_a_rank(MLP(3, 3, 3), "layers.1"), MLP(3, 3, 3)
    with torch.no_grad():
        source.get_parameter("layers.1.weight").add_(1)
    fxpipe.load_state_dict(model, source.state_dict())
    assert torch.equal(model.get_parameter("layers.1.weight"), source.layers[1].weight)
    assert ownership.is_freed(model.get_parameter("layers.0.weight"))
    assert list(fxpipe.owned_state_dict(model)) == ["layers.1.weight", "layers.1.bias"]


def test_a_state_of_another_shape_is_refused_for_freed_tensors_too() -> None:
    model = on_a_rank(MLP(3, 3, 3), "layers.1")
    state = MLP(3, 3, 3).state_dict() | {"layers.0.weight": torch.ones(2, 2)}
    with pytest.raises(RuntimeError, match=r"size mismatch for layers.0.weight: the state has \[2"):
        fxpipe.load_state_dict(model, state)


def test_a_load_gives_memory_to_freed_tensors_that_a_new_step_uses() -> None:
    model, source = on_a_rank(MLP(3, 3, 3), "layers.1"), MLP(3, 3, 3)
    rank = Rank()
    for parameter in model.parameters():
        ownership.record(parameter, rank, True)
    fxpipe.load_state_dict(model, source.state_dict())
    assert_equal(fxpipe.state_dict(model), source.state_dict())


def test_state_that_no_rank_has_is_an_error() -> None:
    with pytest.raises(FxpipeError, match="no rank has the value of 'layers.0.weight'"):
        fxpipe.state_dict(on_a_rank(MLP(3, 3, 3), "layers.1"))


# Clipping and scaling.


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_in_one_process_is_torchs(norm_type: float) -> None:
    model, twin = MLP(3, 3, 3), MLP(3, 3, 3)
    step = compiled(model)
    step(*mlp_batch()).backward()
    twin(*mlp_batch()).backward()
    total = fxpipe.clip_grad_norm_(step, 0.001, norm_type)
    expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.001, norm_type)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
    for mine, theirs in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=0)


def test_a_step_with_an_inf_is_skipped_and_one_without_is_not() -> None:
    model, scaler = MLP(3, 3), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = adamw(model.parameters())
    for bad in (True, False):
        before = model.get_parameter("layers.0.weight").detach().clone()
        scaler.scale(model(*mlp_batch())).backward()
        if bad:
            cast(Tensor, model.get_parameter("layers.0.bias").grad)[0] = float("nan")
        assert fxpipe.agree_on_inf(scaler, optimizer) is bad
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(before, model.get_parameter("layers.0.weight")) is bad
        assert scaler.get_scale() == 4.0


def test_gradients_that_were_unscaled_are_not_unscaled_again() -> None:
    model, scaler = MLP(3, 3), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = adamw(model.parameters())
    scaler.scale(model(*mlp_batch())).backward()
    scaler.unscale_(optimizer)
    gradient = cast(Tensor, model.get_parameter("layers.0.bias").grad).clone()
    assert not fxpipe.agree_on_inf(scaler, optimizer)
    assert torch.equal(gradient, cast(Tensor, model.get_parameter("layers.0.bias").grad))


def test_a_rank_without_gradients_takes_part_in_scaling() -> None:
    model, scaler = MLP(3, 3), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = adamw(model.parameters())
    scaler.scale(torch.ones(()))
    assert not fxpipe.agree_on_inf(scaler, optimizer)
    scaler.step(optimizer)
    scaler.update()


def test_a_scaler_that_is_off_agrees_on_nothing() -> None:
    optimizer = adamw(MLP(3, 3).parameters())
    assert not fxpipe.agree_on_inf(torch.amp.GradScaler("cpu", enabled=False), optimizer)


# Optimizers.


def test_optimizer_state_has_names_and_groups_and_loads_into_torchs() -> None:
    model, optimizer = trained(adamw)
    state = fxpipe.optimizer_state_dict(model, optimizer)
    names = [name for name, _ in model.named_parameters()]
    assert list(state["state"]) == state["param_groups"][0]["params"] == names
    assert set(state["state"][names[0]]) == {"step", "exp_avg", "exp_avg_sq"}
    twin = MLP(3, 3, 3)
    theirs = torch.optim.AdamW(twin.parameters(), lr=1.0)
    set_optimizer_state_dict(twin, theirs, cast(Any, state))
    assert theirs.param_groups[0]["lr"] == 0.125
    for p, q in zip(model.parameters(), twin.parameters()):
        assert torch.equal(theirs.state[q]["exp_avg"], optimizer.state[p]["exp_avg"])


def test_optimizer_state_is_copied_into_an_optimizer_of_some_of_the_parameters() -> None:
    model, optimizer = trained(adamw)
    part = torch.optim.AdamW(cast(Any, model).layers[1].parameters(), lr=1.0)
    fxpipe.load_optimizer_state_dict(model, part, fxpipe.optimizer_state_dict(model, optimizer))
    weight = model.get_parameter("layers.1.weight")
    assert part.param_groups[0]["lr"] == 0.125 and len(part.state) == 2
    assert part.state[weight]["step"] == 2
    assert torch.equal(part.state[weight]["exp_avg"], optimizer.state[weight]["exp_avg"])
    part.state[weight]["exp_avg"].zero_()
    assert optimizer.state[weight]["exp_avg"].any()


def test_parameters_that_the_state_does_not_name_keep_what_they_have() -> None:
    model, optimizer = trained(adamw)
    state = fxpipe.optimizer_state_dict(model, optimizer)
    state["param_groups"][0]["params"].remove("layers.0.weight")
    del state["state"]["layers.0.weight"]
    weight = model.get_parameter("layers.0.weight")
    before = optimizer.state[weight]["exp_avg"].clone()
    fxpipe.load_optimizer_state_dict(model, optimizer, state)
    assert torch.equal(optimizer.state[weight]["exp_avg"], before)
    assert optimizer.state[weight]["step"] == 2


def test_a_rank_gives_the_optimizer_state_of_its_own_parameters_alone() -> None:
    model, optimizer = trained(adamw)
    on_a_rank(model, "layers.1")
    own = ["layers.1.weight", "layers.1.bias"]
    state = fxpipe.owned_optimizer_state_dict(model, optimizer)
    assert list(state["state"]) == list(state["options"]) == own
    assert list(fxpipe.optimizer_state_dict(model, optimizer)["state"]) == own


def test_a_group_whose_parameters_had_other_options_is_refused() -> None:
    def rising(parameters: Any) -> torch.optim.Optimizer:
        groups = [{"params": p, "lr": 0.1 * (i + 1)} for i, p in enumerate(parameters)]
        return torch.optim.SGD(groups, momentum=0.9)

    model, optimizer = trained(rising)
    state = fxpipe.optimizer_state_dict(model, optimizer)
    assert len(state["param_groups"]) == 4
    whole = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(FxpipeError, match="lr=0.1 and lr=0.2 were saved; make the optimizer with"):
        fxpipe.load_optimizer_state_dict(model, whole, state)


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(FxpipeError, match=r"group 0 .* shape \[3, 3\] that is no parameter"):
        fxpipe.optimizer_state_dict(MLP(3, 3), adamw(MLP(3, 3).parameters()))


# Checkpoints.


def test_a_checkpoint_loads_into_a_rank_that_has_freed_a_part(tmp_path: Path) -> None:
    model, optimizer = trained(adamw)
    optimizer.param_groups[0]["betas"] = (0.5, 0.75)
    saved = {
        "training": fxpipe.owned_optimizer_state_dict(model, optimizer),
        "model": fxpipe.owned_state_dict(model),
    }
    dcp.save(saved, checkpoint_id=tmp_path)
    rank = on_a_rank(MLP(3, 3, 3), "layers.1")
    part = adamw(fxpipe.owned_parameters(rank).values())
    reader = dcp.FileSystemReader(tmp_path)
    state = {
        "training": fxpipe.owned_optimizer_state_dict(rank, part, reader.read_metadata()),
        "model": fxpipe.owned_state_dict(rank),
    }
    dcp.load(state, storage_reader=reader)
    fxpipe.load_owned_optimizer_state_dict(rank, part, state["training"])
    mine, theirs = rank.get_parameter("layers.1.weight"), model.get_parameter("layers.1.weight")
    assert torch.equal(mine, theirs)
    assert part.param_groups[0]["betas"] == (0.5, 0.75)
    assert part.state[mine]["step"] == 2
    assert torch.equal(part.state[mine]["exp_avg_sq"], optimizer.state[theirs]["exp_avg_sq"])


def test_a_checkpoint_without_the_optimizer_is_refused(tmp_path: Path) -> None:
    model = MLP(3, 3)
    dcp.save({"model": fxpipe.owned_state_dict(model)}, checkpoint_id=tmp_path)
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    with pytest.raises(FxpipeError, match="holds 0 such states: none"):
        fxpipe.owned_optimizer_state_dict(model, adamw(model.parameters()), metadata)


# Export.


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.halves = nn.ParameterList(torch.arange(6.0).chunk(2))


def test_safetensors_keep_a_tied_weight_once_and_shared_memory_apart(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model = Tied()
    fxpipe.save_safetensors(model, tmp_path / "tied.safetensors", {"step": "3"})
    stored = safetensors.load_file(tmp_path / "tied.safetensors")
    assert "first.weight" in stored and "second.weight" not in stored
    with safetensors.safe_open(tmp_path / "tied.safetensors", "pt") as file:
        assert file.metadata()["second.weight"] == "first.weight"
        assert file.metadata()["step"] == "3"
    expected = {n: t for n, t in model.state_dict().items() if n != "second.weight"}
    assert_equal(dict(sorted(stored.items())), dict(sorted(expected.items())))


def test_safetensors_refuse_what_is_no_tensor(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")

    class Extra(nn.Module):
        def get_extra_state(self) -> Any:
            return {"a": 1}

    with pytest.raises(FxpipeError, match="the state holds '_extra_state', a dict"):
        fxpipe.save_safetensors(Extra(), tmp_path / "x")


def test_without_the_package_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(FxpipeError, match=r"pip install 'fxpipe\[safetensors\]'"):
        fxpipe.save_safetensors(MLP(3, 3), tmp_path / "x")

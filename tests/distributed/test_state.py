"""What a training loop does after the step, on two ranks, beside the unsplit model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fxpipe
from tests.distributed import keeping
from tests.distributed.harness import run_ranks
from tests.distributed.keeping import OPTIMIZERS, GrowingNet, train, worst
from tests.numerics.models import CASES, pipelined, seeded

EXACT = 1e-10
TRAINED = 1e-9  # AdamW divides by the roots of small numbers

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    pytest.importorskip("safetensors")
    return run_ranks(keeping.everything, 2, folder / "run", path=folder / "model.safetensors")


def of(found: Found, name: str) -> Found:
    return [rank[name] for rank in found]


# Clipping.


def test_clipping_equals_torch_on_the_unsplit_model(found: Found) -> None:
    first, second = of(found, "clip")
    assert len(first) == 12
    for name in first:
        # Microbatches add up float32 gradients in another order.
        limit = 1e-6 if "mixed" in name else EXACT
        for total, norm_error, gradient_error in (first[name], second[name]):
            assert total > 0.01  # else nothing would be clipped
            assert norm_error <= limit and gradient_error <= limit


def test_the_total_norm_has_the_same_bits_on_every_rank(found: Found) -> None:
    first, second = of(found, "clip")
    assert [value[0] for value in first.values()] == [value[0] for value in second.values()]


def test_an_inf_on_one_rank_is_refused_on_every_rank(found: Found) -> None:
    for norm, refusal in of(found, "clip infinite"):
        assert norm == "inf"
        assert "is non-finite, so it cannot be clipped" in refusal


@pytest.mark.parametrize(
    "how, kinds, message",
    [
        ("steps", ["RankError", "RankError"], "came to step 2"),
        ("sleeps", ["RankError", "none"], "rank 1 stalled outside a step"),
        ("fails", ["RankError", "NotImplementedError"], "failed on rank 1: NotImplementedError"),
    ],
)
def test_a_rank_that_does_not_clip_too_is_an_error(
    how: str, kinds: list[str], message: str, tmp_path: Path
) -> None:
    told = run_ranks(keeping.leave_out, 2, tmp_path, how=how)
    assert [refusal.kind for refusal in told] == kinds
    assert message in told[0].message
    assert told[0].seconds < 10


# State.


@pytest.mark.parametrize(
    "moment", ["before", "after", "of the plain module", "after freeing", "loaded"]
)
def test_state_is_that_of_the_unsplit_model_on_every_rank(moment: str, found: Found) -> None:
    for rank in of(found, "gather"):
        assert rank[moment] <= EXACT


def test_the_modules_own_state_is_stale_on_a_rank(found: Found) -> None:
    assert all(rank["stale"] > 0.01 for rank in of(found, "gather"))


def test_rank_0_alone_gets_the_state_if_asked(found: Found) -> None:
    first, second = of(found, "gather")
    assert first["rank 0 only"] == list(seeded(GrowingNet).state_dict())
    assert second["rank 0 only"] == []


def test_what_was_freed_stays_so_after_a_load_and_training_goes_on(found: Found) -> None:
    for rank in of(found, "gather"):
        assert rank["freed"] > 0 and rank["freed again"] == 0
        assert rank["trained on"] <= TRAINED


def test_written_safetensors_load_into_the_plain_model(found: Found, folder: Path) -> None:
    from safetensors.torch import load_model

    assert all(rank["written"] for rank in of(found, "gather"))
    twin, model = seeded(GrowingNet), GrowingNet().double()
    train(twin, OPTIMIZERS["adamw"](twin.parameters()), CASES["convnet"].inputs(), 2)
    missing, unexpected = load_model(model, folder / "model.safetensors")
    assert not missing and not unexpected
    assert worst(model.state_dict(), twin.state_dict()) <= EXACT


# Optimizers.


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_is_gathered_by_name(name: str, found: Found) -> None:
    for rank in of(found, "optimize"):
        assert rank[f"{name} gathered"] <= EXACT
    first, second = of(found, "optimize")
    assert first[f"{name} rank 0 only"] == ["param_groups", "state"]
    assert second[f"{name} rank 0 only"] == []


@pytest.mark.parametrize("parameters", ["owned", "all"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_goes_on_from_a_loaded_state(name: str, parameters: str, found: Found) -> None:
    for rank in of(found, "optimize"):
        assert rank[f"{name} {parameters}"] <= TRAINED
        assert rank[f"{name} {parameters} again"] <= TRAINED


# Checkpoints.


def test_a_checkpoint_moves_between_numbers_of_stages_and_ranks(tmp_path: Path) -> None:
    """Two stages on one rank to three on two, and back; two steps before it, two after."""
    case, make = CASES["gpt"], OPTIMIZERS["adamw"]
    model = case.model()
    step, optimizer = pipelined(model), make(model.parameters())
    train(step, optimizer, case.inputs(), 2)
    keeping.save_checkpoint(step, optimizer, tmp_path / "one")

    folders = {"given": tmp_path / "one", "made": tmp_path / "two"}
    for errors in run_ranks(keeping.checkpoint, 2, tmp_path / "run", **folders):
        assert len(errors) == 3
        assert all(error <= TRAINED for error in errors.values()), errors

    torch._dynamo.reset()
    model, twin = case.model(), case.model()
    step, optimizer = pipelined(model), make(model.parameters())
    keeping.load_checkpoint(step, optimizer, tmp_path / "two")
    train(step, optimizer, case.inputs(), 2)
    train(twin, make(twin.parameters()), case.inputs(), 4)
    assert worst(fxpipe.state_dict(step), twin.state_dict()) <= TRAINED


# Scaling.


def test_an_inf_on_one_rank_makes_every_rank_skip_the_same_step(found: Found) -> None:
    for rank in of(found, "scale"):
        assert rank["skipped"] == [False, True, False]
        ours, eager = rank["scales"][:3], rank["scales"][3:]
        assert ours == eager == [64.0, 32.0, 32.0]
        assert rank["error"] <= EXACT


# Deferred.


def test_a_rank_makes_its_own_part_of_a_deferred_model(found: Found) -> None:
    whole = sum(p.numel() * p.element_size() for p in CASES["gpt"].model().parameters())
    for rank in of(found, "defer"):
        assert rank["at first"] == 0
        assert rank["after the plan"] == rank["owned"] == rank["in the end"] < whole


def test_a_deferred_model_starts_and_trains_as_one_built_at_once(found: Found) -> None:
    for rank in of(found, "defer"):
        assert rank["start"] == 0.0
        assert rank["trained"] <= TRAINED

"""A pipelined step gives eager's loss, gradients and trained parameters over a whole grid."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from tests.numerics.models import CASES, Gradients, assert_close, gradients_of
from tests.numerics.shared import SharedCapture

STAGES = (1, 2, 3, 4)
MICROBATCHES = (1, 2, 3, 5, 8)
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "interleaved-zb")
LIMIT, TRAINED_LIMIT = 1e-10, 1e-9
STEPS = 3

OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
}


class Numbers(NamedTuple):
    """Of the first step, and the parameters after the last."""

    loss: torch.Tensor
    gradients: Gradients
    trained: Gradients


@pytest.fixture(autouse=True, scope="module")
def fresh_dynamo() -> Iterator[None]:
    """A model is traced once for all its points, so Dynamo forgets after the last of them only."""
    yield
    shared.cache_clear()
    torch._dynamo.reset()


@functools.cache
def shared(name: str) -> SharedCapture:
    return SharedCapture(CASES[name])


@functools.cache
def eager(name: str, optimizer: str, microbatches: int) -> Numbers:
    case = CASES[name]
    model = case.model()
    return train(model, optimizer, lambda: case.loss(model, microbatches))


def train(model: torch.nn.Module, optimizer: str, loss_of: Any) -> Numbers:
    first: Any = None
    steps = OPTIMIZERS[optimizer](model.parameters())
    for _ in range(STEPS):
        steps.zero_grad()
        loss = loss_of()
        loss.backward()
        first = first or (loss.detach(), gradients_of(model))
        steps.step()
    return Numbers(*first, {name: p.detach().clone() for name, p in model.named_parameters()})


def assert_same(actual: Numbers, expected: Numbers) -> None:
    assert_close(actual.loss, expected.loss, LIMIT, "loss")
    for name, gradient in expected.gradients.items():
        assert_close(actual.gradients[name], gradient, LIMIT, f"gradient of {name}")
    for name, parameter in expected.trained.items():
        assert_close(actual.trained[name], parameter, TRAINED_LIMIT, f"{name} after {STEPS} steps")


def check(name: str, step: Any, model: torch.nn.Module, microbatches: int) -> None:
    """Train twice from the same start, with either optimizer."""
    inputs = CASES[name].inputs()
    start = {key: value.clone() for key, value in model.state_dict().items()}
    parts = microbatches if "loss_reduction" in CASES[name].options else 1
    for optimizer in OPTIMIZERS:
        model.load_state_dict(start)
        try:
            actual = train(model, optimizer, lambda: step(*inputs))
        finally:
            model.load_state_dict(start)
        assert_same(actual, eager(name, optimizer, parts))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("microbatches", MICROBATCHES)
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_eager(name: str, stages: int, microbatches: int, schedule: str) -> None:
    capture = shared(name)
    step = capture.use(stages=stages, microbatches=microbatches, schedule=schedule)
    check(name, step, capture.model, microbatches)


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "schedule"),
    [
        ("mlp", 4, 5, "zb-h1"),
        ("gpt", 4, 8, "interleaved-zb"),
        ("convnet", 2, 3, "1f1b"),
        ("unet", 3, 5, "interleaved-1f1b"),
        ("two-branch", 2, 2, "gpipe"),
    ],
)
def test_a_checked_step_by_the_backends_name_equals_eager(
    name: str, stages: int, microbatches: int, schedule: str
) -> None:
    model = CASES[name].model()
    options = {"stages": stages, "microbatches": microbatches, "schedule": schedule}
    options |= {"lowering": "eager", "check": True} | CASES[name].options
    step = torch.compile(model, backend="fxpipe", options=options)
    check(name, step, model, microbatches)


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "schedule"),
    [("mlp", 2, 3, "zb-h1"), ("unet", 2, 2, "1f1b")],
)
def test_tasks_compiled_by_inductor_equal_eager(
    name: str, stages: int, microbatches: int, schedule: str
) -> None:
    capture = shared(name)
    options = {"stages": stages, "microbatches": microbatches, "schedule": schedule}
    step = capture.use(**options, lowering="inductor")
    check(name, step, capture.model, microbatches)

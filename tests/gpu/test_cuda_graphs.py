"""Captured steps on a GPU: the numbers of eager, no waiting for the device, memory given back."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cases import graphs
from tests.numerics.models import GPT as NumericGPT
from tests.numerics.models import MLP, pipelined, seeded

MODES = ("step", "task")
SCHEDULES = (
    ("gpipe", 2), ("1f1b", 2), ("zb-h1", 2), ("interleaved-1f1b", 4), ("zb-v", 4), ("dualpipev", 4),
)  # fmt: skip


def compile_for(mode: str, lowering: str = "eager") -> graphs.Compile:
    def compile(model: nn.Module, **options: Any) -> Any:
        return pipelined(model, **{"cuda_graphs": mode, "lowering": lowering, **options})

    return compile


def tokens(rows: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = (torch.randint(0, 11, (rows, 5), generator=generator) for _ in range(2))
    first, second = (value.cuda() for value in made)
    return first, second


def steps_equal_eager(step: Any, model: nn.Module, steps: int = 6, limit: float = 1e-9) -> None:
    """Losses and weights of a training beside eager: new inputs and weights each step."""
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (model, twin)]
    for seed in range(steps):
        inputs = tokens(seed=seed)
        losses = []
        for run, optimizer in zip((step, twin), optimizers):
            loss = run(*inputs)
            loss.backward()
            if seed % 2:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[0], losses[1], rtol=limit, atol=limit)
    for found, expected in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(found, expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("schedule", "stages"), SCHEDULES)
def test_a_training_equals_eager(schedule: str, stages: int, mode: str) -> None:
    model = seeded(lambda: NumericGPT(depth=3)).cuda()
    options = {"stages": stages, "ranks": 2, "schedule": schedule, "microbatches": 4}
    steps_equal_eager(compile_for(mode)(model, **options), model)


@pytest.mark.parametrize("mode", MODES)
def test_compiled_tasks_are_captured(mode: str) -> None:
    model = seeded(NumericGPT).cuda()
    steps_equal_eager(compile_for(mode, "inductor")(model), model)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", list(graphs.CHECKS))
def test_a_case_on_a_gpu(case: int, mode: str) -> None:
    graphs.CHECKS[case](compile_for(mode), "cuda")


@pytest.mark.parametrize("mode", MODES)
def test_a_replayed_step_never_waits_for_the_device(mode: str) -> None:
    model = seeded(NumericGPT).cuda()
    step, inputs = compile_for(mode)(model), tokens()
    for _ in range(4):
        step(*inputs).backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            step(*inputs).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_is_given_back_with_the_model() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    x = graphs.batch("cuda", rows=256, width=256)
    model = graphs.Chain(256).cuda()
    step = compile_for("step")(model)
    for _ in range(4):
        step(x).backward()
    del model, step, x
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() - before < 2**20


def test_a_model_on_the_cpu_is_refused() -> None:
    from fxpipe.errors import OptionError

    x = graphs.batch("cpu", width=6)
    with pytest.raises(OptionError, match="needs a model on a GPU, and this one is on cpu"):
        compile_for("step")(seeded(MLP))(x, x)

"""What stays in memory over steps and between the tasks of a step. 66 to 69 need CUDA graphs."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxpipe.program import Task
from tests.cases.shared import check, normal, program_of
from tests.numerics.models import MLP, pipelined, seeded


def live_bytes() -> int:
    """Of all tensors that Python sees and that have memory, each storage once."""
    gc.collect()
    plain = (Tensor, nn.Parameter)
    storages = (t.untyped_storage() for t in gc.get_objects() if type(t) in plain)
    return sum({s.data_ptr(): s.nbytes() for s in storages if s.device.type != "meta"}.values())


@pytest.mark.parametrize("backward", [True, False])
def test_case_71_a_loss_that_is_kept_holds_no_activation(backward: bool) -> None:
    model = seeded(lambda: MLP(depth=2))
    step = pipelined(model, microbatches=8)
    x = normal(512, 6)  # one activation is larger than all parameters
    losses = []
    sizes = []
    for _ in range(4):
        loss = step(x, x)
        if backward:
            loss.backward()
            model.zero_grad()
        losses.append(loss)
        del loss
        sizes.append(live_bytes())
    parameters = sum(p.nbytes for p in model.parameters())
    allowed = 8 if backward else 8 + parameters  # before the backward it holds the gradients
    growth = [after - before for before, after in zip(sizes[1:], sizes[2:])]
    assert all(grown <= 2 * allowed for grown in growth), (growth, parameters)


class Recomputing(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in range(2):
            self.blocks.append(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))
        return x.square().mean()


OPTIONS: dict[str, Any] = {"stages": ["blocks.1"], "schedule": "zb-h1"}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_case_72_checkpointed_blocks_under_a_split_backward_equal_eager(schedule: str) -> None:
    options = {"ranks": 1} if schedule == "zb-v" else {}
    check(lambda: Recomputing(True), [normal(8, 6)], **(OPTIONS | {"schedule": schedule} | options))


def tasks_of(recompute: bool, **options: Any) -> dict[str, Task]:
    model = seeded(lambda: Recomputing(recompute))
    program = program_of(model, normal(4, 6), **OPTIONS, **options)
    return {str(key): task for key, task in program.tasks.items()}


def values_between(tasks: dict[str, Task], first: str, second: str) -> set[str]:
    """What one task of stage 1 leaves for another."""
    return set(tasks[first].outputs) & set(tasks[second].inputs)


def kept_for_w(tasks: dict[str, Task]) -> int:
    """How many values the weights' gradients of stage 1 wait with: F's, I's, and those received."""
    made = {*tasks["0F"].outputs, *tasks["1F"].outputs, *tasks["1I"].outputs}
    return len(made & set(tasks["1W"].inputs))


def test_case_72_a_checkpoint_leaves_no_more_for_w_than_the_plain_block() -> None:
    # What I has computed again and W reads is handed over: nothing is computed twice.
    assert kept_for_w(tasks_of(True)) == kept_for_w(tasks_of(False)) == 4


def test_case_72_a_checkpointed_block_keeps_less() -> None:
    plain, recomputed = tasks_of(False), tasks_of(True)
    assert values_between(plain, "1F", "1I") == {"tanh_1", "add_1"}
    assert values_between(recomputed, "1F", "1I") == {"add_1"}  # of the loss, behind the region


def test_case_72_without_the_pass_a_checkpoint_changes_nothing() -> None:
    x, off = normal(8, 6), {"recompute": False}
    check(lambda: Recomputing(True), [x], **OPTIONS, passes=off)

"""Which task is the last to read each value that a stage keeps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from expecttest import assert_expected_inline

from fxpipe.passes import PlanLastUses
from fxpipe.program import Program, Role
from tests.helpers import (
    GPT,
    MLP,
    Captured,
    captured,
    gpt_batch,
    microbatches,
    mlp_batch,
    run_tasks,
    run_until,
)


def summed(given: Captured, ranks: int = 2) -> Program:
    return run_until(given.program(rows=2, ranks=ranks), "sync_gradients")


def last_uses_text(program: Program) -> str:
    lines = (f"{key}: {' '.join(names)}".rstrip() for key, names in program.last_uses.items())
    return "\n".join(lines)


@pytest.fixture(scope="module")
def split_mlp() -> Captured:
    return captured(MLP(3, 3, 3, 3), *mlp_batch(), stages=3, schedule="zb-h1")


def test_i_frees_what_w_does_not_read(split_mlp: Captured) -> None:
    before = summed(split_mlp, ranks=3)
    after = PlanLastUses()(before)
    assert before.last_uses == {}
    assert_expected_inline(
        last_uses_text(after),
        """\
0F:
0W: tanh mm_2
1F:
1I: tanh_1 mm
1W: tanh tanh_backward
2F:
2I: addmm_2
2W: tanh_1 mse_loss_backward""",
    )


def test_b_frees_what_is_left_of_the_forward() -> None:
    given = captured(MLP(3, 3, 3), *mlp_batch(), stages=2, schedule="1f1b")
    assert_expected_inline(
        last_uses_text(PlanLastUses()(summed(given))),
        """\
0F:
0B: tanh mm
1F:
1B: tanh addmm_1""",
    )


def test_without_a_backward_the_forward_frees_what_it_received() -> None:
    with torch.no_grad():
        given = captured(MLP(3, 3, 3), *mlp_batch(), stages=2)
    assert_expected_inline(
        last_uses_text(PlanLastUses()(summed(given))),
        """\
0F:
1F: tanh""",
    )


def test_one_forward_alone_keeps_nothing() -> None:
    with torch.no_grad():
        given = captured(MLP(3, 3), *mlp_batch(), stages=1)
    after = PlanLastUses()(summed(given, ranks=1))
    assert set(after.last_uses.values()) == {()}


@pytest.fixture(scope="module")
def gpt() -> Captured:
    return captured(GPT(), *gpt_batch())


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_every_kept_value_dies_once_and_is_read_no_more(gpt: Captured, schedule: str) -> None:
    after = PlanLastUses()(summed(gpt.with_options(stages=2, schedule=schedule)))
    inputs = {entry.name for entry in after.inputs}
    for stage in range(2):
        keys = sorted(k for k in after.tasks if k.stage == stage)
        keys.sort(key=lambda k: "FBIW".index(str(k.kind)))
        dead: set[str] = set()
        for key in keys:
            assert not dead & set(after.tasks[key].inputs)
            died = after.last_uses[key]
            assert len(set(died)) == len(died) and not inputs & set(died)
            dead |= set(died)
        read = {name for key in keys for name in after.tasks[key].inputs}
        accumulators = {f"acc_{name}" for key in keys for name in after.tasks[key].accumulates}
        assert dead == read - inputs - accumulators


def test_backwards_of_both_forms_each_free_their_own() -> None:
    """One microbatch runs B, the other I and W."""
    text = "0F0 0F1 0B0 0I1 0W1\n1F0 1F1 1B0 1I1 1W1"
    given = captured(MLP(3, 3, 3), *mlp_batch(), stages=2, schedule=text)
    after = PlanLastUses()(summed(given))
    uses = {str(key): set(names) for key, names in after.last_uses.items()}
    assert uses["1B"] == uses["1I"] | uses["1W"] - {"mse_loss_backward"}


def test_parameters_and_arguments_are_never_freed(split_mlp: Captured) -> None:
    after = PlanLastUses()(summed(split_mlp, ranks=3))
    freed = {name for names in after.last_uses.values() for name in names}
    roles: Sequence[Role] = (Role.PARAMETER, Role.BATCH, Role.SHARE)
    assert not freed & {entry.name for entry in after.inputs if entry.role in roles}


def test_tasks_and_numbers_are_untouched(split_mlp: Captured) -> None:
    before = summed(split_mlp, ranks=3)
    after = PlanLastUses()(before)
    values = next(microbatches(split_mlp, after, (2, 2)))
    torch.testing.assert_close(run_tasks(after, values), run_tasks(before, values), rtol=0, atol=0)

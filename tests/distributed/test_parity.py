"""The first step of every rank is checked; a difference on one of them stops all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.checking import check_first_step
from tests.distributed.failing import STEPS, Told
from tests.distributed.harness import run_ranks


def test_checked_ranks_train_on(tmp_path: Path) -> None:
    told: list[Told] = run_ranks(check_first_step, 2, tmp_path, wrong=None)
    assert [t.step for t in told] == [STEPS, STEPS]


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_difference_on_one_rank_is_told_on_both(wrong: int, tmp_path: Path) -> None:
    told: list[Told] = run_ranks(check_first_step, 2, tmp_path, wrong=wrong)
    assert [(t.kind, t.step) for t in told] == [("ParityError", 0)] * 2
    assert told[0].message == told[1].message
    assert f"{wrong}F0 (stage {wrong}, microbatch 0) gives" in told[0].message
    assert "differs from plain eager" in told[0].message

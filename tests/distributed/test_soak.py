"""Many steps: no hang, no growth, no message taken for another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.harness import run_ranks
from tests.distributed.soaking import Soaked, TwoInTurn, soak, two_models

RANKS = 4
GROWTH = 1 << 20  # bytes that a rank may grow by after its first quarter, however many the steps


def check_soak(steps: int, folder: Path, seconds: float) -> None:
    found: list[Soaked] = run_ranks(soak, RANKS, folder, seconds, steps=steps, samples=8)
    for rank, soaked in enumerate(found):
        print(f"rank {rank}: {steps} steps in {soaked.seconds:.1f} s; resident {soaked.sizes}")
        assert soaked.losses == found[0].losses
        assert soaked.sizes[-1] - soaked.sizes[2] <= GROWTH, soaked.sizes
    assert found[0].losses[-1] < found[0].losses[0]


def test_four_ranks_with_random_delays_neither_hang_nor_grow(tmp_path: Path) -> None:
    check_soak(80, tmp_path, seconds=150.0)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_thousand_steps_on_four_ranks_neither_hang_nor_grow(tmp_path: Path) -> None:
    check_soak(1000, tmp_path, seconds=1700.0)


def test_two_models_in_turn_do_not_mix_their_messages(tmp_path: Path) -> None:
    found: list[TwoInTurn] = run_ranks(two_models, 2, tmp_path, steps=20)
    for errors in found:
        assert errors.first <= 1e-10 and errors.second <= 1e-10

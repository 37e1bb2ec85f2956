"""Ranks of a gloo group train a model as eager does, and own what their stages use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.harness import run_ranks
from tests.distributed.work import Point, Report, train

Reports = dict[Point, list[Report]]

TWO_RANKS = [
    Point("mlp", 2, 5, "gpipe"),
    Point("gpt", 2, 3, "1f1b"),
    Point("gpt", 4, 8, "interleaved-1f1b"),
    Point("unet", 4, 2, "interleaved-zb"),
    Point("convnet", 2, 3, "zb-h1"),
    Point("two-branch", 3, 5, "interleaved-zb"),
    Point("mlp", 2, 1, "1f1b"),
    Point("mlp", 2, 2, "zb-h1", "inductor"),
]
FREEING = [Point("gpt", 2, 2, "zb-h1")]
THREE_RANKS = [
    Point("mlp", 3, 2, "gpipe"),
    Point("gpt", 3, 5, "zb-h1"),
    Point("unet", 3, 3, "1f1b"),
    Point("gpt", 6, 3, "interleaved-1f1b"),
]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    return reports_of(2, TWO_RANKS, FREEING, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    return reports_of(3, THREE_RANKS, [], tmp_path_factory.mktemp("three"))


def reports_of(world_size: int, points: list[Point], freeing: list[Point], folder: Path) -> Reports:
    found = run_ranks(train, world_size, folder, points=points, freeing=freeing)
    return {point: [ranks[i] for ranks in found] for i, point in enumerate(points + freeing)}


def assert_equals_eager(reports: list[Report]) -> None:
    for report in reports:
        assert report.losses == reports[0].losses
        assert report.loss_error <= 1e-10
        assert report.gradient_error <= 1e-10
        assert report.trained_error <= 1e-9
        assert report.with_gradient == report.owned


@pytest.mark.parametrize("point", TWO_RANKS)
def test_two_ranks_equal_eager(point: Point, two_ranks: Reports) -> None:
    assert_equals_eager(two_ranks[point])


@pytest.mark.parametrize("point", THREE_RANKS)
def test_three_ranks_equal_eager(point: Point, three_ranks: Reports) -> None:
    assert_equals_eager(three_ranks[point])


def test_a_tied_weight_has_the_same_bits_on_both_ranks_after_training(two_ranks: Reports) -> None:
    for point in (Point("gpt", 2, 3, "1f1b"), Point("gpt", 4, 8, "interleaved-1f1b")):
        first, second = (report.digests for report in two_ranks[point])
        assert "token.weight" in set(first) & set(second)
        assert all(first[name] == second[name] for name in set(first) & set(second))


def test_a_rank_owns_the_parameters_of_its_stages_alone(two_ranks: Reports) -> None:
    first, second = (set(r.owned) for r in two_ranks[Point("mlp", 2, 1, "1f1b")])
    assert first == {"layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"}
    assert second == {"layers.2.weight", "layers.2.bias", "layers.3.weight", "layers.3.bias"}


def test_training_goes_on_after_the_rest_is_freed(two_ranks: Reports) -> None:
    (point,) = FREEING
    assert_equals_eager(two_ranks[point])
    for report in two_ranks[point]:
        assert report.freed > 0
    assert len(set(two_ranks[point][0].losses)) == 3

"""Schedules on ranks: no deadlock, no fault that one rank alone hears of, no layer left out."""

from __future__ import annotations

from typing import Any

import pytest

from fxpipe.errors import FxpipeError
from tests.cases.shared import check, normal
from tests.numerics.models import MLP, pipelined, seeded

Found = list[dict[str, Any]]


def assert_equals_eager(found: Found, name: str) -> None:
    assert [rank[name] for rank in found] == [None] * len(found)


def test_case_74_interleaved_1f1b_with_delays_does_not_hang(two_ranks: Found) -> None:
    assert_equals_eager(two_ranks, "delays")


def test_case_75_large_messages_cross_each_other(two_ranks: Found) -> None:
    assert_equals_eager(two_ranks, "crossing")


def test_case_80_ranks_that_were_given_other_dtypes_are_told(two_ranks: Found) -> None:
    for told in (found["dtype"] for found in two_ranks):
        assert "RankError: the ranks are about to run different steps: rank 0 has" in told
        assert "every rank must make the same call, with the same options, such as" in told
        assert "%x: f32" in told and "%x: f64" in told


@pytest.mark.parametrize(("depth", "stages"), [(7, 2), (7, 1)])
def test_case_82_every_layer_is_in_a_stage_where_stages_do_not_divide_them(
    depth: int, stages: int
) -> None:
    x = normal(4, 6)
    check(lambda: MLP(depth=depth), [x, x.cos()], stages=stages, microbatches=2)


def test_case_82_more_stages_than_layers_are_refused_or_share_them() -> None:
    x = normal(4, 6)
    check(lambda: MLP(depth=3), [x, x.cos()], stages=4, microbatches=2)
    with pytest.raises(FxpipeError, match="stages=30, but the model has only .*use fewer stages"):
        pipelined(seeded(lambda: MLP(depth=3)), stages=30)(x, x)

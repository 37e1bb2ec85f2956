"""Ranks that differ are told what has to be the same."""

from __future__ import annotations

import pytest

from fxpipe.lowering.group import first_difference

FOUR, TWO = "microbatches of 2 2 2 2 rows", "microbatches of 4 4 rows"


@pytest.mark.parametrize(
    ("mine", "theirs", "told"),
    [
        (TWO, FOUR, "with the same option microbatches, and a batch of the same shape"),
        (TWO, "microbatches of 3 3 rows", "every rank must make the same call, with a batch of "),
        ("schedule 1f1b", "schedule gpipe", "with the same options, such as stages and schedule"),
        ("graph 0F(", "graph 0F(%x", "with the same options, such as stages and schedule"),
    ],
)
def test_ranks_that_differ_are_told_what_must_be_equal(mine: str, theirs: str, told: str) -> None:
    said = first_difference([f"same\n{mine}", f"same\n{mine}", f"same\n{theirs}"])
    assert f"rank 0 has {mine!r} where rank 2 has {theirs!r}; " in said and told in said

"""Stages by cost: equal to brute force, deterministic, and refusals that say what would do."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations

import pytest

from fxpipe.errors import OptionError
from fxpipe.partition import equal_split, partition, stage_times


def all_splits(num_items: int, stages: int) -> Iterator[list[int]]:
    for cuts in combinations(range(1, num_items), stages - 1):
        yield [0, *cuts]


def pieces(values: list[int], starts: list[int]) -> list[list[int]]:
    return [values[a:b] for a, b in zip(starts, [*starts[1:], len(values)], strict=True)]


@pytest.mark.parametrize("seed", range(50))
def test_partition_is_what_brute_force_finds(seed: int) -> None:
    rng = random.Random(seed)
    num_items = rng.randint(1, 9)
    stages = rng.randint(1, num_items)
    costs = [rng.randint(0, 9) for _ in range(num_items)]
    transfer = [rng.randint(0, 4) for _ in range(num_items - 1)] if seed % 2 else None
    memory = [rng.randint(0, 9) for _ in range(num_items)] if seed % 3 else None
    limit = rng.randint(9, 25) if memory else None
    found = []
    for starts in all_splits(num_items, stages):
        if memory and limit and max(map(sum, pieces(memory, starts))) > limit:
            continue
        times = stage_times(costs, starts, transfer)
        found.append((max(times), sum(time * time for time in times), starts))
    if not found:
        with pytest.raises(OptionError, match=f"within memory_limit: a stage may hold {limit}, "):
            partition(costs, stages, transfer, memory, limit)
    else:
        assert partition(costs, stages, transfer, memory, limit) == min(found)[2]


def test_plain_call_balances_costs() -> None:
    assert partition([1, 1, 1, 1, 4], 2) == [0, 4]


def test_heavy_head_gets_a_stage_of_its_own_and_beats_the_equal_split() -> None:
    costs = [1.0] * 9 + [6.0]
    starts, equal = partition(costs, 4), equal_split(10, 4)
    assert equal == [0, 3, 6, 8]
    assert starts == [0, 3, 6, 9]
    assert max(stage_times(costs, starts)) == 6
    assert max(stage_times(costs, equal)) == 7


def test_among_equals_the_early_stages_are_the_small_ones() -> None:
    assert partition([1] * 10, 4) == [0, 2, 4, 7]


def test_transfer_moves_the_cut_to_where_it_is_cheap() -> None:
    assert partition([1, 1, 1, 1], 2) == [0, 2]
    assert partition([1, 1, 1, 1], 2, transfer=[0, 5, 5]) == [0, 1]


def test_each_stage_may_have_its_own_limit() -> None:
    memory = [1, 1, 1, 1]
    assert partition([1, 1, 1, 1], 2, memory=memory, memory_limit=[1, 3]) == [0, 1]


def test_a_thousand_items_take_no_time() -> None:
    rng = random.Random(0)
    costs = [rng.random() for _ in range(1000)]
    starts = partition(costs, 16)
    assert max(stage_times(costs, starts)) < sum(costs) / 16 + 1


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (([1, 2], 3), "stages=3 cannot be cut from 2 items"),
        (([1, 2], 0), "expected 1 to 2"),
        (([1, -2], 1), r"costs\[1\]=-2"),
        (([1, float("nan")], 1), r"costs\[1\]=nan"),
        (([1, 2, 3], 2, [1]), "transfer has 1 values, expected 2"),
        (([1, 2], 2, None, [1, 1]), "memory and memory_limit go together"),
        (([1, 2], 2, None, [1, 1], [1]), "memory_limit has 1 values for stages=2"),
        (([1, 2], 2, None, [1, 7], 3), "part 2 of 2 in their order alone needs 7; raise the limit"),
        (([1, 2, 3], 2, None, [2, 2, 2], 3), "the most even split needs 4; raise .* 1.34 times"),
    ],
)
def test_partition_refuses_with_the_number_found(arguments: tuple, match: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(OptionError, match=match):
        partition(*arguments)


def test_a_rank_shares_its_limit_among_its_stages() -> None:
    costs = memory = [1.0, 1.0, 1.0, 1.0]
    assert partition(costs, 4, memory=memory, memory_limit=2, ranks=2) == [0, 1, 2, 3]
    with pytest.raises(OptionError, match="on ranks=2 .*memory_limit=1: a stage may hold 0.5"):
        partition(costs, 4, memory=memory, memory_limit=1, ranks=2)


def test_a_refusal_names_the_module_and_a_limit_that_would_do() -> None:
    costs, names = [1.0, 2.0, 3.0], ["embedding", "blocks.0", "head"]

    def split(limit: float, memory: list[float]) -> list[int]:
        return partition(costs, 2, None, memory, limit, ranks=1, names=names)

    with pytest.raises(OptionError) as error:
        split(8, [4, 7, 2.5])
    assert str(error.value) == (
        "no split into stages=2 on ranks=1 keeps every stage within memory_limit=8: a stage may "
        "hold 4, but 'blocks.0' alone needs 7; raise the limit to at least 19, as more stages do "
        "not divide it"
    )
    assert split(19, [4, 7, 2.5]) == [0, 1]
    with pytest.raises(OptionError, match="to at least 12, or use more ranks"):
        split(8, [3, 3, 3])
    assert split(12, [3, 3, 3]) in ([0, 1], [0, 2])

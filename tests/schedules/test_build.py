"""The one entry: names, sizes, defaults, and what is refused with its reason."""

from __future__ import annotations

import time
from typing import Any

import pytest

from fxpipe.checker import check_schedule
from fxpipe.costs import Costs
from fxpipe.errors import ScheduleError
from fxpipe.schedule import Schedule
from fxpipe.schedules import build, families, resolve
from fxpipe.simulator import simulate

NEEDS_EVEN_RANKS = {"chimera", "chimera-zb", "bitpipe", "dualpipe"}


@pytest.mark.parametrize("name", families())
def test_every_size_gives_a_complete_schedule_or_names_the_constraint(name: str) -> None:
    for stages in range(1, 8):
        for ranks in (None, *range(1, stages + 1)):
            for microbatches in (1, 2, 3, 5, 8):
                try:
                    schedule = build(name, stages=stages, microbatches=microbatches, ranks=ranks)
                except ScheduleError as error:
                    assert name in NEEDS_EVEN_RANKS
                    assert "is odd, expected an even number" in str(error)
                    continue
                check_schedule(schedule, stages, microbatches)
                assert ranks in (None, schedule.num_ranks)


@pytest.mark.parametrize("name", families())
def test_every_rank_has_a_stage(name: str) -> None:
    for stages, ranks in ((4, 4), (8, 4), (9, 4), (6, 2), (7, 6)):
        schedule = build(name, stages=stages, microbatches=6, ranks=ranks)
        assert all(schedule.stages_of(rank) for rank in range(ranks))


def test_ranks_default_to_what_the_placement_needs() -> None:
    found = {
        name: [build(name, stages=s, microbatches=4).num_ranks for s in (1, 2, 4, 5, 8)]
        for name in ("1f1b", "interleaved-zb", "zb-v", "hanayo")
    }
    assert found == {
        "1f1b": [1, 2, 4, 5, 8],
        "interleaved-zb": [1, 1, 2, 5, 4],
        "zb-v": [1, 1, 2, 3, 4],
        "hanayo": [1, 1, 2, 3, 4],
    }


def test_more_stages_than_places_run_one_after_the_other_as_one() -> None:
    schedule = build("zb-h1", stages=3, microbatches=2, ranks=2)
    assert str(schedule) == (
        "0F0 0F1 0I0 0W0 0I1 0W1\n1F0 2F0 2I0 1I0 1F1 2F1 2I1 1I1 2W0 1W0 2W1 1W1"
    )
    pairs = build("dualpipev", stages=5, microbatches=2, ranks=1)
    assert str(pairs) == (
        "0F0 1F0 2F0 3F0 4F0 0F1 1F1 4B0 3B0 2B0 [2F1|1B0] [3F1|0B0] 4F1 "
        "4B1 3B1 2B1 1I1 0I1 1W1 0W1"
    )


def test_trailing_stages_and_microbatches_are_dropped() -> None:
    assert str(build("zb-v", stages=3, microbatches=1)) == ("0F0 0I0 0W0\n1F0 2F0 2I0 2W0 1I0 1W0")


@pytest.mark.parametrize(
    ("name", "sizes", "sentence"),
    [
        ("1f1", {}, "there is no schedule '1f1'; did you mean '1f1b'?"),
        ("ZB-V", {}, "did you mean 'zb-v'?"),
        ("dualpip", {}, "did you mean 'dualpipe'?"),
        ("seq1f1b", {}, "there is no schedule 'seq1f1b'"),
        ("1f1b", {"stages": 0}, "stages=0; expected a whole number from 1"),
        ("1f1b", {"microbatches": -1}, "microbatches=-1; expected a whole number from 1"),
        ("1f1b", {"microbatches": 1.5}, "microbatches=1.5; expected a whole number from 1"),
        ("1f1b", {"ranks": 5}, "ranks=5 with stages=4 leaves ranks without a stage; use at most"),
        ("1f1b", {"f": 2}, "schedule '1f1b' has no option 'f'; it has none"),
        ("chimera", {"g": 2}, "schedule 'chimera' has no option 'g'; it has f"),
        ("chimera:f=3", {}, "f=3 does not divide ranks/2=2; use f from 1, 2"),
        ("chimera:f", {}, "'f' is no schedule option; expected <name>=<number>"),
        ("dualpipe", {"ranks": 3}, "ranks=3 is odd, expected an even number; use ranks=2 or 4"),
        ("bitpipe", {"stages": 1}, "ranks=1 is odd, expected an even number; use at least 2"),
        ("hanayo", {"memory_limit": 0.5}, "memory_limit=0.5 holds not even one microbatch"),
    ],
)
def test_what_cannot_be_built_says_why(name: str, sizes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ScheduleError) as error:
        build(name, **({"stages": 4, "microbatches": 4} | sizes))  # type: ignore[arg-type]
    assert sentence in str(error.value)


def test_options_may_stand_in_the_name() -> None:
    by_name = build("chimera:f=2", stages=4, microbatches=8)
    assert by_name == build("chimera", stages=4, microbatches=8, f=2)
    assert by_name.holders == {stage: (0, 1, 2, 3) for stage in range(4)}


def test_times_move_weight_gradients_and_waves() -> None:
    long_w = Costs(F=2.0, I=2.0, W=1.0)
    for name in ("chimera-zb", "hanayo"):
        plain = build(name, stages=8, microbatches=8, ranks=4)
        timed = build(name, stages=8, microbatches=8, ranks=4, costs=long_w)
        assert timed != plain
        assert simulate(timed, long_w).makespan <= simulate(plain, long_w).makespan


def test_a_memory_limit_is_kept_by_rules_that_take_one() -> None:
    for limit in (1, 2, 3, 6):
        costs = Costs.of_share(ranks=4, stages=8)
        schedule = build("hanayo", stages=8, microbatches=12, ranks=4, memory_limit=limit)
        check_schedule(schedule, 8, 12)
        assert max(simulate(schedule, costs).peak_activations) <= limit


def test_unequal_stages_have_schedules_too() -> None:
    costs = Costs(F=[1, 2, 3, 4, 5, 6, 7], I=1.0, W=[7, 6, 5, 4, 3, 2, 1], transfer=0.5)
    for name in ("chimera-zb", "hanayo"):
        schedule = build(name, stages=7, microbatches=5, ranks=4, costs=costs)
        check_schedule(schedule, 7, 5)


def test_whatever_is_given_as_a_schedule_is_resolved() -> None:
    text = "0F0 0B0\n1F0 1B0"
    sizes: dict[str, Any] = {"stages": 2, "microbatches": 1}
    wanted = Schedule.parse(text)
    for given in ("1f1b", text, text.splitlines(), wanted, "rank 0: 0F0 0B0\nrank 1: 1F0 1B0"):
        assert resolve(given, **sizes) == wanted
    assert str(resolve("0F0 0B0", stages=1, microbatches=1)) == "0F0 0B0"
    with pytest.raises(ScheduleError, match="stage 0 has nothing for microbatch 1"):
        resolve(text, stages=2, microbatches=2)


def test_a_thousand_ranks_take_seconds() -> None:
    start = time.perf_counter()
    schedule = build("1f1b", stages=1024, microbatches=512)
    assert sum(map(len, schedule.packed)) == 2 * 1024 * 512
    assert schedule.num_microbatches == 512
    assert time.perf_counter() - start < 10

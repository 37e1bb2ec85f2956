"""The choice against exhaustive simulation; the list scheduler and the solver behind it."""

from __future__ import annotations

import random

import pytest

from fxpipe.checker import check_schedule
from fxpipe.choose import SECONDS_AND_BYTES, Choice, choose
from fxpipe.costs import Costs
from fxpipe.errors import OptionError, ScheduleError
from fxpipe.list_scheduler import POLICIES, list_schedule
from fxpipe.schedules import build, families
from fxpipe.simulator import simulate


def random_case(seed: int) -> tuple[int, int, int, Costs, float | None]:
    rng = random.Random(seed)
    ranks = rng.choice([2, 3, 4])
    stages = ranks * rng.choice([1, 2])
    microbatches = rng.randint(1, 8)

    def some() -> list[float]:
        return [rng.randint(1, 12) / 4 for _ in range(stages)]

    same = seed % 2
    costs = Costs(
        F=1 if same else some(),
        I=1 if same else some(),
        W=1 if same else some(),
        transfer=rng.choice([0, 0.25, 1]),
        pair=rng.choice([None, 2.25]),
    )
    return stages, microbatches, ranks, costs, rng.choice([None, None, 3, 5])


def exhaustive(
    stages: int, microbatches: int, ranks: int, costs: Costs, memory_limit: float | None
) -> dict[str, float]:
    """The makespan of every family that can be built and fits."""
    found = {}
    for name in families():
        try:
            schedule = build(
                name,
                stages=stages,
                microbatches=microbatches,
                ranks=ranks,
                costs=costs,
                memory_limit=memory_limit,
            )
        except ScheduleError:
            continue
        timeline = simulate(schedule, costs)
        if memory_limit is None or max(timeline.peak_activations) <= memory_limit:
            found[name] = timeline.makespan
    return found


@pytest.mark.parametrize("seed", range(50))
def test_choice_is_what_exhaustive_simulation_picks(seed: int) -> None:
    case = random_case(seed)
    found = exhaustive(*case)
    if not found:
        with pytest.raises(OptionError, match="keeps memory_limit"):
            choose(*case, search=False)
        return
    best = min(found.values())
    choice = choose(*case, search=False)
    assert choice.makespan == pytest.approx(best, rel=1e-8)
    assert found[choice.name] == choice.makespan
    searched = choose(*case)
    assert searched.makespan <= best * (1 + 1e-8)
    check_schedule(searched.schedule, case[0], case[1])
    if case[4] is not None:
        assert max(searched.timeline.peak_activations) <= case[4]


def test_choice_is_the_same_each_time() -> None:
    case = random_case(6)
    one, other = choose(*case), choose(*case)
    assert (one.name, one.schedule, str(one)) == (other.name, other.schedule, str(other))


def refusal(choice: Choice, name: str) -> str:
    return next(c.refused for c in choice.considered if c.name == name)


def test_choice_says_what_was_considered_and_why_one_won() -> None:
    choice = choose(3, 6, 3, Costs(transfer=0.1), memory_limit=3, search=False)
    assert choice.name == "zb-h1"
    assert refusal(choice, "gpipe") == "needs memory 6, more than memory_limit=3"
    assert "ranks=3 is odd" in refusal(choice, "chimera")
    assert refusal(choice, "1f1b") == ""
    lines = str(choice).splitlines()
    assert lines[0].startswith("zb-h1: 20.8 a step, bubble 13.5 %; ")
    assert "  1f1b: 25, bubble 28.0 %, memory 3, slower by 20.2 %" in lines
    assert len(lines) == 1 + len(families())


def test_measured_numbers_have_their_units() -> None:
    costs = Costs(F=1e-3, I=1e-3, W=1e-3, activations=3e5, weights=1e6)
    choice = choose(2, 4, 2, costs, 2e6, families=["1f1b", "gpipe"], search=False)
    assert choice.describe(SECONDS_AND_BYTES).splitlines() == [
        "1f1b: 15 ms a step, bubble 20.0 %; nothing else of 2 considered fits",
        "  1f1b: 15 ms, bubble 20.0 %, memory 1.6 MB",
        "  gpipe: refused: needs memory 2.2 MB, more than memory_limit=2 MB",
    ]


def test_a_little_slower_is_less_than_a_tenth_of_a_percent() -> None:
    # A transfer that gpipe hides and 1f1b does not.
    choice = choose(4, 8, 4, Costs(transfer=1e-5), families=["1f1b", "gpipe"], search=False)
    assert choice.considered[1].timeline is not None
    assert choice.makespan < choice.considered[1].timeline.makespan < choice.makespan * 1.0005
    assert choice.reason.endswith("slower by less than 0.1 %")


def test_names_of_searched_schedules_are_explained() -> None:
    choice = choose(4, 8, 4, memory_limit=2, families=["gpipe", "1f1b"])
    assert str(choice).splitlines()[-1].startswith("list(x): made for these times on the placement")
    assert "refill(x)" not in str(choice)


def test_weights_count_where_they_are_given() -> None:
    costs = Costs(weights=[4, 1], activations=1)
    assert choose(2, 4, 2, costs, memory_limit=6, families=["1f1b"], search=False).name == "1f1b"
    # The bidirectional one holds both stages on both ranks.
    with pytest.raises(OptionError, match="least is 7 with chimera"):
        choose(2, 4, 2, costs, memory_limit=6, families=["chimera"], search=False)


def test_memory_limit_has_the_unit_of_the_activations() -> None:
    shares = choose(8, 8, 4, Costs(), memory_limit=3, search=False)
    in_bytes = Costs(activations=512.0, weights=1024.0)
    # A rank's share saves 1024 and weighs 2048.
    measured = choose(8, 8, 4, in_bytes, memory_limit=3 * 1024 + 2048, search=False)
    assert measured.schedule == shares.schedule
    assert refusal(measured, "gpipe") == "needs memory 10240, more than memory_limit=5120"


def test_reductions_of_replicated_stages_count() -> None:
    plain = choose(4, 4, 4, Costs(), families=["chimera", "1f1b"], search=False)
    costly = choose(4, 4, 4, Costs(reduce=5), families=["chimera", "1f1b"], search=False)
    assert (plain.name, costly.name) == ("chimera", "1f1b")


def test_nothing_to_choose_from_is_refused() -> None:
    with pytest.raises(OptionError, match="no schedule can be built for stages=3.*is odd"):
        choose(3, 4, 3, families=["chimera"])
    with pytest.raises(OptionError, match="the least is 4 with 1f1b"):
        choose(4, 8, 4, memory_limit=2, families=["gpipe", "1f1b"], search=False)


def test_search_fits_a_limit_that_no_named_family_fits() -> None:
    choice = choose(4, 8, 4, memory_limit=2, families=["gpipe", "1f1b"])
    assert choice.name == "list(1f1b)"
    assert max(choice.timeline.peak_activations) == 2


def test_search_beats_every_family_on_unequal_stages() -> None:
    costs = Costs(F=[1, 1, 1, 2], I=[1, 1, 1, 2.5], W=[1, 1, 1, 1], transfer=0.25)
    case = (4, 8, 4, costs, 5.0)
    choice = choose(*case)
    assert choice.makespan < min(exhaustive(*case).values())
    assert max(choice.timeline.peak_activations) <= 5


@pytest.mark.parametrize("seed", range(20))
def test_list_schedule_is_complete_and_keeps_its_limit(seed: int) -> None:
    stages, microbatches, ranks, costs, _ = random_case(seed)
    name = ("1f1b", "interleaved-1f1b", "zb-v", "hanayo")[seed % 4]
    placement = build(name, stages=stages, microbatches=microbatches, ranks=ranks).rank_of
    limits = [ranks * stages / ranks * (1 + rank) / 2 for rank in range(ranks)]
    for policy in POLICIES:
        found = list_schedule(placement, costs, limits, policy)
        if found is None:
            assert limits[0] < stages / ranks
            continue
        check_schedule(found, stages, microbatches)
        assert dict(found.rank_of) == dict(placement)
        for peak, limit in zip(simulate(found, costs).peak_activations, limits, strict=True):
            assert peak <= limit


def test_w_placed_anew_makes_zero_bubble_of_1f1b() -> None:
    base = build("1f1b", stages=4, microbatches=8, ranks=4)
    refilled = list_schedule(base.rank_of, Costs(), 4, order=base)
    assert refilled is not None
    best = simulate(build("zb-h1", stages=4, microbatches=8, ranks=4))
    assert simulate(refilled).makespan == best.makespan
    assert simulate(refilled).peak_activations == [4, 4, 4, 4]


def test_no_list_schedule_where_one_microbatch_is_too_much() -> None:
    base = build("1f1b", stages=4, microbatches=8, ranks=4)
    assert list_schedule(base.rank_of, Costs(), 0.5) is None
    gpipe = build("gpipe", stages=4, microbatches=8, ranks=4)
    assert list_schedule(gpipe.rank_of, Costs(), 4, order=gpipe) is None


def test_solver_refines_within_memory_and_agrees_with_itself() -> None:
    pytest.importorskip("ortools")
    from fxpipe.solver import refine

    base = build("1f1b", stages=3, microbatches=4, ranks=3)
    costs = Costs(F=[2, 1, 1], I=[2, 1, 1.5], W=[2, 1, 1], transfer=0.3)
    found = refine(base, costs, [3, 3, 3], effort=1)
    assert found is not None
    check_schedule(found, 3, 4)
    before, after = simulate(base, costs), simulate(found, costs)
    assert after.makespan < before.makespan
    assert max(after.peak_activations) <= 3
    assert refine(base, costs, [3, 3, 3], effort=1) == found
    assert refine(found, costs, [3, 3, 3], effort=1) is None


def test_choice_may_end_with_the_solver() -> None:
    pytest.importorskip("ortools")
    costs = Costs(F=[2, 1, 1], I=[2, 1, 1.5], W=[2, 1, 1])
    plain = choose(3, 4, 3, costs, 3, families=["1f1b"], search=False)
    refined = choose(3, 4, 3, costs, 3, families=["1f1b"], search=False, solver_effort=1)
    assert refined.name == "solver(1f1b)"
    assert refined.makespan < plain.makespan

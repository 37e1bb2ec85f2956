"""The simulator against published numbers, hand-made schedules, and its own faster form."""

from __future__ import annotations

import random

import pytest

from fxpipe import wavefront
from fxpipe.costs import Costs
from fxpipe.errors import OptionError, ScheduleError
from fxpipe.events import Events
from fxpipe.schedule import Schedule
from fxpipe.schedules import build
from fxpipe.simulator import Link, Timeline, simulate, simulate_in_turn

# Zero Bubble (arXiv 2401.10241), times of table 9 and bubbles of table 5, own measure.
ZERO_BUBBLE_PAPER = [
    (8, 24, (18.522, 18.086, 9.337, 0.601), (0.2431, 0.1585, 0.1083)),
    (8, 32, (18.513, 18.086, 9.331, 0.626), (0.1985, 0.1242, 0.0837)),
    (8, 64, (18.546, 18.097, 9.321, 0.762), (0.1240, 0.0674, 0.0444)),
    (8, 24, (29.718, 29.444, 19.927, 0.527), (0.2347, 0.1323, 0.0698)),
    (16, 48, (11.347, 11.248, 8.132, 0.377), (0.2552, 0.1397, 0.0672)),
    (32, 96, (10.419, 10.207, 7.715, 0.408), (0.2646, 0.1421, 0.0641)),
]


@pytest.mark.parametrize(("p", "m", "times", "bubbles"), ZERO_BUBBLE_PAPER)
def test_bubbles_are_those_of_the_zero_bubble_paper(
    p: int, m: int, times: tuple[float, ...], bubbles: tuple[float, ...]
) -> None:
    forward, input_grad, weight_grad, transfer = times
    costs = Costs(F=forward, I=input_grad, W=weight_grad, transfer=transfer)
    for name, bubble in zip(("1f1b", "zb-h1", "zb-h2"), bubbles, strict=True):
        timeline = simulate(build(name, stages=p, microbatches=m, ranks=p), costs)
        assert round(timeline.bubble_own, 4) == bubble, name


def run(text: str, costs: Costs | None = None) -> Timeline:
    return simulate(Schedule.parse(text), costs or Costs())


def test_two_ranks_by_hand() -> None:
    timeline = run("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    assert timeline.starts == [[0, 1, 4, 7], [1, 2, 4, 5]]
    assert timeline.ends == [[1, 2, 6, 9], [2, 4, 5, 7]]
    assert timeline.makespan == 9
    assert timeline.work == 6
    assert (timeline.bubble_flush_time, timeline.bubble_flush) == (3, 3 / 9)
    assert (timeline.bubble_own_time, timeline.bubble_own) == (3, 3 / 9)
    assert timeline.peak_activations == [2, 1]


def test_own_bubble_counts_from_a_ranks_first_unit() -> None:
    timeline = run("0F0 0B0\n1F0 1B0", Costs(F=[1, 5]))
    assert timeline.bubble_flush_time == 10 - 5
    assert timeline.bubble_own_time == 10 - 5
    late = run("0F0\n1F0")
    assert (late.bubble_flush_time, late.bubble_own_time) == (1, 0)


def test_gaps_name_the_action_that_is_awaited() -> None:
    timeline = run("0F0 0B0\n1F0 1B0", Costs(transfer=0.5))
    assert [str(gap) for rank in (0, 1) for gap in timeline.gaps(rank)] == [
        "rank 0 idle 1..5: 0B0 waits for 1I0 of rank 1",
        "rank 1 idle 0..1.5: 1F0 waits for 0F0 of rank 0",
        "rank 1 idle 4.5..7: finished",
    ]


def test_transfer_is_paid_between_ranks_only() -> None:
    on_one = run("0F0 1F0 1B0 0B0", Costs(transfer=9))
    assert on_one.makespan == 6
    there_and_back = run("0F0 0B0\n1F0 1B0", Costs(transfer={(0, 1): 1, (1, 0): 3}))
    assert there_and_back.makespan == 6 + 1 + 3


def test_a_send_that_stands_late_delays_the_message() -> None:
    costs = Costs(transfer=1)
    early = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n"
    late = "0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n"
    other = "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    assert run(early + other, costs).starts[1][1] == 2
    assert run(late + other, costs).starts[1][1] == 3
    assert (
        run(early + other, costs).makespan
        == run("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1", costs).makespan
    )


def test_pair_takes_the_sum_unless_its_time_is_given() -> None:
    text = "0F0 [0F1|0B0] 0B1"
    assert run(text).makespan == 1 + 3 + 2
    assert run(text, Costs(pair=2)).makespan == 1 + 2 + 2
    assert run(text, Costs(pair={(0, 0): 2.5})).makespan == 5.5
    assert run("0F0 [0F1|0I0] 0W0 0B1", Costs(pair=1)).makespan == 1 + 2 + 1 + 2


def test_pair_holds_both_its_activations_and_temporaries() -> None:
    assert run("0F0 [0F1|0B0] 0B1").peak_activations == [2]
    assert run("0F0 [0F1|0B0] 0B1", Costs(pair_temporaries=0.5)).peak_activations == [2.5]


def test_split_backward_keeps_activations_until_w_unless_i_frees_some() -> None:
    text = "0F0 0I0 0F1 0I1 0W0 0W1"
    assert run(text).peak_activations == [2]
    assert run(text, Costs(saved_for_w=0.25)).peak_activations == [1.25]
    assert run("0F0 0B0 0F1 0B1").peak_activations == [1]


def test_activations_and_weights_default_to_one_ranks_share() -> None:
    timeline = run("0F0 1F0 1B0 0B0")
    assert timeline.peak_activations == [1]
    assert timeline.weights == [1]
    assert run("0F0 1F0 1B0 0B0", Costs(weights=[3, 4], activations=[1, 2])).weights == [7]


def test_replicated_stages_are_held_and_reduced_on_every_rank() -> None:
    timeline = run("0F0 1F1 0B0 1B1\n0F1 1F0 1B0 0B1", Costs(reduce=[2, 3]))
    assert timeline.weights == [2, 2]
    assert timeline.ends == [[1, 2, 6, 8], [1, 2, 4, 10]]
    # Stage 1 is done on both ranks at 8, stage 0 at 10, while the ranks still sum stage 1.
    assert timeline.reduced == {1: 11, 0: 13}
    assert timeline.makespan == 13
    assert run("0F0 1F0 1B0 0B0", Costs(reduce=2)).makespan == 6


def test_stages_that_form_a_graph_wait_for_all_that_they_read() -> None:
    text = "0F0 0B0\n1F0 1B0\n2F0 2B0"
    edges = {(0, 1): 8.0, (1, 2): 8.0, (0, 2): 32.0}
    far = {(0, 1): 0.0, (1, 2): 0.0, (0, 2): 5.0}
    assert run(text, Costs(edges=edges)).makespan == 9
    timeline = run(text, Costs(edges=edges, transfer=far))
    assert timeline.starts == [[0, 14], [1, 9], [6, 7]]
    assert timeline.links[0, 2] == Link(1, 32.0)
    assert timeline.links[2, 0] == Link(1, 32.0)
    assert timeline.messages(0) == 2


def test_links_count_messages_and_bytes_per_direction() -> None:
    schedule = build("interleaved-1f1b", stages=4, microbatches=4, ranks=2)
    edges = {(0, 1): 1.0, (1, 2): 10.0, (2, 3): 100.0}
    links = simulate(schedule, Costs(edges=edges)).links
    assert links == {(0, 1): Link(12, 444.0), (1, 0): Link(12, 444.0)}


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("0F0 0B0\n1B0 1F0", "rank 0 waits at 0B0 for 1I0, of rank 1; rank 1 waits at 1B0 for 1F0"),
        ("0F0 0B0\n1F0", "rank 0 waits at 0B0 for 1I0, which no rank runs"),
        ("0F0 0W0 0I0", "rank 0 waits at 0W0 for 0I0, of rank 0"),
        ("0F0 0SEND_F0 0B0\n1F0 1B0", "0B0 for 1SEND_B0, which no rank runs"),
    ],
)
def test_deadlock_names_who_waits_for_what(text: str, match: str) -> None:
    with pytest.raises(ScheduleError, match=match):
        run(text)


@pytest.mark.parametrize(
    ("costs", "match"),
    [
        (Costs(F=[1, 2, 3]), r"costs\.F has 3 values for stages=2"),
        (Costs(W=-1), r"costs\.W=-1"),
        (Costs(transfer={}), r"no time for the edge 0 -> 1"),
        (Costs(edges={(0, 5): 1}), r"costs\.edges has \(0, 5\)"),
        (Costs(saved_for_w=3), "saved_for_w=3 of stage 0 is more than its activations=1"),
    ],
)
def test_costs_that_fit_no_schedule_are_refused(costs: Costs, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        run("0F0 0B0\n1F0 1B0", costs)


def same(one: Timeline, other: Timeline) -> None:
    assert [list(starts) for starts in one.starts] == other.starts
    assert [list(ends) for ends in one.ends] == other.ends
    assert one.makespan == other.makespan
    assert one.busy == pytest.approx(other.busy)
    assert one.peak_activations == other.peak_activations
    assert one.weights == other.weights
    assert one.links == other.links


@pytest.mark.parametrize(
    "name", ["1f1b", "interleaved-zb", "zb-v", "dualpipe", "dualpipev", "chimera", "bitpipe"]
)
def test_all_ranks_at_once_gives_the_same_timeline(name: str) -> None:
    rng = random.Random(name)
    stages = 8
    schedule = build(name, stages=stages, microbatches=9, ranks=4)

    def some() -> list[float]:
        return [rng.randint(1, 9) / 4 for _ in range(stages)]

    edges = {(stage, stage + 1): float(stage + 1) for stage in range(stages - 1)}
    for chosen in (edges, edges | {(0, 3): 2.0, (0, 7): 1.0, (2, 7): 5.0}):
        costs = Costs(
            F=some(),
            I=some(),
            W=some(),
            transfer={edge: rng.randint(0, 3) / 4 for edge in chosen},
            edges=chosen,
            pair={(stage, stage): 3.0 for stage in range(stages)},
            saved_for_w=0.25,
            pair_temporaries=0.125,
        )
        same(wavefront.simulate(schedule, costs), simulate_in_turn(Events(schedule, costs)))


def test_all_ranks_at_once_leaves_a_deadlock_to_be_explained() -> None:
    for text in ("0F0 0B0\n1B0 1F0", "0F0 0B0\n1F0", "0B0 0F0\n1F0 1B0"):
        with pytest.raises(ScheduleError, match="rank 0 waits at 0B0"):
            wavefront.simulate(Schedule.parse(text), Costs())


def test_wide_schedule_takes_the_time_of_the_formula() -> None:
    p, m = 128, 512
    timeline = simulate(build("1f1b", stages=p, microbatches=m, ranks=p), Costs(F=1, I=1.5, W=0.5))
    assert timeline.makespan == (m + p - 1) * 3
    assert timeline.peak_activations == [p - rank for rank in range(p)]
    assert timeline.weights == [1] * p
    assert timeline.messages(0) == m
    assert str(timeline.gaps(1)[0]) == "rank 1 idle 0..1: 1F0 waits for 0F0 of rank 0"

"""Bubbles and peaks of every family against golden numbers, F = B = W = 1, no transfer time."""

from __future__ import annotations

import pytest

from fxpipe.costs import Costs
from fxpipe.schedules import build, families
from fxpipe.simulator import Timeline, simulate

# name, chunks, then for p=4, m=8 and for p=8, m=32: flush ratio, own ratio, lowest and highest peak
# of a rank in activations of a rank's share for one microbatch; and the weights.
GOLDEN = [
    ("gpipe", 1, (0.2727, 0.2727, 8, 8), (0.1795, 0.1795, 32, 32), 1),
    ("1f1b", 1, (0.2727, 0.2727, 1, 4), (0.1795, 0.1795, 1, 8), 1),
    ("interleaved-1f1b", 2, (0.1579, 0.1579, 2.5, 5.5), (0.0986, 0.0986, 4.5, 11.5), 1),
    ("interleaved-1f1b", 4, (0.0857, 0.0857, 3.25, 4.75), (0.0519, 0.0519, 6.25, 9.75), 1),
    ("looped-bfs", 2, (0.1579, 0.1579, 8, 8), (0.0986, 0.0986, 32, 32), 1),
    ("zb-h1", 1, (0.1111, 0.1111, 4, 4), (0.0680, 0.0680, 8, 8), 1),
    ("interleaved-zb", 2, (0.0588, 0.0588, 4, 4), (0.0352, 0.0352, 8, 8), 1),
    ("interleaved-zb", 4, (0.0303, 0.0303, 4, 4), (0.0179, 0.0179, 8, 8), 1),
    ("zb-h2", 1, (0.1111, 0, 7, 7), (0.0680, 0, 15, 15), 1),
    ("zb-v", 2, (0.0588, 0, 4, 4), (0.0352, 0, 8, 8), 1),
    ("v-half", 2, (0.0943, 0.0943, 3, 3), (0.0813, 0.0813, 5, 5), 1),
    ("v-min", 2, (0.1864, 0.1864, 2, 2), (0.1233, 0.1233, 3, 4), 1),
    ("chimera", 1, (0.2000, 0.2000, 3, 4), (0.2381, 0.2381, 5, 8), 2),
    ("bitpipe", 2, (0.1111, 0.1111, 3.5, 4), (0.1351, 0.1351, 6.5, 8), 2),
    ("dualpipe", 1, (0.0769, 0.0769, 5, 5), (0.0588, 0.0588, 9, 9), 2),
    ("dualpipev", 2, (0.1111, 0.1111, 4.5, 4.5), (0.0680, 0.0680, 8.5, 8.5), 1),
    ("chimera-zb", 1, (0.0400, 0.0400, 4, 4), (0.0303, 0.0303, 8, 8), 2),
]


def timeline_of(name: str, p: int, m: int, chunks: int, *times: float) -> Timeline:
    costs = Costs.of_share(*times, ranks=p, stages=p * chunks)
    schedule = build(name, stages=p * chunks, microbatches=m, ranks=p, costs=costs)
    return simulate(schedule, costs)


@pytest.mark.parametrize(("name", "chunks", "small", "large", "weights"), GOLDEN)
def test_bubbles_peaks_and_weights_are_the_golden_ones(
    name: str, chunks: int, small: tuple[float, ...], large: tuple[float, ...], weights: int
) -> None:
    for p, m, golden in ((4, 8, small), (8, 32, large)):
        timeline = timeline_of(name, p, m, chunks)
        peaks = timeline.peak_activations
        found = (timeline.bubble_flush, timeline.bubble_own, min(peaks), max(peaks))
        assert tuple(round(number, 4) for number in found) == golden
        assert timeline.weights == [weights] * p


def test_every_family_has_golden_numbers_or_a_test_of_its_own() -> None:
    tested = {name for name, *_ in GOLDEN}
    assert set(families()) - tested == {"eager-1f1b", "combined-1f1b", "hanayo"}


def test_eager_1f1b_hides_transfers_for_twice_the_memory() -> None:
    eager, plain = (timeline_of(name, 8, 32, 1, 1, 1, 1, 0.1) for name in ("eager-1f1b", "1f1b"))
    assert round(eager.bubble_flush, 4) == 0.1892
    assert round(plain.bubble_flush, 4) == 0.2246
    assert max(eager.peak_activations) == 16


def test_combined_1f1b_pairs_more_than_half_for_one_chunk_more() -> None:
    plain, combined = (timeline_of(f"{n}-1f1b", 8, 32, 2) for n in ("interleaved", "combined"))
    assert round(combined.bubble_flush, 4) == 0.0986
    more = [c - p for c, p in zip(combined.peak_activations, plain.peak_activations, strict=True)]
    assert more == [0.5] * 8
    paired = [sum("|" in str(step) for step in steps) for steps in combined.schedule.ranks]
    assert (paired[0], paired[-1]) == (41, 55)


def test_dualpipes_pairs_are_as_many_as_published() -> None:
    dualpipe = build("dualpipe", stages=8, microbatches=32)
    paired = [sum("|" in str(step) for step in steps) for steps in dualpipe.ranks]
    assert paired == [21, 22, 23, 23, 23, 23, 22, 21]
    dualpipev = build("dualpipev", stages=16, microbatches=32)
    assert sum("|" in str(step) for step in dualpipev.ranks[0]) == 41


@pytest.mark.parametrize(("chunks", "bubble"), [(2, 0.368), (4, 0.238), (8, 0.135)])
def test_hanayo_with_backwards_twice_as_long(chunks: int, bubble: float) -> None:
    timeline = timeline_of("hanayo", 8, 8, chunks)
    assert round(timeline.bubble_flush, 3) == bubble
    assert max(timeline.peak_activations) <= 8


def test_hanayo_with_equal_times_has_the_bubble_of_interleaving() -> None:
    for p, m, chunks in ((4, 4, 2), (4, 12, 2), (8, 16, 4)):
        waves = timeline_of("hanayo", p, m, chunks, 2, 1, 1)
        looped = timeline_of("interleaved-1f1b", p, m, chunks, 2, 1, 1)
        assert waves.bubble_flush == pytest.approx(looped.bubble_flush)
        assert max(waves.peak_activations) == p


def test_transfers_count_as_published() -> None:
    for name, chunks, bubble in (
        ("1f1b", 1, 0.2246),
        ("gpipe", 1, 0.1892),
        ("interleaved-1f1b", 4, 0.1066),
        ("looped-bfs", 2, 0.1103),
        ("interleaved-1f1b", 2, 0.1233),
        ("interleaved-zb", 2, 0.0689),
        ("interleaved-zb", 4, 0.0675),
        ("zb-v", 2, 0.0661),
        ("chimera-zb", 1, 0.0689),
        ("bitpipe", 2, 0.216),
        ("v-min", 2, 0.252),
    ):
        timeline = timeline_of(name, 8, 32, chunks, 1, 1, 1, 0.1)
        digits = len(str(bubble)) - 2
        assert round(timeline.bubble_flush, digits) == bubble, name


def test_v_min_grows_worse_with_microbatches_where_times_differ() -> None:
    # F : B : W = 4 : 4 : 3, against 1F1B's .3043 at m=16 and .1795 at m=32.
    assert round(timeline_of("v-min", 8, 16, 2, 4, 4, 3).bubble_flush, 4) == 0.2831
    assert round(timeline_of("v-min", 8, 32, 2, 4, 4, 3).bubble_flush, 4) == 0.1954

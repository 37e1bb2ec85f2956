"""The closed forms that families carry, evaluated against the simulator where they hold."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import sympy

from fxpipe.costs import Costs
from fxpipe.schedules import build, families
from fxpipe.simulator import Timeline, simulate

Times = tuple[tuple[float, float, float], ...]

EQUAL = (1.0, 1.0, 1.0)
ANY = (EQUAL, (2.0, 1.0, 1.0), (1.0, 1.25, 0.75), (3.0, 2.0, 4.0))
SPLIT = (EQUAL, (2.0, 2.0, 1.0), (4.0, 4.0, 3.0))  # F = B >= W

# Where each form holds: ranks, microbatches as multiples of ranks, chunks, times of F, B, W.
HOLDS: dict[str, tuple[tuple[int, ...], tuple[float, ...], tuple[int, ...], Times]] = {
    "gpipe": ((1, 2, 3, 8), (0.5, 1, 2.5, 4), (1,), ANY),
    "1f1b": ((1, 2, 3, 8), (0.5, 1, 2.5, 4), (1,), ANY),
    "eager-1f1b": ((1, 2, 3, 8), (0.5, 1, 2.5, 4), (1,), ANY),
    "interleaved-1f1b": ((2, 3, 4, 8), (1, 2, 4), (2, 3, 4), ANY),
    "combined-1f1b": ((2, 3, 4, 8), (1, 2, 4), (2, 3, 4), ANY),
    "looped-bfs": ((2, 3, 4, 8), (1, 1.5, 4), (2, 3, 4), ANY),
    "zb-h1": ((1, 2, 3, 8), (1, 2.5, 4), (1,), SPLIT),
    "interleaved-zb": ((2, 3, 4, 8), (1, 2, 4), (1, 2, 3, 4), SPLIT),
    "zb-h2": ((1, 2, 3, 8), (2, 2.5, 4), (1,), (EQUAL,)),
    "zb-v": ((1, 2, 3, 8), (2, 2.5, 4), (2,), (EQUAL,)),
    "v-half": ((3, 4, 5, 8, 11, 12), (2, 3), (2,), (EQUAL,)),
    "v-min": ((3, 4, 5, 8, 9, 12), (2, 3), (2,), (EQUAL,)),
    "hanayo": ((2, 3, 4, 8), (1, 2, 4), (2, 4), ((2.0, 1.0, 1.0), (3.0, 1.0, 2.0))),
    "chimera": ((2, 4, 8, 12), (1, 2, 4), (1,), (EQUAL, (2.0, 1.0, 1.0), (1.0, 1.25, 0.75))),
    "chimera-zb": ((2, 4, 8, 12), (1, 2, 4), (1,), (EQUAL, (4.0, 4.0, 3.0), (5.0, 5.0, 3.0))),
    "bitpipe": ((2, 4, 8), (1, 2, 4), (2,), (EQUAL, (2.0, 1.0, 1.0), (1.0, 0.75, 0.75))),
    "dualpipe": ((2, 4, 8), (2, 3, 4), (1,), SPLIT),
    "dualpipev": ((1, 2, 3, 8), (2, 3, 4), (2,), SPLIT),
}


def test_every_family_is_tested() -> None:
    assert set(HOLDS) == set(families())


@cache
def compiled(name: str, which: str) -> Any:
    symbols = sympy.symbols("p m v f F B W", positive=True)
    rank = sympy.Symbol("r", nonnegative=True)
    formula = families()[name].formula(which)
    assert formula is not None, f"{name} has no closed form of {which}"
    assert formula.free_symbols <= {*symbols, rank}
    return sympy.lambdify([*symbols, rank], formula, "sympy")


def cases(name: str) -> Iterator[tuple[Timeline, tuple[float, ...]]]:
    ranks, rounds, chunks, all_times = HOLDS[name]
    for p in ranks:
        for f in (1, 2) if name.startswith("chimera") and p % 4 == 0 else (1,):
            options: dict[str, Any] = {"f": f} if name.startswith("chimera") else {}
            for m in {max(1, int(p * r)) for r in rounds}:
                for v in chunks:
                    for times in all_times:
                        costs = Costs.of_share(*times, ranks=p, stages=p * v)
                        schedule = build(
                            name, stages=p * v, microbatches=m, ranks=p, costs=costs, **options
                        )
                        yield simulate(schedule, costs), (p, m, v, f, *times)


@pytest.mark.parametrize("name", HOLDS)
def test_closed_forms_are_what_the_simulator_finds(name: str) -> None:
    flush, own, peak, messages, weights = (
        compiled(name, which) for which in ("flush", "own", "peak", "messages", "weights")
    )
    by_rank = "r" in families()[name].peak.replace("floor", "")
    for timeline, values in cases(name):
        p = int(values[0])
        case = f"{name} p, m, v, f, F, B, W = {values}"
        assert timeline.bubble_flush_time == pytest.approx(float(flush(*values, 0))), case
        assert timeline.bubble_own_time == pytest.approx(float(own(*values, 0)), abs=1e-9), case
        peaks = timeline.peak_activations
        wanted = [float(peak(*values, r)) for r in range(p)]
        assert max(peaks) == pytest.approx(max(wanted)), case
        if by_rank:
            assert peaks == pytest.approx(wanted), case
        sent = sum(link.messages for link in timeline.links.values())
        assert sent == int(messages(*values, 0)), case
        assert timeline.weights == pytest.approx([float(weights(*values, 0))] * p), case


@pytest.mark.parametrize("name", HOLDS)
def test_families_say_where_they_come_from_and_whether_they_split(name: str) -> None:
    family = families()[name]
    schedule = build(name, stages=8, microbatches=32)
    assert schedule.splits_backward == family.splits_backward
    assert family.source and family.holds and family.summary.endswith(".")

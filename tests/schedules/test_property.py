"""Random sizes and times: a family refuses with its reason, or its schedule runs to the end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.checker import check_schedule
from fxpipe.costs import Costs
from fxpipe.errors import ScheduleError
from fxpipe.schedule import Schedule
from fxpipe.schedules import build, families
from fxpipe.simulator import simulate

times = st.floats(0.0, 8.0, allow_nan=False)


@st.composite
def built(draw: st.DrawFn) -> tuple[str, int, int, Costs, Schedule | str]:
    name = draw(st.sampled_from(sorted(families())))
    stages = draw(st.integers(1, 17))
    ranks = draw(st.none() | st.integers(1, stages))
    microbatches = draw(st.integers(1, 17))
    per_stage = st.lists(times, min_size=stages, max_size=stages)
    costs = Costs(F=draw(per_stage), I=draw(per_stage), W=draw(per_stage), transfer=draw(times))
    options: dict[str, Any] = {"f": draw(st.integers(1, 4))} if name.startswith("chimera") else {}
    limit = draw(st.none() | st.floats(1.0, 20.0))
    try:
        schedule: Schedule | str = build(
            name,
            stages=stages,
            microbatches=microbatches,
            ranks=ranks,
            costs=costs,
            memory_limit=limit,
            **options,
        )
    except ScheduleError as error:
        schedule = str(error)
    return name, stages, microbatches, costs, schedule


@settings(max_examples=300)
@given(built())
def test_a_family_refuses_with_its_reason_or_runs_to_the_end(
    case: tuple[str, int, int, Costs, Schedule | str],
) -> None:
    name, stages, microbatches, costs, schedule = case
    if isinstance(schedule, str):
        assert families()[name].constraint != "none"
        assert "expected an even number; use" in schedule or "does not divide ranks/2" in schedule
        return
    check_schedule(schedule, stages, microbatches)
    timeline = simulate(schedule, costs)
    work = sum(
        microbatches * (f + i + w)
        for f, i, w in zip(timeline.costs.F, timeline.costs.I, timeline.costs.W, strict=True)
    )
    assert sum(timeline.busy) == pytest.approx(work)
    assert timeline.makespan >= max(timeline.busy) - 1e-9


@settings(max_examples=60)
@given(built())
def test_a_familys_text_reads_back_as_the_same_schedule(
    case: tuple[str, int, int, Costs, Schedule | str],
) -> None:
    schedule = case[-1]
    if isinstance(schedule, Schedule):
        assert Schedule.parse(str(schedule)) == schedule

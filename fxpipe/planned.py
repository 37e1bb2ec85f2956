"""A schedule and costs -> the timeline that the simulator expects; measured steps -> such costs."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from fxpipe.costs import Costs, Edge
from fxpipe.errors import ScheduleError
from fxpipe.events import Events, Unit, result_of, text
from fxpipe.messages import receive_of
from fxpipe.schedule import Action, Kind, Pair, Schedule, actions_of, parse_step
from fxpipe.simulator import simulate
from fxpipe.timeline import COMPUTING, Span, Timeline, in_order

# A wait that is shorter found its message already there: it says nothing about how long it took.
_SHORTEST_WAIT = 20e-6


def planned(schedule: Schedule, costs: Costs) -> Timeline:
    """What the simulator expects, in the unit of the costs' times; seconds where they are seconds.

    A schedule with messages gets their spans, which take no time. A wait is there for everything
    that a unit reads from another rank, also where it comes before it is needed.
    """
    simulated = simulate(schedule, costs)
    events = Events(schedule, costs)
    ends = {
        result_of(code): float(end)
        for units, ends in zip(events.units, simulated.ends, strict=True)
        for unit, end in zip(units, ends, strict=True)
        for code in unit
    }
    steps = step_of_results(schedule)
    spans: list[Span] = []
    memory = []
    for rank, units in enumerate(events.units):
        clock, held = 0.0, 0.0
        points = [(0.0, 0.0)]
        times = zip(units, simulated.starts[rank], simulated.ends[rank], strict=True)
        for unit, start, end in times:
            for wait in _waits(events, unit, rank, ends, steps, clock):
                spans.append(wait)
                clock = wait.end
            spans.append(_span(rank, text(unit), float(start), float(end), costs.edges))
            taken, freed = events.memory(unit)
            if taken or freed:
                points += [(float(start), held + taken), (float(end), held + taken - freed)]
            held += taken - freed
            clock = float(end)
        memory.append(tuple(points))
    return Timeline(
        "planned", schedule.num_ranks, float(simulated.makespan), in_order(spans), tuple(memory)
    )


def _waits(
    events: Events,
    unit: Unit,
    rank: int,
    ends: Mapping[int, float],
    steps: Mapping[tuple[int, bool, int], tuple[int, str]],
    clock: float,
) -> Iterator[Span]:
    """The waits of a rank for what a unit reads from others, in the order in which it comes."""
    needs = [(ends[code] + delay, code) for code, delay in events.awaited(unit, rank)]
    for arrival, code in sorted(needs):
        source = events.runner[code]
        if source == rank:
            continue
        awaited = Action.parse(text((code,)))
        backward = awaited.kind is not Kind.F and awaited.kind is not Kind.SEND_F
        step = steps[awaited.stage, backward, awaited.microbatch][1]
        name = step if awaited.kind.is_compute else str(awaited)
        end = max(clock, arrival)
        yield Span(
            rank, "compute", "wait", name, clock, end, f"{step} of rank {source}",
            awaited.stage, awaited.microbatch, _bytes(awaited, events.costs.edges),
        )  # fmt: skip
        clock = end


def step_of_results(schedule: Schedule) -> dict[tuple[int, bool, int], tuple[int, str]]:
    """(stage, whether backward, microbatch) -> the rank and the step, as text, that give it.

    What other stages get of a backward is there after I, or B.
    """
    return {
        (action.stage, action.kind is not Kind.F, action.microbatch): (rank, str(step))
        for rank, steps in enumerate(schedule.ranks)
        for step in steps
        for action in actions_of(step)
        if action.kind in (Kind.F, Kind.I, Kind.B)
    }


def _span(
    rank: int, name: str, start: float, end: float, edges: Mapping[Edge, float] | None
) -> Span:
    track, kind, stage, microbatch = describe(name)
    step = parse_step(name)
    size = None if isinstance(step, Pair) else _bytes(step, edges)
    return Span(rank, track, kind, name, start, end, None, stage, microbatch, size)


def describe(name: str) -> tuple[str, str, int | None, int | None]:
    """Of an action or a pair as text: its track, kind, stage and microbatch; see Span."""
    try:
        step = parse_step(name)
    except ScheduleError:
        return "compute", "other", None, None
    first = actions_of(step)[0]
    if isinstance(step, Pair):
        return "compute", "pair", first.stage, first.microbatch
    track = {"S": "send", "R": "receive"}.get(step.kind.value[0], "compute")
    return track, step.kind.value if track == "compute" else track, first.stage, first.microbatch


def _bytes(action: Action, edges: Mapping[Edge, float] | None) -> int | None:
    """The size of a message, or of what another rank's task gives."""
    if action.kind.is_compute or edges is None:
        return None
    ends = sorted((action.stage, action.other))
    size = edges.get((ends[0], ends[1]))
    return None if size is None else int(size)


# Costs as they were measured.


def measured_costs(timelines: Sequence[Timeline], num_stages: int, known: Costs) -> Costs:
    """Costs with the median seconds of each task and message of measured steps.

    What was not measured (a kind that the schedule does not use) takes no time. Sizes are those of
    `known`, also which stages are connected.
    """
    seconds: dict[str, list[float]] = defaultdict(list)
    for timeline in timelines:
        for span in timeline.spans:
            if span.kind in COMPUTING:
                seconds[_kind_and_stages(span.name)].append(span.seconds)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    by_kind = {
        kind: [median.get(f"{kind} {stage}", 0.0) for stage in range(num_stages)] for kind in "FIWB"
    }
    pairs = [name.split() for name in median if name.startswith("pair")]
    return Costs(
        F=by_kind["F"],
        I=by_kind["I"],
        W=by_kind["W"],
        B=by_kind["B"],
        pair={(int(f), int(b)): median[f"pair {f} {b}"] for _, f, b in pairs} or None,
        transfer=_transfers(timelines, known.edges),
        edges=known.edges,
        activations=known.activations,
        saved_for_w=known.saved_for_w,
        weights=known.weights,
    )


def _kind_and_stages(name: str) -> str:
    step = parse_step(name)
    if isinstance(step, Pair):
        return f"pair {step.forward.stage} {step.backward.stage}"
    return f"{step.kind} {step.stage}"


def _transfers(
    timelines: Sequence[Timeline], edges: Mapping[Edge, float] | None
) -> float | dict[Edge, float]:
    """Seconds from a send to the end of the wait for it, by edge, where the receiver waited."""
    delays: dict[Edge, list[float]] = defaultdict(list)
    for timeline in timelines if edges is not None else ():
        if timeline.shared_thread:
            continue
        sends = {span.name: span for span in timeline.spans if span.kind == "send"}
        for span in timeline.spans:
            if span.kind == "wait" and span.name in sends and span.seconds > _SHORTEST_WAIT:
                send = _message(span.name)
                if send is not None:
                    delays[send].append(max(0.0, span.end - sends[span.name].end))
    if edges is None:
        return 0.0
    ways = [way for edge in edges for way in (edge, (edge[1], edge[0]))]
    return {way: statistics.median(delays[way]) if delays[way] else 0.0 for way in ways}


def _message(name: str) -> Edge | None:
    """The stages of a message that is an action."""
    try:
        action = Action.parse(name)
    except ScheduleError:
        return None
    return action.stage, action.other


def receive_name(message: str) -> str:
    """`0SEND_F3` -> `1RECV_F3`: the action that posts its receive; other messages as they are."""
    try:
        return str(receive_of(Action.parse(message)))
    except ScheduleError:
        return message

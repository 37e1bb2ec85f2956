"""`fxpipe.trace("folder")` and the option `trace`: recorded steps of all ranks -> files.

trace.json       for chrome://tracing and ui.perfetto.dev: measured and planned, a track per rank
timelines.json   the same as fxpipe.timeline has it: {"planned": ..., "measured": [...]}
metrics.json     a few numbers per step and rank
explanation.json what the compiler made of the model, as fxpipe.explanation has it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fxpipe.dump import EXPLANATION
from fxpipe.errors import OptionError
from fxpipe.explain_program import explain_program
from fxpipe.files import make_folder, write_json
from fxpipe.log import logger
from fxpipe.lowering.auto import costs_of
from fxpipe.lowering.clocks import machine, offsets
from fxpipe.lowering.group import gather_objects, num_ranks, this_rank
from fxpipe.lowering.measure import Times
from fxpipe.lowering.plan import Plan
from fxpipe.lowering.recording import Recorded, Recorder, memory_of, spans_of
from fxpipe.lowering.run import Recording
from fxpipe.options import Options
from fxpipe.planned import measured_costs, planned
from fxpipe.timeline import Span, Timeline, in_order
from fxpipe.views.chrome_trace import chrome_trace

log = logger(__name__)

FIRST_STEPS = 5  # of each trace of a model that the option records
STEPS_OF_BLOCK = 100
FILES = ("trace.json", "timelines.json", "metrics.json")

_blocks: list[tuple[Recorder, list[str]]] = []  # and the folders of blocks within that recorded


@contextmanager
def trace(folder: str | Path, steps: int = STEPS_OF_BLOCK) -> Iterator[None]:
    """Record the steps that run in the block, the first `steps` of them, and write the files.

    Nothing is compiled anew, and once the block has ended nothing is noted any more. Every rank
    enters and leaves the block; rank 0 writes. Of blocks within one another the innermost records a
    step, the others do not. Where the block ends with an error, what this
    process has recorded is written if all ranks are in it, else nothing.
    """
    if steps < 1:
        raise OptionError(f"trace(steps={steps}) records nothing; expected at least 1")
    make_folder(folder, "the trace", "fxpipe.trace")
    recorder, within = Recorder(steps), list[str]()
    _blocks.append((recorder, within))
    try:
        yield
    except BaseException:
        if num_ranks() == 1 and recorder.steps:
            write(folder, recorder.steps)
        raise
    finally:
        _blocks.remove((recorder, within))
        if _blocks:
            _blocks[-1][1].extend([str(folder)] * bool(recorder.steps) + within)
    if within and not recorder.steps:
        log.warning(
            "fxpipe.trace(%r) has recorded nothing: the steps in it ran in a block within, "
            "fxpipe.trace(%r), and the innermost block records; leave one of the two out",
            str(folder), within[0],
        )  # fmt: skip
    elif not recorder.steps:
        log.warning("fxpipe.trace(%r) ended without a step of a pipelined model", str(folder))
    if recorder.left_out:
        log.info("%d steps after the first %d were not recorded", recorder.left_out, steps)
    write(folder, recorder.steps)


class FirstSteps(Recorder):
    """The first steps of a compiled model; the files are written anew after each of them."""

    def __init__(self, folder: str) -> None:
        super().__init__(FIRST_STEPS)
        self.folder = folder
        make_folder(folder, "the trace", "the option trace")

    def tell(self) -> None:
        write(self.folder, self.steps)


def begin_recording(plan: Plan, first_steps: Recorder | None) -> Recording | None:
    """What records the next step of a plan, if something does: the innermost block comes first."""
    recorder = _blocks[-1][0] if _blocks else first_steps
    return recorder.begin(plan) if recorder is not None else None


# What ranks tell each other.


@dataclass(frozen=True)
class Part:
    """What one process knows of a step; seconds after `origin`, nanoseconds of its own clock."""

    number: int
    digest: int
    origin: int
    seconds: float
    spans: tuple[Span, ...]
    memory: Mapping[int, tuple[tuple[float, float], ...]]


def part_of(step: Recorded) -> Part:
    return Part(
        step.number,
        step.plan.digest,
        step.begin,
        (step.end - step.begin) / 1e9,
        tuple(spans_of(step, step.begin)),
        memory_of(step, step.begin),
    )


def write(folder: str | Path, steps: Sequence[Recorded]) -> None:
    """Bring the steps of all ranks together; rank 0 writes the files."""
    own = [part_of(step) for step in steps]
    parts, clocks = [own], [0]
    if num_ranks() > 1:
        limit = max((s.plan.timeout or 0.0 for s in steps), default=0.0) or Options().timeout
        told = gather_objects("the end of a trace", (machine(), own), limit)
        parts = [part for _, part in told]
        clocks = offsets([name for name, _ in told], limit)
    if this_rank() or not steps:
        return
    begins, measured = merge(parts, clocks)
    last = steps[-1].plan
    explanation = explain_program(last.program, last.rows, last.programs)
    write_files(Path(folder), begins, measured, expected(last, steps, measured))
    write_json(Path(folder) / EXPLANATION, explanation.to_json())
    log.info("recorded %d steps in %s", len(measured), folder)


def merge(
    parts: Sequence[Sequence[Part]], clocks: Sequence[int]
) -> tuple[list[float], list[Timeline]]:
    """Per process its steps, and what to add to its clock -> when each step began, and timelines.

    Only steps that all have ended count. The first one begins at 0.
    """
    numbers = set.intersection(*({part.number for part in of_rank} for of_rank in parts))
    begins: list[int] = []
    timelines: list[Timeline] = []
    for number in sorted(numbers):
        same = [next(p for p in of_rank if p.number == number) for of_rank in parts]
        starts = [part.origin + clock for part, clock in zip(same, clocks, strict=True)]
        begin = min(starts)
        later = [(start - begin) / 1e9 for start in starts]
        begins.append(begin)
        timelines.append(one_timeline(number, same, later))
    return [(begin - begins[0]) / 1e9 for begin in begins], timelines


def one_timeline(number: int, parts: Sequence[Part], later: Sequence[float]) -> Timeline:
    """later: seconds by which each process began after the first."""
    spans = [
        replace(span, start=span.start + delay, end=span.end + delay)
        for part, delay in zip(parts, later, strict=True)
        for span in part.spans
    ]
    memory = {
        rank: tuple((at + delay, size) for at, size in points)
        for part, delay in zip(parts, later, strict=True)
        for rank, points in part.memory.items()
    }
    duration = max(part.seconds + delay for part, delay in zip(parts, later, strict=True))
    return Timeline(
        "measured",
        len(memory),
        duration,
        in_order(spans),
        tuple(memory[rank] for rank in sorted(memory)),
        number,
        shared_thread=len(parts) == 1 and len(memory) > 1,
    )


def expected(
    plan: Plan, steps: Sequence[Recorded], measured: Sequence[Timeline]
) -> Timeline:  # fmt: skip
    """The planned timeline: the schedule simulated with the median times of its measured tasks."""
    of_plan = {step.number for step in steps if step.plan is plan}
    same = [timeline for timeline in measured if timeline.step in of_plan]
    sizes = costs_of(plan.program, Times({}))
    costs = measured_costs(same, plan.program.schedule.num_stages, sizes)
    return planned(plan.program.schedule, costs)


# Files.


def write_files(
    folder: Path, begins: Sequence[float], measured: Sequence[Timeline], plan: Timeline
) -> None:
    steps = list(zip(begins, measured, strict=True))
    # The plan lies above the last step, where it can be compared with it.
    traced = chrome_trace([(begins[-1], plan), *steps] if steps else [(0.0, plan)])
    timelines = {
        "planned": plan.to_json(),
        "measured": [timeline.to_json() for timeline in measured],
    }
    numbers = {"planned": numbers_of(plan), "steps": [numbers_of(each) for each in measured]}
    for name, value in zip(FILES, (traced, timelines, numbers), strict=True):
        write_json(folder / name, value)


def numbers_of(timeline: Timeline) -> dict[str, Any]:
    """What is worth plotting of a step."""
    ranks = []
    for rank in range(timeline.num_ranks):
        spans, shares = timeline.of_rank(rank), timeline.shares(rank)
        ranks.append(
            {
                "rank": rank,
                "seconds": shares,
                "waiting_seconds": shares["idle"],
                "bytes_sent": sum(span.bytes or 0 for span in spans if span.kind == "send"),
                "bytes_received": sum(span.bytes or 0 for span in spans if span.kind == "receive"),
                "peak_held_bytes": timeline.peak_memory(rank),
            }
        )
    return {
        "step": timeline.step,
        "step_seconds": timeline.duration,
        "bubble": timeline.bubble(),
        "ranks": ranks,
    }


def peak_of_device() -> int | None:
    """The most that torch has had allocated on this process's GPU, in bytes; None without one."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.max_memory_allocated())

"""One rank of the suite: every contestant in turn, round after round, and what the tasks tell."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from contestants import (
    NUM_RANKS,
    PEERS,
    PEERS_WITH_COMPILED_STAGES,
    Contestant,
    Model,
    stages_of,
)
from cores import keep_to_core
from formulas import closed_count, closed_form, costs_of
from gpt import PRESETS, Preset, layers_of
from replay import Recorded, Span

from fxpipe.costs import Costs
from fxpipe.messages import without_messages
from fxpipe.simulator import simulate

ALONE = "tasks alone"


def work(rank: int, store: str, arguments: argparse.Namespace, results: SimpleQueue[Any]) -> None:
    """A rank's process: all presets, one after another; rank 0 hands over what was measured."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(arguments.cache, f"rank{rank}")
    keep_to_core(rank, NUM_RANKS)
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # the same modules, compiled for every contestant
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=NUM_RANKS)
    found = {}
    for preset in arguments.preset:
        if not preset.startswith("deep"):
            found[preset] = PresetRun(preset, arguments).measure()
            torch._dynamo.reset()
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def everywhere(own: Any) -> list[Any]:
    parts: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(parts, own)
    return parts


def progress(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


class PresetRun:
    """All that is measured of one preset within the group of ranks."""

    def __init__(self, preset: str, arguments: argparse.Namespace) -> None:
        self.preset, self.arguments = preset, arguments
        self.size: Preset = PRESETS[preset]
        self.parts: Sequence[str] = arguments.parts
        self.lowerings: Sequence[str] = arguments.lowerings
        self.rounds = arguments.rounds or self.size.rounds
        self.steps = arguments.steps or self.size.steps
        self.model = Model(self.size, layers_of(self.size), arguments.compiler)
        self.recorded: dict[str, Recorded] = {}

    def measure(self) -> dict[str, Any]:
        contestants = []
        for make in self.makers():
            contestant = make()
            start = time.perf_counter()
            contestant.run(self.model.optimizer)
            progress(
                f"{self.preset}: {contestant.schedule or 'no pipeline'}, {contestant.name}: first "
                f"step after {time.perf_counter() - start:.1f} s"
            )
            contestants.append(contestant)
        self.rotate(contestants)
        found: dict[str, Any] = {"rounds": self.rounds, "steps": self.steps}
        found["microbatches"] = self.size.microbatches
        found["rows"] = [merged(contestant) for contestant in contestants]
        found["losses"] = equal_losses(found["rows"])
        if "split" in self.parts:
            found["tasks"] = {name: tasks_of(r) for name, r in self.recorded.items()}
        if "steps" in self.parts:
            found["bubble"] = {name: self.bubble(r) for name, r in self.recorded.items()}
            found["sent"] = {name: self.sent(r) for name, r in self.recorded.items()}
        if "memory" in self.parts:
            found["live"] = {name: self.live(r) for name, r in self.recorded.items()}
        return found

    # Who takes part.

    def makers(self) -> list[Callable[[], Contestant]]:
        """Contestants to be made. Torch's come first: fxpipe sets guards for the whole process."""
        model = self.model
        makers: list[Callable[[], Contestant]] = []
        if "steps" in self.parts:
            makers.append(lambda: model.alone(False))
        if {"steps", "single"} & set(self.parts):
            makers.append(lambda: model.alone(True))
        if {"steps", "host"} & set(self.parts):
            makers += self.peers()
        for lowering in self.lowerings:
            if {"steps", "host"} & set(self.parts):
                makers += [
                    lambda s=s, low=lowering: model.fxpipe_pipeline(s, low)  # type: ignore[misc]
                    for s in self.arguments.schedules
                ]
            if "single" in self.parts:
                makers.append(lambda low=lowering: model.fxpipe_alone(low))  # type: ignore[misc]
        wanted = list(self.arguments.schedules)
        if not {"steps", "host", "memory"} & set(self.parts):
            wanted = [s for s in ("1f1b", "zb-h1") if s in wanted and "split" in self.parts]
        makers += [lambda s=s: self.tasks_alone(s) for s in wanted]  # type: ignore[misc]
        return makers

    def peers(self) -> list[Callable[[], Contestant]]:
        model = self.model
        names = [s for s in self.arguments.schedules if s in PEERS]
        compiled = [s for s in names if s in PEERS_WITH_COMPILED_STAGES]
        makers = [lambda s=s: model.torch_pipeline(s) for s in names]  # type: ignore[misc]
        makers += [lambda s=s: model.torch_pipeline(s, True) for s in compiled]  # type: ignore[misc]
        if "host" in self.parts:
            for flag, own in ((False, names), (True, compiled)):
                for stages in sorted({stages_of(s) for s in own}):
                    makers.append(lambda n=stages, c=flag: model.torch_tasks(n, c))  # type: ignore[misc]
        return makers

    def tasks_alone(self, schedule: str) -> Contestant:
        """The bound of a schedule: each rank's tasks in order, inputs at hand."""
        captured, lowering = self.model.captured, self.lowerings[0]
        step = captured.step(schedule, stages_of(schedule), lowering, NUM_RANKS)
        recorded = Recorded(step, captured.runner(step), dist.get_rank())
        self.recorded[schedule] = recorded
        return Contestant(f"fxpipe, {lowering}, {ALONE}", schedule, recorded.run_alone)

    def rotate(self, contestants: list[Contestant]) -> None:
        for contestant in contestants:
            for _ in range(self.arguments.warm):
                contestant.run(self.model.optimizer)
        start = time.perf_counter()
        for recorded in self.recorded.values():
            recorded.alone.clear()
        for number in range(self.rounds):
            turn = number * len(contestants) // self.rounds
            for contestant in contestants[turn:] + contestants[:turn]:
                contestant.run_round(self.model.optimizer, self.steps)
            progress(
                f"{self.preset}: round {number + 1} of {self.rounds}, "
                f"{time.perf_counter() - start:.0f} s"
            )

    # What the tasks of a pipeline tell.

    def steps_of(self, recorded: Recorded) -> list[list[list[Span]]]:
        """Per step, per rank, the calls of the tasks."""
        own = []
        for _ in range(max(5, self.rounds)):
            self.model.optimizer.zero_grad()
            dist.barrier()
            own.append(recorded.spans())
        return list(zip(*everywhere(own)))  # type: ignore[arg-type]

    def bubble(self, recorded: Recorded) -> dict[str, Any]:
        """Idle parts of a step from its first task to its last: measured, and as they should be."""
        schedule = without_messages(recorded.program.schedule)
        rows = []
        for ranks in self.steps_of(recorded):
            spans = [span for own in ranks for span in own]
            whole = max(s.end for s in spans) - min(s.start for s in spans)
            busy = sum(s.end - s.start for s in spans)
            costs = costs_of(spans, recorded.program.num_stages)
            simulated = simulate(schedule, costs).bubble_flush
            rows.append(
                {
                    "measured": 1 - busy / (len(ranks) * whole),
                    "simulated": simulated,
                    "closed_form": closed_form(schedule, costs),
                }
            )
        return {
            "steps": rows,
            **{
                key: statistics.median(r[key] for r in rows)
                for key in rows[0]
                if rows[0][key] is not None
            },
        }

    def sent(self, recorded: Recorded) -> dict[str, Any]:
        """Messages and bytes of a step by rank, beside the family's own count of messages."""
        size = self.size
        activation = size.microbatch * size.context * size.width * 4
        messages = closed_count(recorded.program.schedule, "messages")
        return {
            "ranks": everywhere(recorded.sent()),
            "messages_by_formula": messages,
            "bytes_by_formula": None if messages is None else messages * activation,
        }

    def live(self, recorded: Recorded) -> dict[str, Any]:
        """The most bytes of saved activations alive at once on each rank, beside the schedule's.

        By the schedule: what one microbatch of each stage saves, as often as the schedule holds it.
        """
        parts = everywhere((recorded.shares, recorded.peak_of_saved()))
        shares = {stage: size for own, _ in parts for stage, size in own.items()}
        costs = Costs(activations=[shares[s] for s in range(recorded.program.num_stages)])
        expected = simulate(without_messages(recorded.program.schedule), costs).peak_activations
        return {"measured": [peak for _, peak in parts], "expected": expected, "shares": shares}


def tasks_of(recorded: Recorded) -> list[list[dict[str, float]]]:
    """Per rank, per run of the tasks alone, the seconds of each task."""
    return everywhere([{str(key): s for key, s in run.items()} for run in recorded.alone])


def equal_losses(rows: Sequence[dict[str, Any]]) -> tuple[float, float] | None:
    """The least and the greatest loss of any step. Raises where they are not one loss."""
    losses = [loss for row in rows if row["losses"] for loss in row["losses"]]
    if losses and max(losses) - min(losses) > 1e-4 * abs(max(losses)):
        raise RuntimeError(f"the contestants do not compute the same: {min(losses)}, {max(losses)}")
    return (min(losses), max(losses)) if losses else None


def merged(contestant: Contestant) -> dict[str, Any]:
    """A contestant's times by round and step: of the slower rank; CPU of both."""
    parts = everywhere((contestant.rounds, contestant.losses))
    ranks = [rounds for rounds, _ in parts]
    losses = [loss for _, own in parts for loss in own]
    taking = [steps for steps in zip(*ranks)]

    def table(pick: Callable[[Sequence[float]], float], name: str) -> list[list[float]]:
        return [
            [pick([getattr(t, name) for t in times]) for times in zip(*of_ranks)]
            for of_ranks in taking
        ]

    return {
        "name": contestant.name,
        "schedule": contestant.schedule,
        "whole": table(max, "whole"),
        "inner": table(max, "inner"),
        "cpu": table(sum, "cpu"),
        "losses": [min(losses), max(losses)] if losses else None,
    }

"""The simulator's step time of four schedules -> beside what two gloo ranks need for them.

The GPT of examples/train_gpt.py, one thread and one core a rank. Both ranks time their tasks, as
schedule="auto" does, and a message there and back; the simulator makes a step of that ("alone"). It
makes another of the times that the tasks, and the starting of their messages, took within the
measured steps themselves ("within"): what is left of the difference is the simulator's own. All
schedules take turns, so that whatever else the machine does falls on all of them. The measured time
is from the first call of either rank to the last one's end. Numbers are means over all rounds, as a
step is the sum of its tasks; `--take least` says more where other work runs on the same cores.

python benchmarks/simulated_against_measured.py --rounds 30 --lowering eager
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cores import keep_to_core

from fxpipe.backend import fxpipe
from fxpipe.lowering.auto import costs_of
from fxpipe.lowering.executor import Executor, Instruction
from fxpipe.lowering.measure import Times, measure_messages, measure_tasks
from fxpipe.lowering.runtime import Step
from fxpipe.messages import without_messages
from fxpipe.program import Key, Program
from fxpipe.schedule import Action
from fxpipe.simulator import simulate

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from train_gpt import GPT, batch  # noqa: E402 - found by the line above

NUM_RANKS, MICROBATCHES = 2, 8
SCHEDULES = {"1f1b": 2, "zb-h1": 2, "interleaved-1f1b": 4, "interleaved-zb": 4}
WARM_UP, TIMINGS = 3, 5
TAKE = {"mean": statistics.mean, "median": statistics.median, "least": min}
LIMIT = 0.10  # what a simulated time may differ by

Take = Callable[[Sequence[float]], float]


class Span(NamedTuple):
    """One call of a rank program; seconds of the clock that all processes share."""

    name: str
    waits: bool
    start: float
    end: float


class Contestant:
    """A compiled GPT whose step tells the time of every call."""

    def __init__(self, schedule: str, stages: int, lowering: str) -> None:
        torch.manual_seed(0)
        self.model, self.spans = GPT(), list[Span]()
        options = {"stages": stages, "microbatches": MICROBATCHES, "schedule": schedule}

        def backend(gm: Any, inputs: Sequence[Any]) -> Any:
            self.step: Step = fxpipe(gm, inputs, options=options | {"lowering": lowering})  # type: ignore[assignment]
            return lambda *values: self.step(*values)

        self.compiled = torch.compile(self.model, backend=backend)
        self.run()
        (plan,) = self.step.plans.values()
        self.program: Program = plan.program
        (executor,) = plan.executors
        watch(executor, self.spans)

    def run(self) -> float:
        """One step; its seconds as the user sees them."""
        self.model.zero_grad()
        self.spans.clear()
        dist.barrier()
        start = time.perf_counter()
        self.compiled(*batch(1)).backward()
        return time.perf_counter() - start


def watch(executor: Executor, spans: list[Span]) -> None:
    def timed(instruction: Instruction) -> Instruction:
        call, name, awaits = instruction

        def run(slots: Any) -> None:
            start = time.perf_counter()
            call(slots)
            spans.append(Span(name, awaits is not None, start, time.perf_counter()))

        return instruction._replace(run=run)

    executor.instructions = [timed(instruction) for instruction in executor.instructions]


def busy(spans: Sequence[Span]) -> dict[Key, list[float]]:
    """The seconds of each task; starting the messages that follow a task counts as its own."""
    found: dict[Key, list[float]] = {}
    current: list[float] | None = None
    for name, waits, start, end in spans:
        if name[0].isdigit():
            action = Action.parse(name)
            current = found.setdefault(Key(action.stage, action.kind), [])
            current.append(end - start)
        elif current is not None and not waits:
            current[-1] += end - start
    return found


def everywhere(own: Any) -> list[Any]:
    parts: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(parts, own)
    return parts


def merged(own: Mapping[Key, float]) -> dict[Key, float]:
    return {key: seconds for part in everywhere(dict(own)) for key, seconds in part.items()}


def simulated(program: Program, times: Times) -> float:
    return simulate(without_messages(program.schedule), costs_of(program, times)).makespan


def compare(
    contestant: Contestant, rounds: Sequence[tuple[float, list[Span]]], take: Take
) -> dict[str, Any]:
    """A row of the table, in seconds; the same on every rank."""
    program = contestant.program
    own = [stage for stage in program.holders if dist.get_rank() in program.holders[stage]]
    timings = [measure_tasks(program, contestant.step.compile, own) for _ in range(TIMINGS)]
    alone = merged({key: take([timing[key] for timing in timings]) for key in timings[0]})
    sent = everywhere([measure_messages(program) for _ in range(TIMINGS)])[0]
    messages = dict(zip(("message", "per_byte", "handling"), map(take, zip(*sent))))
    wholes, tasks, ends = [], dict[Key, list[float]](), []
    for whole, spans in rounds:
        wholes.append(whole)
        ends.append((spans[0].start, spans[-1].end))
        for key, seconds in busy(spans).items():
            tasks.setdefault(key, []).extend(seconds)
    within = merged({key: take(seconds) for key, seconds in tasks.items()})
    spans_of_ranks = zip(*everywhere(ends))
    spent = [max(end for _, end in s) - min(start for start, _ in s) for s in spans_of_ranks]
    measured = take(spent)
    return {
        "measured": measured,
        "alone": simulated(program, Times(alone, **messages)),
        "within": simulated(program, Times(within, **messages | {"handling": 0.0})),
        "whole_step": take(list(map(max, zip(*everywhere(wholes))))),
        "quartiles": statistics.quantiles(spent, n=4),
        "messages": messages,
        "tasks_alone": {str(key): seconds for key, seconds in sorted(alone.items())},
        "tasks_within": {str(key): seconds for key, seconds in sorted(within.items())},
    }


def work(rank: int, store: str, rounds: int, lowering: str, take: str, output: str) -> None:
    keep_to_core(rank, NUM_RANKS)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=NUM_RANKS)
    contestants = {name: Contestant(name, of, lowering) for name, of in SCHEDULES.items()}
    found: dict[str, list[Any]] = {name: [] for name in SCHEDULES}
    for number in range(rounds + WARM_UP):
        for name, contestant in contestants.items():
            whole = contestant.run()
            if number >= WARM_UP:
                found[name].append((whole, list(contestant.spans)))
    rows = {name: compare(c, found[name], TAKE[take]) for name, c in contestants.items()}
    if rank == 0:
        report(rows, {"rounds": rounds, "lowering": lowering, "take": take}, output)
    dist.barrier()
    dist.destroy_process_group()


def report(rows: Mapping[str, Mapping[str, Any]], about: Mapping[str, Any], output: str) -> None:
    print(f"{'schedule':<18}{'measured ms':>12}{'alone ms':>10}{'within ms':>11}{'step ms':>9}")
    for name, row in rows.items():
        off = {key: row[key] / row["measured"] - 1 for key in ("alone", "within")}
        print(
            f"{name:<18}{1e3 * row['measured']:>12.1f}"
            f"{1e3 * row['alone']:>10.1f}{1e3 * row['within']:>11.1f}"
            f"{1e3 * row['whole_step']:>9.1f}   off by {100 * off['alone']:+.1f} % and "
            f"{100 * off['within']:+.1f} %"
        )
    measured = sorted(rows, key=lambda name: rows[name]["measured"])
    verdict: dict[str, Any] = {}
    for key in ("alone", "within"):
        worst = max(abs(row[key] / row["measured"] - 1) for row in rows.values())
        same = sorted(rows, key=lambda name: rows[name][key]) == measured
        verdict[key] = {"same_order": same, "worst": worst, "within_limit": worst <= LIMIT}
        print(f"tasks timed {key}: {'the same' if same else 'another'} order, worst {worst:.1%}")
    result = {"about": about, "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    text = json.dumps(result | {"verdict": verdict, "schedules": rows})
    if output:
        Path(output).write_text(f"{text}\n")
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--lowering", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--take", default="mean", choices=TAKE)
    parser.add_argument("--output", default="", help="a file for the JSON as well")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/store", given.rounds, given.lowering, given.take, given.output)
        mp.spawn(work, arguments, nprocs=NUM_RANKS)


if __name__ == "__main__":
    main()

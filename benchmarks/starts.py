"""Processes that start afresh: the time to their first step, and the memory that they take.

Every measurement has processes of its own, one core each, with a compiler cache that is empty or
kept from an earlier one. The clock starts when torch is imported and the model is built.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from contestants import NUM_RANKS, Model, stages_of
from cores import keep_to_core
from gpt import GPT, PRESETS, fxpipe_options, layers_of
from torch import nn

import fxpipe

STEPS = 3  # whose memory counts, after as many that do not


class Start(NamedTuple):
    """What a process is to start. `how` is a lowering of fxpipe, or torch's compiler, or eager."""

    kind: str  # "fxpipe", "torch", "one process"
    preset: str
    how: str
    schedule: str = ""

    @property
    def num_ranks(self) -> int:
        return 1 if self.kind == "one process" else NUM_RANKS

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.preset, self.schedule, self.kind, self.how)))


def measure(start: Start, cache: str) -> dict[str, Any]:
    """Run it in new processes. Seconds are the slower rank's, CPU seconds the sum."""
    print(f"{time.strftime('%H:%M:%S')} start: {start}", file=sys.stderr, flush=True)
    results: SimpleQueue[Any] = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(begin, (f"{folder}/store", start, cache, results), nprocs=start.num_ranks)
    found = sorted((results.get() for _ in range(start.num_ranks)), key=lambda r: r["rank"])
    return {
        "first": max(r["first"] for r in found),
        "cpu": sum(r["cpu"] for r in found),
        "ranks": found,
    }


def begin(rank: int, store: str, start: Start, cache: str, results: SimpleQueue[Any]) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(cache, f"rank{rank}")
    keep_to_core(rank, NUM_RANKS)
    torch.set_num_threads(1)
    if start.num_ranks > 1:
        dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=NUM_RANKS)
    step, parameters, forget = STARTS[start.kind](start)
    cpu, clock = cpu_seconds(), time.perf_counter()
    step()
    first, cpu = time.perf_counter() - clock, cpu_seconds() - cpu
    forget()
    owned = parameters()
    resident, peak = memory(step, torch.optim.SGD(owned, lr=0.0))
    results.put(
        {"rank": rank, "first": first, "cpu": cpu, "resident": resident, "peak": peak}
        | {"parameters": sum(p.nbytes for p in owned)}
    )
    if start.num_ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


Parameters = Callable[[], list[nn.Parameter]]
Begun = tuple[Callable[[], Any], Parameters, Callable[[], Any]]


def begin_fxpipe(start: Start) -> Begun:
    size = PRESETS[start.preset]
    helper = Model(size, layers_of(size), start.how)
    model, tokens, targets = helper.gpt, helper.tokens, helper.targets
    options = fxpipe_options(size, start.schedule, stages_of(start.schedule), start.how)
    compiled = torch.compile(model, backend="fxpipe", options=options)
    own: Parameters = lambda: list(fxpipe.owned_parameters(compiled).values())  # noqa: E731
    return (
        lambda: compiled(tokens, targets).backward(),
        own,
        lambda: fxpipe.free_unowned(compiled),
    )


def begin_torch(start: Start) -> Begun:
    size = PRESETS[start.preset]
    model = Model(size, layers_of(size), start.how)
    schedule, compiled = start.schedule, start.how != "eager"
    contestant = model.torch_pipeline(schedule, compiled)
    own = [p for _, m in model.torch_stages(schedule, False) for p in m.parameters()]
    assert contestant.step is not None
    return contestant.step, lambda: own, model.forget


def begin_alone(start: Start) -> Begun:
    """One microbatch, forward and backward."""
    size = PRESETS[start.preset]
    helper = Model(size, layers_of(size), start.how)
    tokens, targets = helper.microbatches()[0]
    model = torch.compile(GPT(helper.layers), backend=start.how)
    parameters = list(helper.gpt.parameters())
    return lambda: model(tokens, targets).backward(), lambda: parameters, lambda: None


STARTS: dict[str, Callable[[Start], Begun]] = {
    "fxpipe": begin_fxpipe,
    "torch": begin_torch,
    "one process": begin_alone,
}


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for: C++ compilers are processes."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def memory(step: Callable[[], Any], optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Bytes resident before some steps, and at their peak."""

    def run() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            step()
            optimizer.step()

    run()
    optimizer.zero_grad()
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = from_status("VmRSS")
    forget_peak()
    run()
    return before, from_status("VmHWM")


def from_status(name: str) -> int:
    """A line of /proc/self/status in bytes; elsewhere the process's peak so far."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    lines = status.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def forget_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass  # the peak is then that of the whole life of the process

"""A pipelined step without its tasks -> where the CPU time around them goes.

Two ranks run the suite's model with tasks that return at once what they returned before. What a
rank still takes is what fxpipe, Dynamo and autograd cost in each step: per part, without the parts
that it calls. Prints the medians over steps; first those of whole steps without the clocks within.

python benchmarks/step_cost.py --preset small --schedule 1f1b --steps 300
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
import torch.multiprocessing as mp
from cores import keep_to_core
from gpt import GPT, PRESETS, batch, fxpipe_options, layers_of
from ways import RANKS, STAGES

from fxpipe.lowering import run, runtime
from fxpipe.lowering.tasks import TaskCompiler
from fxpipe.lowering.transport import GroupTransport

PARTS: tuple[tuple[Any, str, str], ...] = (
    (torch.Tensor, "backward", "autograd's engine"),
    (runtime.Step, "__call__", "autograd's node"),
    (runtime.Step, "plan_together", "look up the plan"),
    (runtime.Step, "complete", "return outputs"),
    (runtime, "agree", "agree with other ranks"),
    (run, "prologue_values", "prologue"),
    (run.Run, "__init__", "fill the slots"),
    (run.Run, "advance", "calls of the rank program"),
    (run.PipelinedStep, "backward", "hand out gradients"),
    (GroupTransport, "send", "send messages"),
    (GroupTransport, "wait", "take messages"),
    (GroupTransport, "listen", "look for messages"),
)
REST = "guards of Dynamo, the module's call"


class Clocks:
    """CPU time of this thread by part: what a part's own callees take goes to them."""

    def __init__(self) -> None:
        self.taken: dict[str, int] = defaultdict(int)
        self.inner: list[int] = []

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            self.inner.append(0)
            start = time.thread_time_ns()
            try:
                return function(*arguments, **keywords)
            finally:
                whole = time.thread_time_ns() - start
                self.taken[part] += whole - self.inner.pop()
                if self.inner:
                    self.inner[-1] += whole

        return timed

    def install(self) -> None:
        for owner, name, part in PARTS:
            static = isinstance(vars(owner)[name], staticmethod)
            timed = self.around(part, getattr(owner, name))
            setattr(owner, name, staticmethod(timed) if static else timed)

    def step(self) -> dict[str, int]:
        """What was taken since the last call."""
        taken, self.taken = dict(self.taken), defaultdict(int)
        return taken


def remembering(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
    """Tasks that compute once. Their accumulators stay as they are: no part of this reads them."""

    def compiled(self: TaskCompiler, graph: fx.GraphModule) -> Callable[..., Any]:
        function = compile_graph(self, graph)
        known: list[Any] = []

        def task(*arguments: Any) -> Any:
            if not known:
                known.append(tuple(function(*arguments)))
            return known[0]

        return task

    return compiled


def work(rank: int, folder: str, given: argparse.Namespace) -> None:
    keep_to_core(rank, RANKS)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    TaskCompiler.__call__ = remembering(TaskCompiler.__call__)  # type: ignore[method-assign]
    size = PRESETS[given.preset]
    options = fxpipe_options(size, given.schedule, STAGES[given.schedule], "eager")
    model = GPT(layers_of(size))
    compiled = torch.compile(model, backend="fxpipe", options=options)
    inputs = batch(size)

    def step() -> None:
        compiled(*inputs).backward()

    def cpu_of(step: Callable[[], None]) -> int:
        model.zero_grad()
        dist.barrier()
        start = time.process_time_ns()
        step()
        return time.process_time_ns() - start

    for _ in range(10):
        cpu_of(step)
    whole = [cpu_of(step) for _ in range(given.steps)]
    clocks = Clocks()
    clocks.install()
    timed = clocks.around(REST, step)
    parts = []
    for _ in range(given.steps):
        cpu_of(timed)
        parts.append(clocks.step())
    if rank == 0:
        report(whole, parts, STAGES[given.schedule] // RANKS * size.microbatches)
    dist.barrier()
    dist.destroy_process_group()


def report(whole: list[int], parts: list[dict[str, int]], count: int) -> None:
    """`count`: (stage, microbatch) pairs of this rank."""
    middle = statistics.median(whole) / 1e3
    print(f"{middle:>9.0f} us a step of a rank, {middle / count:.0f} us a (stage, microbatch)")
    medians = {p: statistics.median(own.get(p, 0) for own in parts) / 1e3 for p in parts[0]}
    for part, taken in sorted(medians.items(), key=lambda item: -item[1]):
        print(f"{taken:>9.0f}    {part}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="small", choices=PRESETS)
    parser.add_argument("--schedule", default="1f1b", choices=STAGES)
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (folder, given), nprocs=RANKS)


if __name__ == "__main__":
    main()

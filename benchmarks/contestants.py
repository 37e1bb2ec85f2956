"""A preset and a schedule to what takes part in a benchmark: a step, timed on every rank.

All contestants share one set of parameters, and a learning rate of 0 keeps them as they are: every
contestant computes the same loss in every step, which is checked, and runs on the same memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from gpt import GPT, Preset, batch, fxpipe_options, loss_of, stage_modules
from torch import Tensor, nn
from torch.distributed import pipelining

from fxpipe.backend import fxpipe
from fxpipe.lowering.runtime import Step
from fxpipe.lowering.tasks import TaskCompiler
from fxpipe.options import Options
from fxpipe.passes import default_pipeline

NUM_RANKS = 2
# Schedules by the names of fxpipe; those that are not here have one stage a rank.
TWO_STAGES_A_RANK = frozenset(
    ("interleaved-1f1b", "interleaved-zb", "zb-v", "dualpipev", "looped-bfs", "combined-1f1b")
)
V_SHAPED = frozenset(("zb-v", "dualpipev"))
PEERS: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved-1f1b": pipelining.ScheduleInterleaved1F1B,
    "interleaved-zb": pipelining.ScheduleInterleavedZeroBubble,
    "zb-v": pipelining.ScheduleZBVZeroBubble,
    "dualpipev": pipelining.ScheduleDualPipeV,
}
# The others split the backward through autograd, which they refuse for compiled stages.
PEERS_WITH_COMPILED_STAGES = ("gpipe", "1f1b", "interleaved-1f1b")


def stages_of(schedule: str) -> int:
    return NUM_RANKS * (2 if schedule in TWO_STAGES_A_RANK else 1)


def own_stages(schedule: str, rank: int) -> tuple[int, ...]:
    """The stages that torch's schedules of this name put on a rank."""
    if stages_of(schedule) == NUM_RANKS:
        return (rank,)
    return (rank, 2 * NUM_RANKS - 1 - rank if schedule in V_SHAPED else rank + NUM_RANKS)


class Times(NamedTuple):
    """Seconds of a step on one rank: with the optimizer and until all are done; without; CPU."""

    whole: float
    inner: float
    cpu: float


@dataclass
class Contestant:
    """`step` leaves the gradients, and returns its loss where this rank has it. None: it idles."""

    name: str
    schedule: str
    step: Callable[[], Tensor | None] | None
    rounds: list[list[Times]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def run(self, optimizer: torch.optim.Optimizer) -> Times:
        """One step, from all ranks ready to all ranks done."""
        optimizer.zero_grad()
        dist.barrier()
        cpu, start = time.process_time(), time.perf_counter()
        loss = self.step() if self.step is not None else None
        inner, cpu = time.perf_counter() - start, time.process_time() - cpu
        optimizer.step()
        dist.barrier()
        whole = time.perf_counter() - start
        if loss is not None:
            self.losses.append(float(loss.detach()))
        return Times(whole, inner, cpu)

    def run_round(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self.rounds.append([self.run(optimizer) for _ in range(steps)])


class Model:
    """The layers, their batch and optimizer; makes contestants of them."""

    def __init__(self, size: Preset, layers: Sequence[nn.Module], compiler: str) -> None:
        self.size, self.layers, self.compiler = size, layers, compiler
        self.tokens, self.targets = batch(size)
        self.gpt = GPT(layers)
        self.optimizer = torch.optim.SGD(self.gpt.parameters(), lr=0.0)
        self.captured = Captured(self)

    def microbatches(self) -> list[tuple[Tensor, Tensor]]:
        count = self.size.microbatches
        return list(zip(self.tokens.chunk(count), self.targets.chunk(count)))

    def forget(self) -> None:
        """Let go of the layers that no contestant made so far has taken."""
        del self.layers, self.gpt, self.optimizer, self.captured

    # One process.

    def alone(self, compiled: bool) -> Contestant:
        """Gradient accumulation over the microbatches on rank 0, while the others idle."""
        model: Any = GPT(self.layers)
        if compiled:
            model = torch.compile(model, backend=self.compiler)
        parts = self.microbatches()

        def step() -> Tensor:
            losses = []
            for tokens, targets in parts:
                loss = model(tokens, targets) / len(parts)
                loss.backward()
                losses.append(loss.detach())
            return torch.stack(losses).sum()

        name = f"one process, {self.compiler if compiled else 'eager'}"
        return Contestant(name, "", step if dist.get_rank() == 0 else None)

    # torch.distributed.pipelining.

    def torch_stages(self, schedule: str, compiled: bool) -> list[tuple[int, Any]]:
        """(number, module) of this rank's stages."""
        modules = stage_modules(self.size, self.layers, stages_of(schedule))
        own = own_stages(schedule, dist.get_rank())
        wrap = (lambda m: torch.compile(m, backend=self.compiler)) if compiled else lambda m: m
        return [(index, wrap(modules[index])) for index in own]

    def examples(self, last: bool) -> tuple[Tensor, Tensor]:
        """A microbatch's activations between stages, and what its stage returns."""
        size = self.size
        shape = (size.microbatch, size.context)
        between = torch.zeros(*shape, size.width, requires_grad=True)
        logits = torch.zeros(*shape, size.vocabulary, requires_grad=True)
        return between, logits if last else between

    def torch_pipeline(self, schedule: str, compiled: bool = False) -> Contestant:
        """With shapes given ahead, which is faster than torch's own inference of them."""
        count, rank, own = stages_of(schedule), dist.get_rank(), []
        for index, module in self.torch_stages(schedule, compiled):
            between, result = self.examples(index == count - 1)
            tokens = self.tokens[: self.size.microbatch]
            given = {"input_args": between if index else tokens, "output_args": result}
            cpu = torch.device("cpu")
            own.append(pipelining.PipelineStage(module, index, count, cpu, **given))
        runner = PEERS[schedule](
            own if count > NUM_RANKS else own[0],
            n_microbatches=self.size.microbatches,
            loss_fn=loss_of,
        )
        ends = own_stages(schedule, rank)

        def step() -> Tensor | None:
            losses: list[Tensor] = []
            inputs = (self.tokens,) if 0 in ends else ()
            last = {"target": self.targets, "losses": losses} if count - 1 in ends else {}
            runner.step(*inputs, **last, return_outputs=False)
            return torch.stack(losses).detach().mean() if losses else None

        name = f"torch, {self.compiler}" if compiled else "torch"
        return Contestant(name, schedule, step)

    def torch_tasks(self, stages: int, compiled: bool = False) -> Contestant:
        """What torch's stages take by themselves: forward and backward, inputs at hand."""
        schedule = "1f1b" if stages == NUM_RANKS else "interleaved-1f1b"
        own = self.torch_stages(schedule, compiled)
        parts = self.microbatches()
        given = self.examples(False)[0].detach()

        def step() -> None:
            for tokens, targets in parts:
                for index, module in own:
                    out = module(given.requires_grad_() if index else tokens)
                    if index == stages - 1:
                        loss_of(out, targets).backward()
                    else:
                        out.backward(given.detach())
                    given.grad = None

        name = f"torch, {self.compiler}" if compiled else "torch"
        return Contestant(f"{name}, tasks alone", schedule, step)

    # fxpipe.

    def fxpipe_pipeline(self, schedule: str, lowering: str) -> Contestant:
        step = self.captured.step(schedule, stages_of(schedule), lowering, NUM_RANKS)
        return Contestant(f"fxpipe, {lowering}", schedule, self.captured.runner(step))

    def fxpipe_alone(self, lowering: str) -> Contestant:
        """One rank, one stage, all microbatches."""
        name = f"fxpipe, one rank, {lowering}"
        if dist.get_rank() != 0:
            return Contestant(name, "", None)
        step = self.captured.step("1f1b", 1, lowering, 1)
        return Contestant(name, "", self.captured.runner(step))


class Captured:
    """The model, traced by Dynamo once; its joint graph traced once for each number of stages."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.current: Step | None = None
        self.first: Step | None = None
        self.fronts: dict[int, Any] = {}
        self.compilers: dict[str, TaskCompiler] = {}
        self.compiled = torch.compile(model.gpt, backend=self.backend)

    def backend(self, gm: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        # Its plan is never made: what is taken from it is the capture.
        given = fxpipe_options(self.model.size, "gpipe", NUM_RANKS, "eager")
        self.first = fxpipe(gm, inputs, options=given)  # type: ignore[assignment]
        return lambda *values: self.current_step()(*values)

    def current_step(self) -> Step:
        if self.current is None:
            raise StopCapture
        return self.current

    def step(self, schedule: str, stages: int, lowering: str, num_ranks: int) -> Step:
        """A pipelined step that shares the capture, and compiled tasks, with the others."""
        if self.first is None:
            try:
                self.compiled(self.model.tokens, self.model.targets)
            except StopCapture:
                pass
        assert self.first is not None
        given = fxpipe_options(self.model.size, schedule, stages, lowering)
        options = Options.parse(given)
        step = Step(self.first.capture, options, default_pipeline(options), num_ranks)
        step.fronts = self.fronts.setdefault(stages, step.fronts)
        step.compile = self.compilers.setdefault(lowering, step.compile)
        return step

    def runner(self, step: Step) -> Callable[[], Tensor]:
        def run() -> Tensor:
            self.current = step
            loss: Tensor = self.compiled(self.model.tokens, self.model.targets)
            loss.backward()
            return loss

        return run


class StopCapture(Exception):
    """The model has been traced; no step is to be made yet."""

"""fxpipe and torch.distributed.pipelining on the same GPT -> step times, side by side.

Two gloo ranks with one thread and one core each. All contestants live in the same two processes and
run a few steps in turn, round after round, so that whatever else the machine does falls on all of
them. A step is zero_grad, all microbatches forward and backward, and SGD; its time is that of the
slower rank, its CPU time that of both. A ratio is the median over rounds of (time / torch's time in
the same round). On a busy machine only the CPU times say much.

python benchmarks/against_torch.py --preset medium --schedules 1f1b gpipe
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from cores import keep_to_core
from torch import Tensor, nn
from torch.distributed import pipelining

NUM_RANKS = 2
MICROBATCHES = 8
PEERS = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved-1f1b": pipelining.ScheduleInterleaved1F1B,
}


@dataclass(frozen=True)
class Preset:
    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int
    microbatch: int


PRESETS = {
    "medium": Preset(layers=8, width=256, heads=4, context=128, vocabulary=512, microbatch=2),
    "small": Preset(layers=8, width=64, heads=4, context=32, vocabulary=128, microbatch=1),
}


class Block(nn.Module):
    def __init__(self, size: Preset) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class Embed(nn.Module):
    def __init__(self, size: Preset) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]


def layers_of(size: Preset) -> list[nn.Module]:
    """The model as torch.distributed.pipelining wants it: a row of modules, cut where one likes."""
    head = nn.Sequential(
        nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)
    )
    return [Embed(size), *(Block(size) for _ in range(size.layers)), head]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class GPT(nn.Module):
    """The same modules as one model with its loss: what fxpipe takes."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return loss_of(self.layers(tokens), targets)


def batch(size: Preset) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    shape = (MICROBATCHES * size.microbatch, size.context + 1)
    text = torch.randint(size.vocabulary, shape, generator=random)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


@dataclass
class Contestant:
    """`step` runs all microbatches and leaves the gradients; its loss where this rank has it."""

    name: str
    schedule: str
    step: Callable[[], Tensor | None]
    optimizer: torch.optim.Optimizer
    first: float = 0.0
    loss: float = 0.0
    seconds: list[list[float]] = field(default_factory=list)  # per round, per step
    busy: list[float] = field(default_factory=list)  # CPU seconds of a step, per round

    def run(self) -> float:
        """The seconds of one step, from all ranks ready to all ranks done."""
        dist.barrier()
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.step()
        self.optimizer.step()
        dist.barrier()
        if loss is not None:
            self.loss = float(loss.detach())
        return time.perf_counter() - start

    def run_round(self, steps: int) -> None:
        busy = time.process_time()
        self.seconds.append([self.run() for _ in range(steps)])
        self.busy.append((time.process_time() - busy) / steps)


def stages_of(schedule: str) -> int:
    return 2 * NUM_RANKS if schedule.startswith("interleaved") else NUM_RANKS


def with_fxpipe(
    layers: Sequence[nn.Module], size: Preset, schedule: str, lowering: str
) -> Contestant:
    model = GPT(copy.deepcopy(layers))
    # Cut at the same blocks as the peer.
    per_stage = size.layers // stages_of(schedule)
    starts = [f"layers.{1 + per_stage * i}" for i in range(1, stages_of(schedule))]
    options = {"stages": starts, "microbatches": MICROBATCHES, "schedule": schedule}
    compiled = torch.compile(model, backend="fxpipe", options=options | {"lowering": lowering})
    tokens, targets = batch(size)

    def step() -> Tensor:
        loss: Tensor = compiled(tokens, targets)
        loss.backward()
        return loss

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return Contestant(f"fxpipe, {lowering}", schedule, step, optimizer)


def with_torch(
    layers: Sequence[nn.Module], size: Preset, schedule: str, compiled: bool
) -> Contestant:
    rank, count = dist.get_rank(), stages_of(schedule)
    per_stage = size.layers // count
    tokens, targets = batch(size)
    few = tokens[: size.microbatch]
    shape = (size.microbatch, size.context)
    between = torch.zeros(*shape, size.width, requires_grad=True)
    logits = torch.zeros(*shape, size.vocabulary, requires_grad=True)
    modules, stages = [], []
    for index in range(rank, count, NUM_RANKS):
        first, last = index == 0, index == count - 1
        start, end = 1 + per_stage * index, 1 + per_stage * (index + 1)
        part = layers[0 if first else start : len(layers) if last else end]
        module = nn.Sequential(*copy.deepcopy(part))
        modules.append(module)
        stage = pipelining.PipelineStage(
            torch.compile(module) if compiled else module,
            index,
            count,
            torch.device("cpu"),
            input_args=few if first else between,
            output_args=logits if last else between,
        )
        stages.append(stage)
    peer: Any = PEERS[schedule]
    runner = peer(
        stages if count > NUM_RANKS else stages[0], n_microbatches=MICROBATCHES, loss_fn=loss_of
    )

    def step() -> Tensor | None:
        losses: list[Tensor] = []
        inputs = (tokens,) if rank == 0 else ()
        last = {"target": targets, "losses": losses} if rank == NUM_RANKS - 1 else {}
        runner.step(*inputs, **last, return_outputs=False)
        return sum(losses) / len(losses) if losses else None

    optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=1e-3)
    return Contestant("torch, compiled" if compiled else "torch", schedule, step, optimizer)


def contestants(size: Preset, schedule: str, only_eager: bool) -> list[Contestant]:
    torch.manual_seed(0)
    layers = layers_of(size)
    made = [with_torch(layers, size, schedule, False), with_fxpipe(layers, size, schedule, "eager")]
    if not only_eager:
        made.append(with_torch(layers, size, schedule, True))
        made.append(with_fxpipe(layers, size, schedule, "inductor"))
    return made


def work(rank: int, store: str, arguments: argparse.Namespace) -> None:
    """One rank: every contestant's first step, then the rounds; rank 0 reports."""
    cache = arguments.cache or os.path.dirname(store)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(cache, f"rank{rank}")
    keep_to_core(rank, NUM_RANKS)
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # one model class, compiled for every contestant
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    load = os.getloadavg()[0]
    runs: list[Contestant] = []
    for schedule in arguments.schedules:
        runs += contestants(PRESETS[arguments.preset], schedule, arguments.only_eager)
    for run in runs:
        run.first = run.run()
        for _ in range(arguments.warm):
            run.run()
        progress(f"{run.schedule}, {run.name}: first step {run.first:.1f} s")
    for number in range(arguments.rounds):
        progress(f"round {number + 1} of {arguments.rounds}")
        turn = number % len(runs)
        for run in runs[turn:] + runs[:turn]:
            run.run_round(arguments.steps)
    report(runs, arguments, load)
    dist.destroy_process_group()


def progress(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def report(runs: Sequence[Contestant], arguments: argparse.Namespace, load: float) -> None:
    """The table, and the same as one line of JSON, from what both ranks measured."""
    gathered: list[Any] = [None] * NUM_RANKS
    own = [(run.first, run.seconds, run.busy, run.loss) for run in runs]
    dist.all_gather_object(gathered, own)
    if dist.get_rank() != 0:
        return
    rows = [summary(run, *zip(*parts)) for run, parts in zip(runs, zip(*gathered))]
    for row in rows:
        peer = next(r for r in rows if (r["schedule"], r["name"]) == (row["schedule"], "torch"))
        for key in ("ms", "cpu_ms"):
            ratios = (own / other for own, other in zip(row["rounds"][key], peer["rounds"][key]))
            row[f"ratio_{key}"] = statistics.median(ratios)
    losses = {round(row["loss"], 3) for row in rows}
    print_table(rows, arguments, load, losses)
    facts = vars(arguments) | {"load_before": load, "load_after": os.getloadavg()[0]}
    print(json.dumps(facts | {"torch_version": torch.__version__, "rows": rows}))


def summary(
    run: Contestant,
    firsts: Sequence[float],
    seconds: Sequence[list[list[float]]],
    busy: Sequence[list[float]],
    losses: Sequence[float],
) -> dict[str, Any]:
    times = [
        1e3 * statistics.median(max(step) for step in zip(*of_ranks)) for of_ranks in zip(*seconds)
    ]
    cpu_times = [1e3 * sum(of_ranks) for of_ranks in zip(*busy)]
    return {
        "name": run.name,
        "schedule": run.schedule,
        "first_s": max(firsts),
        "ms": statistics.median(times),
        "least_ms": min(times),
        "cpu_ms": statistics.median(cpu_times),
        "loss": losses[-1],
        "rounds": {"ms": times, "cpu_ms": cpu_times},
    }


def print_table(
    rows: Sequence[dict[str, Any]], arguments: argparse.Namespace, load: float, losses: set[float]
) -> None:
    print(
        f"{arguments.preset}, {MICROBATCHES} microbatches, {NUM_RANKS} ranks, "
        f"{arguments.rounds} rounds of {arguments.steps} steps; "
        f"load {load:.1f} before, {os.getloadavg()[0]:.1f} after; last losses {sorted(losses)}"
    )
    print(
        "                                                step ms             CPU ms      to torch's"
    )
    print(
        "schedule          contestant         first s   median   least    of ranks      ms    CPU"
    )
    for row in rows:
        print(
            f"{row['schedule']:<17} {row['name']:<18} {row['first_s']:>7.1f} {row['ms']:>8.1f}"
            f" {row['least_ms']:>7.1f} {row['cpu_ms']:>11.1f}"
            f" {row['ratio_ms']:>7.2f} {row['ratio_cpu_ms']:>6.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="fxpipe beside torch.distributed.pipelining.")
    parser.add_argument("--preset", default="medium", choices=PRESETS)
    parser.add_argument("--schedules", nargs="+", default=["1f1b"], choices=PEERS)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5, help="steps of a contestant in a round")
    parser.add_argument("--warm", type=int, default=3, help="steps before the first round")
    parser.add_argument("--only-eager", action="store_true", help="leave Inductor out")
    parser.add_argument("--cache", help="Inductor's folder, to keep; a new one by default")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (os.path.join(folder, "store"), arguments), nprocs=NUM_RANKS)


if __name__ == "__main__":
    main()

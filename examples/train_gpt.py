"""The help texts of Python -> a small GPT, trained with two pipeline ranks and checked with eager.

torchrun --nproc-per-node 2 examples/train_gpt.py     one rank a process
python examples/train_gpt.py                          both ranks in this process
python examples/train_gpt.py --trace traces           where the time of some steps goes, in files

The training loop is `train`, the model `GPT`: neither knows of a pipeline. Everything below them
compares the result with plain eager PyTorch, and the schedules with each other.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from collections.abc import Callable, Sequence
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe

TEXT = torch.tensor(list("\n\n".join(topics.values()).encode()))
VOCABULARY, WIDTH, HEADS, LAYERS, CONTEXT = 256, 128, 4, 4, 64
BATCH, MICROBATCHES, STAGES = 16, 4, 2

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

# What the pipeline may differ by, for rounding alone: float32 keeps 7 digits, and sums are made in
# another order. Over the steps of a training, differences grow from there.
LIMIT_FIRST_LOSS = 1e-6
LIMIT_GRADIENTS = 1e-5
LIMIT_ALL_LOSSES = 1e-4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm_attention(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for embedding in (self.embedding, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Pieces of the text from random places, and the same pieces one byte further on."""
    random = torch.Generator().manual_seed(number)
    starts = torch.randint(len(TEXT) - CONTEXT, (BATCH, 1), generator=random)
    places = starts + torch.arange(CONTEXT)
    return TEXT[places], TEXT[places + 1]


def train(step: Callable[[Tensor, Tensor], Tensor], model: nn.Module, steps: int) -> list[float]:
    """The loop of any training in PyTorch; the loss of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    start = time.perf_counter()
    for number in range(1, steps + 1):
        loss = step(*batch(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if number % max(1, steps // 10) == 0:
            speed = max(1, steps // 10) * BATCH * CONTEXT / (time.perf_counter() - start)
            say(f"  step {number:>4}   loss {losses[-1]:.4f}   {speed:>6.0f} tokens/s")
            start = time.perf_counter()
    return losses


def say(text: str) -> None:
    if RANK == 0:
        print(text, flush=True)


def pipeline(model: nn.Module, schedule: str, stages: int, lowering: str) -> nn.Module:
    """What makes a model a pipelined one."""
    options = {"stages": stages, "microbatches": MICROBATCHES, "schedule": schedule}
    return torch.compile(model, backend="fxpipe", options=options | {"lowering": lowering})


def first_step(step: nn.Module, model: nn.Module) -> tuple[float, float]:
    """Leaves the gradients of the first batch; its loss, and the seconds it took."""
    start = time.perf_counter()
    loss = step(*batch(1))
    loss.backward()
    return loss.item(), time.perf_counter() - start


def trace(step: nn.Module, model: nn.Module, folder: str) -> None:
    """Record steps that train nothing, and say what the last one was like."""
    with fxpipe.trace(folder):
        for _ in range(5):
            first_step(step, model)
            model.zero_grad()
    found = fxpipe.metrics(step, tokens=BATCH * CONTEXT)
    say(f"  traced a step of {1e3 * found['step_seconds']:.0f} ms into {folder}")


def worst_gradient(model: nn.Module, plain: nn.Module) -> float:
    """The largest relative difference of a gradient that some rank holds."""
    expected = {name: p.grad for name, p in plain.named_parameters()}
    differences = [
        float((p.grad - expected[name]).norm() / expected[name].norm())
        for name, p in fxpipe.owned_parameters(model).items()
    ]
    return largest_of_ranks(max(differences))


def largest_of_ranks(value: float) -> float:
    """The same largest value on every rank, so that all of them come to the same end."""
    largest = torch.tensor(value, dtype=torch.float64)
    if WORLD_SIZE > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def compare(
    loss: float,
    plain_loss: float,
    gradients: float,
    losses: Sequence[float],
    plain_losses: Sequence[float],
) -> bool:
    """Say by how much the pipeline differs from eager; whether rounding explains it."""
    first = largest_of_ranks(abs(loss / plain_loss - 1))
    during = largest_of_ranks(max(abs(a / b - 1) for a, b in zip(losses, plain_losses)))
    rows = (
        ("loss of the first batch", first, LIMIT_FIRST_LOSS),
        ("worst gradient of the first batch", gradients, LIMIT_GRADIENTS),
        (f"worst loss of {len(losses)} steps", during, LIMIT_ALL_LOSSES),
    )
    say("\nrelative difference from eager      found    limit")
    for name, found, limit in rows:
        say(f"{name:<34} {found:>7.1e}  {limit:>7.1e}")
    fell = losses[-1] < losses[0] or len(losses) < 2
    agrees = all(found < limit for _, found, limit in rows)
    say(
        f"loss fell from {losses[0]:.2f} to {losses[-1]:.2f}; "
        + ("the pipeline agrees with eager" if agrees else "the pipeline DIFFERS from eager")
    )
    return agrees and fell


def time_schedules(start: nn.Module, lowering: str) -> None:
    """Time to the first step, compilation included, and of a step after it."""
    say(f"\nschedule            stages   first step s   step ms     ({lowering})")
    for schedule in ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "interleaved-zb"):
        torch.compiler.reset()
        stages = 2 * STAGES if schedule.startswith("interleaved") else STAGES
        model = copy.deepcopy(start)
        step = pipeline(model, schedule, stages, lowering)
        _, compiling = first_step(step, model)
        seconds = sorted(first_step(step, model)[1] for _ in range(7))
        say(f"{schedule:<20} {stages:>5} {compiling:>14.1f} {1e3 * seconds[3]:>9.0f}")


def main() -> int:
    parser = argparse.ArgumentParser(description="A small GPT, trained in a pipeline of two ranks.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--lowering", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--trace", metavar="DIR", help="record five steps after the first")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT()
    plain, start = copy.deepcopy(model), copy.deepcopy(model)

    where = f"{WORLD_SIZE} processes" if WORLD_SIZE > 1 else "one process"
    say(f"{arguments.schedule}, {STAGES} stages, {MICROBATCHES} microbatches, {where}:")
    step = pipeline(model, arguments.schedule, STAGES, arguments.lowering)
    loss, seconds = first_step(step, model)
    say(f"  compiled and ran the first step in {seconds:.1f} s")
    plain_loss, _ = first_step(plain, plain)
    gradients = worst_gradient(model, plain)
    model.zero_grad()
    plain.zero_grad()
    if arguments.trace:
        trace(step, model, arguments.trace)
    losses = train(step, model, arguments.steps)
    plain_losses = losses
    if RANK == 0:
        say("plain eager PyTorch, unsplit, the same start and batches:")
        plain_losses = train(plain, plain, arguments.steps)
    if WORLD_SIZE > 1:
        dist.barrier()
    time_schedules(start, arguments.lowering)
    agrees = compare(loss, plain_loss, gradients, losses, plain_losses)
    if WORLD_SIZE > 1:
        dist.destroy_process_group()
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())

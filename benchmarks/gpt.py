"""A preset to the model, the batch and the cuts that all contestants of a benchmark share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Preset:
    """Sizes of a GPT and of its batch; how often a contestant's turn comes, and its steps then."""

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int
    microbatch: int
    microbatches: int = 8
    rounds: int = 7
    steps: int = 1


PRESETS = {
    # Bound by arithmetic, bound by the host, and one whose compile time is what matters.
    "medium": Preset(layers=8, width=256, heads=4, context=128, vocabulary=512, microbatch=2),
    "small": Preset(8, 64, 4, 32, 128, microbatch=1, rounds=15, steps=4),
    "deep": Preset(48, 32, 2, 16, 128, microbatch=1, rounds=5),
    "deep-12": Preset(12, 32, 2, 16, 128, microbatch=1, rounds=5),
    "tiny": Preset(4, 16, 2, 8, 32, microbatch=1, microbatches=4, rounds=2),
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
    torch.manual_seed(0)
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
    shape = (size.microbatches * size.microbatch, size.context + 1)
    text = torch.randint(size.vocabulary, shape, generator=random)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def cuts(size: Preset, stages: int) -> list[int]:
    """The numbers of the layers where stages 1, 2, ... begin; every contestant is cut there."""
    return [1 + size.layers // stages * stage for stage in range(1, stages)]


def stage_modules(size: Preset, layers: Sequence[nn.Module], stages: int) -> list[nn.Module]:
    """Each stage as one module."""
    ends = [0, *cuts(size, stages), len(layers)]
    return [nn.Sequential(*layers[start:end]) for start, end in zip(ends, ends[1:])]


def fxpipe_options(size: Preset, schedule: str, stages: int, lowering: str) -> dict[str, object]:
    return {
        "stages": [f"layers.{start}" for start in cuts(size, stages)] or 1,
        "microbatches": size.microbatches,
        "schedule": schedule,
        "lowering": lowering,
    }

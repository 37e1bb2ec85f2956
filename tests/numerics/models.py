"""Five small float64 models whose gradients every way of running them must agree on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

Gradients = dict[str, torch.Tensor]


class MLP(nn.Module):
    """Mean squared error of a chain of layers."""

    def __init__(self, width: int = 6, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x, y)


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Embedding and head share their weight; targets of -100 count for nothing."""

    def __init__(
        self, vocabulary: int = 11, width: int = 8, length: int = 5, depth: int = 2
    ) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads=2) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten())


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(h)))


class ConvNet(nn.Module):
    """Residual blocks; batch norm with statistics unlike those of the batch."""

    def __init__(self, channels: int = 3, depth: int = 2, classes: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(Residual(channels) for _ in range(depth)))
        self.head = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.running_mean)  # type: ignore[arg-type]
                nn.init.uniform_(module.running_var, 0.5, 2.0)  # type: ignore[arg-type]

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        features = self.blocks(self.stem(images)).mean((2, 3))
        return F.cross_entropy(self.head(features), labels, label_smoothing=0.1)


class UNet(nn.Module):
    """Two levels down, two up: the skips jump over the stages between."""

    def __init__(self, channels: int = 2) -> None:
        super().__init__()
        c = channels
        self.down1, self.down2 = nn.Conv2d(1, c, 3, padding=1), nn.Conv2d(c, 2 * c, 3, padding=1)
        self.middle = nn.Conv2d(2 * c, 2 * c, 3, padding=1)
        self.up2 = nn.Conv2d(4 * c, c, 3, padding=1)
        self.up1 = nn.Conv2d(2 * c, 1, 3, padding=1)

    def forward(self, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        skip1 = F.silu(self.down1(images))
        skip2 = F.silu(self.down2(F.avg_pool2d(skip1, 2)))
        x = F.silu(self.middle(F.avg_pool2d(skip2, 2)))
        x = torch.cat((F.interpolate(x, scale_factor=2.0), skip2), 1)
        x = F.silu(self.up2(x))
        x = torch.cat((F.interpolate(x, scale_factor=2.0), skip1), 1)
        return (self.up1(x) - targets).square().sum() / images.shape[0]


class TwoBranch(nn.Module):
    """Images and texts that match pair by pair: every row of the batch is compared with all."""

    def __init__(self, width: int = 6, vocabulary: int = 7) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, width), nn.LayerNorm(width)
        )
        self.text = nn.Embedding(vocabulary, width)
        self.mix = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        image = F.normalize(self.image(images), dim=-1)
        text = F.normalize(self.mix(self.text(texts).mean(1)), dim=-1)
        scores = image @ text.T * self.temperature.exp()
        pairs = torch.arange(scores.shape[0])
        return (F.cross_entropy(scores, pairs) + F.cross_entropy(scores.T, pairs)) / 2


@dataclass(frozen=True)
class Case:
    """A model to build, its batch, and how eager runs it. The same seed makes the same weights."""

    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, ...]]
    options: dict[str, Any] = field(default_factory=dict)

    def model(self) -> nn.Module:
        return seeded(self.build)

    def inputs(self) -> tuple[torch.Tensor, ...]:
        return seeded(self.batch)

    def loss(self, model: nn.Module, microbatches: int) -> torch.Tensor:
        """Eager's loss: of the whole batch, or where rows are compared, the microbatches' mean."""
        inputs = self.inputs()
        if "loss_reduction" not in self.options:
            return model(*inputs)
        parts = zip(*(value.tensor_split(microbatches) for value in inputs))
        rows = len(inputs[0])
        return sum((model(*part) * (len(part[0]) / rows) for part in parts), torch.zeros(()))


def seeded(make: Callable[[], Any]) -> Any:
    """What `make` makes in float64 from a fixed seed, without touching the caller's generator."""
    default = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        try:
            return make()
        finally:
            torch.set_default_dtype(default)


def tokens_and_targets() -> tuple[torch.Tensor, ...]:
    tokens, targets = torch.randint(0, 11, (8, 5)), torch.randint(0, 11, (8, 5))
    targets[:3, :4] = -100  # microbatches count different numbers of targets
    targets[7] = -100
    return tokens, targets


CASES: dict[str, Case] = {
    "mlp": Case(MLP, lambda: (torch.randn(8, 6), torch.randn(8, 6))),
    "gpt": Case(GPT, tokens_and_targets),
    "convnet": Case(
        lambda: ConvNet().eval(), lambda: (torch.randn(8, 2, 5, 5), torch.randint(0, 4, (8,)))
    ),
    "unet": Case(UNet, lambda: (torch.randn(8, 1, 8, 8), torch.randn(8, 1, 8, 8))),
    "two-branch": Case(
        TwoBranch,
        lambda: (torch.randn(16, 1, 4, 4), torch.randint(0, 7, (16, 3))),
        {"loss_reduction": "mean"},
    ),
}


def gradients_of(model: nn.Module) -> Gradients:
    """A copy of every parameter's gradient, by name."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }


def assert_close(actual: torch.Tensor, expected: torch.Tensor, limit: float, what: str) -> None:
    """The norm of the difference is within `limit` of the expected norm."""
    actual, expected = actual.detach(), expected.detach()
    error, scale = float((actual - expected).norm()), float(expected.norm())
    assert error <= limit * scale, (
        f"{what} is off by {error / max(scale, 1e-300):.1e} (limit {limit})"
    )


def pipelined(model: nn.Module, **options: Any) -> Any:
    """The model compiled by fxpipe, as a user does it: two stages, three microbatches."""
    usual = {"stages": 2, "microbatches": 3, "schedule": "1f1b", "lowering": "eager"}
    return torch.compile(model, backend="fxpipe", options=usual | options)


def assert_same_gradients(actual: nn.Module, expected: nn.Module) -> None:
    """The models' parameters have equal gradients, and None in the same places."""
    parameters = dict(actual.named_parameters())
    for name, parameter in expected.named_parameters():
        found = parameters[name].grad
        if parameter.grad is None:
            assert found is None or not found.any(), f"{name} has a gradient"
        else:
            assert found is not None, f"{name} has no gradient"
            assert_close(found, parameter.grad, 1e-10, f"gradient of {name}")

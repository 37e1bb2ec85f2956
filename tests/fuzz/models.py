"""A seed -> a random small model and batches for it: a DAG of operators on rows of a batch.

Every value is [rows, LENGTH, WIDTH], so that any operator can read any value. Nothing mixes rows
before the loss, and nothing is random: what the model gives is what unsplit eager gives.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LENGTH, WIDTH, VOCABULARY = 4, 6, 11
LOSSES = ("mse", "sum", "entropy", "ignoring", "masked", "rows", "two_terms")
RETURNS = ("loss", "tuple", "dict", "logits")


class Batch(NamedTuple):
    """x: what the model starts from; tokens: integers; mask: what counts; y: targets."""

    x: Tensor
    tokens: Tensor
    mask: Tensor
    y: Tensor


def make_batch(rows: int, seed: int) -> Batch:
    numbers = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, LENGTH, WIDTH, generator=numbers, dtype=torch.float64)
    tokens = torch.randint(VOCABULARY, (rows, LENGTH), generator=numbers)
    mask = torch.rand(rows, LENGTH, generator=numbers) < 0.7
    mask[0, 0] = True  # a mean over nothing is NaN in eager too, and NaN hides differences
    y = torch.randn(rows, LENGTH, VOCABULARY, generator=numbers, dtype=torch.float64)
    return Batch(x, tokens, mask, y)


class Step(NamedTuple):
    kind: str
    reads: tuple[int, ...]
    module: str


class RandomModel(nn.Module):
    """forward(x, tokens, mask, y) -> a loss, alone or with other values; or logits."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.ops = nn.ModuleDict()
        self.register_buffer("constant", torch.randn(LENGTH, WIDTH), persistent=False)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.requires_grad_(rng.random() < 0.8)
        self.steps: list[Step] = []
        for number in range(rng.randint(3, 10)):
            self.steps.append(self.make_step(rng, number))
        self.loss, self.returns = rng.choice(LOSSES), rng.choice(RETURNS)
        self.middle = rng.randint(1, len(self.steps))

    def make_step(self, rng: random.Random, number: int) -> Step:
        kind = rng.choice(sorted(UNARY if number == 0 or rng.random() < 0.65 else BINARY))
        # Mostly the newest value, so that the graph is deep; sometimes any, so that it has skips.
        reads = [number if rng.random() < 0.7 else rng.randint(0, number)]
        if kind in BINARY:
            reads.append(rng.randint(0, number))
        name = f"op{number}"
        linears = [step.module for step in self.steps if step.kind == "linear"]
        if kind in ("again", "twice") and linears:
            return Step(kind, tuple(reads), rng.choice(linears))
        if kind in MODULES:
            self.ops[name] = MODULES[kind]()
        return Step(kind, tuple(reads), name)

    def modules_in_use(self) -> list[str]:
        """The names in `ops` whose values reach the head, in the order in which they first run."""
        live = {len(self.steps)}
        for number in range(len(self.steps), 0, -1):
            if number in live:
                live.update(self.steps[number - 1].reads)
        names = [step.module for i, step in enumerate(self.steps, 1) if i in live]
        return [name for name in dict.fromkeys(names) if name in self.ops]

    def forward(self, x: Tensor, tokens: Tensor, mask: Tensor, y: Tensor) -> Any:
        batch = Batch(x, tokens, mask, y)
        values = [x]
        for kind, reads, name in self.steps:
            module = self.ops[name] if name in self.ops else self
            operator = UNARY[kind] if kind in UNARY else BINARY[kind]
            values.append(operator(module, batch, *[values[number] for number in reads]))
        logits = self.head(values[-1])
        if self.returns == "logits":
            return logits
        loss = self.loss_of(logits, values[self.middle], batch)
        if self.returns == "tuple":
            return loss, logits, values[self.middle].detach()
        return loss if self.returns == "loss" else {"loss": loss, "out": {"logits": logits}}

    def loss_of(self, logits: Tensor, middle: Tensor, batch: Batch) -> Tensor:
        squares = (logits - batch.y) ** 2
        match self.loss:
            case "sum":
                return squares.sum() * 0.1
            case "entropy":
                return F.cross_entropy(logits.flatten(0, 1), batch.tokens.flatten())
            case "ignoring":
                labels = batch.tokens.masked_fill(~batch.mask, -100)
                return F.cross_entropy(logits.transpose(1, 2), labels)
            case "masked":
                valid = batch.mask.unsqueeze(-1).to(logits.dtype)
                return (squares * valid).sum() / valid.sum()
            case "rows":
                return squares.sum((1, 2)).mean()
            case "two_terms":
                return squares.mean() + 0.1 * middle.pow(2).mean() - 0.01 * middle.sum()
        return F.mse_loss(logits, batch.y)


def frozen() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH).requires_grad_(False)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "again": lambda: nn.Linear(WIDTH, WIDTH),
    "twice": lambda: nn.Linear(WIDTH, WIDTH),
    "frozen": frozen,
    "norm": lambda: nn.LayerNorm(WIDTH),
    "attention": lambda: nn.Linear(WIDTH, 3 * WIDTH),
    "convolution": lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
    "mix_positions": lambda: nn.Linear(LENGTH, LENGTH),
    "embed": lambda: nn.Embedding(VOCABULARY, WIDTH),
    "concatenate": lambda: nn.Linear(2 * WIDTH, WIDTH),
}

# Operators: (the step's module, or the model where it has none; the batch; values) -> a value.


def call(module: Any, batch: Batch, h: Tensor) -> Tensor:
    return module(h)


def twice(module: Any, batch: Batch, h: Tensor) -> Tensor:
    return module(torch.tanh(module(h)))


def attention(module: Any, batch: Batch, h: Tensor) -> Tensor:
    q, k, v = module(h).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return h + mixed.transpose(1, 2).flatten(2)


def halves(module: Any, batch: Batch, h: Tensor) -> Tensor:
    first, second = h.chunk(2, dim=-1)
    return torch.cat([second, first * 2], dim=-1)


def flatten(module: Any, batch: Batch, h: Tensor) -> Tensor:
    return torch.sigmoid(h.reshape(-1, WIDTH)).view(h.shape[0], LENGTH, WIDTH)


def write_in_place(module: Any, batch: Batch, h: Tensor) -> Tensor:
    h = h * 1.5
    h.mul_(0.5).add_(0.1)
    h[:, 0] += 1.0
    return h


def gather(module: Any, batch: Batch, h: Tensor) -> Tensor:
    return h.gather(1, (batch.tokens % LENGTH).unsqueeze(-1).expand_as(h))


def write_into(module: Any, batch: Batch, a: Tensor, b: Tensor) -> Tensor:
    a = a.clone()
    a[:, 1:] += b[:, :-1]
    return a


UNARY: dict[str, Callable[..., Tensor]] = {
    "linear": call,
    "again": call,
    "frozen": call,
    "norm": call,
    "twice": twice,
    "attention": attention,
    "convolution": lambda module, batch, h: module(h.transpose(1, 2)).transpose(1, 2),
    "mix_positions": lambda module, batch, h: module(h.mT).mT,
    "embed": lambda module, batch, h: h + module(batch.tokens),
    "tanh": lambda model, batch, h: torch.tanh(h),
    "relu": lambda model, batch, h: torch.relu(h),
    "gelu": lambda model, batch, h: F.gelu(h),
    "add_position": lambda model, batch, h: h + model.position,
    "add_constant": lambda model, batch, h: h * 0.5 + model.constant,
    "scale": lambda model, batch, h: h * model.position[0, 0] + 1.0,
    "mask": lambda model, batch, h: h * batch.mask.unsqueeze(-1),
    "halves": halves,
    "pool": lambda model, batch, h: h - h.mean(1, keepdim=True).expand_as(h),
    "flatten": flatten,
    "running_sum": lambda model, batch, h: h.cumsum(1) * 0.3,
    "write_in_place": write_in_place,
    "transposed": lambda model, batch, h: h.transpose(1, 2).contiguous().mT,
    "gather": gather,
}

BINARY: dict[str, Callable[..., Tensor]] = {
    "add": lambda model, batch, a, b: a + b,
    "gate": lambda model, batch, a, b: a * torch.sigmoid(b),
    "concatenate": lambda module, batch, a, b: module(torch.cat([a, b], dim=-1)),
    "choose": lambda model, batch, a, b: torch.where(a > 0, a, b),
    "from_detached": lambda model, batch, a, b: a + b.detach().cos(),
    "write_into": write_into,
}

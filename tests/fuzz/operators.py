"""What a random model is made of: operators from values of [rows, LENGTH, WIDTH] to such values.

Each takes the step's module (or the model where it has none), the batch, and what it reads. None
mixes rows, batch norm in training apart, and none is random.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.fuzz.batches import LENGTH, VOCABULARY, WIDTH, Batch


def frozen() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH).requires_grad_(False)


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.SiLU(), nn.Linear(8, WIDTH))


def image() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 1, 1))


def image_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2), nn.ReLU())


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "again": lambda: nn.Linear(WIDTH, WIDTH),
    "twice": lambda: nn.Linear(WIDTH, WIDTH),
    "frozen": frozen,
    "block": block,
    "checkpointed": block,
    "norm": lambda: nn.LayerNorm(WIDTH),
    "rms_norm": lambda: nn.RMSNorm(WIDTH),
    "group_norm": lambda: nn.GroupNorm(2, LENGTH),
    "batch_norm": lambda: nn.BatchNorm1d(LENGTH),
    "attention": lambda: nn.Linear(WIDTH, 3 * WIDTH),
    "encoder": encoder,
    "convolution": lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
    "image": image,
    "image_norm": image_norm,
    "mix_positions": lambda: nn.Linear(LENGTH, LENGTH),
    "embed": lambda: nn.Embedding(VOCABULARY, WIDTH),
    "embed_note": lambda: nn.Embedding(WIDTH, WIDTH),
    "concatenate": lambda: nn.Linear(2 * WIDTH, WIDTH),
    "bilinear": lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH),
    "write_between": lambda: nn.Linear(WIDTH, WIDTH),
}
NORMS_OF_ROWS = ("batch_norm", "image_norm")  # in training they read the whole batch


class HalfGradient(torch.autograd.Function):
    """A backward that is no derivative of its forward, so that nothing else could stand in.

    It is linear: where it is not, what the loss is multiplied by comes too late.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return torch.where(h > 0.123, h, 0.1 * h)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (h,) = ctx.saved_tensors
        return gradient * (0.5 + 0.01 * h)


def call(module: Any, batch: Batch, h: Tensor) -> Tensor:
    return module(h)


def twice(module: Any, batch: Batch, h: Tensor) -> Tensor:
    return module(torch.tanh(module(h)))


def attention(module: Any, batch: Batch, h: Tensor) -> Tensor:
    q, k, v = module(h).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return h + mixed.transpose(1, 2).flatten(2)


def as_image(module: Any, batch: Batch, h: Tensor) -> Tensor:
    pooled = F.max_pool2d(module(h.unsqueeze(1)), 2)
    return h + F.interpolate(pooled, scale_factor=2).squeeze(1)


def as_normed_image(module: Any, batch: Batch, h: Tensor) -> Tensor:
    return 0.5 * h + module(h.unsqueeze(1)).mean(1)


def halves(module: Any, batch: Batch, h: Tensor) -> Tensor:
    first, second = h.chunk(2, dim=-1)
    return torch.cat([second, first * 2], dim=-1)


def positions(module: Any, batch: Batch, h: Tensor) -> Tensor:
    parts = h.unbind(1)
    return torch.stack([parts[-1], *(a + b for a, b in zip(parts, parts[1:]))], 1)


def flatten(module: Any, batch: Batch, h: Tensor) -> Tensor:
    return torch.sigmoid(h.reshape(-1, WIDTH)).view(h.shape[0], LENGTH, WIDTH)


def write_in_place(module: Any, batch: Batch, h: Tensor) -> Tensor:
    h = h * 1.5
    h.mul_(0.5).add_(0.1)
    h[:, 0] += 1.0
    return h


def write_view(module: Any, batch: Batch, h: Tensor) -> Tensor:
    h = h.clone()
    h.transpose(1, 2)[:, 1:3].mul_(0.7)
    return h.masked_fill_(~batch.mask.unsqueeze(-1), 0.1)


def write_empty(module: Any, batch: Batch, h: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out[:, :2] = h[:, 2:]
    out[:, 2:].copy_(h[:, :2] * 0.5)
    return out


def write_between(module: Any, batch: Batch, h: Tensor) -> Tensor:
    h = h * 0.9
    seen = h.select(1, 0)  # a view, which sees what is written below
    h.add_(module(h * 0.8))
    return h * seen.unsqueeze(1).cos()


def gather(module: Any, batch: Batch, h: Tensor) -> Tensor:
    return h.gather(1, (batch.tokens % LENGTH).unsqueeze(-1).expand_as(h))


def largest(module: Any, batch: Batch, h: Tensor) -> Tensor:
    values, places = (h + OFFSETS).topk(2, dim=-1)
    return h + values.mean(-1, keepdim=True) + 0.1 * places[..., :1]


def straight_through(module: Any, batch: Batch, h: Tensor) -> Tensor:
    return h + ((h > 0.321).to(h.dtype) - h).detach() * 0.3


# No two columns tie, so rounding does not decide which is the larger.
OFFSETS = torch.tensor([0.0, 0.137, -0.211, 0.319, -0.043, 0.077], dtype=torch.float64)

UNARY: dict[str, Callable[..., Any]] = {
    "linear": call,
    "again": call,
    "frozen": call,
    "block": lambda module, batch, h: h + module(h),
    "checkpointed": lambda module, batch, h: h + checkpoint(module, h, use_reentrant=False),
    "norm": call,
    "rms_norm": call,
    "group_norm": call,
    "batch_norm": call,
    "twice": twice,
    "attention": attention,
    "encoder": call,
    "convolution": lambda module, batch, h: module(h.transpose(1, 2)).transpose(1, 2),
    "image": as_image,
    "image_norm": as_normed_image,
    "mix_positions": lambda module, batch, h: module(h.mT).mT,
    "embed": lambda module, batch, h: h + module(batch.tokens),
    "tanh": lambda model, batch, h: torch.tanh(h),
    "relu": lambda model, batch, h: torch.relu(h),
    "gelu": lambda model, batch, h: F.gelu(h),
    "softmax": lambda model, batch, h: h.softmax(-1) * WIDTH,
    "own_function": lambda model, batch, h: HalfGradient.apply(h),
    "straight_through": straight_through,
    "add_position": lambda model, batch, h: h + model.position,
    "add_constant": lambda model, batch, h: h * 0.5 + model.constant,
    "add_whole": lambda model, batch, h: h + batch.whole.sin(),
    "scale": lambda model, batch, h: h * model.position[0, 0] + 1.0,
    "mask": lambda model, batch, h: h * batch.mask.unsqueeze(-1),
    "halves": halves,
    "positions": positions,
    "pool": lambda model, batch, h: h - h.mean(1, keepdim=True).expand_as(h),
    "expanded": lambda model, batch, h: h.mean(1, keepdim=True).expand(-1, LENGTH, -1),
    "transposed_view": lambda model, batch, h: h.transpose(1, 2).contiguous().transpose(1, 2),
    "strided": lambda model, batch, h: torch.cat([h, h.sin()], -1)[..., ::2],
    "turned": lambda model, batch, h: h.flip(1).roll(1, dims=2),
    "reordered": lambda model, batch, h: h[:, model.order],
    "flatten": flatten,
    "running_sum": lambda model, batch, h: h.cumsum(1) * 0.3,
    "einsum": lambda model, batch, h: torch.einsum("blw,vw->blv", h, model.square),
    "write_in_place": write_in_place,
    "write_view": write_view,
    "write_empty": write_empty,
    "write_between": write_between,
    "transposed": lambda model, batch, h: h.transpose(1, 2).contiguous().mT,
    "gather": gather,
    "largest": largest,
    "detached": lambda model, batch, h: h.detach() * model.position,
    # These hand on a value and a note of integers or bools, which a later operator reads.
    "note_index": lambda model, batch, h: (h * 1.1, (h + OFFSETS).argmax(-1)),
    "note_flag": lambda model, batch, h: (h.sin(), h > 0.2345),
    "note_count": lambda model, batch, h: (h - 0.1, (h > 0.2345).sum((1, 2))),
}


def write_into(module: Any, batch: Batch, a: Tensor, b: Tensor) -> Tensor:
    a = a.clone()
    a[:, 1:] += b[:, :-1]
    return a


def products(module: Any, batch: Batch, a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(torch.bmm(a, b.transpose(1, 2)).softmax(-1), a)


BINARY: dict[str, Callable[..., Tensor]] = {
    "add": lambda model, batch, a, b: a + b,
    "gate": lambda model, batch, a, b: a * torch.sigmoid(b),
    "concatenate": lambda module, batch, a, b: module(torch.cat([a, b], dim=-1)),
    "bilinear": lambda module, batch, a, b: torch.tanh(module(a, b)),
    "choose": lambda model, batch, a, b: torch.where(a > 0, a, b),
    "from_detached": lambda model, batch, a, b: a + b.detach().cos(),
    "write_into": write_into,
    "products": products,
    "lerp": lambda model, batch, a, b: torch.lerp(a, b, 0.3),
}

# The second operand is the note of an earlier step of that kind.
BY_NOTE: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "embed_note": ("note_index", lambda module, batch, h, note: h + module(note)),
    "take_along": (
        "note_index",
        lambda model, batch, h, note: h + h.gather(2, note.unsqueeze(-1)),
    ),
    "where_flag": ("note_flag", lambda model, batch, h, note: torch.where(note, h, -h)),
    "by_count": ("note_count", lambda model, batch, h, note: h / (1 + note.view(-1, 1, 1))),
}

"""Losses of one batch: those that microbatches add up to, and those that they cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers import mlp_batch

Formula = Callable[..., Tensor]


def masked_sum(h: Tensor, mask: Tensor) -> Tensor:
    return (h.square().mean(1) * mask).sum()


def accumulated(h: Tensor) -> Tensor:
    total = torch.zeros((), dtype=h.dtype)
    for power in range(1, 4):
        total += (h**power).mean()
    return total


def labels_changed_in_place(h: Tensor, t: Tensor) -> Tensor:
    t = t.clone()
    t[t == 3] = -100
    return F.cross_entropy(h, t)


def count_changed_in_place(h: Tensor, m: Tensor) -> Tensor:
    count = m.sum()
    count.clamp_(min=4)
    return masked_sum(h, m) / count


# s: the model (with weights of classes and a table), h: [rows, 4], y: [rows, 4], t: labels with
# -100 to ignore, u: labels without, m: a mask.
ADDS_UP: dict[str, Formula] = {
    "mean": lambda s, h, y, t, u, m: h.square().mean(),
    "mean by keyword": lambda s, h, y, t, u, m: torch.mean(input=h.square()),
    "sum": lambda s, h, y, t, u, m: h.square().sum(),
    "mean of a flat view": lambda s, h, y, t, u, m: h.square().view(-1).mean(),
    "mean over the batch, then a sum": lambda s, h, y, t, u, m: h.mean(0).sum(),
    "mean over the batch times a matrix": lambda s, h, y, t, u, m: h.mean(0) @ s.weights,
    "mean per row, then over rows": lambda s, h, y, t, u, m: h.square().sum(-1).mean(),
    "mean squared error": lambda s, h, y, t, u, m: F.mse_loss(h, y),
    "huber, smooth l1 and l1": lambda s, h, y, t, u, m: (
        F.huber_loss(h, y) + F.smooth_l1_loss(h, y) + F.l1_loss(h, y)
    ),
    "binary cross entropy": lambda s, h, y, t, u, m: F.binary_cross_entropy_with_logits(
        h, y.sigmoid(), pos_weight=s.weights
    ),
    "cross entropy": lambda s, h, y, t, u, m: F.cross_entropy(h, t),
    "cross entropy, arguments by place": lambda s, h, y, t, u, m: F.cross_entropy(
        h, u, None, None, 3
    ),
    "cross entropy, class weights": lambda s, h, y, t, u, m: F.cross_entropy(
        h, t, weight=s.weights
    ),
    "cross entropy, label smoothing": lambda s, h, y, t, u, m: F.cross_entropy(
        h, t, label_smoothing=0.1
    ),
    "cross entropy, weights and smoothing": lambda s, h, y, t, u, m: F.cross_entropy(
        h, t, weight=s.weights, label_smoothing=0.1
    ),
    "cross entropy, other ignore_index": lambda s, h, y, t, u, m: F.cross_entropy(
        h, u, ignore_index=1
    ),
    "cross entropy, sum": lambda s, h, y, t, u, m: F.cross_entropy(h, t, reduction="sum"),
    "cross entropy, mean over rows": lambda s, h, y, t, u, m: F.cross_entropy(
        h, u, reduction="none"
    ).mean(),
    "cross entropy with probabilities": lambda s, h, y, t, u, m: F.cross_entropy(
        h, y.softmax(-1), weight=s.weights
    ),
    "cross entropy, labels changed in place": lambda s, h, y, t, u, m: labels_changed_in_place(
        h, t
    ),
    "negative log likelihood": lambda s, h, y, t, u, m: F.nll_loss(h.log_softmax(-1), t),
    "likelihood by gather": lambda s, h, y, t, u, m: (
        -h.log_softmax(-1).gather(1, u[:, None]).mean()
    ),
    "likelihood by row index": lambda s, h, y, t, u, m: (
        -h.log_softmax(-1)[torch.arange(h.shape[0]), u].mean()
    ),
    "kl_div batchmean": lambda s, h, y, t, u, m: F.kl_div(
        h.log_softmax(-1), y.softmax(-1), reduction="batchmean"
    ),
    "kl_div batchmean, batch second": lambda s, h, y, t, u, m: F.kl_div(
        h.log_softmax(-1).t(), y.softmax(-1).t(), reduction="batchmean"
    ),
    "masked mean": lambda s, h, y, t, u, m: masked_sum(h, m) / m.sum(),
    "masked mean, at least one": lambda s, h, y, t, u, m: masked_sum(h, m) / m.sum().clamp(min=1),
    "masked mean, count changed in place": lambda s, h, y, t, u, m: count_changed_in_place(h, m),
    "mask that sums to one": lambda s, h, y, t, u, m: masked_sum(h, m / m.sum()),
    "mask that sums to one, again by its largest": lambda s, h, y, t, u, m: (
        masked_sum(h, m / m.sum()) / (m / m.sum()).max()
    ),
    "mask by its share of rows": lambda s, h, y, t, u, m: (
        masked_sum(h, m) / (m.sum() / h.shape[0])
    ),
    "mask made of labels": lambda s, h, y, t, u, m: (
        masked_sum(h, (t != -100).to(h.dtype)) / (t != -100).sum()
    ),
    "sum / rows": lambda s, h, y, t, u, m: h.square().sum() / h.shape[0],
    "sum / elements": lambda s, h, y, t, u, m: h.square().sum() / h.numel(),
    "sum * (1 / rows)": lambda s, h, y, t, u, m: h.square().sum() * (1.0 / h.shape[0]),
    "sum / sqrt(rows)": lambda s, h, y, t, u, m: h.square().sum() / h.shape[0] ** 0.5,
    "rows that limit a value": lambda s, h, y, t, u, m: h.clamp(max=h.shape[0] - 4).mean(),
    "rows that fill a tensor": lambda s, h, y, t, u, m: (
        (h + torch.full((4,), h.shape[0])).square().mean()
    ),
    "ones that count rows": lambda s, h, y, t, u, m: h.sum() / torch.ones(h.shape[0]).sum(),
    "mean + L2 of parameters": lambda s, h, y, t, u, m: (
        h.square().mean() + 0.1 * sum(p.square().sum() for p in s.linear.parameters())
    ),
    "two terms": lambda s, h, y, t, u, m: F.mse_loss(h, y) + 0.1 * F.cross_entropy(h, t),
    "1 - mean": lambda s, h, y, t, u, m: 1 - h.square().mean(),
    "-mean - 2": lambda s, h, y, t, u, m: -h.square().mean() - 2,
    "stacked terms": lambda s, h, y, t, u, m: torch.stack([h.mean(), h.square().sum()]).mean(),
    "stacked with a constant": lambda s, h, y, t, u, m: torch.stack(
        [h.mean(), s.linear.weight.sum()]
    ).sum(),
    "add and sub with alpha": lambda s, h, y, t, u, m: torch.add(
        h.mean(), h.square().mean(), alpha=2
    ).sub(h.sum(), alpha=3),
    "changed in place": lambda s, h, y, t, u, m: h.mean().add_(h.square().mean()).mul_(2),
    "accumulated in zeros": lambda s, h, y, t, u, m: accumulated(h),
    "rows joined with heads": lambda s, h, y, t, u, m: (
        h.view(-1, 2, 2).reshape(-1, 2).softmax(-1).view(-1, 2, 2)[:, 0].mean()
    ),
    "heads joined with rows": lambda s, h, y, t, u, m: (
        h.view(-1, 2, 2).transpose(0, 1).reshape(-1, 2).softmax(-1).view(2, -1, 2)[0].mean()
    ),
    "two views of each row": lambda s, h, y, t, u, m: (
        torch.sub(*torch.cat([h, h * 2]).chunk(2)).square().mean()
    ),
    "repeated rows": lambda s, h, y, t, u, m: h.repeat_interleave(3, 0).mean(),
    "a token for every row": lambda s, h, y, t, u, m: torch.cat(
        [s.weights.expand(h.shape[0], -1), h], 1
    ).mean(),
    "convolution and pool": lambda s, h, y, t, u, m: F.max_pool2d(
        F.conv2d(h.view(-1, 1, 2, 2), s.weights.view(1, 1, 2, 2), padding=1), 2
    ).mean(),
    "relu in place": lambda s, h, y, t, u, m: F.relu(h, inplace=True).mean(),
    "checkpoint": lambda s, h, y, t, u, m: checkpoint(
        lambda z: z.tanh().softmax(-1), h, use_reentrant=False
    )[:, 0].mean(),
}  # fmt: skip

NOT_LINEAR = r"not linear in its reductions over the batch, at .*losses.py:\d+"
MIXES = "along the batch dimension mixes microbatches"
AS_NUMBER = "position in the batch is used as a number"
BEFORE = "a reduction over the batch is used before the loss"
ALL_PAIRS = "compares every row of the batch with every other"
PARTS_OF_ROWS = "mixes the rows of the batch"

REFUSED: dict[str, tuple[str, Formula]] = {
    "sqrt of a mean": (NOT_LINEAR, lambda s, h, y, t, u, m: h.square().mean().sqrt()),
    "norm": (NOT_LINEAR, lambda s, h, y, t, u, m: h.norm()),
    "maximum": (NOT_LINEAR, lambda s, h, y, t, u, m: h.max()),
    "clamped mean": (NOT_LINEAR, lambda s, h, y, t, u, m: h.mean().clamp(min=0)),
    "product of means": (NOT_LINEAR, lambda s, h, y, t, u, m: h.mean() * h.square().mean()),
    "1 / mean": (NOT_LINEAR, lambda s, h, y, t, u, m: 1 / h.square().mean()),
    "quotient of sums": (NOT_LINEAR, lambda s, h, y, t, u, m: h.sum() / h.square().sum()),
    "integer of a sum": (NOT_LINEAR, lambda s, h, y, t, u, m: h.mean() + h.sum().to(torch.int64)),
    "changed behind its name": (
        NOT_LINEAR,
        lambda s, h, y, t, u, m: (lambda loss: (loss.add_(s.weights.sum()), loss)[1])(h.mean()),
    ),
    "labels left out at random": (
        NOT_LINEAR,
        lambda s, h, y, t, u, m: F.cross_entropy(h, (torch.rand(u.shape) * u).long()),
    ),
    "contrastive": (
        ALL_PAIRS,
        lambda s, h, y, t, u, m: F.cross_entropy(h @ h.t(), torch.arange(h.shape[0])),
    ),
    "distances": (ALL_PAIRS, lambda s, h, y, t, u, m: torch.cdist(h, h).mean()),
    "mse_loss of [rows, 1] and [rows]": (
        "mse_loss broadcasts its arguments",
        lambda s, h, y, t, u, m: F.mse_loss(h.sum(1, keepdim=True), m),
    ),
    "batch standard deviation": (
        f"std {MIXES}",
        lambda s, h, y, t, u, m: ((h - h.mean(0)) / h.std(0)).square().mean(),
    ),
    "centred by the batch": (BEFORE, lambda s, h, y, t, u, m: (h - h.mean(0)).square().mean()),
    "softmax over the batch": (f"softmax {MIXES}", lambda s, h, y, t, u, m: h.softmax(0).mean()),
    "softmax over the batch, by keyword": (
        f"softmax {MIXES}",
        lambda s, h, y, t, u, m: torch.softmax(input=h, dim=0).mean(),
    ),
    "softmax over all": (f"softmax {MIXES}", lambda s, h, y, t, u, m: h.view(-1).softmax(0).mean()),
    "cumulative sum": (f"cumsum {MIXES}", lambda s, h, y, t, u, m: h.cumsum(0).mean()),
    "flip": (f"flip {MIXES}", lambda s, h, y, t, u, m: (h * h.flip(0)).mean()),
    "roll": (f"roll {MIXES}", lambda s, h, y, t, u, m: (h * h.roll(1, 0)).mean()),
    "fourier transform": (
        f"fft_fft {MIXES}",
        lambda s, h, y, t, u, m: torch.fft.fft(h, dim=0).abs().mean(),
    ),
    "attention between rows": (
        f"scaled_dot_product_attention {MIXES}",
        lambda s, h, y, t, u, m: F.scaled_dot_product_attention(h[None], h[None], h[None]).mean(),
    ),
    "triangle of rows": (f"triu {MIXES}", lambda s, h, y, t, u, m: h.triu().mean()),
    "layer norm over the batch": (
        f"layer_norm {MIXES}",
        lambda s, h, y, t, u, m: F.layer_norm(h.t(), (h.shape[0],)).square().mean(),
    ),
    "classes along the batch": (
        f"cross_entropy {MIXES}",
        lambda s, h, y, t, u, m: F.cross_entropy(h.t(), s.table[:4, 0].long().clamp(0, 0)),
    ),
    "convolution over the batch": (
        f"conv1d {MIXES}",
        lambda s, h, y, t, u, m: F.conv1d(h.t(), s.table[:4].view(4, 4, 1)).mean(),
    ),
    "rows in an argument's order": (
        f"an index tensor {MIXES}",
        lambda s, h, y, t, u, m: (h - h[u]).square().mean(),
    ),
    "index_select": (f"index_select {MIXES}", lambda s, h, y, t, u, m: h.index_select(0, u).mean()),
    "masked_scatter": (
        f"masked_scatter {MIXES}",
        lambda s, h, y, t, u, m: h.masked_scatter(y > 0, h).mean(),
    ),
    "first row": (f"an index or slice {MIXES}", lambda s, h, y, t, u, m: h[0].mean()),
    "first row written": (
        f"an index or slice {MIXES}",
        lambda s, h, y, t, u, m: (lambda z: (z.__setitem__(0, 0.0), z)[1])(h.clone()).mean(),
    ),
    "differences of neighbours": (
        r"has s\d+ - 1 rows where the batch has s\d+",
        lambda s, h, y, t, u, m: (h[1:] - h[:-1]).square().mean(),
    ),
    "first half": (
        r"has \(\(s\d+ \+ 1\)//2\) rows where the batch has s\d+",
        lambda s, h, y, t, u, m: h.chunk(2)[0].mean(),
    ),
    "rows beside a table": (
        r"has s\d+ \+ 16 rows where the batch has s\d+",
        lambda s, h, y, t, u, m: torch.cat([h, s.table]).sum(),
    ),
    "view that cuts rows": (
        f"view {PARTS_OF_ROWS}",
        lambda s, h, y, t, u, m: h.view(2, h.shape[0], 2)[0].mean(),
    ),
    "reshape of a transpose": (
        f"reshape {PARTS_OF_ROWS}",
        lambda s, h, y, t, u, m: h.t().reshape(h.shape[0], 4)[:, 0].mean(),
    ),
    "row numbers as a factor": (
        AS_NUMBER,
        lambda s, h, y, t, u, m: (h.sum(1) * torch.arange(h.shape[0])).mean(),
    ),
    "row numbers into a table": (
        AS_NUMBER,
        lambda s, h, y, t, u, m: (h + s.table[torch.arange(h.shape[0])]).mean(),
    ),
    "row numbers into an embedding": (
        AS_NUMBER,
        lambda s, h, y, t, u, m: (h + F.embedding(torch.arange(h.shape[0]), s.table)).mean(),
    ),
    "a table's first rows": (
        AS_NUMBER,
        lambda s, h, y, t, u, m: (h + s.table[: h.shape[0]]).mean(),
    ),
    "shuffled rows": (
        AS_NUMBER,
        lambda s, h, y, t, u, m: (h - h[torch.randperm(h.shape[0])]).square().mean(),
    ),
    "rows that fill rows": (
        "the batch size fills a tensor",
        lambda s, h, y, t, u, m: (h.sum(1) * torch.full((h.shape[0],), h.shape[0])).mean(),
    ),
    "softmax over the batch in a checkpoint": (
        f"softmax {MIXES}",
        lambda s, h, y, t, u, m: checkpoint(
            lambda z: z.softmax(0), h, use_reentrant=False
        ).mean(),
    ),
    "mean over the batch in a checkpoint": (
        "a reduction over the batch inside of a checkpoint",
        lambda s, h, y, t, u, m: checkpoint(
            lambda z: z - z.mean(0), h, use_reentrant=False
        ).mean(),
    ),
}  # fmt: skip


class Formulas(nn.Module):
    """One output per formula, so that Dynamo runs once for all of them."""

    weights: Tensor
    table: Tensor

    def __init__(
        self, adds_up: Mapping[str, Formula], refused: Mapping[str, tuple[str, Formula]]
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.formulas = [*adds_up.values(), *(formula for _, formula in refused.values())]
        self.linear = nn.Linear(3, 4, dtype=torch.float64)
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 3.0, 0.5], dtype=torch.float64))
        self.register_buffer("table", torch.randn(16, 4, dtype=torch.float64))

    def forward(self, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        return tuple(formula(self, self.linear(x), *rest) for formula in self.formulas)


def batch() -> tuple[Tensor, ...]:
    x, y = mlp_batch(5, 3)[0], mlp_batch(5, 4)[1]
    labels = torch.tensor([1, -100, 0, 3, -100])
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    return x, y, labels, torch.tensor([1, 2, 0, 3, 1]), mask

"""A seed -> a random small model: a DAG of operators, a loss, and what it returns."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from tests.fuzz.batches import LENGTH, VOCABULARY, WIDTH, Batch
from tests.fuzz.operators import BINARY, BY_NOTE, MODULES, NORMS_OF_ROWS, UNARY

LOSSES = (
    "mse", "sum", "rows", "huber", "binary", "entropy", "ignoring", "smoothed", "soft",
    "divergence", "weighted", "masked", "rows_by_weight", "two_terms",
)  # fmt: skip
RETURNS = ("loss", "tuple", "dict", "many", "turned", "logits", "two_values")
WITHOUT_LOSS = ("logits", "two_values")


class Step(NamedTuple):
    kind: str
    reads: tuple[int, ...]
    module: str


class RandomModel(nn.Module):
    """forward(*batch) -> a loss, alone or with other values; or values alone."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.ops = nn.ModuleDict()
        self.register_buffer("constant", torch.randn(LENGTH, WIDTH), persistent=False)
        self.register_buffer("order", torch.randperm(LENGTH))
        self.register_buffer("weights", torch.rand(VOCABULARY) + 0.5)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.square = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.4)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.requires_grad_(rng.random() < 0.8)
        self.steps: list[Step] = []
        for number in range(rng.randint(3, 10)):
            self.steps.append(self.make_step(rng, number))
        self.loss, self.returns = rng.choice(LOSSES), rng.choice(RETURNS)
        self.middle = rng.randint(1, len(self.steps))
        embedded = [step.module for step in self.steps if step.kind == "embed"]
        if embedded and rng.random() < 0.4:
            self.head.weight = self.ops[embedded[0]].weight
        self.train(rng.random() < 0.5)
        live = self.live_steps()
        self.num_annotated = rng.randint(1, min(4, len(live))) if rng.random() < 0.1 else 0
        starts = sorted(rng.sample(live[1:], max(0, self.num_annotated - 1)))
        self.stage_of = [sum(start <= i for start in starts) for i in range(1, 1 + len(self.steps))]

    def make_step(self, rng: random.Random, number: int) -> Step:
        notes = [i for i, step in enumerate(self.steps) if step.kind.startswith("note")]
        kind = rng.choice(sorted(UNARY if number == 0 or rng.random() < 0.65 else BINARY))
        # Mostly the newest value, so that the graph is deep; sometimes any, so that it has skips.
        reads = [number if rng.random() < 0.7 else rng.randint(0, number)]
        if kind in BINARY:
            reads.append(rng.randint(0, number))
        if notes and rng.random() < 0.4:
            note = rng.choice(notes)
            kinds = [k for k, (source, _) in BY_NOTE.items() if source == self.steps[note].kind]
            kind, reads = rng.choice(kinds), [number, note + 1]
        name = f"op{number}"
        linears = [step.module for step in self.steps if step.kind == "linear"]
        if kind in ("again", "twice") and linears:
            return Step(kind, tuple(reads), rng.choice(linears))
        if kind in MODULES:
            self.ops[name] = MODULES[kind]()
        return Step(kind, tuple(reads), name)

    @property
    def reads_whole_batch(self) -> bool:
        """Whether microbatches would have other statistics than the batch, as documented."""
        return self.training and any(step.kind in NORMS_OF_ROWS for step in self.steps)

    @property
    def has_loss(self) -> bool:
        return self.returns not in WITHOUT_LOSS

    def live_steps(self) -> list[int]:
        """The numbers of the steps whose values reach the head."""
        live = {len(self.steps)}
        for number in range(len(self.steps), 0, -1):
            if number in live:
                live.update(self.steps[number - 1].reads)
        return sorted(live - {0})

    def modules_in_use(self) -> list[str]:
        """The names in `ops` whose values reach the head, in the order in which they first run."""
        names = [self.steps[number - 1].module for number in self.live_steps()]
        return [name for name in dict.fromkeys(names) if name in self.ops]

    def forward(self, x: Tensor, tokens: Tensor, mask: Tensor, y: Tensor, whole: Tensor) -> Any:
        batch = Batch(x, tokens, mask, y, whole)
        with self.in_stage(0):  # what is made of arguments alone belongs to no stage
            values: list[Tensor] = [x @ self.square if self.num_annotated else x]
        notes: list[Tensor] = [tokens]
        for (kind, reads, name), stage in zip(self.steps, self.stage_of):
            module = self.ops[name] if name in self.ops else self
            operands = [values[number] for number in reads]
            if kind in BY_NOTE:
                operands[1] = notes[reads[1]]
            with self.in_stage(stage):
                found = operator_of(kind)(module, batch, *operands)
            value, note = found if kind.startswith("note") else (found, tokens)
            values.append(value)
            notes.append(note)
        with self.in_stage(self.stage_of[-1]):
            logits = self.head(values[-1])
            return self.returned(logits, values[self.middle], batch)

    def in_stage(self, number: int) -> AbstractContextManager[object]:
        return fxpipe.stage(number) if self.num_annotated else nullcontext()

    def returned(self, logits: Tensor, middle: Tensor, batch: Batch) -> Any:
        if self.returns == "logits":
            return logits
        if self.returns == "two_values":
            return {"logits": logits, "middle": middle * 2}
        loss = self.loss_of(logits, middle, batch)
        match self.returns:
            case "tuple":
                return loss, logits, middle.detach()
            case "dict":
                return {"loss": loss, "out": {"logits": logits}}
            case "many":
                found = logits.argmax(-1)
                right = found == batch.tokens
                return {"loss": loss, "right": (right, right.sum(1)), "none": None, "number": 3}
            case "turned":
                return logits.transpose(0, 1), loss, batch.mask
        return loss

    def loss_of(self, logits: Tensor, middle: Tensor, batch: Batch) -> Tensor:
        squares = (logits - batch.y) ** 2
        flat, tokens = logits.flatten(0, 1), batch.tokens.flatten()
        match self.loss:
            case "sum":
                return squares.sum() * 0.1
            case "rows":
                return squares.sum((1, 2)).mean()
            case "huber":
                return F.huber_loss(logits, batch.y)
            case "binary":
                return F.binary_cross_entropy_with_logits(logits, batch.y.sigmoid())
            case "entropy":
                return F.cross_entropy(flat, tokens)
            case "smoothed":
                return F.cross_entropy(flat, tokens, label_smoothing=0.1)
            case "soft":
                return F.cross_entropy(flat, batch.y.softmax(-1).flatten(0, 1))
            case "divergence":
                soft = batch.y.softmax(-1)
                return F.kl_div(logits.log_softmax(-1), soft, reduction="batchmean")
            case "weighted":
                return F.cross_entropy(flat, tokens, weight=self.weights)
            case "ignoring":
                labels = batch.tokens.masked_fill(~batch.mask, -100)
                return F.cross_entropy(logits.transpose(1, 2), labels)
            case "masked":
                valid = batch.mask.unsqueeze(-1).to(logits.dtype)
                return (squares * valid).sum() / valid.sum()
            case "rows_by_weight":
                weight = batch.mask.sum(1)
                return (squares.mean((1, 2)) * weight).sum() / weight.sum()
            case "two_terms":
                return squares.mean() + 0.1 * middle.pow(2).mean() - 0.01 * middle.sum()
        return F.mse_loss(logits, batch.y)


def operator_of(kind: str) -> Any:
    if kind in BY_NOTE:
        return BY_NOTE[kind][1]
    return UNARY[kind] if kind in UNARY else BINARY[kind]

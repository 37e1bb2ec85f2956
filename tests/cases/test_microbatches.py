"""How batches are split, and shapes that change from call to call."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpipe.errors import FxpipeError
from tests.cases.shared import check, line_of, normal
from tests.numerics.models import MLP, pipelined, seeded


def tokens_and_targets(rows: int, length: int) -> tuple[Tensor, Tensor]:
    tokens = torch.arange(rows * length).view(rows, length) * 7 % 11
    return tokens, tokens.roll(1, 0)


class RowsAndPlaces(nn.Module):
    """A loss over all places of all rows, in one dimension as in `cross_entropy(logits.view(...))`,
    or in two.
    """

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.tokens, self.head, self.flat = nn.Embedding(11, 6), nn.Linear(6, 11), flat

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.tokens(tokens)))
        if self.flat:
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return F.cross_entropy(logits.transpose(1, 2), targets)


SIZES = [(8, 5), (4, 5), (8, 4)]


@pytest.mark.parametrize("flat", [False, True])
def test_case_27_batch_and_sequence_may_change_between_calls(flat: bool) -> None:
    batches = [tokens_and_targets(*size) for size in SIZES]
    check(lambda: RowsAndPlaces(flat), *batches)


def test_case_27_sequences_on_ranks_may_become_shorter_and_longer(
    two_ranks: list[dict[str, Any]],
) -> None:
    assert [found["lengths"] for found in two_ranks] == [None, None]


class Attending(nn.Module):
    """Attention under a mask of the whole batch: rows hold different documents."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)

    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, 2, 3).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, 6))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.attend(torch.tanh(self.attend(x, mask)), mask).square().mean()


def documents(rows: int, length: int) -> Tensor:
    """The number of each token's document; every row changes at another place."""
    return (torch.arange(length) >= torch.arange(1, rows + 1).unsqueeze(1)).long()


def same_document(rows: int, length: int) -> Tensor:
    ids = documents(rows, length)
    return (ids.unsqueeze(1) == ids.unsqueeze(2)).unsqueeze(1)


def test_case_30_every_microbatch_sees_its_own_rows_of_a_mask() -> None:
    check(Attending, (normal(8, 9, 6), same_document(8, 9)), microbatches=4)


class MakingItsMask(Attending):
    """The mask is made in the model, of the documents."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        mask = (ids.unsqueeze(1) == ids.unsqueeze(2)).unsqueeze(1)
        return self.attend(torch.tanh(self.attend(x, mask)), mask).square().mean()


def test_case_30_a_mask_made_in_the_model_is_of_the_microbatchs_rows() -> None:
    check(MakingItsMask, (normal(8, 9, 6), documents(8, 9)), microbatches=4)


class PackedSequences(NamedTuple):
    starts: Tensor  # where each sequence begins in the packed rows, and the end of the last
    longest: int


class Packed(nn.Module):
    """All sequences in one row of tokens, told apart by where they begin."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, packed: PackedSequences) -> Tensor:
        h = torch.tanh(self.first(x))
        sums = torch.segment_reduce(h, "sum", offsets=packed.starts, axis=0)
        return self.second(sums).square().mean()


class ComparingPacked(Packed):
    def forward(self, x: Tensor, packed: PackedSequences) -> Tensor:
        h = torch.tanh(self.first(x))
        ids = torch.searchsorted(packed.starts, torch.arange(x.shape[0]), right=True)
        scores = (h @ h.T).masked_fill(ids.unsqueeze(0) != ids.unsqueeze(1), float("-inf"))
        return self.second(scores.softmax(-1) @ h).square().mean()


@pytest.mark.parametrize(("build", "line"), [(Packed, "return"), (ComparingPacked, "ids = ")])
def test_case_32_starts_of_packed_sequences_are_not_split_but_refused(
    build: type[nn.Module], line: str
) -> None:
    packed = PackedSequences(torch.tensor([0, 3, 8]), 5)
    with pytest.raises(FxpipeError) as told:
        pipelined(seeded(build), microbatches=2)(normal(8, 6), packed)
    assert line_of(build, line) in str(told.value)


@pytest.mark.parametrize("microbatches", [10, 3])
def test_case_35_interleaved_1f1b_takes_any_number_of_microbatches(microbatches: int) -> None:
    options = {"stages": 8, "ranks": 4, "schedule": "interleaved-1f1b"}
    x = normal(20, 6)
    check(lambda: MLP(depth=8), [x, x.cos()], microbatches=microbatches, **options)

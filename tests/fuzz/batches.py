"""A number of rows and a seed -> the arguments of a call of a random model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LENGTH, WIDTH, VOCABULARY = 4, 6, 11


class Batch(NamedTuple):
    """x: what the model starts from; tokens: integers; mask: what counts; y: targets.

    `whole` has no batch: every microbatch gets it as it is.
    """

    x: Tensor
    tokens: Tensor
    mask: Tensor
    y: Tensor
    whole: Tensor


def make_batch(rows: int, seed: int) -> Batch:
    numbers = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, LENGTH, WIDTH, generator=numbers, dtype=torch.float64)
    tokens = torch.randint(VOCABULARY, (rows, LENGTH), generator=numbers)
    mask = torch.rand(rows, LENGTH, generator=numbers) < 0.7
    mask[0, 0] = True  # a mean over nothing is NaN in eager too, and NaN hides differences
    y = torch.randn(rows, LENGTH, VOCABULARY, generator=numbers, dtype=torch.float64)
    whole = torch.randn(1, LENGTH, WIDTH, generator=numbers, dtype=torch.float64)
    return Batch(x, tokens, mask, y, whole)

"""Two values that should be equal -> how far apart they are, and how far rounding may take them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

# A value smaller than this part of the largest of its like is compared as though it were as large:
# a gradient that should be zero is rounding alone.
FLOOR = 1e-3
SMALLEST = 1e-300

# Why plain eager on the whole batch gives other numbers than a pipeline, by contract.
REDUCED = "loss_reduction makes the batch's loss of the microbatches'"
BATCH_NORM = "BatchNorm in training sees one microbatch after another"
RANDOM = "the model draws random numbers, and eager draws others"


@dataclass(frozen=True)
class Compared:
    """One value beside its reference: the norm of the difference, relative to the reference's."""

    what: str
    error: float
    limit: float

    @property
    def agrees(self) -> bool:
        return self.error <= self.limit

    def __str__(self) -> str:
        said = "" if self.agrees else "  differs"
        return f"{self.what:<52} {self.error:8.1e}   limit {self.limit:.1e}{said}"


def compared(what: str, ours: torch.Tensor, theirs: torch.Tensor, floor: float = 0.0) -> Compared:
    """The limit is the square root of the type's step; integers and booleans have to be equal.

    Infinities and NaNs are equal to themselves. `floor`: the least norm that is divided by.
    """
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return Compared(f"{what} ({shape_of(ours)} for {shape_of(theirs)})", math.inf, 0.0)
    ours, theirs = ours.detach(), theirs.detach()
    if not theirs.is_floating_point() and not theirs.is_complex():
        return Compared(what, 0.0 if torch.equal(ours, theirs) else math.inf, 0.0)
    limit = math.sqrt(torch.finfo(theirs.dtype).eps)
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    apart = norm(torch.where(same, 0, ours - theirs))
    error = apart / max(norm(theirs.nan_to_num()), floor, SMALLEST) if apart else 0.0
    return Compared(what, math.inf if math.isnan(error) else error, limit)


def compare_named(
    what: str, ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
) -> list[Compared]:
    """Values by name, those of one mapping being of one kind; one that `ours` lacks differs."""
    floor = FLOOR * max((norm(v) for v in theirs.values() if v.is_floating_point()), default=0.0)
    return [
        compared(f"{what} {name}", ours[name], value, floor)
        if name in ours
        else Compared(f"{what} {name} is missing", math.inf, 0.0)
        for name, value in theirs.items()
    ]


def shape_of(value: torch.Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def norm(value: torch.Tensor) -> float:
    """The norm of all elements; NaN where one is."""
    wide = torch.complex128 if value.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(value.detach().to(wide)))

"""A tensor to one dense block, as messages carry it, and back."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch

from fxpipe.lowering.mailboxes import Layout

META = torch.device("meta")


class Spec(NamedTuple):
    """What the receiver must know of a tensor before it comes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @staticmethod
    def of(value: torch.Tensor) -> Spec:
        return Spec(
            tuple(map(int, value.shape)), tuple(map(int, value.stride())), value.dtype, value.device
        )


@cache
def order_in_memory(spec: Spec) -> list[int]:
    """The dimensions from the one with the largest stride to the one with the smallest."""
    dims = range(len(spec.shape))
    return sorted(dims, key=lambda d: (-spec.stride[d], -spec.shape[d], d))


def pack(tensor: torch.Tensor, spec: Spec) -> torch.Tensor:
    """The tensor as one contiguous block, in the order in which it lies: mostly no copy."""
    return tensor.permute(order_in_memory(spec)).contiguous()


def buffer_for(spec: Spec) -> torch.Tensor:
    shape = [spec.shape[d] for d in order_in_memory(spec)]
    return torch.empty(shape, dtype=spec.dtype, device=spec.device)


def layout_of(specs: tuple[Spec, ...]) -> Layout:
    """What `unpack` makes of a message, as memory that two processes share holds it."""
    return Layout.of(unpack(buffer_for(s._replace(device=META)), s) for s in specs)


def unpack(buffer: torch.Tensor, spec: Spec) -> torch.Tensor:
    """The received block with the strides that the receiver's tasks expect."""
    order = order_in_memory(spec)
    return buffer.permute([order.index(d) for d in range(len(order))])


def lay_out(tensor: torch.Tensor, spec: Spec) -> torch.Tensor:
    """The tensor with the strides of the spec; itself where it has them."""
    return tensor if tensor.stride() == spec.stride else unpack(pack(tensor, spec), spec)

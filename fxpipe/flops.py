"""How much work a node of an ATen graph is, from its shapes alone."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.fx as fx
from torch.utils.flop_counter import flop_registry

from fxpipe.program import tensors_of

# What an element that is read or written costs, in floating point operations: a matrix product of
# the sizes that models have does about this many per element moved.
FLOPS_PER_ELEMENT = 16
# What a byte costs that is sent to another rank: 50 Gflop/s and 1 GB/s for a core and loopback, a
# thousand times as much of both for an accelerator and its links.
FLOPS_PER_BYTE_SENT = 50


def flops(node: fx.Node) -> int:
    """Floating point operations of a matrix product, convolution or attention; 0 for others."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        query, key, value = (a.meta["val"] for a in node.args[:3])
        scores = math.prod(query.shape[:-1]) * key.shape[-2]
        return int(2 * scores * (query.shape[-1] + value.shape[-1]))
    if packet is torch.ops.aten.addmm_:
        packet = torch.ops.aten.addmm
    if packet not in flop_registry:
        return 0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return int(flop_registry[packet](*args, **kwargs, out_val=node.meta.get("val")))


def cost(node: fx.Node) -> int:
    """`flops`, and what moving the result costs, in floating point operations."""
    return flops(node) + FLOPS_PER_ELEMENT * elements(node.meta.get("val"))


def elements(value: Any) -> int:
    return sum(int(tensor.numel()) for tensor in tensors_of(value))


def bytes_of(value: Any) -> int:
    return sum(int(tensor.numel()) * tensor.dtype.itemsize for tensor in tensors_of(value))

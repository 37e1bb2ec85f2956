"""Gradients that are spread over ranks -> their norm, and whether one of them is not finite."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor, nn

from fxpipe.lowering.collect import together
from fxpipe.lowering.group import num_ranks
from fxpipe.ownership import is_owned, plain, timeout_of
from fxpipe.torch_private import found_infs

Norms = dict[str, tuple[float, torch.dtype]]


def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale the gradients of all ranks, in place, so that their total norm is `max_norm` at most.

    `model` is the module or what torch.compile made of it. Each parameter counts once, however many
    ranks or names it has; one without a gradient does not count. The total norm, which is returned
    with the same value on every rank, and what it does to the gradients are those of
    `torch.nn.utils.clip_grad_norm_` on the unsplit model; `norm_type` may be inf. In one process it
    is that function.

    Every rank must call it, after `backward`. Raises RankError on all ranks where one does not come
    within the step's `timeout`, and RuntimeError, also on all, where the norm is not finite and
    `error_if_nonfinite` is set.
    """
    parameters = dict(plain(model).named_parameters())
    if num_ranks() == 1:
        return nn.utils.clip_grad_norm_(
            parameters.values(), max_norm, norm_type, error_if_nonfinite
        )
    max_norm, norm_type = float(max_norm), float(norm_type)
    limit = timeout_of(parameters.values())
    label = f"clip_grad_norm_(max_norm={max_norm}, norm_type={norm_type})"
    tables = together(label, lambda: norms_of(parameters, norm_type), limit)
    device = next(iter(parameters.values())).device if parameters else torch.device("cpu")
    total = total_norm(list(parameters), tables, norm_type).to(device)
    # For its error only: the norm of one number is its absolute value.
    nn.utils.get_total_norm([total], norm_type, error_if_nonfinite)
    nn.utils.clip_grads_with_norm_(parameters.values(), max_norm, total)
    return total


@torch.no_grad()
def norms_of(parameters: dict[str, nn.Parameter], norm_type: float) -> Norms:
    """The norms of the gradients that this rank vouches for, with the dtypes that they have."""
    gradients = {
        name: parameter.grad
        for name, parameter in parameters.items()
        if parameter.grad is not None and is_owned(parameter, True)
    }
    norms = [torch.linalg.vector_norm(g, norm_type) for g in gradients.values()]
    # One copy to the host for each device. A wider float holds a narrower one exactly.
    values: dict[int, float] = {}
    for device in {norm.device for norm in norms}:
        there = [i for i, norm in enumerate(norms) if norm.device == device]
        values |= zip(there, torch.stack([norms[i] for i in there]).tolist())
    return {name: (values[i], norms[i].dtype) for i, name in enumerate(gradients)}


def total_norm(names: list[str], tables: list[Norms], norm_type: float) -> Tensor:
    """The norm of all gradients, each as the lowest rank has it that has one."""
    found: Norms = {}
    for table in reversed(tables):
        found |= table
    norms = [torch.tensor(found[name][0], dtype=found[name][1]) for name in names if name in found]
    if not norms:
        return torch.tensor(0.0)
    dtype = reduce(torch.promote_types, (norm.dtype for norm in norms))
    return torch.linalg.vector_norm(torch.stack([norm.to(dtype) for norm in norms]), norm_type)


def agree_on_inf(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Let every rank skip the optimizer's step where the gradients of one hold an inf or NaN.

    Call it on every rank after `backward` and before `scaler.step(optimizer)`; it unscales the
    gradients if `scaler.unscale_` has not. `scaler.step` and `scaler.update` then do the same on
    all ranks, so that their scales stay equal. Returns whether the step will be skipped. A scaler
    that is not enabled agrees on nothing. Raises RankError on all ranks where one does not come
    within the step's `timeout`.
    """
    if not scaler.is_enabled():
        return False
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    own: dict[torch.device, Tensor] = {}

    def look() -> bool:
        own.update(found_infs(scaler, optimizer))
        return any(bool(found) for found in own.values())

    everywhere = together("agree_on_inf", look, timeout_of(parameters))
    for found in own.values():
        found.fill_(float(any(everywhere)))
    return any(everywhere)

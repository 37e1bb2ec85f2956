"""Which parameters and buffers this rank uses, and freeing the storage of the others."""

from __future__ import annotations

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fxpipe.errors import FxpipeError

_owned = WeakTensorKeyDictionary()  # tensor -> (the compiled step, whether it uses the tensor)


def record(tensor: torch.Tensor, step: object, used: bool) -> None:
    """Remember whether a plan of `step` uses a tensor on this rank. The newest step counts."""
    known, before = _owned.get(tensor, (None, False))
    _owned[tensor] = (id(step), used or (before and known == id(step)))


def is_owned(tensor: torch.Tensor, default: bool) -> bool:
    return bool(_owned[tensor][1]) if tensor in _owned else default


def owned_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that this rank's stages use, by name: those that get a gradient here.

    In one process these are all that the model uses. Raises FxpipeError before the first step,
    when the stages are not known yet.
    """
    named = dict(plain(model).named_parameters())
    require_a_step(named.values())
    return {name: p for name, p in named.items() if is_owned(p, False)}


def free_unowned(model: torch.nn.Module) -> int:
    """Give back the memory of parameters and buffers that only other ranks use; bytes freed.

    Shapes and names stay, so `step(...)` goes on as before; reading a freed tensor elsewhere
    fails. A tensor whose storage an owned one shares is kept.
    """
    module = plain(model)
    tensors = [*module.parameters(), *module.buffers()]
    require_a_step(tensors)
    kept = {t.untyped_storage().data_ptr() for t in tensors if is_owned(t, True)}
    freed = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in kept and storage.size():
            freed += storage.size()
            storage.resize_(0)
    return freed


def plain(model: torch.nn.Module) -> torch.nn.Module:
    """The module that torch.compile wrapped."""
    return getattr(model, "_orig_mod", model)


def require_a_step(tensors: object) -> None:
    if not any(t in _owned for t in tensors):  # type: ignore[attr-defined]
        raise FxpipeError(
            "no step of this model has run through fxpipe yet; call it once, then ask what it owns"
        )

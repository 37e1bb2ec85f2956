"""Which parameters and buffers this rank uses, and freeing the storage of the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fxpipe.errors import FxpipeError
from fxpipe.options import Options


class Use(NamedTuple):
    """Of a tensor by a compiled step on this rank."""

    step: int  # tells steps apart
    used: bool
    timeout: float  # seconds: the step's option


_owned = WeakTensorKeyDictionary()  # tensor -> Use
_guarded: WeakSet[torch.nn.Module] = WeakSet()  # whose state_dict() refuses what was freed


def record(tensor: torch.Tensor, step: object, used: bool) -> None:
    """Remember whether a plan of `step` uses a tensor on this rank. The newest step counts."""
    known = _owned.get(tensor)
    before = known is not None and known.used and known.step == id(step)
    options = getattr(step, "options", None) or Options()
    _owned[tensor] = Use(id(step), used or before, options.timeout)


def is_owned(tensor: torch.Tensor, default: bool) -> bool:
    return bool(_owned[tensor].used) if tensor in _owned else default


def is_held(tensor: torch.Tensor) -> bool:
    """Whether this rank has a tensor's current value: it owns it, or no step has changed it."""
    return is_owned(tensor, True) and not is_freed(tensor)


def is_known(tensor: torch.Tensor) -> bool:
    """Whether a step has been planned in which a rank uses the tensor."""
    return tensor in _owned


def is_freed(tensor: torch.Tensor) -> bool:
    return bool(tensor.numel()) and not tensor.untyped_storage().size()


def bytes_of(tensor: torch.Tensor) -> int:
    """What the storage must hold for this tensor."""
    last = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
    return int(last + 1) * tensor.element_size()


def timeout_of(tensors: Iterable[torch.Tensor]) -> float:
    """The option `timeout` of the steps that have run with these tensors, in seconds."""
    known = [_owned[tensor].timeout for tensor in tensors if tensor in _owned]
    return max(known, default=Options().timeout)


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

    Shapes and names stay, so `step(...)` goes on as before. A tensor whose storage an owned one
    shares is kept. Do not read a freed tensor: there is no memory behind it, and torch does not
    look before it reads, so that the process dies. `model.state_dict()` is refused from here on,
    since it would hold such tensors; `fxpipe.state_dict(model)` gathers the whole.
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
    if freed and module not in _guarded:
        module.register_state_dict_pre_hook(refuse_freed)
        _guarded.add(module)
    return freed


def refuse_freed(module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
    """A hook of `state_dict`: what was freed would be saved as nothing, without a word."""
    if keep_vars:  # the very parameters are asked for, not their values
        return
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_freed(tensor):
            raise FxpipeError(
                f"state_dict() would hold {name!r}, whose memory fxpipe.free_unowned gave back on "
                f"this rank; fxpipe.state_dict(model) gathers the whole model's state"
            )


def plain(model: torch.nn.Module) -> torch.nn.Module:
    """The module that torch.compile wrapped."""
    return getattr(model, "_orig_mod", model)


def require_a_step(tensors: Iterable[torch.Tensor]) -> None:
    if not any(t in _owned for t in tensors):
        raise FxpipeError(
            "no step of this model has run through fxpipe yet; call it once, then ask what it owns"
        )

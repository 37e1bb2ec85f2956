"""Parameters and buffers that are spread over ranks <-> one state under the model's own names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fxpipe.errors import FxpipeError
from fxpipe.lowering.collect import collect, together
from fxpipe.lowering.group import num_ranks, this_rank
from fxpipe.ownership import bytes_of, is_freed, is_held, is_known, is_owned, plain, timeout_of


def state_dict(model: nn.Module, *, rank0_only: bool = False, cpu: bool = False) -> dict[str, Any]:
    """The whole model's state, gathered over the ranks: what the unsplit model's would be.

    `model` is the module or what torch.compile made of it; names are the module's. On every rank,
    or with `rank0_only` on rank 0 while the others get an empty dict. A tensor whose value this
    rank has is the model's own, as in torch; the others are new. With `cpu` all are on the CPU.

    Every rank must call it, before or after the first step and `free_unowned`. Raises RankError on
    all ranks where one does not come within the step's `timeout`.
    """
    state = variables(model)
    first = first_names(state)
    held = {
        name: state[name].detach() for name in dict.fromkeys(first.values()) if is_held(state[name])
    }
    limit = timeout_of(tensors_in(state))
    if num_ranks() == 1:
        found = {name: tensor.cpu() if cpu else tensor for name, tensor in held.items()}
    else:
        found = collect("state_dict", held, limit, rank0_only, cpu)
    if rank0_only and this_rank():
        return {}
    if lost := [name for name in first.values() if name not in found]:
        raise FxpipeError(
            f"no rank has the value of {lost[0]!r}: its memory was freed, or comes with the first "
            f"step; load the values again, or call the step before you ask for the state"
        )
    return {name: found[first[name]] if name in first else state[name] for name in state}


def load_state_dict(model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> Any:
    """Load a whole model's state; what this rank has freed, and does not use, stays freed.

    Names are the module's, as `state_dict` gives them. Every rank must get the same state. Returns
    the missing and unexpected names, as `nn.Module.load_state_dict` does; that is what loads.
    """
    given = dict(state)
    require_memory(model)
    for name, tensor in variables(model).items():
        if not isinstance(tensor, Tensor) or not is_freed(tensor):
            continue
        if is_owned(tensor, False):
            storage = tensor.untyped_storage()
            storage.resize_(bytes_of(tensor))
        elif name in given:
            check_shape(name, tensor, given[name])
            given[name] = tensor  # copied to itself, which copies nothing
    return plain(model).load_state_dict(given, strict=strict)


def owned_state_dict(model: nn.Module) -> dict[str, Any]:
    """The part of the model's state that this rank has: what it uses, and what no rank uses.

    The tensors are the model's own, under its names, so that torch.distributed.checkpoint saves
    from them and loads into them; before the first step, when no stages are known, that is the
    whole state. Nothing is sent: ranks need not call it together.
    """
    require_memory(model)
    return {
        name: value.detach() if isinstance(value, Tensor) else value
        for name, value in variables(model).items()
        if not isinstance(value, Tensor) or is_held(value)
    }


def save_safetensors(
    model: nn.Module,
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write the whole model's state, gathered over the ranks, to one file on rank 0.

    A weight with several names is written under the first; the metadata maps its other names to
    that one, as `safetensors.torch.save_model` does it, and `safetensors.torch.load_model` loads
    the file into the plain model. Needs the extra `safetensors`.

    Every rank must call it, and none returns before the file is there. Raises RankError on all
    ranks where one does not come within the step's `timeout`, or the file cannot be written.
    """
    limit = timeout_of(tensors_in(variables(model)))
    together("save_safetensors", require_safetensors, limit)
    first = first_names(variables(model))
    state = state_dict(model, rank0_only=True, cpu=True)
    others = {name: kept for name, kept in first.items() if name != kept}

    def write() -> None:
        from safetensors.torch import save_file

        if bad := [name for name, value in state.items() if not isinstance(value, Tensor)]:
            raise FxpipeError(
                f"the state holds {bad[0]!r}, a {type(state[bad[0]]).__name__}, and safetensors "
                f"holds tensors alone; save it with torch.save(fxpipe.state_dict(model), ...)"
            )
        kept = {name: alone(tensor) for name, tensor in state.items() if name not in others}
        save_file(kept, Path(path), {"format": "pt", **others, **(metadata or {})})

    together("save_safetensors", lambda: write() if not this_rank() else None, limit)


def require_safetensors() -> None:
    try:
        import safetensors.torch  # noqa: F401
    except ImportError as error:
        raise FxpipeError(
            f"save_safetensors needs the package safetensors ({error}); "
            f"install it with pip install 'fxpipe[safetensors]'"
        ) from error


def alone(tensor: Tensor) -> Tensor:
    """A tensor with a storage of its own: one that two tensors share cannot be written."""
    tensor = tensor.contiguous()
    whole = tensor.untyped_storage().size() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()


def variables(model: nn.Module) -> dict[str, Any]:
    """The module's state as the very parameters and buffers, by which uses are known."""
    state: dict[str, Any] = plain(model).state_dict(keep_vars=True)
    return state


def require_memory(model: nn.Module) -> None:
    """Refuse a model that waits for its first step to get its memory."""
    state = variables(model)
    if any(is_known(tensor) for tensor in tensors_in(state)):
        return
    if waiting := [
        n for n, value in state.items() if isinstance(value, Tensor) and is_freed(value)
    ]:
        raise FxpipeError(
            f"{waiting[0]!r} has no memory yet, since the model is from fxpipe.deferred; call the "
            f"step once, under torch.no_grad() if nothing is to be trained, before its state"
        )


def tensors_in(state: Mapping[str, Any]) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)]


def first_names(state: Mapping[str, Any]) -> dict[str, str]:
    """The name of each tensor -> the first name of the same one: a tied weight has several."""
    names: dict[int, str] = {}
    return {
        name: names.setdefault(id(value), name)
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


def check_shape(name: str, tensor: Tensor, value: Any) -> None:
    shape = tuple(getattr(value, "shape", ()))
    if shape != tuple(tensor.shape):
        raise RuntimeError(
            f"size mismatch for {name}: the state has {list(shape)}, the model "
            f"{list(tensor.shape)}; load a state of the same model"
        )

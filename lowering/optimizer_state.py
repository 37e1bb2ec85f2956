"""An optimizer's state by number, a part of it on each rank <-> one state by parameter names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from fxpipe.errors import FxpipeError
from fxpipe.lowering.collect import collect
from fxpipe.lowering.group import num_ranks, this_rank
from fxpipe.ownership import is_owned, plain, timeout_of

State = dict[str, Any]


def optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer, *, rank0_only: bool = False, cpu: bool = False
) -> State:
    """The optimizer's state for the whole model, keyed by parameter names, over all ranks.

    Each rank's optimizer holds its own parameters, or all of them. The result is that of
    `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`: `state` is parameter name ->
    what the optimizer keeps for it, `param_groups` lists names under "params" with their options.
    On every rank, or with `rank0_only` on rank 0 while the others get an empty dict; with `cpu`
    its tensors are on the CPU.

    Every rank must call it. Raises RankError on all ranks where one does not come within the step's
    `timeout`.
    """
    names = names_in(model, optimizer)
    held = held_values(names, optimizer)
    if num_ranks() == 1:
        found = {k: v.cpu() if cpu and isinstance(v, Tensor) else v for k, v in held.items()}
    else:
        limit = timeout_of(plain(model).parameters())
        found = collect("optimizer_state_dict", held, limit, rank0_only, cpu)
    if rank0_only and this_rank():
        return {}
    return assembled(list(dict(plain(model).named_parameters())), found)


def load_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]
) -> None:
    """Load what `optimizer_state_dict` gave, for the parameters that this optimizer holds.

    Parameters that the state does not name keep what they have; those that only other ranks use get
    nothing. A group takes the options that were saved for its parameters. Raises FxpipeError where
    these differ within a group. The tensors are copied. Nothing is sent.
    """
    by_name = {
        name: {k: v for k, v in group.items() if k != "params"}
        for group in state["param_groups"]
        for name in group["params"]
    }
    kept = {
        name: {k: v.clone() if isinstance(v, Tensor) else v for k, v in values.items()}
        for name, values in state["state"].items()
    }
    load(names_in(model, optimizer), optimizer, kept, by_name)


def owned_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer, metadata: Metadata | None = None
) -> State:
    """This rank's part of the optimizer's state, as torch.distributed.checkpoint saves or loads it.

    `state` is parameter name -> what the optimizer keeps for it, `options` parameter name -> the
    options of its group. To load, give the `metadata` of the checkpoint (`reader.read_metadata()`):
    the result then has a place for each value that was saved for this rank's parameters, whatever
    the optimizer holds by now; fill it by `dcp.load` and hand it to
    `load_owned_optimizer_state_dict`. Nothing is sent: ranks need not call it together.
    """
    names = names_in(model, optimizer)
    if metadata is not None:
        return places(names, metadata)
    state: dict[str, State] = {}
    options: dict[str, tuple[tuple[str, Any], ...]] = {}
    for (name, key), value in held_values(names, optimizer).items():
        if key is None:
            options[name] = value[1]
        else:
            state.setdefault(name, {})[key] = value
    return {"state": state, "options": options}


def load_owned_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]
) -> None:
    """Put what `dcp.load` has filled into the optimizer; see `load_optimizer_state_dict`."""
    options = {name: dict(pairs) for name, pairs in state["options"].items()}
    load(names_in(model, optimizer), optimizer, state["state"], options)


# By name.


def names_in(model: nn.Module, optimizer: Optimizer) -> dict[Tensor, str]:
    """The names of the parameters that the optimizer holds, in its order."""
    known = {parameter: name for name, parameter in plain(model).named_parameters()}
    names: dict[Tensor, str] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in known:
                raise FxpipeError(
                    f"group {number} of the optimizer holds a tensor of shape "
                    f"{list(parameter.shape)} that is no parameter of the model; give the model "
                    f"whose parameters the optimizer was made for"
                )
            names[parameter] = known[parameter]
    return names


def held_values(
    names: Mapping[Tensor, str], optimizer: Optimizer
) -> dict[tuple[str, str | None], Any]:
    """(name, key) -> value of the state, and (name, None) -> (group, options), where owned."""
    held: dict[tuple[str, str | None], Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        options = tuple((key, value) for key, value in group.items() if key not in OWN_KEYS)
        for parameter in group["params"]:
            if is_owned(parameter, True):
                held[names[parameter], None] = number, options
                for key, value in optimizer.state.get(parameter, {}).items():
                    held[names[parameter], key] = value
    return held


OWN_KEYS = ("params", "param_names")  # of a group: they say what it holds, not how it is trained


def assembled(order: list[str], found: Mapping[tuple[str, str | None], Any]) -> State:
    """Flat values -> a state with groups. Of equal number and options are one group's parts."""
    state: dict[str, State] = {}
    for (name, key), value in found.items():
        if key is not None:
            state.setdefault(name, {})[key] = value
    groups: dict[tuple[int, str], State] = {}
    for name in order:
        if (name, None) in found:
            number, options = found[name, None]
            group = groups.setdefault((number, repr(options)), {"params": [], **dict(options)})
            group["params"].append(name)
    return {
        "state": {name: state[name] for name in order if name in state},
        "param_groups": [groups[key] for key in sorted(groups)],
    }


def load(
    names: Mapping[Tensor, str],
    optimizer: Optimizer,
    state: Mapping[str, State],
    options: Mapping[str, State],
) -> None:
    """Through the optimizer's own load_state_dict, which casts, moves and calls hooks."""
    numbers = {parameter: i for i, parameter in enumerate(names)}
    groups, values = [], {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[parameter]
            found = state.get(name, {}) if name in options else optimizer.state.get(parameter)
            if found and is_owned(parameter, True):
                values[numbers[parameter]] = found
        members = [numbers[parameter] for parameter in group["params"]]
        saved = options_of([names[parameter] for parameter in group["params"]], options)
        groups.append({**group, **saved, "params": members})
    optimizer.load_state_dict({"state": values, "param_groups": groups})


def options_of(names: list[str], options: Mapping[str, State]) -> State:
    """The options that were saved for the parameters of one group."""
    saved = [name for name in names if name in options]
    for name in saved:
        for key, value in options[name].items():
            if repr(value) != repr(options[saved[0]].get(key)):
                raise FxpipeError(
                    f"a group of the optimizer holds {saved[0]!r} and {name!r}, for which "
                    f"{key}={options[saved[0]].get(key)!r} and {key}={value!r} were saved; make "
                    f"the optimizer with the groups that it had"
                )
    return dict(options[saved[0]]) if saved else {}


# Of a checkpoint.


def places(names: Mapping[Tensor, str], metadata: Metadata) -> State:
    """Empty tensors, and None for other values, for what a checkpoint has on these parameters."""
    wanted = {name: p for p, name in names.items() if is_owned(p, True)}
    state: dict[str, State] = {}
    options: State = {}
    for key, path in paths_in(metadata, set(names.values())):
        match path:
            case ("options", str(name)) if name in wanted:
                options[name] = None
            case ("state", str(name), str(part)) if name in wanted:
                about = metadata.state_dict_metadata[key]
                state.setdefault(name, {})[part] = empty(about, wanted[name])
    return {"state": state, "options": options}


def paths_in(metadata: Metadata, names: set[str]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Each key of the one optimizer state that a checkpoint holds for these names, and its path."""
    paths = dict(metadata.planner_data or {})
    tops = {p[:-2] for p in paths.values() if p[-2:-1] == ("options",) and p[-1] in names}
    if names and len(tops) != 1:
        listed = ", ".join("/".join(map(str, top)) or "the top" for top in sorted(tops, key=str))
        raise FxpipeError(
            f"the checkpoint should hold for these parameters what one "
            f"owned_optimizer_state_dict gave, and holds {len(tops)} such states: "
            f"{listed or 'none'}; save each model with its optimizer in a folder of its own"
        )
    for top in tops:
        for key, path in paths.items():
            if path[: len(top)] == top:
                yield key, path[len(top) :]


def empty(about: Any, parameter: Tensor) -> Tensor | None:
    """What is shaped like the parameter lies where it does, a count of steps on the CPU."""
    if not isinstance(about, TensorStorageMetadata):
        return None
    device = parameter.device if about.size == parameter.shape else torch.device("cpu")
    return torch.empty(about.size, dtype=about.properties.dtype, device=device)

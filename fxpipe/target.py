"""What a command is given as text: `train.py:make`, `stages=2`, `int:8x128:512` -> values."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxpipe.errors import OptionError

DTYPES = {"float": torch.float32, "int": torch.int64, "bool": torch.bool}
Batch = tuple[tuple[Any, ...], dict[str, Any]]


def load(target: str, inputs: Sequence[str]) -> tuple[nn.Module, Batch]:
    """The model and the batch that a target names, made under the seed 0.

    target: `path/script.py:name` or `package.module:name`; the name is a module of torch, or
    something that is called without arguments and returns one, or (module, args), or (module, args,
    kwargs). inputs: a batch as text, for a target without one; see `make_input`.

    Raises OptionError where the target names nothing of the kind.
    """
    place, _, name = target.rpartition(":")
    if not place or not name.isidentifier():
        raise OptionError(
            f"{target!r} names no model; write path/script.py:name or package.module:name"
        )
    torch.manual_seed(0)
    space = import_from(place)
    if not hasattr(space, name):
        known = ", ".join(n for n in vars(space) if callable(getattr(space, n)) and n[0] != "_")
        raise OptionError(f"{place} has no {name!r}; it has {known or 'nothing to call'}")
    found = getattr(space, name)
    found = found if isinstance(found, nn.Module) else found()
    model, args, kwargs = (*found, (), {})[:3] if isinstance(found, tuple) else (found, (), {})
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"{target} gave a {type(model).__name__}; expected a torch.nn.Module, or a tuple of it "
            f"with its arguments and its keyword arguments"
        )
    if inputs:
        args = tuple(make_input(text) for text in inputs)
    elif not args and not kwargs:
        raise OptionError(
            f"{target} gave a model without a batch; return (model, args) from it, or give its "
            f"inputs, for instance --input float:8x16 --input int:8:10"
        )
    return model, (tuple(args), dict(kwargs))


def import_from(place: str) -> Any:
    """A script by its path, or a module by its name."""
    path = Path(place)
    sys.path.insert(0, str(path.parent if path.suffix == ".py" else Path.cwd()))
    if path.suffix != ".py":
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise OptionError(f"there is no module {place!r}: {error}") from error
    if not path.is_file():
        raise OptionError(f"there is no file {place}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def make_input(text: str) -> torch.Tensor:
    """`float:8x16` normal numbers; `int:8x128:512` whole ones from 0 to 511; `bool:8x16`."""
    dtype, *rest = text.split(":")
    try:
        shape = [int(size) for size in rest[0].split("x")]
        below = int(rest[1]) if len(rest) > 1 else 2
        made = torch.randn(shape) if dtype == "float" else torch.randint(below, shape)
        return made.to(DTYPES[dtype])
    except (IndexError, KeyError, ValueError, RuntimeError) as error:
        raise OptionError(
            f"the input {text!r} cannot be read; write dtype:sizes or int:sizes:below, for "
            f"instance float:8x16 or int:8x128:512"
        ) from error


def program_of(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]
) -> Any:
    """The finished program of a model's first microbatch, after one step that is not compiled."""
    from fxpipe.backend import fxpipe as backend

    steps: list[Any] = []

    def noted(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Any:
        steps.append(backend(gm, examples, options={"lowering": "eager", **options}))
        return steps[-1]

    torch.compile(model, backend=noted)(*args, **kwargs)
    plans = [plan for step in steps for plan in step.plans.values()]
    return plans[-1].program


def read_options(texts: Sequence[str]) -> Mapping[str, Any]:
    """`stages=2` is the number, `stages=["a", "b"]` the list, `schedule=1f1b` the text."""
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise OptionError(
                f"the option {text!r} has no value; write for instance -o stages=2 (a file is "
                f"named by --output)"
            )
        try:
            options[name.strip()] = json.loads(value)
        except json.JSONDecodeError:
            options[name.strip()] = value
    return options

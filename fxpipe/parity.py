"""A model and a batch, trained a few steps by plain eager and by fxpipe -> what differs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxpipe.compare import BATCH_NORM, RANDOM, REDUCED, Compared, compare_named
from fxpipe.errors import ModelError, ParityError
from fxpipe.torch_private import tree_leaves, tree_map
from fxpipe.views.progress import each

LEARNING_RATE, MOMENTUM = 1e-2, 0.9


@dataclass(frozen=True)
class Parity:
    """What `check` found. `place`: where the first difference arises; `note`: what was left out."""

    rows: tuple[Compared, ...]
    place: str = ""
    note: str = ""

    @property
    def agrees(self) -> bool:
        return not self.place and all(row.agrees for row in self.rows)

    def __str__(self) -> str:
        lines = map(str, self.rows)
        reference = "its joint graph" if self.note else "plain eager"
        end = f"fxpipe {'agrees with' if self.agrees else 'differs from'} {reference}"
        return "\n".join([*lines, *filter(None, (self.note, self.place)), end])


def check(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    steps: int = 2,
    dtype: torch.dtype = torch.float64,
) -> Parity:
    """Train copies of the model on one batch, by plain eager and by fxpipe, and compare.

    args, kwargs: one call's arguments; floating point tensors among them, and the model, are cast
    to `dtype`. The loss is the one differentiable scalar that the model returns; without one, the
    sum of all that it returns and that has a gradient. Each step is SGD with momentum. Compared are
    every step's loss, the first step's gradients, and parameters and buffers after the last step.

    Where plain eager gives other numbers by contract (random numbers, BatchNorm in training, the
    option `loss_reduction`), the first step is compared with its joint graph run unsplit instead,
    and `note` says so.

    Raises ModelError where nothing that the model returns has a gradient, and what fxpipe raises
    for models and options that it refuses.
    """
    batch = tuple(cast(list(args), dtype)), cast(dict(kwargs or {}), dtype)
    given = dict(options or {})
    start = copy.deepcopy(model).to(dtype)
    reason = differs_by_contract(start, *batch, given)
    if reason:
        note = f"{reason}: one step was compared with its joint graph, not with plain eager"
        return Parity((), first_difference(start, *batch, given), note)
    theirs, ours = copy.deepcopy(start), copy.deepcopy(start)
    reference = train(theirs, theirs, *batch, steps)
    torch.compiler.reset()
    compiled: Any = torch.compile(ours, backend="fxpipe", options=given)
    both = train(ours, compiled, *batch, steps), reference
    after = f"after {steps} steps of"
    losses = [{f"of step {i}": loss for i, loss in enumerate(t.losses, 1)} for t in both]
    rows = compare_named("loss", *losses)
    rows += worst(compare_named("gradient of", *(t.gradients for t in both)))
    rows += worst(compare_named(after, *(dict(m.named_parameters()) for m in (ours, theirs))))
    rows += worst(compare_named(after, *(dict(m.named_buffers()) for m in (ours, theirs))))
    parity = Parity(tuple(rows))
    if parity.agrees:
        return parity
    return Parity(parity.rows, first_difference(start, *batch, given))


@dataclass(frozen=True)
class Trained:
    """The losses of all steps, and the gradients of the first by name."""

    losses: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]


def train(
    model: nn.Module, call: Any, args: Sequence[Any], kwargs: Mapping[str, Any], steps: int
) -> Trained:
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, MOMENTUM)
    trained = Trained([], {})
    how = "plain" if call is model else "pipelined"
    for _ in each(f"{how} steps", range(steps), steps):
        optimizer.zero_grad()
        loss = loss_of(call(*tree_map(fresh, list(args)), **tree_map(fresh, dict(kwargs))))
        loss.backward()
        trained.losses.append(loss.detach().clone())
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                trained.gradients.setdefault(name, parameter.grad.clone())
        optimizer.step()
    return trained


def fresh(value: Any) -> Any:
    """A copy, so that a model that writes to its arguments does not change the next step's."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def loss_of(returned: Any) -> torch.Tensor:
    leaves = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, torch.Tensor)]
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    scalars = [leaf for leaf in leaves if leaf.dim() == 0]
    if not leaves:
        raise ModelError(
            "nothing that the model returns has a gradient, so there is nothing to train; return a "
            "loss, and let some parameter have requires_grad"
        )
    return scalars[0] if len(scalars) == 1 else torch.stack([leaf.sum() for leaf in leaves]).sum()


def differs_by_contract(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]
) -> str:
    """Why plain eager on the whole batch gives other numbers, if it does."""
    if options.get("loss_reduction") is not None:
        return REDUCED
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in model.modules()):
        return BATCH_NORM
    if is_random(model, args, kwargs):
        return RANDOM
    return ""


def is_random(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether two runs from different seeds differ."""
    found = []
    for seed in (0, 1):
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            returned = copy.deepcopy(model)(
                *tree_map(fresh, list(args)), **tree_map(fresh, dict(kwargs))
            )
            found.append([leaf for leaf in tree_leaves(returned) if isinstance(leaf, torch.Tensor)])
    return any(not torch.equal(a, b) and not (a != a).any() for a, b in zip(*found))


def first_difference(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]
) -> str:
    """What `check="first"` says of a step; nothing where it finds no difference."""
    torch.compiler.reset()
    own = copy.deepcopy(model)
    compiled: Any = torch.compile(own, backend="fxpipe", options={**options, "check": "first"})
    try:
        compiled(*args, **kwargs)
    except ParityError as error:
        return str(error).splitlines()[0]
    return ""


def cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map(
        lambda v: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v,
        values,
    )


def worst(rows: Sequence[Compared]) -> list[Compared]:
    """The value that is furthest off, and every other one that differs."""
    ordered = sorted(rows, key=lambda row: -row.error)
    return [row for number, row in enumerate(ordered) if number == 0 or not row.agrees]

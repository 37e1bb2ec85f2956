"""A model that does not fit one rank -> its parameters' shapes now, their first values where used.

`build()` runs twice. The first run gives the model; a module's parameters lose their memory when
the module becomes part of another, so that there is never more than one module's. The second run,
in the first step, starts from the same state of the generators and lets those live that this rank
needs. Operators on a tensor without memory get some for as long as they run, so that every random
number is drawn in both runs, by whomever it is for.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary

from fxpipe.errors import FxpipeError
from fxpipe.ownership import bytes_of, is_freed, is_known
from fxpipe.torch_private import OperatorMode, reads_and_writes, storage_number, tensors_within

Model = TypeVar("Model", bound=nn.Module)

SHAPE_ONLY = re.compile(r"(\w+_like|new_\w+)\.")  # operators that look at no value

_waiting = WeakTensorKeyDictionary()  # parameter or buffer -> (its Construction, its name)


def deferred(build: Callable[..., Model], *arguments: Any, **keywords: Any) -> Model:
    """The module that `build(*arguments, **keywords)` makes, its parameters without memory yet.

    They get it, and the values that `build` would have given them, in the first step: on each rank
    those that its stages use. So a rank needs the memory of its own part and, while it builds, of
    one more module. Values are those of `build` under the same seed, bit by bit, and torch's
    generators are left where `build` leaves them. Buffers are made at once, on every rank.

    `build` is called a second time in the first step, and must do the same again. Until then the
    parameters can be neither read nor moved to another device: build under
    `with torch.device(...)`. What `build` makes of parameters must be parameters and buffers.
    Raises FxpipeError where it lets its course depend on a parameter's value.
    """
    construction = Construction(build, arguments, keywords)
    model = construction.run(set())
    for name, tensor in tensors_of(model).items():
        if is_freed(tensor):
            _waiting[tensor] = construction, name
    return model


def initialise(used: Iterable[Tensor], seen: Iterable[Tensor], others: bool) -> None:
    """Give those of the `used` tensors that wait for it their memory and first values.

    seen: all tensors of the model that the step knows; with `others`, those of the same model that
    no step has seen get theirs too.
    """
    wanted: dict[Construction, set[str]] = {}
    for tensor in seen:
        if tensor in _waiting:
            wanted.setdefault(_waiting[tensor][0], set())
    for tensor in used:
        if tensor in _waiting:
            construction, name = _waiting[tensor]
            wanted[construction].add(name)
    if others:
        for tensor, (construction, name) in _waiting.items():
            if construction in wanted and not is_known(tensor):
                wanted[construction].add(name)
    for construction, names in wanted.items():
        if names:
            fill(construction, names)


def fill(construction: Construction, names: set[str]) -> None:
    found = tensors_of(construction.run(names))
    waiting = {name: t for t, (of, name) in _waiting.items() if of is construction}
    for name in sorted(names):
        target, fresh = waiting[name], found.get(name)
        if fresh is None or (fresh.shape, fresh.dtype) != (target.shape, target.dtype):
            raise FxpipeError(
                f"the second call of {construction.title} made another {name!r} than the first; "
                f"what is given to fxpipe.deferred must do the same each time"
            )
        target.data = fresh.data
        del _waiting[target]


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


class Construction:
    """How a model is built, as often as one likes: with the same random numbers each time."""

    def __init__(
        self, build: Callable[..., nn.Module], arguments: Any, keywords: dict[str, Any]
    ) -> None:
        self.build = build
        self.arguments = arguments
        self.keywords = keywords
        self.title = getattr(build, "__name__", repr(build))
        self.needs: dict[str, set[int]] | None = None  # name -> what its value is made of
        self.start = generators()
        self.dtype, self.device = torch.get_default_dtype(), torch.get_default_device()

    def run(self, names: set[str]) -> Any:
        """Build, with values for these names alone. Later runs leave all generators alone."""
        if self.needs is None:
            building = Building(self.title, set())
            model = self.build_in(building)
            building.see(model)
            self.needs = {n: building.needs_of(t) for n, t in tensors_of(model).items()}
            return model
        kept = set().union(*(self.needs[name] for name in names))
        with self.settings_of_then():
            return self.build_in(Building(self.title, kept))

    def build_in(self, building: Building) -> Any:
        handle = register_module_module_registration_hook(building.registered)
        try:
            with building:
                return self.build(*self.arguments, **self.keywords)
        finally:
            handle.remove()

    @contextmanager
    def settings_of_then(self) -> Iterator[None]:
        now, dtype = generators(), torch.get_default_dtype()
        with ExitStack() as stack:
            stack.callback(set_generators, now)
            stack.callback(torch.set_default_dtype, dtype)
            set_generators(self.start)
            torch.set_default_dtype(self.dtype)
            stack.enter_context(self.device)
            stack.enter_context(torch.enable_grad())
            yield


class Building(OperatorMode):
    """What every operator of a build goes through.

    Storages of parameters are numbered in the order in which they are seen; those in `kept` live.
    Tensors made from values that are gone are as good as gone, and lose their memory at once.
    """

    def __init__(self, title: str, kept: set[int]) -> None:
        super().__init__()
        self.title = title
        self.kept = kept
        self.numbers: dict[int, int] = {}  # storage -> its place in the order
        self.made_of: dict[int, set[int]] = {}  # storage -> the numbers of what it was made from
        self.storages: list[Any] = []  # they stay, so that no other gets their identity

    def registered(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        if module is not None:
            self.see(module)

    def see(self, module: nn.Module) -> None:
        """A module is whole: what it holds and is not kept loses its memory."""
        for parameter in module.parameters():
            number = storage_number(parameter)
            if number not in self.numbers:
                self.numbers[number] = len(self.numbers)
                self.storages.append(parameter.untyped_storage())
            if self.numbers[number] not in self.kept and parameter.untyped_storage().resizable():
                parameter.untyped_storage().resize_(0)

    def needs_of(self, tensor: Tensor) -> set[int]:
        """The numbers of the storages that must be kept for this tensor's value."""
        number = storage_number(tensor)
        own = {self.numbers[number]} if number in self.numbers else set()
        return own | self.made_of.get(number, set())

    def operator(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        gone = [t for t in tensors_within((arguments, keywords)) if is_freed(t)]
        if not gone:
            return function(*arguments, **keywords)
        read, written, is_view = reads_and_writes(function, arguments, keywords)
        if SHAPE_ONLY.match(function.__name__):
            read = []
        undefined = [t for t in read if is_freed(t)]
        if undefined and function.__name__.startswith(("_local_scalar_dense", "equal", "is_non")):
            raise FxpipeError(
                f"{self.title} decides by the value of a parameter of shape "
                f"{list(undefined[0].shape)}, which fxpipe.deferred has not kept; build the model "
                f"without it"
            )
        made_of = set().union(*map(self.needs_of, undefined))
        with borrowed_memory(gone, undefined):
            result = function(*arguments, **keywords)
            if undefined and not is_view:
                for tensor in tensors_within(result) + written:
                    self.lose(tensor, made_of)
        return result

    def lose(self, tensor: Tensor, made_of: set[int]) -> None:
        number = storage_number(tensor)
        if number not in self.made_of:
            self.storages.append(tensor.untyped_storage())
        self.made_of[number] = self.made_of.get(number, set()) | made_of
        tensor.untyped_storage().resize_(0)


@contextmanager
def borrowed_memory(gone: list[Tensor], read: list[Tensor]) -> Iterator[None]:
    """Memory for tensors without, zeros where it is read: garbage may be no number at all."""
    for tensor in gone:
        storage = tensor.untyped_storage()
        storage.resize_(max(storage.size(), bytes_of(tensor)))
    for tensor in read:
        tensor.untyped_storage().fill_(0)  # type: ignore[attr-defined]
    yield
    for tensor in gone:
        tensor.untyped_storage().resize_(0)


def generators() -> tuple[Any, ...]:
    """The states of all generators that a build may draw from."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return random.getstate(), torch.get_rng_state(), cuda


def set_generators(states: tuple[Any, ...]) -> None:
    python, cpu, cuda = states
    random.setstate(python)
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)

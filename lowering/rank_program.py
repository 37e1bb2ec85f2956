"""What one rank executes: an FX graph of task calls and messages, and how it is filled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch.fx as fx

from fxpipe.lowering import instructions
from fxpipe.lowering.mailboxes import LARGEST, Layout
from fxpipe.lowering.packing import Spec, layout_of


class Message(NamedTuple):
    """The tensors that one rank sends to another at once."""

    source: int
    target: int
    specs: tuple[Spec, ...]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)


class Slot(NamedTuple):
    """How the runtime fills a placeholder: an input's name, and a microbatch where it is split."""

    name: str
    microbatch: int | None = None


@dataclass(frozen=True)
class RankProgram:
    """What one rank executes in a step.

    `graph` takes the transport and one value per slot; its submodules are the tasks. It returns
    the outputs by number, then the gradients by input name.
    """

    rank: int
    graph: fx.GraphModule
    slots: tuple[Slot, ...]
    outputs: tuple[int, ...]
    gradients: tuple[str, ...]
    messages: Mapping[str, Message]

    @cached_property
    def tags(self) -> Mapping[str, int]:
        """The first tag of each message; its tensors take one each."""
        tags: dict[str, int] = {}
        following: dict[tuple[int, int], int] = {}
        for name in sorted(self.messages):
            source, target, specs = self.messages[name]
            tags[name] = following.get((source, target), 0)
            following[source, target] = tags[name] + len(specs)
        return tags

    @cached_property
    def layouts(self) -> Mapping[str, Layout]:
        """How messages lie in memory that two processes share; only of those that fit into it."""
        on_cpu = {
            name: layout_of(message.specs)
            for name, message in self.messages.items()
            if all(spec.device.type == "cpu" for spec in message.specs)
        }
        return {name: layout for name, layout in on_cpu.items() if layout.size <= LARGEST}

    def __str__(self) -> str:
        code = self.graph.code.strip().replace(f"{instructions.__name__.replace('.', '_')}_", "")
        return f"# rank {self.rank}\n{code}"

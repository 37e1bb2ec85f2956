"""What the nodes of a rank program call, beside its tasks.

Messages are named by text: the action that sends them (`0SEND_F3`, or `1SEND_B3>0`), a gradient's
sum (`SUM head_weight 1>0`) or an output's part (`OUTPUT 0 1>0`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from fxpipe.lowering.status import Status


class Transport(Protocol):
    """Moves messages between ranks. One per rank and step; a message's tensors have known specs."""

    status: Status
    """Of the rank; the executor writes its action."""

    def send(self, message: str, tensors: Sequence[torch.Tensor]) -> None:
        """Start to send. Never blocks; the tensors must not change until `finish`."""

    def post(self, message: str) -> None:
        """Get ready to receive."""

    def ready(self, message: str) -> bool:
        """Whether `wait` returns at once, as far as it can be known."""

    def wait(self, message: str) -> tuple[torch.Tensor, ...]:
        """The tensors of a message that was posted, once they are there."""


def send(transport: Transport, message: str, tensors: Sequence[torch.Tensor]) -> None:
    transport.send(message, tensors)


def post(transport: Transport, message: str) -> None:
    transport.post(message)


def wait(transport: Transport, message: str) -> tuple[torch.Tensor, ...]:
    return transport.wait(message)


def pause(outputs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Outputs to the caller, their gradients back: the backward begins with `loss.backward()`."""
    raise RuntimeError("a rank program with a pause runs step by step; call its executor")


def total(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of at least one part, in order; the same order makes the same bits on every rank."""
    result = parts[0]
    for part in parts[1:]:
        result = result + part
    return result


def join(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return torch.cat(tuple(parts), dim)


def new_accumulator(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter)

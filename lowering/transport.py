"""Two ways for messages to travel: inside one process, and through a process group."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from fxpipe.lowering.rank_program import RankProgram, Spec
from fxpipe.lowering.status import Status
from fxpipe.lowering.watch import Watch

# A tag is below 2**31: enough for this many tensors between two ranks in a step, and for this many
# steps begun before the first of them has ended.
MESSAGES = 2**23
STEPS_IN_FLIGHT = 2**8 - 1


class LocalTransport:
    """All ranks in one process: a message is the tensors themselves, in a box that they share."""

    def __init__(self, boxes: dict[str, tuple[torch.Tensor, ...]]) -> None:
        self.boxes = boxes
        self.status = Status()

    def send(self, message: str, tensors: Sequence[torch.Tensor]) -> None:
        self.boxes[message] = tuple(tensors)

    def post(self, message: str) -> None:
        pass

    def ready(self, message: str) -> bool:
        return message in self.boxes

    def wait(self, message: str) -> tuple[torch.Tensor, ...]:
        return self.boxes.pop(message)


class GroupTransport:
    """One rank a process: gloo or NCCL. Receives are posted early, sends do not block.

    A message's tag is its number among the messages of its pair of ranks, so that messages cannot
    be mistaken for one another whatever order they come in; and it holds the number of the step,
    since a step of another model may run between this one's forward and its backward. Waits end,
    with the error that all ranks raise, when another rank fails: see fxpipe.lowering.watch.
    """

    def __init__(self, program: RankProgram, watch: Watch, timeout: float) -> None:
        self.messages = program.messages
        self.tags = program.tags
        self.watch = watch
        self.status = watch.status
        self.timeout = timeout
        self.first_tag = self.status.step % STEPS_IN_FLIGHT * MESSAGES
        self.receiving: dict[str, tuple[list[torch.Tensor], list[Any]]] = {}
        self.sending: list[tuple[str, list[torch.Tensor], list[Any]]] = []

    def send(self, message: str, tensors: Sequence[torch.Tensor]) -> None:
        _, target, specs = self.messages[message]
        packed = [pack(tensor, spec) for tensor, spec in zip(tensors, specs)]
        self.sending.append((message, packed, self.start(dist.isend, packed, target, message)))

    def post(self, message: str) -> None:
        source, _, specs = self.messages[message]
        buffers = [buffer_for(spec) for spec in specs]
        self.receiving[message] = buffers, self.start(dist.irecv, buffers, source, message)

    def start(
        self, function: Any, tensors: Sequence[torch.Tensor], other: int, message: str
    ) -> list[Any]:
        tag = self.first_tag + self.tags[message]
        return [
            start(self.watch, function, t, other, tag + i)
            for i, t in enumerate(tensors)
            if t.numel()
        ]

    def ready(self, message: str) -> bool:
        return True

    def wait(self, message: str) -> tuple[torch.Tensor, ...]:
        source, _, specs = self.messages[message]
        buffers, works = self.receiving.pop(message)
        wait_for(self.watch, works, f"{message} from rank {source}", self.timeout)
        return tuple(unpack(buffer, spec) for buffer, spec in zip(buffers, specs))

    def finish(self) -> None:
        """Wait until all that was sent is out."""
        for message, _, works in self.sending:
            what = f"{message} to reach rank {self.messages[message].target}"
            wait_for(self.watch, works, what, self.timeout)
        self.sending.clear()


def start(watch: Watch, function: Any, tensor: torch.Tensor, other: int, tag: int) -> Any:
    """Begin to send or to receive; the error of all ranks where the other one is gone."""
    try:
        return function(tensor, other, tag=tag)
    except RuntimeError as error:
        raise watch.lost(error) from without_frames(error)


def wait_for(watch: Watch, works: Sequence[Any], what: str, limit: float) -> None:
    """Wait for messages; ends with the error of all ranks when another rank fails meanwhile."""
    # The watch sees either this wait or is seen here: what comes first holds for both.
    watch.status.wait(what, limit)
    watch.check()
    try:
        for work in works:
            # The watch gives a wait up before this; it is for a watch that has died.
            work.wait(timedelta(seconds=limit + 8))
    except RuntimeError as error:
        raise watch.lost(error) from without_frames(error)
    watch.status.message = ""


def without_frames(error: Exception) -> Exception:
    """The frames of torch in which it arose would keep the process group alive."""
    return error.with_traceback(None)


@cache
def order_in_memory(spec: Spec) -> list[int]:
    """The dimensions from the one with the largest stride to the one with the smallest."""
    dims = range(len(spec.shape))
    return sorted(dims, key=lambda d: (-spec.stride[d], -spec.shape[d], d))


def pack(tensor: torch.Tensor, spec: Spec) -> torch.Tensor:
    """The tensor as one contiguous block, in the order in which it lies: mostly no copy."""
    return tensor.permute(order_in_memory(spec)).contiguous()


def buffer_for(spec: Spec) -> torch.Tensor:
    shape = [spec.shape[d] for d in order_in_memory(spec)]
    return torch.empty(shape, dtype=spec.dtype, device=spec.device)


def unpack(buffer: torch.Tensor, spec: Spec) -> torch.Tensor:
    """The received block with the strides that the receiver's tasks expect."""
    order = order_in_memory(spec)
    return buffer.permute([order.index(d) for d in range(len(order))])

"""Two ways for messages to travel: inside one process, and through a process group."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fxpipe.errors import RankError
from fxpipe.lowering.rank_program import Message, Spec


class LocalTransport:
    """All ranks in one process: a message is the tensors themselves, in a box that they share."""

    def __init__(self, boxes: dict[str, tuple[torch.Tensor, ...]]) -> None:
        self.boxes = boxes

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
    be mistaken for one another whatever order they come in.
    """

    def __init__(self, rank: int, messages: Mapping[str, Message], timeout: float) -> None:
        self.rank = rank
        self.messages = messages
        self.timeout = timedelta(seconds=timeout)
        self.tags = tags_of(messages)
        self.receiving: dict[str, tuple[list[torch.Tensor], list[Any]]] = {}
        self.sending: list[tuple[str, list[torch.Tensor], list[Any]]] = []

    def send(self, message: str, tensors: Sequence[torch.Tensor]) -> None:
        _, target, specs = self.messages[message]
        packed = [pack(tensor, spec) for tensor, spec in zip(tensors, specs)]
        tag = self.tags[message]
        works = [dist.isend(t, target, tag=tag + i) for i, t in enumerate(packed) if t.numel()]
        self.sending.append((message, packed, works))

    def post(self, message: str) -> None:
        source, _, specs = self.messages[message]
        buffers = [buffer_for(spec) for spec in specs]
        tag = self.tags[message]
        works = [dist.irecv(t, source, tag=tag + i) for i, t in enumerate(buffers) if t.numel()]
        self.receiving[message] = buffers, works

    def ready(self, message: str) -> bool:
        return True

    def wait(self, message: str) -> tuple[torch.Tensor, ...]:
        source, _, specs = self.messages[message]
        buffers, works = self.receiving.pop(message)
        self.finish_works(works, f"{message} from rank {source}")
        return tuple(unpack(buffer, spec) for buffer, spec in zip(buffers, specs))

    def finish(self) -> None:
        """Wait until all that was sent is out."""
        for message, _, works in self.sending:
            self.finish_works(works, f"{message} to reach rank {self.messages[message].target}")
        self.sending.clear()

    def finish_works(self, works: Sequence[Any], what: str) -> None:
        start = time.monotonic()
        try:
            for work in works:
                work.wait(self.timeout)
        except RuntimeError as error:
            seconds = time.monotonic() - start
            raise RankError(
                f"rank {self.rank} waited {seconds:.1f} s for {what} and it did not come: "
                f"{str(error).splitlines()[0]}"
            ) from error


def tags_of(messages: Mapping[str, Message]) -> dict[str, int]:
    """The first tag of each message; its tensors take one each."""
    tags: dict[str, int] = {}
    following: dict[tuple[int, int], int] = {}
    for name in sorted(messages):
        pair = messages[name][:2]
        tags[name] = following.get(pair, 0)
        following[pair] = tags[name] + len(messages[name].specs)
    return tags


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

"""Ways for messages to travel: inside one process, and between processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fxpipe.lowering.packing import buffer_for, pack, unpack
from fxpipe.lowering.rank_program import RankProgram
from fxpipe.lowering.status import Status
from fxpipe.lowering.watch import Watch

# A tag is below 2**31: enough for this many tensors between two ranks in a step, and for this many
# steps begun before the first of them has ended.
MESSAGES = 2**23
STEPS_IN_FLIGHT = 2**8 - 1
LOOK = 0.05  # seconds between two looks at whether another rank has failed
PATIENCE = 8.0  # seconds beyond the limit: the watch gives a wait up before, unless it has died
RETRY = 0.001  # seconds until what had no place is tried again


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
    """One rank a process: gloo, NCCL, or memory that two processes share. Sends do not block.

    A message's tag is its number among the messages of its pair of ranks, so that messages cannot
    be mistaken for one another whatever order they come in; and it holds the number of the step,
    since a step of another model may run between this one's forward and its backward. Waits end,
    with the error that all ranks raise, when another rank fails: see fxpipe.lowering.watch.
    """

    def __init__(self, program: RankProgram, watch: Watch, timeout: float) -> None:
        self.messages = program.messages
        self.tags = program.tags
        self.layouts = program.layouts
        self.watch = watch
        # As they are now: a plan that is made within this step may open more of them.
        self.inboxes = dict(watch.mailboxes.inboxes)
        self.outboxes = dict(watch.mailboxes.outboxes)
        self.status = watch.status
        self.timeout = timeout
        self.first_tag = self.status.step % STEPS_IN_FLIGHT * MESSAGES
        self.receiving: dict[str, tuple[list[torch.Tensor], list[Any]]] = {}
        self.sending: list[tuple[str, list[torch.Tensor], list[Any]]] = []

    def send(self, message: str, tensors: Sequence[torch.Tensor]) -> None:
        _, target, specs = self.messages[message]
        if target in self.outboxes and message in self.layouts:
            tag = self.first_tag + self.tags[message]
            self.outboxes[target].put(tag, self.layouts[message], tensors)
            self.flush()
            return
        packed = [pack(tensor, spec) for tensor, spec in zip(tensors, specs)]
        self.sending.append((message, packed, self.start(dist.isend, packed, target, message)))

    def post(self, message: str) -> None:
        source, _, specs = self.messages[message]
        if source in self.inboxes and message in self.layouts:
            return
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
        if message not in self.receiving:
            tag, inbox = self.first_tag + self.tags[message], self.inboxes[source]
            if not inbox.has(tag):
                what = f"{message} from rank {source}"
                self.listen(what, lambda: inbox.has(tag), inbox.listen)
            return inbox.take(tag, self.layouts[message])
        buffers, works = self.receiving.pop(message)
        wait_for(self.watch, works, f"{message} from rank {source}", self.timeout)
        return tuple(unpack(buffer, spec) for buffer, spec in zip(buffers, specs))

    def listen(
        self, what: str, is_over: Callable[[], bool], pause: Callable[[float], None]
    ) -> None:  # fmt: skip
        """Wait until it is over; ends with the error of all ranks when another rank fails."""
        self.status.wait(what, self.timeout)
        while not is_over():
            self.watch.check()
            if time.monotonic() - self.status.since > self.timeout + PATIENCE:
                raise self.watch.lost(TimeoutError(f"waited too long for {what}"))
            pause(LOOK if self.flush() else RETRY)
        self.status.waited += time.monotonic() - self.status.since
        self.status.message = ""

    def flush(self) -> bool:
        """Send what found no place before. Whether all is out."""
        try:
            return all([box.flush() for box in self.outboxes.values()])
        except OSError as error:
            raise self.watch.lost(error) from without_frames(error)

    def finish(self) -> None:
        """Wait until all that was sent is out."""
        for message, _, works in self.sending:
            what = f"{message} to reach rank {self.messages[message].target}"
            wait_for(self.watch, works, what, self.timeout)
        self.sending.clear()
        if not self.flush():
            self.listen("other ranks to take what was sent", self.flush, time.sleep)


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
            work.wait(timedelta(seconds=limit + PATIENCE))
    except RuntimeError as error:
        raise watch.lost(error) from without_frames(error)
    watch.status.waited += time.monotonic() - watch.status.since
    watch.status.message = ""


def without_frames(error: Exception) -> Exception:
    """The frames of torch in which it arose would keep the process group alive."""
    return error.with_traceback(None)

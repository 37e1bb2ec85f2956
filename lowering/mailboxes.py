"""Tensors between two processes of one machine, through memory that both map.

A mailbox leads from one rank to another. The receiver makes it: a block of memory and two pipes.
The sender copies tensors into the block, then writes where they are to the first pipe; the receiver
copies them out, then says so on the second, which gives their place back. What a process
wrote to memory before it wrote to a pipe is seen by whoever reads the pipe, on any processor.

benchmarks/ways.py measures what that saves beside a process group on loopback.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import struct
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from ctypes import memmove
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fxpipe.lowering.links import machine

CAPACITY = 1 << 26  # bytes of a block; only what was ever used of it takes memory
LARGEST = CAPACITY // 4  # bytes of a message; larger ones take the process group
ALIGNMENT = 64
KEPT = 8  # messages under way until the sender looks which places are free again
RECORD = struct.Struct("<qqq")  # the tag, where in the block, the bytes
CREDIT = struct.Struct("<q")  # where in the block


class Address(NamedTuple):
    """Where a sender finds a mailbox: the receiver's process and its open files."""

    pid: int
    file: int
    records: int
    credits: int


class Part(NamedTuple):
    """A tensor of a message: how it lies, and from where to where in the message."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]  # dense: the tensor is one block of bytes
    dtype: torch.dtype
    start: int
    nbytes: int

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)


class Layout(NamedTuple):
    """The tensors of a message, one after another."""

    parts: tuple[Part, ...]
    size: int  # bytes

    @staticmethod
    def of(tensors: Iterable[torch.Tensor]) -> Layout:
        """For tensors like these, whose strides are dense."""
        parts, start = [], 0
        for like in tensors:
            count = like.numel() * like.dtype.itemsize
            parts.append(Part(tuple(like.shape), like.stride(), like.dtype, start, count))
            start += -(-max(count, 1) // ALIGNMENT) * ALIGNMENT
        return Layout(tuple(parts), start)


def write(address: int, layout: Layout, tensors: Sequence[torch.Tensor]) -> None:
    for part, tensor in zip(layout.parts, tensors):
        if tensor.stride() != part.stride:
            tensor = part.empty().copy_(tensor)
        memmove(address + part.start, tensor.data_ptr(), part.nbytes)


def read(address: int, layout: Layout) -> tuple[torch.Tensor, ...]:
    tensors = tuple(part.empty() for part in layout.parts)
    for part, tensor in zip(layout.parts, tensors):
        memmove(tensor.data_ptr(), address + part.start, part.nbytes)
    return tensors


def map_file(file: int) -> torch.Tensor:
    """The block of a mailbox as bytes; it stays mapped as long as the tensor lives."""
    return torch.frombuffer(mmap.mmap(file, CAPACITY), dtype=torch.uint8)


class Arrived(NamedTuple):
    """A message that is there: in the block, or in memory of this process alone."""

    start: int  # in the block
    size: int
    aside: torch.Tensor | None = None


class Inbox:
    """The receiver's end. Messages may be taken in another order than they came in."""

    def __init__(self) -> None:
        """Raises OSError or AttributeError where the system has no such memory."""
        self.file = os.memfd_create("fxpipe")
        os.ftruncate(self.file, CAPACITY)
        self.block = map_file(self.file)
        self.records, self.records_end = os.pipe()
        self.credits, self.credits_end = os.pipe()
        os.set_blocking(self.records, False)
        os.set_blocking(self.credits_end, False)
        self.address = Address(os.getpid(), self.file, self.records_end, self.credits)
        self.arrived: dict[int, Arrived] = {}
        self.poll = select.poll()
        self.poll.register(self.records, select.POLLIN)

    def has(self, tag: int) -> bool:
        """Whether the message is there."""
        if tag not in self.arrived:
            with contextlib.suppress(BlockingIOError):
                said = os.read(self.records, RECORD.size * 64)
                for found, start, size in RECORD.iter_unpack(said):
                    self.arrived[found] = Arrived(start, size)
        return tag in self.arrived

    def take(self, tag: int, layout: Layout) -> tuple[torch.Tensor, ...]:
        """The tensors of a message that is there."""
        start, _, aside = self.arrived.pop(tag)
        if aside is not None:
            return read(aside.data_ptr(), layout)
        tensors = read(self.block.data_ptr() + start, layout)
        os.write(self.credits_end, CREDIT.pack(start))
        return tensors

    def listen(self, seconds: float) -> None:
        """Return when something has come, or after so long.

        What came and is not wanted yet is put aside first: it may lie where the message that is
        waited for has its place.
        """
        for tag, (start, size, aside) in self.arrived.items():
            if aside is None:
                copy = torch.empty(size, dtype=torch.uint8)
                memmove(copy.data_ptr(), self.block.data_ptr() + start, size)
                self.arrived[tag] = Arrived(start, size, copy)
                os.write(self.credits_end, CREDIT.pack(start))
        self.poll.poll(seconds * 1e3)

    def __del__(self) -> None:
        # Not before: a number that was closed may be another file's by the next write.
        for file in ("file", "records", "records_end", "credits", "credits_end"):
            close(getattr(self, file, -1))


class Outbox:
    """The sender's end. What finds no place waits for `flush`."""

    def __init__(self, address: Address) -> None:
        """Raises OSError where this process may not open the other's files."""
        files = f"/proc/{address.pid}/fd"
        file = os.open(f"{files}/{address.file}", os.O_RDWR)
        try:
            self.block = map_file(file)
        finally:
            os.close(file)
        self.records = os.open(f"{files}/{address.records}", os.O_WRONLY | os.O_NONBLOCK)
        self.credits = os.open(f"{files}/{address.credits}", os.O_RDONLY | os.O_NONBLOCK)
        self.waiting: deque[tuple[int, Layout, Sequence[torch.Tensor]]] = deque()
        self.places: deque[tuple[int, int]] = deque()  # from, to; the oldest first
        self.given_back: set[int] = set()

    def put(self, tag: int, layout: Layout, tensors: Sequence[torch.Tensor]) -> None:
        """Let a message wait for `flush`; its tensors must not change until then."""
        self.waiting.append((tag, layout, tensors))

    def flush(self) -> bool:
        """Send what waits, in order, as far as there is place; never blocks. Whether all is out."""
        while self.waiting:
            tag, layout, tensors = self.waiting[0]
            if len(self.places) >= KEPT:
                self.free()
            start = self.find_place(layout.size)
            if start is None and self.free():
                start = self.find_place(layout.size)
            if start is None:
                return False
            write(self.block.data_ptr() + start, layout, tensors)
            try:
                os.write(self.records, RECORD.pack(tag, start, layout.size))
            except BlockingIOError:
                return False
            self.places.append((start, start + layout.size))
            self.waiting.popleft()
        return True

    def find_place(self, size: int) -> int | None:
        """Where in the block, which is used as a ring, so many bytes are free."""
        if not self.places:
            return 0
        first, last = self.places[0][0], self.places[-1][1]
        if last > first:
            if CAPACITY - last >= size:
                return last
            return 0 if size < first else None
        return last if size < first - last else None

    def free(self) -> bool:
        """Forget the places that the receiver has given back. Whether there are any."""
        before = len(self.places)
        with contextlib.suppress(BlockingIOError):
            said = os.read(self.credits, CREDIT.size * len(self.places))
            self.given_back.update(start for (start,) in CREDIT.iter_unpack(said))
        while self.places and self.places[0][0] in self.given_back:
            self.given_back.remove(self.places.popleft()[0])
        return len(self.places) < before

    def __del__(self) -> None:
        close(getattr(self, "records", -1))
        close(getattr(self, "credits", -1))


def close(file: int) -> None:
    with contextlib.suppress(OSError):
        os.close(file)


@dataclass
class Mailboxes:
    """The mailboxes of one process: `inboxes` by the rank that sends, `outboxes` by the one that
    receives. A rank that was asked once and has none is reached through the process group.
    """

    inboxes: dict[int, Inbox] = field(default_factory=dict)
    outboxes: dict[int, Outbox] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)

    def offer(self, senders: Iterable[int]) -> dict[int, Address]:
        """Make the inboxes that are new: where each sender finds its own."""
        made: dict[int, Address] = {}
        for rank in set(senders) - self.asked:
            self.asked.add(rank)
            with contextlib.suppress(OSError, AttributeError):
                self.inboxes[rank] = Inbox()
                made[rank] = self.inboxes[rank].address
        return made

    def accept(self, offers: Mapping[int, Address]) -> list[int]:
        """Open the inboxes of others, as far as the system allows it: whose."""
        for rank, address in offers.items():
            with contextlib.suppress(OSError):
                self.outboxes[rank] = Outbox(address)
        return [rank for rank in offers if rank in self.outboxes]


def machine_and_processes() -> str:
    """A text that two processes share exactly where one may find the other's open files."""
    with contextlib.suppress(OSError):
        return f"{machine()} {os.readlink('/proc/self/ns/pid')}"
    return ""

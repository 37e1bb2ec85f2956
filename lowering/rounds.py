"""What each rank says -> what all say, over plain sockets: agreement without the process group.

A round waits for no device and can be left at once when another rank fails.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
from collections.abc import Callable, Mapping

HEADER = struct.Struct("<HI")  # bytes of the label, bytes of the data
PAUSE = 0.05  # seconds between two looks at whether another rank has failed
CHUNK = 1 << 16


class Rounds:
    """The rounds of one process. `connections`: rank -> a socket that does not block."""

    def __init__(self, rank: int, connections: Mapping[int, socket.socket]) -> None:
        self.rank = rank
        self.connections = dict(connections)
        self.received = {other: bytearray() for other in connections}
        self.selector = selectors.DefaultSelector()
        for other, connection in connections.items():
            self.selector.register(connection, selectors.EVENT_READ, other)

    def exchange(
        self, label: str, data: bytes, while_waiting: Callable[[list[int]], None]
    ) -> dict[int, tuple[str, bytes]]:
        """rank -> the label and data that it has come with: all ranks, if their labels are equal.

        Returns at once when one differs. `while_waiting` is called now and then with the ranks that
        have not come, and may raise.
        """
        frame = HEADER.pack(len(label), len(data)) + label.encode() + data
        unsent = {other: memoryview(frame) for other in self.connections}
        parts = {self.rank: (label, data)}
        missing = list(self.connections)
        self.push(unsent)
        while missing or unsent:
            for other in missing:
                if found := self.take(other):
                    parts[other] = found
                    if found[0] != label:
                        return parts
            missing = [other for other in missing if other not in parts]
            if missing or unsent:
                self.pull(PAUSE if not unsent else 0.001)
                self.push(unsent)
                while_waiting(missing)
        return parts

    def push(self, unsent: dict[int, memoryview]) -> None:
        for other, rest in list(unsent.items()):
            with contextlib.suppress(BlockingIOError):
                # A connection that broke is the watch's to tell of: here its rank stays missing.
                with contextlib.suppress(ConnectionError):
                    rest = rest[self.connections[other].send(rest) :]
            if rest:
                unsent[other] = rest
            else:
                del unsent[other]

    def pull(self, seconds: float) -> None:
        for key, _ in self.selector.select(seconds):
            try:
                chunk = self.connections[key.data].recv(CHUNK)
            except BlockingIOError:
                continue
            except ConnectionError:
                chunk = b""
            if chunk:
                self.received[key.data] += chunk
            else:
                self.selector.unregister(key.fileobj)

    def take(self, other: int) -> tuple[str, bytes] | None:
        """The next message of a rank, if all of it is here."""
        received = self.received[other]
        if len(received) < HEADER.size:
            return None
        of_label, of_data = HEADER.unpack_from(received)
        start, end = HEADER.size + of_label, HEADER.size + of_label + of_data
        if len(received) < end:
            return None
        label, data = received[HEADER.size : start].decode(), bytes(received[start:end])
        del received[:end]
        return label, data

    def close(self) -> None:
        self.selector.close()
        for connection in self.connections.values():
            connection.close()

"""Short messages between the watches of a group's processes: one JSON text a line."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from fxpipe.lowering.status import Report

CHUNK = 1 << 16


class Peer:
    """Another process, as far as it is known here."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.connection: socket.socket | None = None
        self.unread, self.unsent = b"", b""
        self.report: Report | None = None
        self.heard = self.changed = time.monotonic()
        self.ended: float | None = None  # when its process left, or its connection broke
        self.farewell = ""  # what it said on leaving
        self.has_last_words = False  # its report is of the moment of a failure, and stays

    def hear(self, report: Report, last: bool) -> None:
        self.heard = time.monotonic()
        if self.has_last_words:
            return
        if self.report is None or report.place != self.report.place:
            self.changed = self.heard
        self.report, self.has_last_words = report, last

    def end(self, farewell: str = "") -> None:
        self.ended = self.ended or time.monotonic()
        self.farewell = self.farewell or farewell


class News:
    """The connections of one process's watch. Sending and closing is safe from any thread."""

    def __init__(self, rank: int, size: int) -> None:
        self.peers = {other: Peer(other) for other in range(size) if other != rank}
        self.lock = threading.RLock()
        self.selector = selectors.DefaultSelector()
        self.bell, self.ringer = socket.socketpair()
        for end in (self.bell, self.ringer):
            end.setblocking(False)
        self.selector.register(self.bell, selectors.EVENT_READ)

    def connect(self, connections: Mapping[int, socket.socket]) -> None:
        for other, connection in connections.items():
            peer = self.peers[other]
            peer.connection = connection
            peer.heard = peer.changed = time.monotonic()
            self.selector.register(connection, selectors.EVENT_READ, peer)

    def wake(self) -> None:
        """Make `listen` return."""
        with contextlib.suppress(OSError):
            self.ringer.send(b"!")

    def send(self, message: Mapping[str, Any], droppable: bool = False) -> None:
        """Send to everybody; what is droppable is not queued behind what is still unsent."""
        line = json.dumps(message).encode() + b"\n"
        with self.lock:
            for peer in self.peers.values():
                if peer.connection is None or peer.ended is not None:
                    continue
                if not (droppable and peer.unsent):
                    peer.unsent += line
                with contextlib.suppress(OSError):
                    peer.unsent = peer.unsent[peer.connection.send(peer.unsent) :]

    def listen(self, seconds: float) -> Iterator[tuple[Peer, dict[str, Any]]]:
        """What comes within so many seconds, all that is there already included."""
        for key, _ in self.selector.select(seconds):
            peer: Peer | None = key.data
            if peer is None:
                with contextlib.suppress(OSError):
                    self.bell.recv(CHUNK)
                continue
            yield from ((peer, json.loads(line)) for line in self.lines(peer))

    def lines(self, peer: Peer) -> list[bytes]:
        """The whole lines that a peer has sent."""
        assert peer.connection is not None
        while True:
            try:
                chunk = peer.connection.recv(CHUNK)
            except BlockingIOError:
                break
            except OSError:
                chunk = b""
            if not chunk:
                self.selector.unregister(peer.connection)
                peer.end()
                break
            peer.unread += chunk
        *lines, peer.unread = peer.unread.split(b"\n")
        return lines

    def close(self) -> None:
        with self.lock:
            self.selector.close()
            for end in (self.bell, self.ringer):
                end.close()
            for peer in self.peers.values():
                if peer.connection is not None:
                    peer.connection.close()
                    peer.connection = None

"""A process group to sockets between all its processes, apart from the group's own messages.

Each pair of processes gets one connection per channel. Process groups cannot carry this: what must
be told when a message is stuck may not wait behind it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

PAUSE = 0.05  # seconds between two looks at the store
PATIENCE = 5.0  # seconds for a connection, and for an answer on it
LINE = 4096  # bytes of a greeting at most

Links = dict[tuple[int, str], socket.socket]  # (rank, channel) -> connection


class Meeting:
    """One process's way to the others: it says where it is, calls lower ranks, awaits higher ones.

    `store` is the group's. Greetings carry a secret that only readers of the store know.
    """

    def __init__(self, rank: int, size: int, store: Any, key: str, channels: tuple[str, ...]):
        self.rank, self.size, self.store, self.key = rank, size, store, key
        self.channels = channels
        self.secret = secrets.token_hex(16)
        self.listener = listen()
        self.links: Links = {}
        self.over = False

    def missing(self) -> list[int]:
        """The ranks that are not connected yet."""
        others = (other for other in range(self.size) if other != self.rank)
        return [r for r in others if any((r, c) not in self.links for c in self.channels)]

    def run(self, look: Callable[[list[int]], None]) -> bool:
        """Connect with everybody; False where `stop` came first. `look` gets those that miss."""
        self.store.set(f"{self.key}/{self.rank}", json.dumps(self.card()))
        threading.Thread(target=self.answer, name="fxpipe-answer", daemon=True).start()
        while not self.over and self.missing():
            for other in self.missing():
                if other < self.rank and self.store.check([f"{self.key}/{other}"]):
                    self.call(other, json.loads(self.store.get(f"{self.key}/{other}")))
            look(self.missing())
            time.sleep(PAUSE)
        done = not self.over
        self.stop()
        return done

    def stop(self) -> None:
        self.over = True
        with contextlib.suppress(OSError):
            self.listener.close()

    def card(self) -> dict[str, Any]:
        """Where and as whom this process answers."""
        return {
            "machine": machine(),
            "addresses": list(dict.fromkeys(own_addresses())),
            "port": self.listener.getsockname()[1],
            "secret": self.secret,
        }

    def call(self, other: int, card: Mapping[str, Any]) -> None:
        """Connect with a lower rank on the channels that are still missing."""
        addresses = list(card["addresses"])
        if card["machine"] == machine():
            addresses.insert(0, "127.0.0.1")
        for channel in self.channels:
            for address in addresses:
                if (other, channel) not in self.links:
                    with contextlib.suppress(OSError):
                        self.links[other, channel] = self.dial(address, card, channel)

    def dial(self, address: str, card: Mapping[str, Any], channel: str) -> socket.socket:
        connection = socket.create_connection((address, card["port"]), PATIENCE)
        greeting = {"secret": card["secret"], "rank": self.rank, "channel": channel}
        try:
            connection.sendall(json.dumps(greeting).encode() + b"\n")
            if read_line(connection) != b"yes":
                raise ConnectionError("whoever answered is no process of this group")
            # The answer to the answer: a call that was given up is never taken for a link.
            connection.sendall(b"go\n")
            return ready(connection)
        except OSError:
            connection.close()
            raise

    def answer(self) -> None:
        """Take the calls of higher ranks, one after another."""
        self.listener.settimeout(PAUSE)
        while not self.over:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                continue
            try:
                self.greet(connection)
            except (OSError, ValueError, KeyError, TypeError):
                connection.close()

    def greet(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE)
        greeting = json.loads(read_line(connection))
        rank, channel = greeting["rank"], greeting["channel"]
        if not secrets.compare_digest(greeting["secret"], self.secret):
            raise ConnectionError("a stranger called")
        connection.sendall(b"yes\n")
        if read_line(connection) != b"go":
            raise ConnectionError("the caller has gone")
        self.links[rank, channel] = ready(connection)


def read_line(connection: socket.socket) -> bytes:
    """Up to a line's end, which is left out; byte by byte, as what follows is not ours to take."""
    line = b""
    while len(line) < LINE:
        byte = connection.recv(1)
        if not byte:
            raise ConnectionError("closed within a greeting")
        if byte == b"\n":
            return line
        line += byte
    raise ConnectionError("too long a greeting")


def ready(connection: socket.socket) -> socket.socket:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setblocking(False)
    return connection


def listen() -> socket.socket:
    """A socket that any of this machine's addresses reaches."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def machine() -> str:
    """A text that two processes share exactly where one reaches the other over loopback."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    return socket.gethostname()


def own_addresses() -> Iterator[str]:
    """Addresses under which other machines may reach this one, the likeliest first."""
    # To connect a datagram socket sends nothing; it shows the address that packets would bear.
    targets = [os.environ.get("MASTER_ADDR", ""), "192.0.2.1", "2001:db8::1"]
    for target in filter(None, targets):
        with contextlib.suppress(OSError):
            family, kind, _, _, address = socket.getaddrinfo(
                target, 9, type=socket.SOCK_DGRAM
            )[0]  # fmt: skip
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                found: str = probe.getsockname()[0]
                if not found.startswith(("127.", "::1")):
                    yield found

"""What every rank did in a step, and when: planned by the simulator, or measured; to JSON and back.

A span is one call of a rank's program, so that no two spans of a rank overlap, on whichever track
they are. Times are seconds since the step began, by one clock for all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

COMPUTING = ("F", "I", "W", "B", "pair")
SHARES = (*COMPUTING, "communication", "idle", "host")


@dataclass(frozen=True)
class Span:
    """One call of a rank.

    track, kind:
        "compute"   "F", "I", "W", "B", "pair": a task on a microbatch
                    "wait": the rank can do nothing until a message has come (or its turn, where
                    all ranks share one thread; or, with name "pause", the caller's backward())
                    "other": a sum of gradients, outputs put together, memory for gradients
        "send"      "send": a message is handed to the transport; "wait": with name "sent", the end
                    of the step, until all that was sent is out
        "receive"   "receive": a receive is posted; it ends with the wait for its message
    name: the action as a schedule writes it (`2F5`, `[2F5|1B3]`, `0SEND_F3`, `1RECV_F3`); of a wait
        the message that it waits for, which is the name of its send; `SUM head_weight 1>0` and
        `OUTPUT 0 1>0` are messages without an action.
    cause: of a wait, what it waits for, such as `0F3 of rank 0`.
    stage, microbatch: of a pair, those of its forward; of a wait, those of who sends.
    bytes: of a send, a receive or a wait: the message's.
    """

    rank: int
    track: str
    kind: str
    name: str
    start: float
    end: float
    cause: str | None = None
    stage: int | None = None
    microbatch: int | None = None
    bytes: int | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Bubble:
    """An idle time of a rank. `cause`: what it waits for; None once it has nothing left to do."""

    rank: int
    start: float
    end: float
    cause: str | None

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def __str__(self) -> str:
        """`rank 1 idle 0.0012 s at 0.0034 s: waits for 0F3 of rank 0`."""
        why = f"waits for {self.cause}" if self.cause else "finished"
        return f"rank {self.rank} idle {self.seconds:.3g} s at {self.start:.3g} s: {why}"


@dataclass(frozen=True)
class Timeline:
    """One step of all ranks.

    name: "planned" or "measured". duration: seconds from the first rank's begin to the last one's
    end. spans: by rank, then by start. memory: per rank (seconds, bytes) points, each holding until
    the next: the values that the rank's program keeps (saved activations, received messages, sums
    of gradients; no parameters); empty where that is not known.
    step: its number since tracing began, from 0. shared_thread: all ranks ran in one thread, taking
    turns, so that a rank's idle time is mostly the other ranks' work.
    """

    name: str
    num_ranks: int
    duration: float
    spans: tuple[Span, ...]
    memory: tuple[tuple[tuple[float, float], ...], ...] = ()
    step: int = 0
    shared_thread: bool = False

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        """The spans of a rank, by start."""
        return tuple(span for span in self.spans if span.rank == rank)

    def shares(self, rank: int) -> dict[str, float]:
        """Where a rank's time went, in seconds; the sum is the duration.

        F, I, W, B, pair: its tasks. communication: starting to send and to receive, and at the end
        the wait until all is out. idle: waits, and the time after its last span. host: the rest:
        `other` spans, and what Python needs between calls.
        """
        found = dict.fromkeys(SHARES, 0.0)
        last = 0.0
        for span in self.of_rank(rank):
            if span.kind in COMPUTING:
                found[span.kind] += span.seconds
            elif span.track in ("send", "receive"):
                found["communication"] += span.seconds
            elif span.kind == "wait":
                found["idle"] += span.seconds
            last = max(last, span.end)
        found["idle"] += self.duration - last
        found["host"] = self.duration - sum(found.values())
        return found

    def bubbles(self, rank: int) -> tuple[Bubble, ...]:
        """The idle times of a rank, in order, each with its cause."""
        spans = self.of_rank(rank)
        found = [
            Bubble(rank, span.start, span.end, span.cause)
            for span in spans
            if span.kind == "wait" and span.track == "compute" and span.end > span.start
        ]
        last = max((span.end for span in spans), default=0.0)
        if last < self.duration:
            found.append(Bubble(rank, last, self.duration, None))
        return tuple(found)

    def bubble(self) -> float:
        """The part of all ranks' time that is idle, from 0 to 1."""
        whole = self.num_ranks * self.duration
        idle = sum(self.shares(rank)["idle"] for rank in range(self.num_ranks))
        return idle / whole if whole else 0.0

    def peak_memory(self, rank: int) -> float | None:
        """The largest of a rank's memory points, in bytes; None where none is known."""
        points = self.memory[rank] if rank < len(self.memory) else ()
        return max((size for _, size in points), default=None)

    def to_json(self) -> dict[str, Any]:
        """A dict of plain values, which `json` writes and `from_json` reads back as an equal one.

        A span's entries that are None are left out.
        """
        return {
            "name": self.name,
            "num_ranks": self.num_ranks,
            "duration": self.duration,
            "step": self.step,
            "shared_thread": self.shared_thread,
            "spans": [
                {name: value for name, value in asdict(span).items() if value is not None}
                for span in self.spans
            ],
            "memory": [[list(point) for point in points] for points in self.memory],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Timeline:
        return Timeline(
            data["name"],
            data["num_ranks"],
            data["duration"],
            tuple(Span(**span) for span in data["spans"]),
            tuple(tuple((at, size) for at, size in points) for points in data["memory"]),
            data["step"],
            data["shared_thread"],
        )


def in_order(spans: Sequence[Span]) -> tuple[Span, ...]:
    """As a timeline has them: by rank, then by start."""
    return tuple(sorted(spans, key=lambda span: (span.rank, span.start, span.end)))

"""What each process of a group is at -> one error, on all of them, when one fails or stalls.

A thread per process tells the others several times a second what its rank is doing, and hears what
they do. It ends the waits of its own rank once another has raised, died, or not moved for longer
than the option `timeout`. Times are durations by a process's own clock: when a value last changed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fxpipe.errors import RankError
from fxpipe.log import logger
from fxpipe.lowering.links import Meeting
from fxpipe.lowering.mailboxes import Mailboxes
from fxpipe.lowering.news import News
from fxpipe.lowering.rounds import Rounds
from fxpipe.lowering.sentences import ended, in_short, silent, stalled
from fxpipe.lowering.status import Report, Status

log = logger(__name__)
KEY = "fxpipe/watch"
PERIOD = 0.1  # seconds between two tellings in a small group
GRACE = 1.0  # seconds in which what a process sent before its end may still arrive
LAST_WORDS = 0.3  # seconds in which all ranks say where a failure met them
SLOW_NEWS = 3.0  # seconds until the reason for a lost connection is known, at the latest
COMPILING = 1800.0  # seconds for which a rank that lives may compile the same thing
PROBE_TAG = 2**31 - 1  # of receives that nobody answers


class Failure(NamedTuple):
    """The first failure: whose, and a sentence on it."""

    rank: int
    text: str


class Watch:
    """The watch of one process over the default group. `status` is written by the step."""

    def __init__(self, number: int) -> None:
        """number: how many watches this process had before, of groups that it has left."""
        self.key = f"{KEY}/failed/{number}"
        # Weak: the group and its store must end when the program destroys them.
        self.group = weakref.ref(dist.group.WORLD)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.is_gloo = "cpu:gloo" in dist.get_backend_config()
        self.status = Status()
        self.mailboxes = Mailboxes()
        self.failure: Failure | None = None
        self.story = ""  # the failure, and what every rank was at
        self.told = threading.Event()  # the story is complete
        self.connected = threading.Event()
        self.closing = self.in_round = False
        self.news = News(self.rank, self.size)
        self.rounds = Rounds(self.rank, {})
        self.period = max(PERIOD, self.size * PERIOD / 10)
        self.probed = self.spoken = 0.0
        self.meeting = Meeting(self.rank, self.size, group_store(), KEY, ("news", "rounds"))
        self.thread = threading.Thread(target=self.run, name="fxpipe-watch", daemon=True)
        self.thread.start()

    # For the step.

    @contextlib.contextmanager
    def step(self, first: str = "start") -> Iterator[None]:
        """An error in this block is every rank's; raised here as a RankError."""
        self.status.action = first
        try:
            yield
        except Exception as error:
            text = str(error)
            if not isinstance(error, RankError):
                text = f"rank {self.rank} failed {self.status.report()}: {in_short(error)}"
            self.fail(self.rank, text)
            if text == str(self.error()):
                raise
            # No name here for what is raised: its frames would keep each other, and the group.
            raise self.error() from (error.__cause__ if isinstance(error, RankError) else error)
        finally:
            self.status.action = self.status.message = ""

    def check(self) -> None:
        """Raise where a failure has been told."""
        if self.failure is not None:
            raise self.error()

    def error(self) -> RankError:
        """What to raise after a failure, once it is known what every rank was at."""
        self.told.wait(SLOW_NEWS)
        assert self.failure is not None
        return RankError(self.story or self.failure.text)

    def lost(self, error: Exception) -> RankError:
        """What to raise for a message that broke. Mostly the news of a failure are on their way."""
        if not self.told.wait(SLOW_NEWS):
            doing = self.status.report()
            cause = str(error).splitlines()[0]
            self.fail(self.rank, f"rank {self.rank} failed {doing}: {cause}")
        return self.error()

    def fail(self, rank: int, text: str) -> None:
        """Tell everybody of a failure, unless one is known already."""
        with self.news.lock:
            if self.failure is None:
                self.failure = Failure(rank, text)
                self.news.send({"failed": [rank, text]})
        if not self.connected.is_set():
            # For those who come later, and cannot be told.
            with contextlib.suppress(Exception):
                self.meeting.store.set(self.key, json.dumps(self.failure))
            self.meeting.stop()
        self.news.wake()

    def round(self, label: str, data: bytes, limit: float) -> dict[int, tuple[str, bytes]]:
        """See `Rounds.exchange`; raises RankError where a rank does not come."""
        self.check()
        self.in_round = True
        self.missing(label, limit, [r for r in range(self.size) if r != self.rank])
        try:
            while not self.connected.wait(0.05):
                if missing := self.meeting.missing():
                    self.missing(label, limit, missing)
                self.check()
            parts = self.rounds.exchange(
                label, data, lambda missing: self.missing(label, limit, missing)
            )
        finally:
            self.in_round = False
            self.status.message = ""
        return parts

    def missing(self, label: str, limit: float, ranks: list[int]) -> None:
        """Note who has not come to a round; raise where that has become a failure."""
        self.check()
        who = f"ranks {', '.join(map(str, ranks))}" if len(ranks) > 1 else f"rank {ranks[0]}"
        message = f"{who} to come to {label}"
        if not self.status.message:
            self.status.wait(message, limit)
        self.status.message = message

    # The thread.

    def run(self) -> None:
        try:
            self.connect(everybody=self.meeting.run(self.look))
            while not self.closing:
                self.listen(self.period)
                self.tell()
                self.judge()
                if self.failure is not None and not self.told.is_set():
                    self.conclude()
                if not self.is_current():
                    self.leave("it left the process group")
        except Exception as error:
            if not self.closing:
                log.debug("the watch failed", exc_info=True)
                self.fail(self.rank, f"rank {self.rank} failed in its watch: {in_short(error)}")
                self.told.set()

    def connect(self, everybody: bool) -> None:
        links = self.meeting.links
        self.news.connect({r: link for (r, channel), link in links.items() if channel == "news"})
        if everybody:
            others = {r: link for (r, channel), link in links.items() if channel == "rounds"}
            self.rounds = Rounds(self.rank, others)
            self.meeting.store = None
            self.connected.set()
        elif self.failure is not None:
            self.news.send({"failed": self.failure})

    def look(self, missing: list[int]) -> None:
        """While processes still meet: whether one that has not come ever will."""
        if not self.is_current():
            return self.meeting.stop()
        now = time.monotonic()
        if self.is_gloo and now - self.probed > 5 * PERIOD:
            self.probed = now
            for rank in missing:
                if has_left(rank):
                    self.news.peers[rank].end(self.last_word_of(rank))
        self.judge()
        if self.failure is None and self.meeting.store.check([self.key]):
            self.failure = Failure(*json.loads(self.meeting.store.get(self.key)))
            self.meeting.stop()

    def last_word_of(self, rank: int) -> str:
        key, store = f"{KEY}/ended/{rank}", self.meeting.store
        return store.get(key).decode() if store.check([key]) else ""

    def listen(self, seconds: float) -> None:
        for peer, message in self.news.listen(seconds):
            match message:
                case {"at": at, "last": last}:
                    peer.hear(Report(*at), last)
                case {"failed": [rank, text]}:
                    self.failure = self.failure or Failure(rank, text)
                case {"bye": text}:
                    peer.end(text)

    def tell(self, last: bool = False) -> None:
        if last or time.monotonic() - self.spoken >= self.period / 2:
            self.spoken = time.monotonic()
            self.news.send({"at": self.status.report(), "last": last}, droppable=not last)

    def judge(self) -> None:
        """Whether another rank can never go on, or this one waits in vain."""
        if self.failure is not None:
            return
        now, status = time.monotonic(), self.status
        waiting, since, limit = bool(status.message), status.since, status.limit
        step = status.step if status.action else 0
        peers = list(self.news.peers.values())
        if not self.connected.is_set():
            peers = [self.news.peers[rank] for rank in self.meeting.missing()]
        for peer in peers:
            if peer.ended is not None and (waiting or not peer.farewell):
                if now - max(peer.ended, since if waiting else 0.0) > GRACE:
                    return self.fail(peer.rank, ended(peer, step))
        if not waiting or now - since <= limit:
            return
        for peer in peers:
            if now - max(since, peer.heard) > limit:
                return self.fail(peer.rank, silent(peer, step, now - peer.heard, limit))
        still = [peer for peer in peers if now - max(since, peer.changed) > limit]
        for peer in still:
            assert peer.report is not None
            patience = COMPILING if peer.report.compiling else limit
            if not peer.report.awaited and now - peer.changed > patience:
                return self.fail(peer.rank, stalled(peer, now - peer.changed, limit))
        if all(peer in still and peer.report.awaited for peer in peers if peer.report):
            self.fail(self.rank, f"all ranks wait for each other, longer than timeout={limit:g}")

    def conclude(self) -> None:
        """End this rank's wait, hear where the failure met the others, and write the story."""
        own = self.status.report()
        self.tell(last=True)
        self.interrupt(own)
        deadline = time.monotonic() + LAST_WORDS
        while time.monotonic() < deadline and any(
            peer.connection and not peer.ended and not peer.has_last_words
            for peer in self.news.peers.values()
        ):
            self.listen(0.02)
        assert self.failure is not None
        rank, text = self.failure
        reports = {self.rank: own} | {r: peer.report for r, peer in self.news.peers.items()}
        lines = [
            f"rank {r} was {report or 'not there yet'}"
            for r, report in sorted(reports.items())
            if r != rank
        ]
        self.story = f"{text}; when it stopped: {', '.join(lines)}"
        self.told.set()

    def interrupt(self, own: Report) -> None:
        """End this process's waits for messages."""
        if not self.is_gloo:
            with contextlib.suppress(RuntimeError):
                abort_group()
            return
        # gloo has no such call; but a wait that runs out of time ends all waits of its group.
        for rank in self.news.peers if own.awaited and not self.in_round else ():
            with contextlib.suppress(RuntimeError):
                work = dist.irecv(torch.empty(1), rank, tag=PROBE_TAG)
                assert work is not None
                with contextlib.suppress(RuntimeError):
                    work.wait(timedelta(milliseconds=1))
                return

    def is_current(self) -> bool:
        return self.group() is not None and self.group() is dist.group.WORLD

    def leave(self, text: str) -> None:
        """Say goodbye and close; the process may start another watch."""
        self.closing = True
        self.meeting.stop()
        self.meeting.store = None
        self.news.send({"at": self.status.report(), "last": False})
        self.news.send({"bye": text})
        self.news.close()
        self.rounds.close()
        for connection in self.meeting.links.values():
            connection.close()

    def close(self, text: str) -> None:
        """`leave` from another thread, once the watch's own is over."""
        self.closing = True
        self.meeting.stop()
        self.news.wake()
        self.thread.join(1.0)
        self.leave(text)


def group_store() -> Any:
    assert dist.group.WORLD is not None
    return dist.group.WORLD.get_group_store()


def abort_group() -> None:
    assert dist.group.WORLD is not None
    dist.group.WORLD.abort()


def has_left(rank: int) -> bool:
    """Whether gloo has lost the connection to a rank. It says so to the next receive."""
    try:
        dist.irecv(torch.empty(1), rank, tag=PROBE_TAG)
    except RuntimeError:
        return True
    except ValueError:  # this process has left the group itself
        pass
    return False


# One watch at a time.

_watch: Watch | None = None
_number = 0


def watch() -> Watch:
    """The watch of the default group: started by the first call."""
    global _watch, _number
    if _watch is None or _watch.closing or not _watch.is_current():
        if _watch is not None and not _watch.closing:
            _watch.close("it left the process group")
        _watch = Watch(_number)
        _number += 1
    return _watch


@atexit.register
def say_goodbye() -> None:
    """Tell the others why this process ends, as far as Python knows."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    text = "its process ended" + (f" with {in_short(error)}" if error is not None else "")
    if _watch is not None and not _watch.closing:
        _watch.close(text)
    elif dist.is_available() and dist.is_initialized():
        # Those who wait for the first step of this process find it here.
        with contextlib.suppress(Exception):
            group_store().set(f"{KEY}/ended/{dist.get_rank()}", text)


def forget() -> None:
    """In a forked child: its copies of the connections would hide this process's end."""
    global _watch
    if _watch is not None:
        _watch.closing = True
        for connection in _watch.meeting.links.values():
            connection.close()
        _watch = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget)

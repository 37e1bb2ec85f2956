"""Two or more passes over the ranks, there and back: ZB-V and Hanayo."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from fxpipe.errors import ScheduleError
from fxpipe.packed import KIND_F, B, F, I, W, kind_of, microbatch_of, stage_of
from fxpipe.schedules.family import V_SHAPE, ZIG_ZAG, family
from fxpipe.schedules.times import Times


def fill_the_pipe(p: int, m: int) -> int:
    return max(m, 2 * p - 1)


@family(
    "zb-v",
    placement=V_SHAPE,
    splits_backward=True,
    flush="(p - 1)*F/2",
    own="(p - 1)*(Max(F, B) - W)",
    peak="p",
    messages="4*(p - 1)*m",
    holds="m >= 2*p - 1, F = B = W",
    legal_microbatches=fill_the_pipe,
    source="Zero Bubble (arXiv 2401.10241), section 6; torch ScheduleZBVZeroBubble",
)
def zb_v(p: int, m: int) -> Iterator[list[int]]:
    """No bubble within a rank and 1F1B's memory: split backward over stages r and 2p - 1 - r."""
    for r in range(p):
        line = CountedLine(r, 2 * p - 1 - r)
        line.add("F0", times=2 * (p - r) - 1)
        line.add("F1 F0", times=r)
        line.add("F1 I1 W1", times=p - r)
        while line.done["F0"] < m or line.done["F1"] < m:
            line.add("F0", times=min(1, m - line.done["F0"]))
            line.add("I0 W0 F1 I1 W1")
        line.add("I0 I1", times=r)
        line.add("I0 W0", times=p - r)
        line.add("W1", times=m - line.done["W1"])
        line.add("W0", times=m - line.done["W0"])
        yield line.codes


class CountedLine:
    """The actions of a rank; each kind of each chunk takes its microbatches in order."""

    def __init__(self, *stages: int) -> None:
        self.stages = stages
        self.codes: list[int] = []
        self.done = {f"{kind}{chunk}": 0 for kind in "FIW" for chunk in range(len(stages))}

    def add(self, names: str, times: int = 1) -> None:
        make = {"F": F, "I": I, "W": W}
        for _ in range(times):
            for name in names.split():
                self.codes.append(make[name[0]](self.stages[int(name[1])], self.done[name]))
                self.done[name] += 1


@family(
    "hanayo",
    placement=ZIG_ZAG,
    splits_backward=False,
    flush="(p - 1)*(F + B + W)/v",
    peak="Min(m, p)",
    messages="2*v*(p - 1)*m",
    holds="m mod p = 0, F = B + W",
    takes=("times", "memory_limit"),
    source="Hanayo (arXiv 2308.15762)",
)
def hanayo(
    p: int, m: int, v: int, times: Times | None = None, memory_limit: float | None = None
) -> Iterable[list[int]]:
    """1F1B in v/2 waves, there and back, without copies of the weights.

    A rank runs a backward where one is ready, else of the oldest group of microbatches the
    forward of its deepest stage, within memory for p microbatches (or the limit).
    """
    limit = int((memory_limit or p) * v + 1e-9)
    if limit < v:
        raise ScheduleError(
            f"schedule 'hanayo': memory_limit={memory_limit} holds not even one microbatch; "
            f"expected at least 1"
        )
    return _Waves(p, m, v, times or Times.equal(p * v), limit).run()


class _Waves:
    def __init__(self, p: int, m: int, v: int, times: Times, limit: int) -> None:
        self.p, self.m, self.v, self.times, self.limit = p, m, v, times, limit
        # A group fits into memory as a whole, so the oldest one can always be finished.
        self.group = min(p, limit // v)
        self.ready: list[list[tuple[int, ...]]] = [[] for _ in range(p)]
        self.free_at = [0.0] * p
        self.held = [0] * p
        self.forwards = [[0] * (-(-m // self.group)) for _ in range(p)]
        self.lines: list[list[int]] = [[] for _ in range(p)]
        self.events = [(0.0, 0, F(0, microbatch)) for microbatch in range(m)]

    def rank_of(self, stage: int) -> int:
        wave, place = divmod(stage, self.p)
        return self.p - 1 - place if wave % 2 else place

    def run(self) -> list[list[int]]:
        """At every time at which something ends, let the ranks that are free choose again."""
        while self.events:
            now = self.events[0][0]
            woken = set()
            while self.events and self.events[0][0] == now:
                _, rank, code = heapq.heappop(self.events)
                woken.add(rank)
                if code >= 0:
                    heapq.heappush(self.ready[rank], self.priority(code))
            for rank in sorted(woken):
                if self.free_at[rank] <= now:
                    self.start_best(rank, now)
        return self.lines

    def priority(self, code: int) -> tuple[int, ...]:
        stage, microbatch = stage_of(code), microbatch_of(code)
        if kind_of(code) != KIND_F:
            return (0, microbatch, stage, code)
        return (1, microbatch // self.group, -stage, microbatch, code)

    def start_best(self, rank: int, now: float) -> None:
        ready = self.ready[rank]
        if not ready or not self.fits(rank, ready[0][-1]):
            return
        code = heapq.heappop(ready)[-1]
        stage, microbatch = stage_of(code), microbatch_of(code)
        self.lines[rank].append(code)
        if kind_of(code) == KIND_F:
            self.held[rank] += 1
            self.forwards[rank][microbatch // self.group] += 1
            end = now + self.times.F[stage]
            last = stage == self.p * self.v - 1
            follower = B(stage, microbatch) if last else F(stage + 1, microbatch)
        else:
            self.held[rank] -= 1
            end = now + self.times.B[stage]
            follower = B(stage - 1, microbatch) if stage else -1
        self.free_at[rank] = end
        heapq.heappush(self.events, (end, rank, -1))
        if follower >= 0:
            target = self.rank_of(stage_of(follower))
            arrival = end + (self.times.transfer if target != rank else 0.0)
            heapq.heappush(self.events, (arrival, target, follower))

    def fits(self, rank: int, code: int) -> bool:
        """Whether a forward leaves room for all forwards of older groups, so none can starve."""
        if kind_of(code) != KIND_F:
            return True
        group = microbatch_of(code) // self.group
        owed = group * self.group * self.v - sum(self.forwards[rank][:group])
        return self.held[rank] + owed < self.limit

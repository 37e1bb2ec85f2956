"""Paired forwards and backwards that hide each other's messages: DualPipe and DualPipeV."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from fxpipe.packed import B, F, I, W, pair
from fxpipe.schedules.family import BIDIRECTIONAL, V_SHAPE, even_ranks, family

_SOURCE = "DeepSeek-V3 (arXiv 2412.19437); github.com/deepseek-ai/DualPipe"


def _even_and_full(p: int, m: int) -> int:
    return max(m + m % 2, 2 * p)


def _full(p: int, m: int) -> int:
    return max(m, 2 * p)


@family(
    "dualpipe",
    placement=BIDIRECTIONAL,
    splits_backward=True,
    flush="(p/2 - 1)*(F + 2*B - W)",
    peak="p + 1",
    messages="2*(p - 1)*m",
    weights="2",
    holds="m even, m >= 2*p, F = B >= W, a pair takes as long as its parts",
    constraint="p even",
    check=even_ranks,
    legal_microbatches=_even_and_full,
    source=_SOURCE,
)
def dualpipe(p: int, m: int) -> Iterator[list[int]]:
    """Pipelines from both ends meet in pairs: a forward of one with a backward of the other.

    Chunk 0 is of the pipeline that starts nearer to the rank; pipelines take microbatches in turn.
    """
    for r in range(p):
        near = 0 if r < p // 2 else 1
        stages = (r, p - 1 - r) if near == 0 else (p - 1 - r, r)
        line = _PairedLine(stages, offsets=(near, 1 - near), stride=2)
        yield _eight_steps(line, p // 2, min(r, p - 1 - r), m // 2, full=p)


@family(
    "dualpipev",
    placement=V_SHAPE,
    splits_backward=True,
    flush="(p - 1)*(F + 2*B - W)/2",
    peak="p + 1/2",
    messages="4*(p - 1)*m",
    holds="m >= 2*p, F = B >= W, a pair takes as long as its parts",
    legal_microbatches=_full,
    source="DualPipeV (github.com/deepseek-ai/DualPipe), half of DualPipe",
)
def dualpipev(p: int, m: int) -> Iterator[list[int]]:
    """DualPipe folded in the middle: both directions are the two chunks of one V."""
    for r in range(p):
        line = _PairedLine((r, 2 * p - 1 - r), offsets=(0, 0), stride=1)
        yield _eight_steps(line, p, r, m, full=2 * p)


class _PairedLine:
    """The actions of a rank with two chunks; each kind of each takes its microbatches in order."""

    def __init__(self, stages: tuple[int, int], offsets: tuple[int, int], stride: int) -> None:
        self.stages, self.offsets, self.stride = stages, offsets, stride
        self.forwards, self.backwards = [0, 0], [0, 0]
        self.owed: deque[int] = deque()
        self.codes: list[int] = []

    def _next(self, counts: list[int], chunk: int) -> tuple[int, int]:
        counts[chunk] += 1
        return self.stages[chunk], (counts[chunk] - 1) * self.stride + self.offsets[chunk]

    def forward(self, chunk: int) -> None:
        self.codes.append(F(*self._next(self.forwards, chunk)))

    def backward(self, chunk: int, split: bool = False) -> None:
        place = self._next(self.backwards, chunk)
        self.codes.append(I(*place) if split else B(*place))
        if split:
            self.owed.append(W(*place))

    def weights(self) -> None:
        self.codes.append(self.owed.popleft())

    def pair(self, forward: int, backward: int) -> None:
        places = self._next(self.forwards, forward), self._next(self.backwards, backward)
        self.codes += pair(F(*places[0]), B(*places[1]))


def _eight_steps(line: _PairedLine, half: int, near: int, m: int, full: int) -> list[int]:
    """DualPipe's steps for the rank at distance `near` from its end; m microbatches a direction."""
    inner = half - near - 1
    for _ in range(2 * inner):
        line.forward(0)
    for _ in range(near + 1):
        line.forward(0)
        line.forward(1)
    for _ in range(inner):
        line.backward(1, split=True)
        line.weights()
        line.forward(1)
    for step in range(m - full + near + 1):
        if step == 0 and inner == 0:
            # Apart on the ranks in the middle: pairing here would lengthen the pipeline's fill.
            line.forward(0)
            line.backward(1)
        else:
            line.pair(0, 1)
        line.pair(1, 0)
    for _ in range(inner):
        line.backward(1)
        line.pair(1, 0)
    for step in range(2 * (near + 1)):
        line.backward(1 - step % 2, split=step >= near + 1)
    for _ in range(inner):
        line.weights()
        line.backward(0, split=True)
    for _ in range(near + 1):
        line.weights()
    return line.codes

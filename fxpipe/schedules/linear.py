"""One stage a rank, in a line: GPipe, 1F1B, eager 1F1B, ZB-H1, ZB-H2."""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.packed import B, F, I, W
from fxpipe.schedules.family import LINEAR, family

_MESSAGES = "2*(p - 1)*m"


@family(
    "gpipe",
    placement=LINEAR,
    splits_backward=False,
    flush="(p - 1)*(F + B + W)",
    peak="m",
    messages=_MESSAGES,
    source="GPipe (arXiv 1811.06965)",
)
def gpipe(p: int, m: int) -> Iterator[list[int]]:
    """All forwards, then all backwards."""
    for r in range(p):
        yield [F(r, i) for i in range(m)] + [B(r, i) for i in range(m)]


@family(
    "1f1b",
    placement=LINEAR,
    splits_backward=False,
    flush="(p - 1)*(F + B + W)",
    peak="Min(m, p - r)",
    messages=_MESSAGES,
    source="PipeDream-Flush (arXiv 2006.09503), DAPPLE",
)
def one_f_one_b(p: int, m: int) -> Iterator[list[int]]:
    """A forward for each backward once the pipeline is full."""
    for r in range(p):
        yield _alternate(r, m, warmup=min(m, p - 1 - r))


@family(
    "eager-1f1b",
    placement=LINEAR,
    splits_backward=False,
    flush="(p - 1)*(F + B + W)",
    peak="Min(m, 2*(p - r))",
    messages=_MESSAGES,
    source="JaxPP (github.com/NVIDIA/jaxpp)",
)
def eager_one_f_one_b(p: int, m: int) -> Iterator[list[int]]:
    """1F1B with twice the forwards in flight, so that messages travel while ranks compute."""
    for r in range(p):
        yield _alternate(r, m, warmup=min(m, 2 * (p - r) - 1))


def _alternate(r: int, m: int, warmup: int) -> list[int]:
    line = [F(r, i) for i in range(warmup)]
    for i in range(m - warmup):
        line += F(r, warmup + i), B(r, i)
    return line + [B(r, i) for i in range(m - warmup, m)]


@family(
    "zb-h1",
    placement=LINEAR,
    splits_backward=True,
    flush="(p - 1)*(F + B - W)",
    peak="Min(m, p)",
    messages=_MESSAGES,
    holds="m >= p, F = B >= W",
    source="Zero Bubble (arXiv 2401.10241), section 2",
)
def zb_h1(p: int, m: int) -> Iterator[list[int]]:
    """1F1B with split backward: W fills the bubble, with no more memory than 1F1B's rank 0."""
    for r in range(p):
        warmup = min(m, p - 1 - r)
        line = [F(r, i) for i in range(warmup)]
        for i in range(m):
            if warmup + i < m:
                line.append(F(r, warmup + i))
            line.append(I(r, i))
            if i >= r:
                line.append(W(r, i - r))
        yield line + [W(r, i) for i in range(max(0, m - r), m)]


@family(
    "zb-h2",
    placement=LINEAR,
    splits_backward=True,
    flush="(p - 1)*F",
    own="(p - 1)*(F + B - 2*W)",
    peak="2*p - 1",
    messages=_MESSAGES,
    holds="m >= 2*p - 1, F = B = W",
    source="Zero Bubble (arXiv 2401.10241), section 2",
)
def zb_h2(p: int, m: int) -> Iterator[list[int]]:
    """No bubble within a rank for twice the memory; lost where a barrier ends each step."""
    for r in range(p):
        warmup = min(m, 2 * (p - r) - 1)
        line = [F(r, i) for i in range(warmup)]
        for i in range(m):
            line.append(I(r, i))
            if i >= 2 * r:
                line.append(W(r, i - 2 * r))
            if warmup + i < m:
                line.append(F(r, warmup + i))
        yield line + [W(r, i) for i in range(max(0, m - 2 * r), m)]

"""Stage s on rank s mod p: interleaved 1F1B, its split and paired forms, breadth-first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fxpipe.packed import B, F, I, W, pair
from fxpipe.schedules.family import LOOPED, family, multiple_of_ranks

_MESSAGES = "2*(p*v - 1)*m"


def _order(p: int, m: int, v: int, r: int) -> tuple[Callable[[int], tuple[int, int]], ...]:
    """The k-th forward and the k-th backward of rank r, each as (stage, microbatch)."""

    def forward(k: int) -> tuple[int, int]:
        return k % (p * v) // p * p + r, k // (p * v) * p + k % p

    def backward(k: int) -> tuple[int, int]:
        return (v - 1 - k % (p * v) // p) * p + r, k // (p * v) * p + k % p

    return forward, backward


@family(
    "interleaved-1f1b",
    placement=LOOPED,
    splits_backward=False,
    flush="(p - 1)*(F + B + W)/v",
    peak="Min(m, p + (p - 1 - 2*r)/v)",
    messages=_MESSAGES,
    holds="m mod p = 0, p > 1",
    legal_microbatches=multiple_of_ranks,
    source="Megatron-LM (arXiv 2104.04473), section 2.2",
)
def interleaved(p: int, m: int, v: int) -> Iterator[list[int]]:
    """1F1B over v chunks a rank: the bubble shrinks by v, messages grow by v."""
    for r in range(p):
        forward, backward = _order(p, m, v, r)
        warmup = min(m * v, 2 * (p - 1 - r) + (v - 1) * p)
        line = [F(*forward(k)) for k in range(warmup)]
        for k in range(m * v - warmup):
            line += F(*forward(warmup + k)), B(*backward(k))
        yield line + [B(*backward(k)) for k in range(m * v - warmup, m * v)]


@family(
    "combined-1f1b",
    placement=LOOPED,
    splits_backward=False,
    flush="(p - 1)*(F + B + W)/v",
    peak="Min(m, p + (p - 2*r)/v)",
    messages=_MESSAGES,
    holds="m mod p = 0, p > 1, v > 1",
    legal_microbatches=multiple_of_ranks,
    source="Megatron-LM, --overlap-moe-expert-parallel-comm",
)
def combined(p: int, m: int, v: int) -> Iterator[list[int]]:
    """Interleaved 1F1B one forward further ahead, so that each forward and backward can pair."""
    for r in range(p):
        forward, backward = _order(p, m, v, r)
        warmup = min(m * v, 2 * (p - 1 - r) + (v - 1) * p + 1)
        line = [F(*forward(k)) for k in range(warmup)]
        for k in range(m * v - warmup):
            line += pair(F(*forward(warmup + k)), B(*backward(k)))
        yield line + [B(*backward(k)) for k in range(m * v - warmup, m * v)]


@family(
    "interleaved-zb",
    placement=LOOPED,
    splits_backward=True,
    flush="(p - 1)*(F + B - W)/v",
    peak="Min(m, p)",
    messages=_MESSAGES,
    holds="m mod p = 0, p > 1, F = B >= W",
    legal_microbatches=multiple_of_ranks,
    source="torch.distributed.pipelining ScheduleInterleavedZeroBubble; bubble fitted",
)
def interleaved_zb(p: int, m: int, v: int) -> Iterator[list[int]]:
    """Interleaved 1F1B with split backward: ZB-H1 over v chunks a rank."""
    for r in range(p):
        forward, backward = _order(p, m, v, r)
        warmup = min(m * v, (p - 1 - r) + (v - 1) * p)
        line = [F(*forward(k)) for k in range(warmup)]
        for k in range(m * v):
            if warmup + k < m * v:
                line.append(F(*forward(warmup + k)))
            line.append(I(*backward(k)))
            if k >= r:
                line.append(W(*backward(k - r)))
        yield line + [W(*backward(k)) for k in range(max(0, m * v - r), m * v)]


@family(
    "looped-bfs",
    placement=LOOPED,
    splits_backward=False,
    flush="(p - 1)*(F + B + W)/v",
    peak="m",
    messages=_MESSAGES,
    holds="m >= p > 1",
    source="Breadth-first pipeline parallelism (arXiv 2211.05953), MLSys 2023",
)
def looped_bfs(p: int, m: int, v: int) -> Iterator[list[int]]:
    """Chunk by chunk: all forwards of a chunk, then of the next; weights are gathered once."""
    for r in range(p):
        chunks = range(r, p * v, p)
        line = [F(stage, i) for stage in chunks for i in range(m)]
        yield line + [B(stage, i) for stage in reversed(chunks) for i in range(m)]

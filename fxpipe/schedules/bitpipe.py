"""Two V-shaped pipelines in opposite directions over the same ranks: BitPipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from fxpipe.packed import B, F
from fxpipe.schedules.family import BIDIRECTIONAL_V, even_ranks, family, multiple_of_ranks


@family(
    "bitpipe",
    placement=BIDIRECTIONAL_V,
    splits_backward=False,
    flush="(p - 2)/2*((B + W) + (m/p - 1)*(B + W - F))",
    peak="p - (p/2 - 1 - Min(r, p - 1 - r))/2",
    messages="4*(p - 1)*m",
    weights="2",
    holds="m mod p = 0, F <= B + W <= 2*F",
    constraint="p even",
    check=even_ranks,
    legal_microbatches=multiple_of_ranks,
    source="BitPipe (arXiv 2410.19367)",
)
def bitpipe(p: int, m: int) -> Iterator[list[int]]:
    """Two V-shaped pipelines, one from each end, of half the microbatches each."""
    for r in range(p):
        forwards = iter(_order(F, p, m, r, first=0))
        backwards = iter(_order(B, p, m, r, first=1))
        warmup = 3 * p // 2 + min(r, p - 1 - r)
        rest = 2 * p - warmup
        line = [*islice(forwards, warmup)]
        for _ in range(m // p - 1):
            line += _alternate(forwards, backwards, rest)
            line += islice(backwards, warmup - rest + 1)
            line += _alternate(forwards, backwards, rest - 1)
            line += islice(forwards, warmup - rest + 1)
        yield line + _alternate(forwards, backwards, rest) + [*backwards]


def _alternate(forwards: Iterator[int], backwards: Iterator[int], times: int) -> list[int]:
    return [code for _ in range(times) for code in (next(forwards), next(backwards))]


def _order(make: Callable[[int, int], int], p: int, m: int, r: int, first: int) -> Iterator[int]:
    """The forwards of rank r, or with `first=1` the backwards, which meet the second chunk first.

    A group of p microbatches goes through both pipes; that of the nearer end comes first.
    """
    near, far = (0, 1) if r < p // 2 else (1, 0)
    stages = {(0, 0): r, (0, 1): 2 * p - 1 - r, (1, 0): p - 1 - r, (1, 1): p + r}
    done = dict.fromkeys(stages, 0)
    alone = p // 2 - min(r, p - 1 - r)
    both = p // 2 - alone
    group = [(near, first)] * alone + [(far, first), (near, first)] * both
    group += [(far, first), (far, 1 - first)] * alone
    group += [(near, 1 - first), (far, 1 - first)] * both + [(near, 1 - first)] * alone
    for pipe, chunk in group * (m // p):
        yield make(stages[pipe, chunk], 2 * done[pipe, chunk] + pipe)
        done[pipe, chunk] += 1

"""Sizes and lifetimes -> offsets in one block of memory, in which no two live values overlap.

The problem is dynamic storage allocation, which is NP-complete (Garey and Johnson, SR2). Values are
placed one by one in the smallest gap that takes them, in several orders (Pisarchyk and Lee,
"Efficient Memory Management for Deep Neural Net Inference", arXiv 2001.03288), and what reaches
highest is then placed earlier, as long as that helps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

# What the improvement may cost: pairs of values that are compared.
COMPARISONS = 2_000_000


class Block(NamedTuple):
    """A value: its bytes, and the first and the last call at which it is live."""

    size: int
    start: int
    end: int

    def meets(self, other: Block) -> bool:
        return self.start <= other.end and other.start <= self.end


ORDERS: tuple[Callable[[Block], tuple[int, ...]], ...] = (
    lambda block: (-block.size, block.start),
    lambda block: (block.start, -block.size),
    lambda block: (block.start - block.end, -block.size),
    lambda block: ((block.start - block.end - 1) * block.size, block.start),
)


def place(blocks: Sequence[Block]) -> list[int]:
    """An offset for each block, from 0 on."""
    least = peak(blocks)
    best: list[int] = []
    order: list[int] = []
    for key in ORDERS:
        tried = sorted(range(len(blocks)), key=lambda i: key(blocks[i]))
        offsets = fit(blocks, tried)
        if not best or height(blocks, offsets) < height(blocks, best):
            best, order = offsets, tried
    return improved(blocks, order, best, least)


def improved(
    blocks: Sequence[Block], order: list[int], best: list[int], least: int
) -> list[int]:  # fmt: skip
    """Place what reaches highest before what it met, until that stops to help."""
    lowest, offsets, seen = height(blocks, best), best, {tuple(order)}
    for _ in range(min(200, COMPARISONS // (len(blocks) ** 2 + 1))):
        if lowest <= least:
            break
        top = max(range(len(blocks)), key=lambda i: offsets[i] + blocks[i].size)
        at = order.index(top)
        order = [*order[: at // 2], top, *order[at // 2 : at], *order[at + 1 :]]
        if tuple(order) in seen:
            break
        seen.add(tuple(order))
        offsets = fit(blocks, order)
        if height(blocks, offsets) < lowest:
            lowest, best = height(blocks, offsets), offsets
    return best


def fit(blocks: Sequence[Block], order: Sequence[int]) -> list[int]:
    """Place blocks in this order, each in the smallest gap between those that are live with it."""
    offsets = [0] * len(blocks)
    placed: list[int] = []
    for i in order:
        block = blocks[i]
        taken = sorted(
            (offsets[j], offsets[j] + blocks[j].size) for j in placed if blocks[j].meets(block)
        )
        offsets[i] = best_gap(taken, block.size)
        placed.append(i)
    return offsets


def best_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    """Where so many bytes fit with the least left over; above everything, if nowhere else."""
    end, best, spare = 0, -1, 0
    for low, high in taken:
        if low - end >= size and (best < 0 or low - end - size < spare):
            best, spare = end, low - end - size
        end = max(end, high)
    return end if best < 0 else best


def height(blocks: Sequence[Block], offsets: Sequence[int]) -> int:
    """The bytes that the blocks take together, so placed."""
    return max((o + block.size for o, block in zip(offsets, blocks)), default=0)


def peak(blocks: Sequence[Block]) -> int:
    """The most bytes that are live at once: no placement takes less."""
    changes: dict[int, int] = {}
    for block in blocks:
        changes[block.start] = changes.get(block.start, 0) + block.size
        changes[block.end + 1] = changes.get(block.end + 1, 0) - block.size
    live = most = 0
    for _, change in sorted(changes.items()):
        live += change
        most = max(most, live)
    return most


def colour(blocks: Sequence[Block]) -> list[int]:
    """A number for each block, as few as are live at once; no two that meet share one."""
    colours, free_from = [0] * len(blocks), list[int]()
    for i in sorted(range(len(blocks)), key=lambda i: blocks[i].start):
        ready = [c for c, end in enumerate(free_from) if end < blocks[i].start]
        colours[i] = ready[0] if ready else len(free_from)
        free_from[colours[i] :] = [blocks[i].end, *free_from[colours[i] + 1 :]]
    return colours

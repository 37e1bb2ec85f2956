"""Two texts -> what changed between them, line by line, as the pages show it side by side."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

# One stretch: "equal", "replace", "insert" or "delete"; begin and end before, begin and end after.
Stretch = tuple[str, int, int, int, int]


def stretches(before: Sequence[str], after: Sequence[str]) -> list[Stretch]:
    """All lines of both in order; equal texts are one stretch.

    What both begin and end with is not searched, since most passes change a part alone.
    """
    head = 0
    limit = min(len(before), len(after))
    while head < limit and before[head] == after[head]:
        head += 1
    tail = 0
    while tail < limit - head and before[-1 - tail] == after[-1 - tail]:
        tail += 1
    ends = len(before) - tail, len(after) - tail
    matcher = SequenceMatcher(None, before[head : ends[0]], after[head : ends[1]], autojunk=False)
    found: list[Stretch] = [("equal", 0, head, 0, head)] if head else []
    for tag, a, b, c, d in matcher.get_opcodes():
        found.append((tag, a + head, b + head, c + head, d + head))
    if tail:
        found.append(("equal", ends[0], len(before), ends[1], len(after)))
    return found

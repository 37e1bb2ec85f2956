"""An action becomes one integer, so that a schedule of millions of actions is a few arrays.

    bits 0-2    kind, its place in `Kind`          bits 4-23   stage
    bit 3       run as one unit with the next      bits 24-43  microbatch
                                                   bits 44-62  peer stage + 1, 0 if none

Families build these integers directly: `F(2, 5)` is the action 2F5.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

KIND_F, KIND_I, KIND_W, KIND_B = range(4)
JOINED = 1 << 3
STAGE_SHIFT, MICROBATCH_SHIFT, PEER_SHIFT = 4, 24, 44
FIELD_MASK = (1 << 20) - 1
LIMIT = (1 << 19) - 2  # the largest stage or microbatch that fits every field


def F(stage: int, microbatch: int) -> int:  # noqa: N802 - the field's letter
    """Forward."""
    return stage << STAGE_SHIFT | microbatch << MICROBATCH_SHIFT


def I(stage: int, microbatch: int) -> int:  # noqa: E743, N802 - the field's letter
    """Input gradient."""
    return KIND_I | stage << STAGE_SHIFT | microbatch << MICROBATCH_SHIFT


def W(stage: int, microbatch: int) -> int:  # noqa: N802 - the field's letter
    """Weight gradient."""
    return KIND_W | stage << STAGE_SHIFT | microbatch << MICROBATCH_SHIFT


def B(stage: int, microbatch: int) -> int:  # noqa: N802 - the field's letter
    """Both gradients as one task."""
    return KIND_B | stage << STAGE_SHIFT | microbatch << MICROBATCH_SHIFT


def pair(forward: int, backward: int) -> tuple[int, int]:
    """A forward and a backward that run as one unit."""
    return forward | JOINED, backward


def kind_of(code: int) -> int:
    return code & 7


def stage_of(code: int) -> int:
    return code >> STAGE_SHIFT & FIELD_MASK


def microbatch_of(code: int) -> int:
    return code >> MICROBATCH_SHIFT & FIELD_MASK


def peer_of(code: int) -> int | None:
    return (code >> PEER_SHIFT) - 1 if code >> PEER_SHIFT else None


def units(codes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The actions of a rank unit by unit: one code, or the two of a pair."""
    codes = iter(codes)  # type: ignore[assignment]
    for code in codes:
        yield (code, next(codes)) if code & JOINED else (code,)  # type: ignore[call-overload]

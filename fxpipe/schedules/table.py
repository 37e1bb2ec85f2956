"""What is known of the families becomes the table of docs/schedules.md."""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.schedules.builder import families

_COLUMNS = (
    "name",
    "placement",
    "backward",
    "flush bubble",
    "own bubble",
    "peak",
    "weights",
    "messages",
    "holds for",
    "needs",
    "source",
)


def markdown_table() -> str:
    """One row a family, in the order of their names."""
    return "\n".join(_rows())


def _rows() -> Iterator[str]:
    yield _row(_COLUMNS)
    yield _row(["---"] * len(_COLUMNS))
    for name, family in sorted(families().items()):
        forms = (family.flush, family.own or "same", family.peak, family.weights, family.messages)
        cells = [f"`{name}`", family.placement, "I, W" if family.splits_backward else "B"]
        cells += [form if form == "same" else f"`{form}`" for form in forms]
        yield _row([*cells, family.holds, family.constraint, family.source])


def _row(cells: list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(markdown_table())

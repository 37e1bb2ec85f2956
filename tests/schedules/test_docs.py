"""docs/schedules.md says what the families are."""

from __future__ import annotations

from pathlib import Path

from fxpipe.schedules.table import markdown_table

PAGE = Path(__file__).parents[2] / "docs" / "schedules.md"


def test_the_table_is_that_of_the_families() -> None:
    assert markdown_table() in PAGE.read_text(), "run python -m fxpipe.schedules.table"

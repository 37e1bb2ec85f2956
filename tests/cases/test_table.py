"""The table of cases and the tests name each other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "cases.md").read_text()
ROWS = [line for line in TABLE.splitlines() if re.match(r"\| \d+: ", line)]
WITHOUT = {77}  # the page says why


def names_in_the_tree() -> set[str]:
    files = (ROOT / "tests").rglob("test_*.py")
    return {
        name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)
    }


def number_of(row: str) -> int:
    return int(row[2 : row.index(":")])


def test_every_test_that_the_table_names_is_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", TABLE))
    assert len(named) > 60
    assert named - names_in_the_tree() == set()


def test_every_case_has_a_test_and_is_there_once() -> None:
    numbers = [number_of(row) for row in ROWS]
    assert numbers == sorted(set(numbers)) and not WITHOUT & set(numbers)
    assert all(re.search(r"`test_\w+`", row) for row in ROWS)
    assert len(numbers) == 62


def test_every_test_of_a_case_is_in_its_row() -> None:
    rows = {number_of(row): row for row in ROWS}
    for name in names_in_the_tree():
        if case := re.match(r"test_case_(\d+)_", name):
            assert f"`{name}`" in rows[int(case[1])], name

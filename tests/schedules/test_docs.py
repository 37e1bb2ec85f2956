"""docs/schedules.md says what the families are, and its way from directives to training works."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from fxpipe.schedules import load
from fxpipe.schedules.table import markdown_table
from tests.helpers import MLP, mlp_batch

PAGE = Path(__file__).parents[2] / "docs" / "schedules.md"


def block(first: str) -> str:
    """The indented block of the page that begins with this line."""
    found = re.search(rf"(?m)^ +{re.escape(first)}\n(?: {{6}}.*\n|\n(?= {{6}}))*", PAGE.read_text())
    assert found is not None
    return dedent(found[0])


def test_the_table_is_that_of_the_families() -> None:
    assert markdown_table() in PAGE.read_text(), "run python -m fxpipe.schedules.table"


def test_directives_become_a_schedule_that_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "heavy.txt").write_text(block("stages 4"))
    monkeypatch.chdir(tmp_path)
    assert load("heavy.txt").holders == {0: (0,), 1: (1, 2), 2: (1, 2), 3: (0,)}
    model = MLP(3, 3, 3, 3, 3)
    x, y = mlp_batch(16)
    model(x, y).backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    names: dict[str, Any] = {"torch": torch, "model": model, "x": x, "y": y}
    program = block("from fxpipe.schedules import load").replace("8}", "8, 'lowering': 'eager'}")
    assert "eager" in program
    exec(program, names)
    assert names["step"] is not model
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-14)

"""What the documentation shows as Python runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(DOCS.glob("writing-*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_of_a_page_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    torch.compiler.reset()
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks:
        # One file for each, so that Dynamo finds the source of the functions.
        script = tmp_path / f"block_{blocks.index(block)}.py"
        script.write_text(block)
        exec(compile(block, str(script), "exec"), names)

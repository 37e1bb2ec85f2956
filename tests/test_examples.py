"""The examples run as a user runs them; what the documentation shows of them is what they print."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("how-*.md")))


def output_of(name: str, *arguments: str) -> str:
    """What an example prints. Without Inductor: these tests are about the examples."""
    command = [sys.executable, str(ROOT / "examples" / name), "--lowering", "eager", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """What the MLP prints, and all that it dumps."""
    folder = tmp_path_factory.mktemp("dumps")
    output = output_of("mlp.py", "--dump", str(folder))
    return output, "\n".join(path.read_text() for path in sorted(folder.rglob("*.txt")))


def test_mlp_agrees_with_eager(mlp: tuple[str, str]) -> None:
    assert "the pipeline agrees with eager" in mlp[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_documentation_shows_what_the_mlp_gives(page: Path, mlp: tuple[str, str]) -> None:
    blocks = re.findall(
        r"^```\n((?:graph |schedule |edge |step |0F0 ).*?)^```", page.read_text(), re.M | re.S
    )
    parts = [part.strip("\n") for block in blocks for part in block.split("\n\n")]
    assert parts
    assert [part for part in parts if part not in "\n".join(mlp)] == []


def test_skip_connection_jumps_over_the_middle_stage() -> None:
    output = output_of("skip_connection.py")
    assert "the pipeline agrees with eager" in output
    assert "edge 0 -> 2: %relu" in output


def test_pass_of_ones_own_shares_what_was_computed_twice() -> None:
    output = output_of("write_a_pass.py")
    assert "the joint graph had 65 nodes, and has 64" in output
    assert "the pipeline agrees with eager" in output


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_says_how_it_is_run(path: Path) -> None:
    assert f"python examples/{path.name}" in path.read_text()

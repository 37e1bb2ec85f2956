"""The examples run as a user runs them, and say that the pipeline agrees with eager."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def output_of(name: str, *arguments: str) -> str:
    """What an example prints. Without Inductor: these tests are about the examples."""
    command = [sys.executable, str(EXAMPLES / name), "--lowering", "eager", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_mlp_agrees_with_eager_and_shows_its_schedule(tmp_path: Path) -> None:
    output = output_of("mlp.py", "--dump", str(tmp_path))
    assert "the pipeline agrees with eager" in output
    assert "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2" in output
    assert len(list(tmp_path.rglob("schedule.txt"))) == 1


def test_skip_connection_jumps_over_the_middle_stage() -> None:
    output = output_of("skip_connection.py")
    assert "the pipeline agrees with eager" in output
    assert "edge 0 -> 2: %relu" in output


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_example_says_how_it_is_run(path: Path) -> None:
    assert f"python examples/{path.name}" in path.read_text()

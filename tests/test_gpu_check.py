"""The script for a GPU runs on a CPU, with a stand-in for what captures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
SCRIPT = [sys.executable, str(ROOT / "tools" / "gpu_check.py")]


def test_a_dry_run_writes_a_table_and_json(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    arguments = ["--dry-run", "--only", "case 66, step", "--json", str(path)]
    ran = subprocess.run([*SCRIPT, *arguments], capture_output=True, text=True, timeout=150)
    assert ran.returncode == 0, ran.stderr
    assert "| case 66, step | as eager | right |" in ran.stdout
    assert "0 of them wrong" in ran.stdout
    found = json.loads(path.read_text())
    assert found["on"].startswith("cpu, dry run, torch ")
    assert [row["right"] for row in found["rows"]] == [True]


def test_what_has_no_time_is_left_out() -> None:
    arguments = ["--dry-run", "--only", "zb", "--seconds", "0"]
    ran = subprocess.run([*SCRIPT, *arguments], capture_output=True, text=True, timeout=150)
    assert ran.returncode == 0 and ran.stdout.count("left out: out of time") == 8
    assert "8 rows, 0 of them wrong, 0 right" in ran.stdout


def test_without_a_gpu_it_says_what_to_do() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    ran = subprocess.run(SCRIPT, capture_output=True, text=True, timeout=150)
    assert ran.returncode == 2 and "--dry-run goes through the same on a CPU" in ran.stdout

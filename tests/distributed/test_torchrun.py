"""torchrun starts a script that never heard of process groups."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.harness import ROOT

TORCHRUN = Path(sys.executable).with_name("torchrun")


@pytest.mark.torchrun
def test_a_script_without_a_process_group_trains_on_two_ranks(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [
            TORCHRUN,
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "tests.distributed.script",
            tmp_path,
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    for rank in range(2):
        backend, world_size, error = (tmp_path / f"rank{rank}").read_text().split()
        assert (backend, world_size) == ("gloo", "2")
        assert float(error) < 1e-9

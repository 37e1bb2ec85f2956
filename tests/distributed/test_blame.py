"""An error in what Inductor made of a task names the model's line on every rank."""

from __future__ import annotations

import re
from pathlib import Path

from tests.distributed import blaming
from tests.distributed.harness import run_ranks


def test_compiled_task_names_its_line_on_all_ranks(tmp_path: Path) -> None:
    for told in run_ranks(blaming.look_up_in_compiled, 2, tmp_path, timeout=170.0):
        assert told.kind == "RankError"
        assert re.match(
            r"rank 1 failed in 1F1 \(stage 1, microbatch 1\) at .*test_blame\.py:\d+: "
            r"x = x \* self\.small\(ids\) \(as its graph shows, run again without Inductor\): "
            r"RuntimeError: .*index out of bounds",
            told.message,
        ), told.message

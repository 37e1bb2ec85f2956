"""Every test here needs a GPU with CUDA; without one all are skipped."""

from __future__ import annotations

import pytest
import torch

REASON = "needs a GPU with CUDA, and torch finds none"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason=REASON))

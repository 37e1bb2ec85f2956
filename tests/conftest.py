"""What holds for every test: one thread, a fresh Dynamo, one copy of every module."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Before torch is imported, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Times vary too much on a shared machine for a deadline per example.
settings.register_profile("fxpipe", deadline=None)
settings.load_profile("fxpipe")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Forget compiled code after a test, so that no test depends on the ones before it."""
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


@pytest.fixture(autouse=True)
def one_copy_of_every_module() -> Iterator[None]:
    """`import passes` from the repository's folder would give a second copy of every class."""
    yield
    copies = {"passes", "lowering"} & set(sys.modules)
    assert not copies, f"imported under two names: {copies}; import fxpipe.passes, fxpipe.lowering"

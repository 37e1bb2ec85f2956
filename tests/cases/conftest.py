"""What holds for the tests of cases: a quiet trace, and what two ranks found, which files share."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.cases.work import on_two_ranks
from tests.distributed.harness import run_ranks

# torch writes a program's text into its structured trace where that has a handler. pytest gives
# one to every logger that does not propagate, and so every pass would print its program.
logging.getLogger("torch.__trace").propagate = True


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks says: None where it agrees with eager, or how it was refused."""
    return run_ranks(on_two_ranks, 2, tmp_path_factory.mktemp("ranks"), timeout=150)

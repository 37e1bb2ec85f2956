"""What the ranks of the test of compiled tasks run: an index that is too high."""

from __future__ import annotations

import torch

from tests.distributed.failing import Told, until_told
from tests.lowering.test_blame import Tables
from tests.numerics.models import pipelined, seeded


def look_up_in_compiled(rank: int, world_size: int) -> Told:
    step = pipelined(seeded(Tables), stages=["large"], microbatches=2, lowering="inductor")
    x, ids = torch.ones(8, 6, dtype=torch.float64), torch.arange(8)
    ids = torch.where(ids == 5, 9, ids)
    with torch.no_grad():
        return until_told(lambda: step(x, ids))

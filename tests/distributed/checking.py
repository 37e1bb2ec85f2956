"""What the ranks of the parity tests run: a checked step, wrong on one rank or on none."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from fxpipe.lowering.tasks import TaskCompiler
from tests.distributed.failing import Told, until_told
from tests.numerics.models import MLP, pipelined, seeded


def check_first_step(rank: int, world_size: int, wrong: int | None) -> Told:
    """The forward of rank `wrong` gives one part in a thousand too much."""
    compile_graph = TaskCompiler.__call__

    def call(self: TaskCompiler, graph: fx.GraphModule) -> Any:
        function = compile_graph(self, graph)
        return lambda *arguments: tuple(v * 1.001 for v in function(*arguments))

    if rank == wrong:
        TaskCompiler.__call__ = call  # type: ignore[method-assign]
    step = pipelined(seeded(MLP), stages=world_size, microbatches=2, check="first", timeout=30.0)
    x = torch.ones(4, 6, dtype=torch.float64)
    return until_told(lambda: step(x, x).backward())

"""Programs, schedules and rank programs to numbered text files and to torch's structured trace."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch.distributed as dist

from fxpipe.options import Options
from fxpipe.program import Program
from fxpipe.torch_private import structured_trace


class Dump:
    """The files of one program, in a folder of their own: `<dump>/microbatch-of-2/`.

    `NN-<pass>.txt` after each pass, headed by its name and time; then `schedule.txt`, the grid, and
    `rank-R.txt`, what rank R runs, as Python. Under torchrun every rank writes its own rank
    program, and the lowest one all that the ranks have in common.
    """

    def __init__(self, options: Options, program: Program) -> None:
        rows = program.microbatch_size
        name = "whole-batch" if rows is None else f"microbatch-of-{rows}"
        self.name = name if program.training else f"{name}-forward"
        self.folder = Path(options.dump) / self.name if options.dump else None

    def clear(self) -> None:
        """Remove what an earlier run left."""
        if self.folder is not None and is_lowest_rank():
            for old in self.folder.glob("*.txt"):
                old.unlink()

    def program(self, number: int, name: str, program: Program, seconds: float) -> None:
        head = f"# {number:02} {name} ({seconds * 1e3:.1f} ms)\n\n"
        self.write(f"{number:02}-{name}", lambda: f"{head}{program}")

    def schedule(self, grid: Callable[[], str]) -> None:
        self.write("schedule", grid)

    def rank(self, rank: int, code: Callable[[], str]) -> None:
        self.write(f"rank-{rank}", code, every_rank=True)

    def write(self, name: str, text: Callable[[], str], every_rank: bool = False) -> None:
        text = cache(text)
        structured_trace(f"fxpipe_{self.name}_{name}", text)
        if self.folder is not None and (every_rank or is_lowest_rank()):
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"{name}.txt").write_text(text() + "\n")


def is_lowest_rank() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0

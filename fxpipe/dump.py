"""Programs, schedules and rank programs to numbered text files, to a page over them, and to
torch's structured trace."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fxpipe.explain_program import explain_program
from fxpipe.files import make_folder, write_json, write_text
from fxpipe.options import Options
from fxpipe.program import Program
from fxpipe.torch_private import structured_trace
from fxpipe.views.snapshot import output_codes, snapshot

# What the files of a dump that are no text are called.
PASSES, CODES, PAGE = "passes.json", "output-code.json", "index.html"
EXPLANATION = "explanation.json"
HOW = "the option dump, or FXPIPE_DUMP,"  # to name the folder


class Dump:
    """The files of one program, in a folder of their own: `<dump>/microbatch-of-2/`.

    `NN-<pass>.txt` after each pass, headed by its name and time; then `schedule.txt`, the grid, and
    `rank-R.txt`, what rank R runs, as Python. `index.html` shows all of them (extra `viz`), from
    them and from `.json` files beside them. Under torchrun every rank writes its own rank program,
    and the lowest one all that the ranks have in common.
    """

    def __init__(self, options: Options, program: Program) -> None:
        rows = program.microbatch_size
        name = "whole-batch" if rows is None else f"microbatch-of-{rows}"
        self.name = name if program.training else f"{name}-forward"
        self.folder = Path(options.dump) / self.name if options.dump else None
        self.of = program

    def clear(self) -> None:
        """Remove what an earlier run left."""
        if self.folder is not None and is_lowest_rank():
            ours = ("*.txt", "[0-9][0-9]-*.json", PASSES, CODES, PAGE, EXPLANATION)
            for old in (path for pattern in ours for path in self.folder.glob(pattern)):
                old.unlink()

    def passes(self) -> None:
        """The names of all passes in order, and which of them are on."""
        entries = [{"name": name, "on": on} for name, on in self.of.passes]
        self.write_json(PASSES, lambda: entries)

    def program(
        self, number: int, name: str, program: Program, seconds: float, description: str = ""
    ) -> None:
        head = f"# {number:02} {name} ({seconds * 1e3:.1f} ms)\n\n"
        self.write(f"{number:02}-{name}", lambda: f"{head}{program}")
        self.write_json(
            f"{number:02}-{name}.json",
            lambda: snapshot(number, name, description, program, seconds),
        )

    def schedule(self, grid: Callable[[], str]) -> None:
        self.write("schedule", grid)

    def memory(self, rank: int, text: Callable[[], str]) -> None:
        """What a rank's values hold, and when."""
        self.write(f"memory-{rank}", text, every_rank=True)

    def rank(self, rank: int, code: Callable[[], str]) -> None:
        """What a rank runs. With the last of this process the dump is whole: see `close`."""
        self.write(f"rank-{rank}", code, every_rank=True)
        alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
        if rank == self.of.schedule.num_ranks - 1 or not alone:
            self.close()

    def close(self) -> None:
        """Write the page, and what the program became: that of microbatches of one size."""
        rows = (self.of.microbatch_size or 0,) * self.of.num_microbatches
        self.write_json(CODES, lambda: dict(output_codes(self.of)))
        self.write_json(EXPLANATION, lambda: explain_program(self.of, rows).to_json())
        self.page()

    def write(self, name: str, text: Callable[[], str], every_rank: bool = False) -> None:
        text = cache(text)
        structured_trace(f"fxpipe_{self.name}_{name}", text)
        if self.folder is not None and (every_rank or is_lowest_rank()):
            write_text(make_folder(self.folder, "the dump", HOW) / f"{name}.txt", text() + "\n")

    def write_json(self, name: str, value: Callable[[], Any]) -> None:
        if self.folder is not None and is_lowest_rank():
            write_json(make_folder(self.folder, "the dump", HOW) / name, value())

    def page(self) -> None:
        """Write `index.html` over the files that are there."""
        if self.folder is not None and is_lowest_rank():
            from fxpipe.views.dump_page import write_page

            write_page(self.folder)


def is_lowest_rank() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0

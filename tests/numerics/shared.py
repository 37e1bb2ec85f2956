"""One capture of a model, many ways to run it: passes that give the same run once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from fxpipe.capture import Capture, capture
from fxpipe.lowering.runtime import Step
from fxpipe.options import Options
from fxpipe.passes import default_pipeline
from fxpipe.pipeline import Pass, name_of
from fxpipe.program import Program
from tests.numerics.models import Case


class SharedCapture:
    """A compiled model whose step can be exchanged for one with other options.

    Dynamo traces the model once. The passes up to the trace of the joint graph depend on the
    microbatch's size alone, those that cut it into stages on their number as well; both are kept.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.kept: dict[Hashable, Program] = {}
        self.captured: Capture | None = None
        self.step: Step | None = None
        self.compiled = torch.compile(case.model(), backend=self.backend)

    def backend(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        self.captured = capture(gm, inputs, Options.parse(self.case.options))
        self.use_current_options()
        return lambda *values: self.step(*values)  # type: ignore[misc]

    def use(self, **options: Any) -> torch.nn.Module:
        """The compiled model, which from now on runs with these options."""
        self.options = Options.parse({"lowering": "eager", **self.case.options, **options})
        if self.captured is not None:
            self.use_current_options()
        return self.compiled  # type: ignore[return-value]

    def use_current_options(self) -> None:
        assert self.captured is not None
        self.step = Step(self.captured, self.options, self.build, world_size=1)

    def build(self, program: Program) -> Program:
        """What the pipeline makes of a program."""
        options = program.options
        rows = program.microbatch_size
        for pass_ in default_pipeline(options).passes:
            match name_of(pass_):
                case "split_loss" | "trace_joint" | "normalize":
                    program = self.keep((name_of(pass_), rows), pass_, program)
                case "assign_stages" | "partial_gradients":
                    program = self.keep((name_of(pass_), rows, options.stages), pass_, program)
                case _:
                    program = pass_(program)
        return program

    def keep(self, key: Hashable, pass_: Pass, program: Program) -> Program:
        if key not in self.kept:
            self.kept[key] = pass_(program)
        return replace(
            self.kept[key],
            options=program.options,
            num_microbatches=program.num_microbatches,
            num_ranks=program.num_ranks,
        )

"""One capture of a model, many ways to run it: passes that would give the same again run once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.fx as fx

from fxpipe.capture import Capture, capture
from fxpipe.lowering.runtime import Step
from fxpipe.options import Options
from fxpipe.passes import default_pipeline
from fxpipe.pipeline import Pass, Pipeline, name_of
from fxpipe.program import Program
from tests.numerics.models import Case


class SharedCapture:
    """A compiled model whose step can be exchanged for one with other options."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.options = Options()
        self.kept: dict[Hashable, dict[str, Any]] = {}
        self.captured: Capture | None = None
        self.model = case.model()
        self.compiled = torch.compile(self.model, backend=self.backend)

    def backend(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        self.captured = capture(gm, inputs, Options.parse(self.case.options))
        self.step = self.make_step()
        return lambda *values: self.step(*values)

    def use(self, **options: Any) -> Any:
        """The compiled model, which from now on runs with these options."""
        self.options = Options.parse({"lowering": "eager", **self.case.options, **options})
        if self.captured is not None:
            self.step = self.make_step()
        return self.compiled

    def make_step(self) -> Step:
        assert self.captured is not None
        usual = default_pipeline(self.options)
        pipeline = KeepingPipeline(usual.passes, usual.optional, self.options, self.kept)
        return Step(self.captured, self.options, pipeline, world_size=1)


@dataclass(frozen=True)
class KeepingPipeline(Pipeline):
    """A pipeline that keeps what a pass changed, for programs in which it reads the same."""

    kept: dict[Hashable, dict[str, Any]] = field(default_factory=dict)

    def run(self, number: int, pass_: Pass, program: Program) -> Program:
        key = what_is_read(name_of(pass_), program)
        if key is None:
            return super().run(number, pass_, program)
        if key not in self.kept:
            made = super().run(number, pass_, program)
            values = {entry.name: getattr(made, entry.name) for entry in fields(made)}
            self.kept[key] = {n: v for n, v in values.items() if v is not getattr(program, n)}
        return replace(program, **self.kept[key])


def what_is_read(name: str, program: Program) -> Hashable | None:
    """What a pass's result depends on within one capture; None: the pass runs each time."""
    key = name, program.microbatch_size
    if name in ("split_loss", "expose_randomness", "trace_joint", "normalize", "seed_randomness"):
        return key
    key = *key, program.options.stages, tuple(program.places.items())
    if name in ("assign_stages", "partial_gradients", "make_cuts_dense"):
        return key
    if name in ("split_weight_grads", "split_tasks"):
        ranks = range(program.schedule.num_ranks)
        actions = (a for rank in ranks for a in program.schedule.actions(rank))
        return *key, frozenset((a.stage, a.kind) for a in actions)
    return None

"""`fxpipe.explain(compiled)`: the plan of a compiled model -> an Explanation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fxpipe.errors import FxpipeError
from fxpipe.explain_program import explain_program
from fxpipe.explanation import Explanation
from fxpipe.lowering.metrics import ended, plans_of
from fxpipe.ownership import plain
from fxpipe.unsplit import why_unsplit


def explain(model: Any, *inputs: Any, **keywords: Any) -> Explanation:
    """What fxpipe made of a model: stages, edges, schedule, prediction, passes.

    model: what torch.compile returned, once it was called; or with one call's arguments here, which
    run one step (forward and backward; no gradient is handed out, buffers and random numbers are as
    before). Under torchrun every rank passes the arguments, or none does.

    `str` gives text, `.print()` and rich tables in a terminal, a notebook shows tables, `to_json`
    gives plain values.

    Raises FxpipeError where no step has run and no arguments are given.
    """
    before = {id(plan) for plan in plans_of(model)}
    if inputs or keywords:
        with unchanged(plain(model)):
            model(*inputs, **keywords)
    plans = plans_of(model)
    if not plans:
        if told := why_unsplit(plain(model)):
            raise FxpipeError(f"no step of this model has run through fxpipe: {told}")
        raise FxpipeError(
            "no step of this model has run through fxpipe yet; call it once, or give explain the "
            "arguments of a call: fxpipe.explain(step, tokens, targets)"
        )
    made = [plan for plan in plans if id(plan) not in before] if inputs or keywords else []
    plan = made[-1] if made else max(plans, key=ended)
    return explain_program(plan.program, plan.rows, plan.programs)


@contextmanager
def unchanged(module: torch.nn.Module) -> Iterator[None]:
    """A block after which buffers and random numbers are what they were."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with torch.random.fork_rng(devices):
        yield
    with torch.no_grad():
        for buffer, value in kept:
            buffer.copy_(value)

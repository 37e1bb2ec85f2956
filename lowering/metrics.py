"""The last step of a compiled model -> a dict of numbers, for a logger of metrics."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fxpipe.errors import FxpipeError, OptionError
from fxpipe.lowering.group import num_ranks, this_rank
from fxpipe.lowering.plan import Plan
from fxpipe.lowering.recording import peak_held
from fxpipe.lowering.tracing import merge, part_of, peak_of_device
from fxpipe.ownership import plain
from fxpipe.unsplit import why_unsplit

if TYPE_CHECKING:
    from fxpipe.lowering.runtime import Step

_steps = WeakTensorKeyDictionary()  # parameter or buffer -> the steps that use it, weakly


def register(step: Step, tensors: Iterable[torch.Tensor]) -> None:
    """Note that a compiled step is one of the model with these parameters and buffers."""
    reference = weakref.ref(step)
    for tensor in tensors:
        known = _steps.setdefault(tensor, [])
        known[:] = [r for r in known if r() is not None and r() is not step] + [reference]


def metrics(model: torch.nn.Module, tokens: int | None = None) -> dict[str, Any]:
    """Numbers of the last step that this process has ended, as plain values.

    model: what torch.compile returned, or the module that it was given. tokens: how many the step
    had, for `tokens_per_second`.

    rank: of this process; 0 where all ranks are in it. step_seconds: from the step's first call to
    its last, the time between a call that returns logits and its backward() left out.
    waiting_seconds: of them in waits for other ranks. bubble: the part of the step that this rank
    waited, from 0 to 1. Both are None where all ranks share one thread and the step was not
    recorded; where it was, they are those of all ranks, and another rank's work is a wait.
    bytes_sent, bytes_received: of all messages. peak_held_bytes: the most that the rank's program
    keeps between tasks, by sizes; peak_memory_bytes: what torch had allocated on the GPU at most
    since the process began, None without one.

    Costs nothing while steps run, and talks to no other rank. Raises FxpipeError before the first
    step has ended.
    """
    number = isinstance(tokens, Real) and not isinstance(tokens, bool)
    if tokens is not None and not (number and tokens >= 0):
        raise OptionError(
            f"metrics(tokens={tokens!r}) is a {type(tokens).__name__}; expected the number of "
            f"tokens of a step, at least 0, for instance tokens=x.numel()"
        )
    plan = last_plan(model)
    assert plan.metered is not None
    _, seconds, waited = plan.metered
    bubble = waited / seconds if waited is not None and seconds else None
    if plan.recorded is not None and num_ranks() == 1:
        _, (timeline,) = merge([[part_of(plan.recorded)]], [0])
        bubble = timeline.bubble()
        waited = sum(timeline.shares(rank)["idle"] for rank in range(timeline.num_ranks))
    sent, received = moved(plan)
    found: dict[str, Any] = {
        "rank": this_rank(),
        "step_seconds": seconds,
        "bubble": bubble,
        "waiting_seconds": waited,
        "bytes_sent": sent,
        "bytes_received": received,
        "peak_held_bytes": sum(peak_held(executor) for executor in plan.executors),
        "peak_memory_bytes": peak_of_device(),
    }
    if tokens is not None:
        found["tokens_per_second"] = tokens / seconds if seconds else None
    return found


def last_plan(model: torch.nn.Module) -> Plan:
    """The plan that ran last, of all traces of a model."""
    ran = [plan for plan in plans_of(model) if plan.metered]
    if not ran:
        if told := why_unsplit(plain(model)):
            raise FxpipeError(f"no step of this model has run through fxpipe: {told}")
        raise FxpipeError(
            "no step of this model has run to its end through fxpipe yet; call it once, with the "
            "backward if it returns no loss, then ask for its metrics"
        )
    return max(ran, key=ended)


def plans_of(model: Any) -> list[Plan]:
    """The plans of all traces of a model, oldest first."""
    module = plain(model)
    known = (_steps.get(t, ()) for t in [*module.parameters(), *module.buffers()])
    steps = {id(step): step for found in known for r in found if (step := r()) is not None}
    return [plan for step in steps.values() for plan in step.plans.values()]


def ended(plan: Plan) -> float:
    """When a plan last ran to its end; 0 where it never did."""
    return plan.metered.ended if plan.metered else 0.0


def moved(plan: Plan) -> tuple[int, int]:
    """Bytes that the ranks of this process send and receive in a step."""
    sent = received = 0
    for executor in plan.executors:
        for message in executor.program.messages.values():
            size = message.nbytes
            sent += size if message.source == executor.program.rank else 0
            received += size if message.target == executor.program.rank else 0
    return sent, received

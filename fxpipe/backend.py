"""The torch.compile backend: capture, passes, lowering, in this order."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
import torch.fx as fx

from fxpipe.capture import capture
from fxpipe.errors import CaptureError, FxpipeError, OptionError
from fxpipe.log import logger
from fxpipe.lowering.group import agree, compiling, start_group
from fxpipe.lowering.runtime import Step
from fxpipe.options import Options
from fxpipe.passes import default_pipeline
from fxpipe.torch_private import RestartAnalysis, guard_on_hooks, own_inductor_cache
from fxpipe.unsplit import warn_of_last_trace, warn_of_unsplit_runs

log = logger(__name__)


def fxpipe(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., list[Any]]:
    """`torch.compile(model, backend="fxpipe", options={...})`; see `fxpipe.Options`.

    Returns the pipelined step: a function of the graph's inputs. Errors are raised by the first
    call, on every rank, as what they are.
    """
    start = time.perf_counter()
    guard_on_hooks()
    warn_of_unsplit_runs(fxpipe)
    world_size = start_group()
    if world_size > 1:
        own_inductor_cache(dist.get_rank())
    try:
        with compiling(world_size):
            parsed = Options.parse(options)
            check_ranks(parsed, world_size)
            captured = capture(gm, example_inputs, parsed)
            pipeline = default_pipeline(parsed)
            step = Step(captured, parsed, pipeline, world_size)
    except RestartAnalysis:
        raise
    except FxpipeError as error:
        return failure(error, world_size)
    except Exception as error:
        broken = CaptureError(f"the capture failed: {type(error).__name__}: {error}")
        broken.__cause__ = error
        return failure(broken, world_size)
    warn_of_last_trace()
    log.debug("captured in %.2f s: %d inputs", time.perf_counter() - start, len(captured.inputs))
    return step


def check_ranks(options: Options, world_size: int) -> None:
    if world_size > 1 and options.ranks not in (None, world_size):
        raise OptionError(
            f"ranks={options.ranks}, but {world_size} processes run; leave the option out"
        )


def failure(error: FxpipeError, world_size: int) -> Callable[..., list[Any]]:
    """A step that raises: Dynamo would wrap an error of the backend, and may be set to hide it."""

    def fail(*inputs: Any) -> list[Any]:
        if world_size > 1:
            agree("", 0, Options().timeout, failure=error)
        raise error

    return fail


# torch.compile imports this file when it is given the backend's name: before the first trace.
warn_of_unsplit_runs(fxpipe)

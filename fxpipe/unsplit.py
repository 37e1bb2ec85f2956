"""What Dynamo leaves to Python, where it can be seen, to a warning that names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fxpipe.log import logger, warn_once
from fxpipe.torch_private import Traced, now_traced, on_frame_left_to_python

log = logger(__name__)
ADVICE = "compile with fullgraph=True to have an error instead"


def warn_of_unsplit_runs(backend: Callable[..., Any]) -> None:
    """From here on, warn where Dynamo gives up on a model that was compiled with `backend`."""

    def left(traced: Traced, reason: str) -> None:
        if traced.backend is backend and not traced.fullgraph:
            warn_once(
                log,
                "Dynamo leaves %s at %s to Python, where it runs unsplit, as in plain eager, on "
                "every rank (%s); move what breaks the graph out of the model, or %s",
                traced.name,
                traced.place,
                reason.rstrip("."),
                ADVICE,
            )

    on_frame_left_to_python(left)


def warn_of_last_trace() -> None:
    """Called within a trace: warn where Dynamo makes no further one of the same model."""
    traced = now_traced()
    if traced is not None and not traced.fullgraph and traced.traces + 1 >= traced.limit:
        warn_once(
            log,
            "this is trace %d of %s at %s, and Dynamo makes no more: a call that needs another one "
            "will run unsplit, as in plain eager; raise torch._dynamo.config.recompile_limit=%d, "
            "or %s",
            traced.traces + 1,
            traced.name,
            traced.place,
            traced.limit,
            ADVICE,
        )

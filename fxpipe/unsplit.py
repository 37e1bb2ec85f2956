"""What Dynamo leaves to Python, where it can be seen, to a warning that names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fxpipe.log import logger, warn_once
from fxpipe.torch_private import Traced, now_traced, on_frame_left_to_python

log = logger(__name__)
ADVICE = "compile with fullgraph=True to have an error instead"

_left: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
_left_classes: WeakKeyDictionary[type[torch.nn.Module], str] = WeakKeyDictionary()


def warn_of_unsplit_runs(backend: Callable[..., Any]) -> None:
    """From here on, warn where Dynamo gives up on a model that was compiled with `backend`."""

    def left(traced: Traced, reason: str, line: str) -> None:
        if traced.fullgraph:
            return
        at = f", at {line}" if line else ""
        told = (
            f"Dynamo leaves {traced.name} at {traced.place} to Python, where it runs unsplit, as "
            f"in plain eager, on every rank ({reason.rstrip('.')}{at}); move what breaks the graph "
            f"out of the model, or {ADVICE}"
        )
        if traced.backend is backend:
            warn_once(log, "%s", told)
        if traced.model is not None:
            _left[traced.model] = told
            # Dynamo does not come back to a forward that it has given up on, for any backend;
            # torch's own classes have one forward for models that differ.
            if not type(traced.model).__module__.startswith("torch."):
                _left_classes[type(traced.model)] = told

    on_frame_left_to_python(left)


def why_unsplit(model: torch.nn.Module) -> str | None:
    """Why no step of this model may have run, if Dynamo has given up on it, or on its class."""
    if model in _left:
        return _left[model]
    told = _left_classes.get(type(model))
    return told and f"call it once; if it was called: {told}"


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

"""Pipeline parallelism as a backend of torch.compile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fxpipe import errors as errors
from fxpipe.errors import CaptureError as CaptureError
from fxpipe.errors import FxpipeError as FxpipeError
from fxpipe.errors import ModelError as ModelError
from fxpipe.errors import OptionError as OptionError
from fxpipe.errors import PassError as PassError
from fxpipe.errors import RankError as RankError
from fxpipe.errors import ScheduleError as ScheduleError
from fxpipe.schedule import Schedule as Schedule

if TYPE_CHECKING:
    from fxpipe.annotate import stage as stage
    from fxpipe.construction import deferred as deferred
    from fxpipe.lowering.explain import explain as explain
    from fxpipe.lowering.gradients import agree_on_inf as agree_on_inf
    from fxpipe.lowering.gradients import clip_grad_norm_ as clip_grad_norm_
    from fxpipe.lowering.metrics import metrics as metrics
    from fxpipe.lowering.optimizer_state import (
        load_optimizer_state_dict as load_optimizer_state_dict,
    )
    from fxpipe.lowering.optimizer_state import (
        load_owned_optimizer_state_dict as load_owned_optimizer_state_dict,
    )
    from fxpipe.lowering.optimizer_state import optimizer_state_dict as optimizer_state_dict
    from fxpipe.lowering.optimizer_state import (
        owned_optimizer_state_dict as owned_optimizer_state_dict,
    )
    from fxpipe.lowering.state import load_state_dict as load_state_dict
    from fxpipe.lowering.state import owned_state_dict as owned_state_dict
    from fxpipe.lowering.state import save_safetensors as save_safetensors
    from fxpipe.lowering.state import state_dict as state_dict
    from fxpipe.lowering.tracing import trace as trace
    from fxpipe.ownership import free_unowned as free_unowned
    from fxpipe.ownership import owned_parameters as owned_parameters

# What needs torch is imported when it is asked for: `fxpipe schedule ...` starts without it.
_LAZY = {
    "stage": "fxpipe.annotate",
    "deferred": "fxpipe.construction",
    "owned_parameters": "fxpipe.ownership",
    "free_unowned": "fxpipe.ownership",
    "clip_grad_norm_": "fxpipe.lowering.gradients",
    "agree_on_inf": "fxpipe.lowering.gradients",
    "state_dict": "fxpipe.lowering.state",
    "trace": "fxpipe.lowering.tracing",
    "metrics": "fxpipe.lowering.metrics",
    "explain": "fxpipe.lowering.explain",
    "load_state_dict": "fxpipe.lowering.state",
    "owned_state_dict": "fxpipe.lowering.state",
    "save_safetensors": "fxpipe.lowering.state",
    "optimizer_state_dict": "fxpipe.lowering.optimizer_state",
    "load_optimizer_state_dict": "fxpipe.lowering.optimizer_state",
    "owned_optimizer_state_dict": "fxpipe.lowering.optimizer_state",
    "load_owned_optimizer_state_dict": "fxpipe.lowering.optimizer_state",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'fxpipe' has no attribute {name!r}")

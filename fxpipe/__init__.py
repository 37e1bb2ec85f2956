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
    from fxpipe.ownership import free_unowned as free_unowned
    from fxpipe.ownership import owned_parameters as owned_parameters

# What needs torch is imported when it is asked for: `fxpipe schedule ...` starts without it.
_LAZY = {
    "stage": "fxpipe.annotate",
    "owned_parameters": "fxpipe.ownership",
    "free_unowned": "fxpipe.ownership",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'fxpipe' has no attribute {name!r}")

"""Stages marked in the model's own code."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch.fx.traceback


def stage(number: int) -> AbstractContextManager[object]:
    """`with fxpipe.stage(1): x = self.encoder(x)` puts the operations inside into stage 1.

    Stages are numbered from 0 without gaps and follow the flow of data. What is outside of every
    annotation joins the stage of what it is computed from. In eager mode it does nothing.
    """
    return torch.fx.traceback.annotate({"fxpipe_stage": number})

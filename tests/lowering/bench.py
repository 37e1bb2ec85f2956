"""Models compiled to run in one of the ways that a step can run, and what was made for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxpipe.lowering.captured as captured_module
import fxpipe.lowering.runtime as runtime
from fxpipe.lowering.captured import replay_of
from fxpipe.lowering.plan import Plan
from fxpipe.lowering.replay import Replay
from fxpipe.lowering.stand_in import StandIn
from tests.numerics.models import pipelined

# Without copies; on memory that stays; that, captured as one graph, or as one for each call.
WAYS = ("replayed", "own memory", "step", "task")


class Bench:
    """Compiles models for one way to run them, and keeps the plans that were made."""

    def __init__(self, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
        torch._dynamo.reset()
        self.way = way
        self.plans: list[Plan] = []
        self.devices: list[StandIn] = []
        self.options: dict[str, Any] = {}
        if way in ("own memory", "step", "task"):
            self.options = {"cuda_graphs": "task" if way == "task" else "step"}
        monkeypatch.setattr(captured_module, "make_device", self.make_device)
        monkeypatch.setattr(runtime, "replay_of", self.replay_of)

    def make_device(self, *_: Any) -> StandIn | None:
        if self.way == "own memory":
            return None
        self.devices.append(StandIn())
        return self.devices[-1]

    def replay_of(self, plan: Plan, *others: Any) -> Replay | None:
        self.plans.append(plan)
        return None if self.way == "executors" else replay_of(plan, *others)

    def compile(self, model: nn.Module, **options: Any) -> Any:
        return pipelined(model, **(self.options | options))

    @property
    def replays(self) -> int:
        return sum(graph.replays for device in self.devices for graph in device.graphs)

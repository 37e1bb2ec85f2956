"""Costs per stage become times per slot of a pipeline, for the rules that ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxpipe.costs import Costs, per_stage


@dataclass(frozen=True)
class Times:
    """Per slot the times of its tasks, in any one unit; `transfer` is the longest delay."""

    F: Sequence[float]
    I: Sequence[float]  # noqa: E741 - the field's name for the input gradient
    W: Sequence[float]
    B: Sequence[float]
    transfer: float = 0.0

    @staticmethod
    def equal(slots: int) -> Times:
        """One unit for each of F, I and W."""
        ones = [1.0] * slots
        return Times(ones, ones, ones, [2.0] * slots)

    @staticmethod
    def of(costs: Costs, groups: Sequence[range], *, ranks: int, stages: int) -> Times:
        """The times of groups of stages that run as one; an empty group takes none."""
        given = per_stage(costs, ranks=ranks, stages=stages)

        def add_up(times: Sequence[float]) -> list[float]:
            return [sum(times[stage] for stage in group) for group in groups]

        transfer = max(given.transfer.values(), default=0.0)
        return Times(add_up(given.F), add_up(given.I), add_up(given.W), add_up(given.B), transfer)

"""What a user says of time and memory -> one number per stage and edge for the simulator."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fxpipe.errors import OptionError

PerStage = float | Sequence[float]
Edge = tuple[int, int]


@dataclass(frozen=True)
class Costs:
    """Times and sizes of the tasks of one microbatch, each one number or one per stage.

    F, I, W, B: time of the stage's task, any one unit; B is I + W unless given.
    pair: time of a unit `[2F5|3B1]`, one for all or per (forward's stage, backward's stage); both
        tasks' times added where not given. A pair with I alone always takes the sum.
    transfer: delay of a message between two ranks, one for all or per (source, destination)
        stage; the way back takes as long unless (destination, source) is given too. Messages
        within a rank take none.
    edges: bytes per microbatch of each (source, destination) of the stages' graph; the gradient
        on the way back has the same size. Default: the chain, one byte each.
    activations: what F saves, until B, or W where the backward is split, has run. Default: the
        unit is what one rank's share of the model saves, so a stage saves ranks / stages.
    saved_for_w: the part of it that I leaves for W. Default: all.
    weights: per stage; default ranks / stages, the unit being one rank's share.
    pair_temporaries: memory that a pair needs while it runs.
    reduce: time to sum the gradients of a stage that several ranks hold, once a step after its
        last W; a rank sums one stage at a time, while it computes.
    """

    F: PerStage = 1.0
    I: PerStage = 1.0  # noqa: E741 - the field's name for the input gradient
    W: PerStage = 1.0
    B: PerStage | None = None
    pair: float | Mapping[Edge, float] | None = None
    transfer: float | Mapping[Edge, float] = 0.0
    edges: Mapping[Edge, float] | None = None
    activations: PerStage | None = None
    saved_for_w: PerStage | None = None
    weights: PerStage | None = None
    pair_temporaries: float = 0.0
    reduce: PerStage = 0.0

    @staticmethod
    def of_share(
        F: float = 1.0,  # noqa: N803 - the field's letter
        I: float = 1.0,  # noqa: E741, N803
        W: float = 1.0,  # noqa: N803
        transfer: float = 0.0,
        *,
        ranks: int,
        stages: int,
    ) -> Costs:
        """Costs from the times of one rank's share (1 / ranks of the model) for one microbatch.

        A stage is 1 / stages of the model and takes its part of them; a transfer takes all.
        """
        part = ranks / stages
        return Costs(F=F * part, I=I * part, W=W * part, transfer=transfer)


@dataclass(frozen=True)
class StageCosts:
    """Costs with every number written out: lists are per stage, mappings per directed edge."""

    F: list[float]
    I: list[float]  # noqa: E741
    W: list[float]
    B: list[float]
    pair: float | Mapping[Edge, float] | None
    transfer: dict[Edge, float]
    edges: dict[Edge, float]
    activations: list[float]
    saved_for_w: list[float]
    weights: list[float]
    pair_temporaries: float
    reduce: list[float]

    def pair_time(self, forward: int, backward: int) -> float:
        """The time of a unit of one stage's F and another's B."""
        if isinstance(self.pair, Mapping):
            given = self.pair.get((forward, backward))
        else:
            given = self.pair
        return self.F[forward] + self.B[backward] if given is None else given


def per_stage(costs: Costs, *, ranks: int, stages: int) -> StageCosts:
    """Write out costs for so many stages. Raises OptionError on a wrong count or number."""
    share = ranks / stages if stages else 1.0
    times = {name: _spread(name, getattr(costs, name), stages) for name in ("F", "I", "W")}
    both = [i + w for i, w in zip(times["I"], times["W"], strict=True)]
    activations = _spread("activations", _default(costs.activations, share), stages)
    saved_for_w = _spread("saved_for_w", _default(costs.saved_for_w, activations), stages)
    for stage, (left, saved) in enumerate(zip(saved_for_w, activations, strict=True)):
        if left > saved:
            raise OptionError(
                f"saved_for_w={left:g} of stage {stage} is more than its activations={saved:g}; "
                f"W can read no more than F saved"
            )
    edges = costs.edges
    if edges is None:
        edges = {(stage, stage + 1): 1.0 for stage in range(stages - 1)}
    return StageCosts(
        **times,
        B=_spread("B", _default(costs.B, both), stages),
        pair=costs.pair,
        transfer=_transfer(costs.transfer, edges, stages),
        edges=dict(edges),
        activations=activations,
        saved_for_w=saved_for_w,
        weights=_spread("weights", _default(costs.weights, share), stages),
        pair_temporaries=costs.pair_temporaries,
        reduce=_spread("reduce", costs.reduce, stages),
    )


def _default(given: PerStage | None, default: PerStage) -> PerStage:
    return default if given is None else given


def _spread(name: str, given: PerStage, stages: int) -> list[float]:
    numbers = [given] * stages if isinstance(given, (int, float)) else list(given)
    if len(numbers) != stages:
        raise OptionError(
            f"costs.{name} has {len(numbers)} values for stages={stages}; "
            f"give one number, or one per stage"
        )
    for number in numbers:
        if not (math.isfinite(number) and number >= 0):
            raise OptionError(f"costs.{name}={number}; expected a finite number of at least 0")
    return [float(number) for number in numbers]


def _transfer(
    given: float | Mapping[Edge, float], edges: Mapping[Edge, float], stages: int
) -> dict[Edge, float]:
    """The delay of both directions of every edge."""
    delays: dict[Edge, float] = {}
    for source, destination in edges:
        if not (0 <= source < stages and 0 <= destination < stages and source != destination):
            raise OptionError(
                f"costs.edges has ({source}, {destination}); expected two of stages={stages}"
            )
        forward, back = (source, destination), (destination, source)
        if isinstance(given, Mapping):
            if forward not in given:
                raise OptionError(
                    f"costs.transfer has no time for the edge {source} -> {destination}"
                )
            delays[forward] = given[forward]
            delays[back] = given.get(back, given[forward])
        else:
            delays[forward] = delays[back] = given
    _spread("transfer", list(delays.values()), len(delays))
    return delays

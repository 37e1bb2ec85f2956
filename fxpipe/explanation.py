"""What a compiled model became, as plain data: stages, edges, schedule, prediction, passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class StageFacts:
    """One stage. Numbers per microbatch, for one that has the first one's rows.

    modules: the outermost that run in it alone. parameters: their number of elements, those that
    other stages use too included. flops, operators: by kind of task. saved: bytes that its forward
    keeps for its backward.
    """

    stage: int
    ranks: tuple[int, ...]
    modules: tuple[str, ...]
    parameters: int
    parameter_bytes: int
    flops: Mapping[str, int]
    operators: Mapping[str, int]
    saved: int


@dataclass(frozen=True)
class EdgeFacts:
    """The values that one stage gives another. `values`: (name, type as `f32[4, 8]`, bytes)."""

    source: int
    target: int
    values: tuple[tuple[str, str, int], ...]
    bytes: int


@dataclass(frozen=True)
class RankFacts:
    """One rank, as it is predicted: seconds, bytes, and messages of one step.

    weights: bytes of parameters and their gradients. peak: those, and the most that is saved at
    once. messages, sent: how many it sends and their bytes, all of them: values for other stages,
    sums of the gradients that ranks share, outputs. busy: seconds of computing.
    """

    rank: int
    stages: tuple[int, ...]
    weights: float
    peak: float
    busy: float
    messages: int
    sent: float


@dataclass(frozen=True)
class PassFacts:
    """A pass, in its place, and whether it was on."""

    name: str
    on: bool


@dataclass(frozen=True)
class Explanation:
    """See `fxpipe.explain`. `print` shows it as text, a notebook as tables.

    rows: of each microbatch. actions: per rank, as text. grid: the schedule, a row a step.
    seconds, bubble: of a step, predicted as fxpipe.estimate says. options: those that are not
    the default. environment: what runs here, name to version.
    """

    schedule: str
    training: bool
    rows: tuple[int, ...]
    actions: tuple[str, ...]
    grid: str
    stages: tuple[StageFacts, ...]
    edges: tuple[EdgeFacts, ...]
    ranks: tuple[RankFacts, ...]
    seconds: float
    bubble: float
    passes: tuple[PassFacts, ...]
    options: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def peak(self) -> float:
        """Bytes of the rank that holds most."""
        return max((rank.peak for rank in self.ranks), default=0.0)

    @property
    def sent(self) -> float:
        """Bytes that all ranks send in a step."""
        return sum(rank.sent for rank in self.ranks)

    def to_json(self) -> dict[str, Any]:
        """A dict of plain values, which `from_json` reads back as an equal one."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Explanation:
        parts = {"stages": StageFacts, "edges": EdgeFacts, "ranks": RankFacts, "passes": PassFacts}
        given = {entry.name: data[entry.name] for entry in fields(Explanation)}
        for name, kind in parts.items():
            given[name] = tuple(kind(**_tuples(entry)) for entry in given[name])
        return Explanation(**_tuples(given))

    def __str__(self) -> str:
        from fxpipe.views.explanation_text import as_text

        return as_text(self)

    def print(self) -> None:
        """Print it: as tables where rich is installed (extra `cli`), else as text."""
        try:
            import rich
        except ImportError:
            print(self)
        else:
            rich.print(self)

    def __rich__(self) -> Any:
        from fxpipe.views.explanation_text import as_rich

        return as_rich(self)

    def _repr_html_(self) -> str:
        from fxpipe.views.explanation_text import as_html

        return as_html(self)


def _tuples(entries: Mapping[str, Any]) -> dict[str, Any]:
    """JSON's lists as the tuples that they were."""

    def back(value: Any) -> Any:
        if isinstance(value, Sequence) and not isinstance(value, str):
            return tuple(map(back, value))
        return value

    return {name: back(value) for name, value in entries.items()}

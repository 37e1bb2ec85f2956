"""A few lines that say where and in which order things run become a schedule, after Piper.

    strategy = Directives(stages=4, microbatches=8, annotations={"heavy": [1, 2]})
    strategy.place(on(stage=[0, 3]), rank=0)
    strategy.replicate(on(annotation="heavy"), ranks=[1, 2])
    strategy.split(on(stage=range(1, 4)))
    strategy.order(on(kind="F"), on(kind="W"), rank=0)
    schedule = strategy.schedule()

`parse` reads the same from text, and `fxpipe.schedules.load` from a file of it, which is data and
runs nothing:

    stages 4
    microbatches 8
    annotation heavy 1,2
    place stage=0,3 rank=0
    replicate annotation=heavy ranks=1,2
    split stage=1..3
    order kind=F then kind=W rank=0

What no directive orders runs as early as it can: gradients first, then the oldest forward, then
weight gradients. The idea is Piper's (arXiv 2606.11169); names and meaning are those given here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from fxpipe.checker import check_schedule
from fxpipe.errors import ScheduleError
from fxpipe.schedule import Action, Kind, Schedule
from fxpipe.schedules.precedence import Precedence
from fxpipe.text_grid import Edges, chain

Numbers = int | Iterable[int]


@dataclass(frozen=True)
class Filter:
    """Which actions a directive is about; what is None is not asked for."""

    stage: frozenset[int] | None = None
    kind: frozenset[Kind] | None = None
    microbatch: frozenset[int] | None = None
    annotation: frozenset[str] | None = None

    def holds(self, action: Action, names: Iterable[str]) -> bool:
        """Whether it is about an action of a stage with these annotation names."""
        return (
            (self.stage is None or action.stage in self.stage)
            and (self.kind is None or action.kind in self.kind)
            and (self.microbatch is None or action.microbatch in self.microbatch)
            and (self.annotation is None or not self.annotation.isdisjoint(names))
        )

    def __str__(self) -> str:
        parts = []
        for name in ("stage", "kind", "microbatch", "annotation"):
            if (wanted := getattr(self, name)) is not None:
                parts.append(f"{name}={','.join(map(str, sorted(wanted)))}")
        return " ".join(parts) or "everything"


def on(
    *,
    stage: Numbers | None = None,
    kind: str | Iterable[str] | None = None,
    microbatch: Numbers | None = None,
    annotation: str | Iterable[str] | None = None,
) -> Filter:
    """A filter: each of these is one value or several; all that are given must hold."""
    return Filter(
        None if stage is None else _numbers(stage),
        None if kind is None else frozenset(map(_kind, _strings(kind))),
        None if microbatch is None else _numbers(microbatch),
        None if annotation is None else frozenset(_strings(annotation)),
    )


def _numbers(given: Numbers) -> frozenset[int]:
    return frozenset([given] if isinstance(given, int) else given)


def _strings(given: str | Iterable[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


def _kind(text: str) -> Kind:
    if text not in ("F", "I", "W", "B"):
        raise ScheduleError(f"kind={text!r}; expected F, I, W or B")
    return Kind(text)


class Directives:
    """Directives for a number of stages and microbatches; a later place or replicate wins.

    `annotations` gives each annotation name the stages that carry it. Data flows along
    `forward_edges`, without them along the chain of stages.
    """

    def __init__(
        self,
        stages: int,
        microbatches: int,
        annotations: Mapping[str, Iterable[int]] | None = None,
        forward_edges: Edges | None = None,
    ) -> None:
        if stages < 1 or microbatches < 1:
            raise ScheduleError(
                f"stages={stages} and microbatches={microbatches}; expected at least 1 of each"
            )
        self.stages, self.microbatches, self.forward_edges = stages, microbatches, forward_edges
        self.annotations = {name: _numbers(found) for name, found in (annotations or {}).items()}
        self._rank_of: dict[tuple[int, int], int] = {}
        self._splits: set[tuple[int, int]] = set()
        self._orders: list[tuple[tuple[Filter, ...], int | None]] = []

    def place(self, where: Filter, rank: int) -> None:
        """Run the stages (of the microbatches, where the filter names some) on a rank."""
        self._assign("place", where, [rank])

    def replicate(self, where: Filter, ranks: Sequence[int]) -> None:
        """Run the stages on several ranks, which take the microbatches in turn."""
        self._assign("replicate", where, ranks)

    def split(self, where: Filter | None = None) -> None:
        """Run the backward of the stages, of all without a filter, as I and W instead of B."""
        self._splits.update(self._places("split", where or Filter()))

    def order(self, *filters: Filter, rank: int | None = None) -> None:
        """On each rank, or the one given, run what a filter holds for before that of the next.

        An action belongs to the first filter that holds for it.
        """
        if len(filters) < 2:
            raise ScheduleError(f"order has {len(filters)} filters; expected at least 2")
        self._orders.append((filters, rank))

    def schedule(self, name: str = "directives") -> Schedule:
        """The schedule that the directives give, checked."""
        tasks = self._tasks()
        edges = chain(self.stages) if self.forward_edges is None else self.forward_edges
        precedence = Precedence(tasks, edges)
        for filters, rank in self._orders:
            groups: list[list[Action]] = [[] for _ in filters]
            for action, home in tasks.items():
                names = self._names_of(action.stage)
                held = (i for i, where in enumerate(filters) if where.holds(action, names))
                if rank in (None, home) and (index := next(held, None)) is not None:
                    groups[index].append(action)
            precedence.add_order(groups, f"order {' then '.join(map(str, filters))}")
        schedule = Schedule(tuple(map(tuple, precedence.lines())), name)
        check_schedule(schedule, self.stages, self.microbatches, self.forward_edges)
        return schedule

    def _names_of(self, stage: int) -> list[str]:
        return [name for name, stages in self.annotations.items() if stage in stages]

    def _assign(self, what: str, where: Filter, ranks: Sequence[int]) -> None:
        if not ranks or min(ranks) < 0:
            raise ScheduleError(f"ranks={list(ranks)}; expected at least one rank, none negative")
        for stage, microbatch in self._places(what, where):
            self._rank_of[stage, microbatch] = ranks[microbatch % len(ranks)]

    def _places(self, what: str, where: Filter) -> list[tuple[int, int]]:
        if where.kind is not None:
            raise ScheduleError(
                f"{what} {where}: F, I, W and B of a stage and microbatch go together; "
                f"leave kind out of the filter"
            )
        found = [
            (stage, microbatch)
            for stage in range(self.stages)
            for microbatch in range(self.microbatches)
            if where.holds(Action(stage, Kind.F, microbatch), self._names_of(stage))
        ]
        if not found:
            raise ScheduleError(
                f"{what} {where} holds for nothing; expected stages 0 to {self.stages - 1}, "
                f"microbatches 0 to {self.microbatches - 1}, annotations "
                f"{', '.join(sorted(self.annotations)) or '(none)'}"
            )
        return found

    def _tasks(self) -> dict[Action, int]:
        """Every action and its rank."""
        tasks = {}
        for stage in range(self.stages):
            for microbatch in range(self.microbatches):
                place = (stage, microbatch)
                if place not in self._rank_of:
                    raise ScheduleError(
                        f"stage {stage} has no rank for microbatch {microbatch}; add "
                        f"place(on(stage={stage}), rank=...)"
                    )
                split = (Kind.F, Kind.I, Kind.W) if place in self._splits else (Kind.F, Kind.B)
                for kind in split:
                    tasks[Action(stage, kind, microbatch)] = self._rank_of[place]
        for rank in range(max(tasks.values())):
            if rank not in tasks.values():
                raise ScheduleError(f"rank {rank} has no stage; number the ranks without a gap")
        return tasks


def parse(text: str, forward_edges: Edges | None = None) -> Directives:
    """Read directives from text: one a line, filters as words `key=value`, `#` starts a comment."""
    sizes: dict[str, int] = {}
    annotations: dict[str, frozenset[int]] = {}
    lines: list[tuple[int, list[str]]] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        with _line(number, line):
            if not words:
                continue
            if words[0] in ("stages", "microbatches") and len(words) == 2:
                (sizes[words[0]],) = _read_numbers(words[1])
            elif words[0] == "annotation" and len(words) == 3:
                annotations[words[1]] = frozenset(_read_numbers(words[2]))
            elif words[0] in ("place", "replicate", "split", "order"):
                lines.append((number, words))
            else:
                raise ScheduleError(
                    "expected stages N, microbatches N, annotation NAME STAGES, place, replicate, "
                    "split or order"
                )
    for name in ("stages", "microbatches"):
        if name not in sizes:
            raise ScheduleError(f"the directives do not say {name}; add a line '{name} 4'")
    found = Directives(sizes["stages"], sizes["microbatches"], annotations, forward_edges)
    for number, words in lines:
        with _line(number, " ".join(words)):
            _apply(found, *words)
    return found


@contextmanager
def _line(number: int, line: str) -> Iterator[None]:
    try:
        yield
    except ScheduleError as error:
        raise ScheduleError(f"line {number}, {line.strip()!r}: {error}") from None


def _apply(found: Directives, verb: str, *words: str) -> None:
    ranks = [w.partition("=")[2] for w in words if w.startswith(("rank=", "ranks="))]
    if len(ranks) > 1 or (verb in ("place", "replicate") and not ranks):
        raise ScheduleError(f"{len(ranks)} times rank= or ranks=, expected one")
    numbers = _read_numbers(ranks[0]) if ranks else []
    if verb == "place" and len(numbers) > 1:
        raise ScheduleError(f"place takes one rank, found {len(numbers)}; use replicate")
    filters: list[list[str]] = [[]]
    for word in words:
        if word == "then":
            filters.append([])
        elif not word.startswith(("rank=", "ranks=")):
            filters[-1].append(word)
    read = [_read_filter(group) for group in filters]
    if verb == "order":
        for rank in numbers or (None,):
            found.order(*read, rank=rank)
    elif len(read) > 1:
        raise ScheduleError(f"{verb} takes one filter, found {len(read)}; 'then' is for order")
    elif verb == "split":
        found.split(*read)
    elif verb == "place":
        found.place(read[0], numbers[0])
    else:
        found.replicate(read[0], numbers)


def _read_filter(words: Sequence[str]) -> Filter:
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (equals and value and key in ("stage", "kind", "microbatch", "annotation")):
            raise ScheduleError(
                f"{word!r} is no filter; expected stage=, kind=, microbatch= or annotation="
            )
        given[key] = value
    return on(
        stage=_read_numbers(given["stage"]) if "stage" in given else None,
        microbatch=_read_numbers(given["microbatch"]) if "microbatch" in given else None,
        kind=given["kind"].split(",") if "kind" in given else None,
        annotation=given["annotation"].split(",") if "annotation" in given else None,
    )


def _read_numbers(text: str) -> list[int]:
    """`0,2..4` is 0, 2, 3, 4."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        if not first.isdigit() or (dots and not last.isdigit()):
            raise ScheduleError(f"{text!r} is no list of numbers; expected the form 0,2..4")
        numbers += range(int(first), int(last or first) + 1)
    return numbers

"""A schedule is proved complete, in order and free of deadlock, or shown with its fault marked."""

from __future__ import annotations

from collections import defaultdict
from typing import NoReturn

from fxpipe.errors import ScheduleError
from fxpipe.schedule import RECEIVES, SENDS, Action, Kind, Schedule, actions_of
from fxpipe.text_grid import Edges, Layout, chain, grid, lay_out, message

_ROWS_SHOWN = 40
_COLUMNS_SHOWN = 12

_Place = tuple[int, int]  # rank, step


def check_schedule(
    schedule: Schedule,
    num_stages: int | None = None,
    num_microbatches: int | None = None,
    forward_edges: Edges | None = None,
    *,
    training: bool = True,
) -> None:
    """Raise ScheduleError unless the schedule runs every task once, in order, to the end.

    For every stage and microbatch: one F, then either one B, or one I and one W, on F's rank;
    without `training` the F alone.
    Data flows along `forward_edges`, pairs (source stage, target stage), and gradients the other
    way; without them along the chain of stages. Messages, where there are any, must be matched,
    lie between their producer and its consumer, and be sent and received in the same order.
    """
    stages = schedule.num_stages if num_stages is None else num_stages
    microbatches = schedule.num_microbatches if num_microbatches is None else num_microbatches
    edges = chain(stages) if forward_edges is None else set(forward_edges)
    check = _Check(schedule, stages, microbatches, edges, forward_edges is None, training)
    check.once()
    check.complete()
    if check.messages:
        check.messages_matched()
        check.messages_placed()
        check.messages_in_order()
    check.runs_to_the_end()


class _Check:
    def __init__(
        self,
        schedule: Schedule,
        stages: int,
        microbatches: int,
        edges: Edges,
        is_chain: bool,
        training: bool,
    ) -> None:
        self.schedule, self.edges, self.is_chain = schedule, edges, is_chain
        self.training = training
        self.stages, self.microbatches = stages, microbatches
        self.tasks: dict[tuple[Kind, int, int], _Place] = {}
        self.messages: dict[Action, _Place] = {}

    def fail(
        self, sentence: str, mark: _Place | None = None, edges: Edges | None = None
    ) -> NoReturn:
        text = grid(
            self.schedule,
            mark,
            forward_edges=self.edges if edges is None else edges,
            max_rows=_ROWS_SHOWN,
            max_columns=_COLUMNS_SHOWN,
        )
        raise ScheduleError(f"schedule {self.schedule.name!r}: {sentence}\n\n{text}")

    def once(self) -> None:
        """Note where each action stands; each is one of the model's, and there once."""
        for rank, steps in enumerate(self.schedule.ranks):
            for index, step in enumerate(steps):
                for action in actions_of(step):
                    self._note(action, (rank, index))

    def _note(self, action: Action, place: _Place) -> None:
        stages = (action.stage,) if action.peer is None else (action.stage, action.peer)
        for stage in stages:
            if not 0 <= stage < self.stages:
                self.fail(f"{action} is of stage {stage}, expected 0 to {self.stages - 1}", place)
        if not 0 <= action.microbatch < self.microbatches:
            self.fail(
                f"{action} is of microbatch {action.microbatch}, "
                f"expected 0 to {self.microbatches - 1}",
                place,
            )
        if action.peer is None:
            key = (action.kind, action.stage, action.microbatch)
            first = self.tasks.setdefault(key, place)
        else:
            first = self.messages.setdefault(action, place)
        if first is not place:
            also = "" if first[0] == place[0] else f" and on rank {place[0]}"
            self.fail(f"{action} is there twice, on rank {first[0]}{also}; take one away", place)

    def complete(self) -> None:
        """Every stage and microbatch has its F and its backward, on one rank."""
        for stage in range(self.stages):
            for microbatch in range(self.microbatches):
                self._check_task(stage, microbatch)

    def _check_task(self, stage: int, microbatch: int) -> None:
        found = {k: p for k in _TASKS if (p := self.tasks.get((k, stage, microbatch))) is not None}
        kinds = tuple(found)
        if kinds not in (_COMPLETE if self.training else _FORWARD):
            names = ", ".join(f"{stage}{kind}{microbatch}" for kind in kinds) or "nothing"
            backward = (
                f"then either {stage}B{microbatch}, or {stage}I{microbatch} and "
                f"{stage}W{microbatch}"
            )
            self.fail(
                f"stage {stage} has {names} for microbatch {microbatch}, expected "
                f"{stage}F{microbatch} and {backward if self.training else 'nothing else'}",
                next(iter(found.values()), None),
            )
        home = found[Kind.F][0]
        for kind, place in found.items():
            if place[0] != home:
                self.fail(
                    f"{stage}{kind}{microbatch} is on rank {place[0]} and its forward on rank "
                    f"{home}; put them on one rank, the backward reads what the forward saved",
                    place,
                )

    def messages_matched(self) -> None:
        """Every SEND has its RECV and the reverse, along an edge; a chain has all it needs."""
        for action, place in self.messages.items():
            other = _other_end(action)
            if other not in self.messages:
                self.fail(f"{action} has no {other}", place)
            _, *ends = message(action)
            edge = (ends[0], ends[1]) if action.kind.value[-1] == "F" else (ends[1], ends[0])
            if edge not in self.edges and not self.is_chain:
                self.fail(f"{action} goes along no edge of the model's stages", place)
        for kind in (Kind.SEND_F, Kind.SEND_B):
            if self.is_chain and any(action.kind is kind for action in self.messages):
                self._check_none_missing(kind)

    def _check_none_missing(self, kind: Kind) -> None:
        for (task, stage, microbatch), place in self.tasks.items():
            target = stage + (1 if kind is Kind.SEND_F else -1)
            if task is Kind.W or (task is Kind.F) != (kind is Kind.SEND_F):
                continue
            home = self.tasks.get((Kind.F, target, microbatch))
            if home is None or home[0] == place[0]:
                continue
            if (send := Action(stage, kind, microbatch)) not in self.messages:
                self.fail(f"{send} is missing, although others of its kind are there", place)

    def messages_placed(self) -> None:
        """A SEND stands after the task that makes its value, a RECV before its reader."""
        for action, place in self.messages.items():
            task = self._task_at(action)
            if place[0] != task[0]:
                self.fail(f"{action} is on rank {place[0]}, its stage on rank {task[0]}", place)
            if action.kind in SENDS and place < task:
                self.fail(f"{action} stands before the task that makes its value", place)
            if action.kind in RECEIVES and place > task:
                self.fail(f"{action} stands after the task that reads its value", place)

    def _task_at(self, action: Action) -> _Place:
        kinds = (Kind.F,) if action.kind.value[-1] == "F" else (Kind.I, Kind.B)
        keys = [(kind, action.stage, action.microbatch) for kind in kinds]
        return next(self.tasks[key] for key in keys if key in self.tasks)

    def messages_in_order(self) -> None:
        """From one rank to another, values are received in the order they are sent."""
        sent: dict[_Place, list[Action]] = defaultdict(list)
        received: dict[_Place, list[Action]] = defaultdict(list)
        for action, (rank, _) in self.messages.items():
            other = self.messages[_other_end(action)][0]
            if action.kind in SENDS:
                sent[rank, other].append(action)
            else:
                received[other, rank].append(action)
        for (source, target), sends in sent.items():
            for send, receive in zip(sends, received[source, target], strict=True):
                if receive != _other_end(send):
                    self.fail(
                        f"rank {target} expects {receive} from rank {source}, which sends {send} "
                        f"first; receive in the order of sending",
                        self.messages[receive],
                    )

    def runs_to_the_end(self) -> None:
        """Running every rank's steps in order reaches the last of each."""
        edges = set(self.edges)
        if self.is_chain:
            edges |= {message(a)[1:3] for a in self.messages if a.kind is Kind.SEND_F}
        layout = lay_out(self.schedule, edges)
        if not layout.lacks:
            return
        cycle = _find_cycle(layout)
        waits = [self._describe(rank, layout) for rank in cycle]
        mark = (cycle[0], len(layout.rows[cycle[0]]))
        advice = "move one of these steps behind what it waits for"
        self.fail(f"deadlock: {', '.join(waits)}; {advice}", mark, edges)

    def _describe(self, rank: int, layout: Layout) -> str:
        needed, place = layout.lacks[rank]
        step = self.schedule.ranks[rank][len(layout.rows[rank])]
        if place is None:
            return f"rank {rank} waits at {step} for {needed}, which is nowhere"
        if place[0] == rank:
            return f"rank {rank} waits at {step} for {needed}, which it would run only later"
        return f"rank {rank} waits at {step} for {needed} of rank {place[0]}"


_TASKS = (Kind.F, Kind.B, Kind.I, Kind.W)
_COMPLETE = ((Kind.F, Kind.B), (Kind.F, Kind.I, Kind.W))
_FORWARD = ((Kind.F,),)


def _other_end(action: Action) -> Action:
    assert action.peer is not None
    verb, _, direction = action.kind.value.partition("_")
    kind = Kind(("RECV_" if verb == "SEND" else "SEND_") + direction)
    return Action(action.peer, kind, action.microbatch, action.stage)


def _find_cycle(layout: Layout) -> list[int]:
    """The ranks that wait for each other, from any rank that is stuck."""
    seen: list[int] = []
    rank = next(iter(layout.lacks))
    while rank not in seen:
        seen.append(rank)
        _, place = layout.lacks[rank]
        if place is None:
            return [rank]
        rank = place[0]
    return seen[seen.index(rank) :]

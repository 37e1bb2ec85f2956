"""Tasks with ranks, and what must come before what, become a list of actions per rank."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fxpipe.errors import ScheduleError
from fxpipe.schedule import Action, Kind
from fxpipe.text_grid import Edges


@dataclass(frozen=True)
class _Gate:
    """Opens when all of one group of an order have run, before any of the next may."""

    label: str
    rank: int
    index: int


_Node = Action | _Gate


class Precedence:
    """Runs what is ready, one action a step and rank, under what data and the orders ask for.

    Where several are ready, gradients go first, then the oldest forward, then weight gradients.
    """

    def __init__(self, rank_of: Mapping[Action, int], forward_edges: Edges) -> None:
        self.rank_of = rank_of
        # Ordered, so that what is reported does not depend on hashes.
        self.waits: dict[_Node, dict[_Node, None]] = {action: {} for action in rank_of}
        self.followers: dict[_Node, list[_Node]] = defaultdict(list)
        self.ready: list[list[tuple[int, int, int, Action]]] = [
            [] for _ in range(1 + max(rank_of.values()))
        ]
        sources: dict[int, list[int]] = defaultdict(list)
        for source, target in sorted(forward_edges):
            sources[target].append(source)
        for action in rank_of:
            self._add_data(action, sources[action.stage])

    def _add_data(self, action: Action, sources: Sequence[int]) -> None:
        stage, microbatch = action.stage, action.microbatch
        if action.kind is Kind.F:
            for source in sources:
                self._link(Action(source, Kind.F, microbatch), action)
        elif action.kind is Kind.W:
            self._link(Action(stage, Kind.I, microbatch), action)
        else:
            self._link(Action(stage, Kind.F, microbatch), action)
            for source in sources:
                split = Action(source, Kind.I, microbatch)
                whole = Action(source, Kind.B, microbatch)
                self._link(action, split if split in self.rank_of else whole)

    def _link(self, first: _Node, then: _Node) -> None:
        self.waits.setdefault(first, {})
        waits = self.waits.setdefault(then, {})
        if first not in waits:
            waits[first] = None
            self.followers[first].append(then)

    def add_order(self, groups: Sequence[Sequence[Action]], label: str) -> None:
        """On each rank, all of a group run before any of the next; `label` names it in errors."""
        for rank in range(len(self.ready)):
            here = [[a for a in group if self.rank_of[a] == rank] for group in groups]
            here = [group for group in here if group]
            for index, (first, then) in enumerate(zip(here, here[1:], strict=False)):
                gate = _Gate(label, rank, index)
                for action in first:
                    self._link(action, gate)
                for action in then:
                    self._link(gate, action)

    def lines(self) -> list[list[Action]]:
        """The actions of each rank in order. Raises ScheduleError where orders contradict."""
        lines: list[list[Action]] = [[] for _ in self.ready]
        for node in [node for node, waits in self.waits.items() if not waits]:
            self._release(node)
        while any(self.ready):
            busy = [rank for rank, ready in enumerate(self.ready) if ready]
            done = [heapq.heappop(self.ready[rank])[-1] for rank in busy]
            for rank, action in zip(busy, done, strict=True):
                lines[rank].append(action)
                self._finish(action)
        stuck = set(self.rank_of).difference(*lines)
        if stuck:
            raise ScheduleError(self._explain(next(a for a in self.rank_of if a in stuck)))
        return lines

    def _release(self, node: _Node) -> None:
        if isinstance(node, _Gate):
            self._finish(node)
            return
        urgency = {Kind.F: 1, Kind.W: 2}.get(node.kind, 0)
        entry = (urgency, node.microbatch, -node.stage, node)
        heapq.heappush(self.ready[self.rank_of[node]], entry)

    def _finish(self, node: _Node) -> None:
        for follower in self.followers[node]:
            del self.waits[follower][node]
            if not self.waits[follower]:
                self._release(follower)

    def _explain(self, node: _Node) -> str:
        """The circle of waiting that a stuck action leads to, and the orders in it."""
        seen: list[_Node] = []
        while node not in seen:
            seen.append(node)
            node = next(iter(self.waits[node]))
        circle = seen[seen.index(node) :]
        labels = dict.fromkeys(f"'{n.label}'" for n in circle if isinstance(n, _Gate))
        actions = [str(n) for n in circle if isinstance(n, Action)]
        names = " and ".join(labels) or "the stages' edges"
        return (
            f"{names} cannot be followed: {' waits for '.join([*actions, actions[0]])}; "
            f"change the order or place the stages otherwise"
        )

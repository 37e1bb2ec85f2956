"""A schedule of tasks to one with messages: SEND after the producer, RECV ahead of the consumer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator

from fxpipe.program import Edge
from fxpipe.schedule import Action, Kind, Pair, Schedule, Step, actions_of

# A receive is posted this many tasks ahead of the task that needs it, so that the message travels
# while the rank computes.
TASKS_AHEAD = 2


def with_messages(schedule: Schedule, edges_of: Callable[[int], Collection[Edge]]) -> Schedule:
    """Add the messages of every microbatch's edges that cross ranks.

    A RECV is the posting of a receive; its rank waits where the value is first used. For each
    ordered pair of ranks, receives are posted in the order of the sends, which is what backends
    without tags match by.
    """
    sends = [list(place_sends(schedule, rank, edges_of)) for rank in range(schedule.num_ranks)]
    first_use = {
        (action.stage, action.kind is not Kind.F, action.microbatch): (rank, index)
        for rank, steps in enumerate(schedule.ranks)
        for index, step in reversed(list(enumerate(steps)))
        for action in actions_of(step)
    }
    posts: list[dict[int, list[Action]]] = [defaultdict(list) for _ in schedule.ranks]
    for source in range(schedule.num_ranks):
        by_target: dict[int, list[tuple[int, Action]]] = defaultdict(list)
        for _, send in sends[source]:
            receive = receive_of(send)
            backward = receive.kind is Kind.RECV_B
            rank, index = first_use[receive.stage, backward, receive.microbatch]
            by_target[rank].append((index, receive))
        for rank, received in by_target.items():
            latest = len(schedule.ranks[rank])
            for index, receive in reversed(received):
                latest = min(latest, index)
                posts[rank][max(0, latest - TASKS_AHEAD)].insert(0, receive)
    ranks = tuple(
        tuple(merged(steps, sends[rank], posts[rank])) for rank, steps in enumerate(schedule.ranks)
    )
    return Schedule(ranks, schedule.name)


def without_messages(schedule: Schedule) -> Schedule:
    """The tasks alone."""
    ranks = (
        tuple(step for step in steps if isinstance(step, Pair) or step.kind.is_compute)
        for steps in schedule.ranks
    )
    return Schedule(tuple(ranks), schedule.name)


def place_sends(
    schedule: Schedule, rank: int, edges_of: Callable[[int], Collection[Edge]]
) -> Iterator[tuple[int, Action]]:
    """(index of the producing step, the send after it)."""
    for index, step in enumerate(schedule.ranks[rank]):
        for action in actions_of(step):
            if action.kind is Kind.W:
                continue
            forward = action.kind is Kind.F
            for edge in edges_of(action.microbatch):
                if edge.source != action.stage or edge.forward != forward:
                    continue
                if schedule.rank_of[edge.target, action.microbatch] != rank:
                    kind = Kind.SEND_F if forward else Kind.SEND_B
                    yield index, Action(edge.source, kind, action.microbatch, edge.target)


def receive_of(send: Action) -> Action:
    """The receive that takes a send."""
    kind = Kind.RECV_F if send.kind is Kind.SEND_F else Kind.RECV_B
    return Action(send.other, kind, send.microbatch, send.stage)


def send_of(receive: Action) -> Action:
    """The send that a receive takes, whose text names the message."""
    kind = Kind.SEND_F if receive.kind is Kind.RECV_F else Kind.SEND_B
    return Action(receive.other, kind, receive.microbatch, receive.stage)


def merged(
    steps: tuple[Step, ...], sends: list[tuple[int, Action]], posts: dict[int, list[Action]]
) -> Iterator[Step]:
    after: dict[int, list[Action]] = defaultdict(list)
    for index, send in sends:
        after[index].append(send)
    for index, step in enumerate(steps):
        yield from posts.get(index, ())
        yield step
        yield from after[index]

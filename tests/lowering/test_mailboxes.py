"""Tensors through memory that two processes share; here both ends are in one process."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from fxpipe.lowering import mailboxes
from fxpipe.lowering.mailboxes import Address, Inbox, Layout, Mailboxes, Outbox
from fxpipe.lowering.packing import Spec, layout_of

Ends = tuple[Inbox, Outbox]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    """The two ends of a mailbox of 1,024 bytes."""
    monkeypatch.setattr(mailboxes, "CAPACITY", 1024)
    inbox = Inbox()
    yield inbox, Outbox(inbox.address)


def send(outbox: Outbox, tag: int, *tensors: Tensor) -> bool:
    outbox.put(tag, layout(tensors), tensors)
    return outbox.flush()


def layout(tensors: Sequence[Tensor]) -> Layout:
    return layout_of(tuple(map(Spec.of, tensors)))


def take(inbox: Inbox, tag: int, likes: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return inbox.take(tag, layout(likes))


def test_tensors_come_out_as_they_went_in(ends: Ends) -> None:
    inbox, outbox = ends
    sent = [
        torch.randn(2, 3, dtype=torch.float64).t(),
        torch.tensor(True),
        torch.empty(0, 4),
        torch.arange(5, dtype=torch.int16)[::2],
    ]
    assert not inbox.has(7)
    assert send(outbox, 7, *sent)
    assert inbox.has(7)
    taken = take(inbox, 7, sent)
    assert all(torch.equal(a, b) for a, b in zip(taken, sent))
    assert taken[0].stride() == sent[0].stride()
    assert not inbox.has(7)


def test_what_was_sent_may_change_afterwards_and_what_was_taken_stays(ends: Ends) -> None:
    inbox, outbox = ends
    value = torch.ones(4)
    send(outbox, 1, value)
    value.fill_(2)
    assert inbox.has(1)
    send(outbox, 2, value)
    assert take(inbox, 1, [value])[0].tolist() == [1, 1, 1, 1]


def test_what_finds_no_place_is_sent_when_there_is_some(ends: Ends) -> None:
    inbox, outbox = ends
    values = [torch.full((100,), float(i)) for i in range(5)]  # 448 bytes of 1,024
    assert [send(outbox, i, value) for i, value in enumerate(values)] == [True, True] + 3 * [False]
    for i, value in enumerate(values):
        assert inbox.has(i)
        assert torch.equal(take(inbox, i, [value])[0], value)
        outbox.flush()
    assert outbox.flush()


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_or_overwritten_in_any_order(ends: Ends, seed: int) -> None:
    inbox, outbox = ends
    rng = random.Random(seed)
    under_way: dict[int, list[Tensor]] = {}
    for tag in range(300):
        message = [torch.randn(rng.randint(0, 20)) for _ in range(rng.randint(1, 3))]
        under_way[tag] = message
        send(outbox, tag, *message)
        while under_way and rng.random() < 0.55:
            outbox.flush()
            wanted = rng.choice(list(under_way))
            if inbox.has(wanted):
                likes = under_way.pop(wanted)
                taken = take(inbox, wanted, likes)
                assert all(map(torch.equal, taken, likes))
    for tag, likes in under_way.items():
        while not inbox.has(tag):
            inbox.listen(0.001)
            outbox.flush()
        assert all(map(torch.equal, take(inbox, tag, likes), likes))
    assert outbox.flush() and not inbox.arrived


def test_a_pipe_that_is_full_loses_nothing(ends: Ends) -> None:
    inbox, outbox = ends
    mailboxes.CAPACITY = 1 << 20
    inbox, outbox = (made := Inbox()), Outbox(made.address)
    count = 6000  # records of 24 bytes: more than a pipe of 64 KB holds
    for tag in range(count):
        send(outbox, tag, torch.tensor([tag]))
    assert outbox.waiting
    for tag in range(count):
        while not inbox.has(tag):
            inbox.listen(0.001)
            outbox.flush()
        assert take(inbox, tag, [torch.tensor([0])])[0].item() == tag


def test_layout_leaves_every_tensor_aligned() -> None:
    found = layout([torch.empty(1), torch.empty(17), torch.empty(0)])
    assert [part.start for part in found.parts] == [0, 64, 192]
    assert found.size == 256


def test_a_message_that_is_put_aside_makes_room_for_the_one_that_is_awaited(ends: Ends) -> None:
    inbox, outbox = ends
    values = [torch.full((100,), float(i)) for i in range(3)]  # 448 bytes of 1,024
    for tag, value in enumerate(values):
        send(outbox, tag, value)
    while not inbox.has(2):
        inbox.listen(0.001)
        outbox.flush()
    for tag in (2, 0, 1):
        assert torch.equal(take(inbox, tag, [values[tag]])[0], values[tag])


def test_a_rank_that_cannot_be_reached_has_no_outbox() -> None:
    ours, theirs = Mailboxes(), Mailboxes()
    offers = ours.offer([1, 2])
    assert sorted(offers) == [1, 2] and ours.offer([1]) == {}
    gone = Address(2**22 - 1, *offers[2][1:])
    assert theirs.accept({0: offers[1], 5: gone}) == [0]
    assert list(theirs.outboxes) == [0]


def test_files_are_closed_with_the_mailbox() -> None:
    before = len(os.listdir("/proc/self/fd"))
    inbox = Inbox()
    outbox = Outbox(inbox.address)
    assert len(os.listdir("/proc/self/fd")) > before
    del inbox, outbox
    assert len(os.listdir("/proc/self/fd")) == before

"""Values that cross ranks become messages, posted ahead of their use."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline

from fxpipe.errors import ScheduleError
from fxpipe.passes import InsertCommunication
from fxpipe.program import Edge, Program
from fxpipe.schedule import COMPUTE, RECEIVES, SENDS, Pair, Schedule
from tests.helpers import MLP, Captured, captured, microbatches, mlp_batch, run_tasks, run_until


def mlp(stages: int, schedule: str) -> Captured:
    widths = [3] * (stages + 1)
    return captured(MLP(*widths), *mlp_batch(), stages=stages, schedule=schedule)


def tasks(given: Captured, ranks: int, microbatches: int = 2) -> Program:
    return run_until(given.program(2, microbatches, ranks), "split_tasks")


@pytest.fixture(scope="module")
def given() -> Captured:
    return mlp(2, "1f1b")


def test_messages_follow_their_producer_and_precede_their_consumer(given: Captured) -> None:
    before = tasks(given, ranks=2)
    after = InsertCommunication()(before)
    assert_expected_inline(
        str(before.schedule),
        """\
0F0 0F1 0B0 0B1
1F0 1B0 1F1 1B1""",
    )
    assert_expected_inline(
        str(after.schedule),
        """\
0RECV_B0 0F0 0SEND_F0 0RECV_B1 0F1 0SEND_F1 0B0 0B1
1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1""",
    )


def test_split_backward_sends_after_i_and_not_after_w() -> None:
    after = InsertCommunication()(tasks(mlp(2, "zb-h1"), ranks=2))
    assert_expected_inline(
        str(after.schedule),
        """\
0RECV_B0 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0I0 0W0 0I1 0W1
1RECV_F0 1RECV_F1 1F0 1I0 1SEND_B0 1F1 1I1 1SEND_B1 1W0 1W1""",
    )


def test_edge_between_stages_of_one_rank_needs_no_message() -> None:
    text = "0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"
    before = tasks(mlp(2, text), ranks=1)
    assert set(before.edges) == {Edge(0, 1), Edge(1, 0)}
    after = InsertCommunication()(before)
    assert str(after.schedule) == text


def test_looped_stages_send_from_the_last_rank_to_the_first() -> None:
    after = InsertCommunication()(tasks(mlp(4, "interleaved-1f1b"), ranks=2))
    lines = str(after.schedule).splitlines()
    assert "1SEND_F0" in lines[1] and "2RECV_F0" in lines[0]
    assert "2SEND_B0" in lines[0] and "1RECV_B0" in lines[1]


def test_a_skip_is_a_message_of_its_own_between_its_two_ranks(given: Captured) -> None:
    before = tasks(mlp(3, "1f1b"), ranks=3)
    edges = {**before.edges, Edge(0, 2): ("tanh",)}
    after = InsertCommunication()(replace(before, edges=edges))
    lines = str(after.schedule).splitlines()
    assert lines[0].count("SEND_F0>2") == 1
    assert lines[2].count("2RECV_F0<0") == 1


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_every_send_has_its_receive_and_tasks_keep_their_order(schedule: str) -> None:
    before = tasks(mlp(3, schedule), ranks=3, microbatches=5)
    after = InsertCommunication()(before)
    sends = [a for r in range(3) for a in after.schedule.actions(r) if a.kind in SENDS]
    receives = [a for r in range(3) for a in after.schedule.actions(r) if a.kind in RECEIVES]
    assert len(sends) == 2 * 2 * 5
    assert sorted((a.peer, a.stage, a.microbatch) for a in sends) == sorted(
        (a.stage, a.peer, a.microbatch) for a in receives
    )
    for old, new in zip(before.schedule.ranks, after.schedule.ranks):
        assert old == tuple(s for s in new if isinstance(s, Pair) or s.kind in COMPUTE)


def test_tasks_and_numbers_are_untouched(given: Captured) -> None:
    before = tasks(given, ranks=2)
    after = InsertCommunication()(before)
    assert after.tasks is before.tasks
    for values in microbatches(given, after, (2, 2)):
        torch.testing.assert_close(
            run_tasks(after, values), run_tasks(before, values), rtol=0, atol=0
        )


def test_schedule_that_a_skip_would_block_is_refused() -> None:
    before = tasks(mlp(3, "1f1b"), ranks=3)
    text = "0F0 0B0 0F1 0B1\n1F0 1B0 1F1 1B1\n2F1 2B1 2F0 2B0"
    blocked = replace(before, schedule=Schedule.parse(text))
    with pytest.raises(ScheduleError, match="deadlock"):
        InsertCommunication()(blocked)

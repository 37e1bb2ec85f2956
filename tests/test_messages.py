"""Messages in a schedule of tasks: SEND after the producer, RECV ahead of the consumer."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

import fxpipe
from fxpipe.lowering.lower import lower
from fxpipe.lowering.metrics import last_plan, plans_of
from fxpipe.messages import receive_of, send_of, with_messages, without_messages
from fxpipe.messages_of_step import messages_of
from fxpipe.program import Edge
from fxpipe.schedule import RECEIVES, SENDS, Action, Schedule
from fxpipe.schedules import build
from tests.numerics.models import GPT, pipelined, seeded

CHAIN = (Edge(0, 1), Edge(1, 0))


def placed(text: str, *edges: Edge) -> str:
    return str(with_messages(Schedule.parse(text), lambda microbatch: edges))


def test_send_follows_its_task_and_receive_is_two_tasks_ahead() -> None:
    text = "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2"
    assert_expected_inline(
        placed(text, *CHAIN),
        """\
0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0F2 0SEND_F2 0RECV_B2 0B0 0B1 0B2
1RECV_F0 1RECV_F1 1RECV_F2 1F0 1F1 1F2 1B0 1SEND_B0 1B1 1SEND_B1 1B2 1SEND_B2""",
    )


def test_i_sends_and_w_does_not() -> None:
    assert_expected_inline(
        placed("0F0 0I0 0W0\n1F0 1W0 1I0", *CHAIN),
        """\
0RECV_B0 0F0 0SEND_F0 0I0 0W0
1RECV_F0 1F0 1W0 1I0 1SEND_B0""",
    )


def test_values_of_one_rank_need_no_message() -> None:
    text = "0F0 1F0 1B0 0B0"
    assert placed(text, *CHAIN) == text


def test_no_edge_no_message() -> None:
    text = "0F0 0B0\n1F0 1B0"
    assert placed(text) == text


def test_one_way_edge_has_messages_one_way() -> None:
    assert placed("0F0 0B0\n1F0 1B0", Edge(0, 1)) == "0F0 0SEND_F0 0B0\n1RECV_F0 1F0 1B0"


def test_skip_names_its_other_stage() -> None:
    text = "0F0 0B0\n1F0 1B0\n2F0 2B0"
    assert_expected_inline(
        placed(text, Edge(0, 2), Edge(2, 0)),
        """\
0RECV_B0<2 0F0 0SEND_F0>2 0B0
1F0 1B0
2RECV_F0<0 2F0 2B0 2SEND_B0>0""",
    )


def test_pair_sends_what_both_its_actions_make() -> None:
    text = "0F0 0F1 0B0 0B1\n1F0 [1F1|1B0] 1B1\n2F0 2F1 2B0 2B1"
    edges = (Edge(0, 1), Edge(1, 2), Edge(2, 1), Edge(1, 0))
    middle = placed(text, *edges).splitlines()[1]
    after_pair = middle.partition("[1F1|1B0] ")[2]
    assert after_pair.startswith("1SEND_F1 1SEND_B0")


def test_receives_of_a_pair_of_ranks_are_posted_in_the_order_of_the_sends() -> None:
    """Rank 1 needs microbatch 1 first, but rank 0 sends microbatch 0 first."""
    text = "0F0 0F1 0B1 0B0\n1F1 1F0 1B1 1B0"
    lines = placed(text, *CHAIN).splitlines()
    assert lines[1].split()[:3] == ["1RECV_F0", "1RECV_F1", "1F1"]


def test_replicated_stage_sends_from_the_rank_of_the_microbatch() -> None:
    text = "0F0 0B0\n0F1 0B1\n1F0 1F1 1B0 1B1"
    lines = placed(text, *CHAIN).splitlines()
    assert "0SEND_F0" in lines[0] and "0SEND_F1" in lines[1]
    assert "0RECV_B0" in lines[0] and "0RECV_B1" in lines[1]


def test_microbatches_may_have_edges_of_their_own() -> None:
    schedule = Schedule.parse("0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1")
    sent = with_messages(schedule, lambda microbatch: CHAIN if microbatch else ())
    assert_expected_inline(
        str(sent),
        """\
0F0 0RECV_B1 0F1 0SEND_F1 0B0 0B1
1RECV_F1 1F0 1F1 1B0 1B1 1SEND_B1""",
    )


def test_receive_of_and_send_of_are_inverse() -> None:
    for text in ("0SEND_F3", "3SEND_B5", "0SEND_F1>4", "4SEND_B2>1"):
        send = Action.parse(text)
        assert send_of(receive_of(send)) == send
    assert str(receive_of(Action.parse("0SEND_F1>4"))) == "4RECV_F1<0"
    assert str(send_of(Action.parse("2RECV_B7"))) == "3SEND_B7"


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "interleaved-zb"])
@pytest.mark.parametrize("microbatches", [4, 8])
def test_every_family_gets_its_messages_in_matching_order(name: str, microbatches: int) -> None:
    stages = 8 if name.startswith("interleaved") else 4
    schedule = build(name, stages=stages, microbatches=microbatches, ranks=4)
    chain = [Edge(s, s + 1) for s in range(stages - 1)] + [
        Edge(s + 1, s) for s in range(stages - 1)
    ]
    sent = with_messages(schedule, lambda microbatch: chain)
    assert without_messages(sent) == schedule
    count = 0
    for source in range(4):
        for target in range(4):
            sends = [
                receive_of(a)
                for a in sent.actions(source)
                if a.kind in SENDS and schedule.rank_of[a.other, a.microbatch] == target
            ]
            receives = [
                a
                for a in sent.actions(target)
                if a.kind in RECEIVES and schedule.rank_of[a.other, a.microbatch] == source
            ]
            assert sends == receives
            count += len(sends)
    assert count == 2 * (stages - 1) * microbatches


@pytest.mark.parametrize(
    ("rows", "options"),
    [(6, {}), (7, {"schedule": "zb-h1"}), (6, {"schedule": "chimera", "microbatches": 4})],
)
def test_all_messages_of_a_tied_model_are_predicted(rows: int, options: dict[str, object]) -> None:
    step = pipelined(seeded(GPT), **options)
    words = torch.arange(rows * 5).view(rows, 5) % 11
    step(words, words.flip(1)).backward()
    found, plan = fxpipe.explain(step), last_plan(step)
    sent = {
        (name, message.source, message.nbytes)
        for executor in plan.executors
        for name, message in executor.program.messages.items()
    }
    assert any(name.startswith("SUM ") for name, _, _ in sent)
    assert found.sent == fxpipe.metrics(step)["bytes_sent"]
    assert sum(rank.messages for rank in found.ranks) == len(sent)
    for rank in found.ranks:
        own = [size for _, source, size in sent if source == rank.rank]
        assert (rank.messages, rank.sent) == (len(own), sum(own))


@pytest.mark.parametrize("training", [True, False])
def test_with_a_process_per_rank_outputs_go_to_all(training: bool) -> None:
    step = pipelined(seeded(GPT), schedule="1f1b")
    words = torch.arange(30).view(6, 5) % 11
    with torch.set_grad_enabled(training):
        step(words, words)
    (plan,) = plans_of(step)
    programs = plan.programs
    made = [lower(programs, rank, lambda graph: graph) for rank in range(2)]
    sent = {(name, *message) for each in made for name, message in each.messages.items()}
    expected = sorted((m[1], m[2], sum(spec.nbytes for spec in m[3])) for m in sent)
    assert sorted(messages_of(programs, range(2))) == expected

"""A program becomes, per rank, a graph of task calls and messages that runs as it is printed."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from fxpipe.lowering.lower import lower
from fxpipe.lowering.rank_program import Message, RankProgram, Slot
from fxpipe.lowering.status import Status
from fxpipe.program import Program
from tests.helpers import (
    GPT,
    MLP,
    Captured,
    captured,
    gpt_batch,
    lowered,
    microbatches,
    mlp_batch,
    run_ranks,
    run_until,
    slot_values,
)


@pytest.fixture(scope="module")
def mlp() -> Captured:
    return captured(MLP(3, 3, 3), *mlp_batch())


@pytest.fixture(scope="module")
def gpt() -> Captured:
    return captured(GPT(), *gpt_batch())


def planned(
    given: Captured, schedule: str, stages: int = 2, ranks: int = 2, rows: int = 2
) -> Program:
    with_schedule = given.with_options(stages=stages, schedule=schedule)
    return run_until(with_schedule.program(rows, 2, ranks), "plan_last_uses")


def test_two_ranks_of_1f1b(mlp: Captured) -> None:
    first, second = lowered(planned(mlp, "1f1b"))
    assert_expected_inline(
        readable(first),
        """\
# rank 0
def forward(self, transport, layers_0_weight, layers_0_bias, x_mb0, x_mb1):
    posted_1SEND_B0 = post(transport, '1SEND_B0')
    ran_0F0 = self.stage0_F(layers_0_weight, layers_0_bias, x_mb0)
    tanh_mb0 = ran_0F0[0]
    sent_0SEND_F0 = send(transport, '0SEND_F0', [tanh_mb0])
    posted_1SEND_B1 = post(transport, '1SEND_B1')
    ran_0F1 = self.stage0_F(layers_0_weight, layers_0_bias, x_mb1)
    tanh_mb1 = ran_0F1[0]
    sent_0SEND_F1 = send(transport, '0SEND_F1', [tanh_mb1])
    got_1SEND_B0 = wait(transport, '1SEND_B0')
    mm_mb0 = got_1SEND_B0[0]
    acc_layers_0_weight = new_accumulator(layers_0_weight)
    acc_layers_0_bias = new_accumulator(layers_0_bias)
    ran_0B0 = self.stage0_B(x_mb0, tanh_mb0, mm_mb0, acc_layers_0_weight, acc_layers_0_bias)
    got_1SEND_B1 = wait(transport, '1SEND_B1')
    mm_mb1 = got_1SEND_B1[0]
    ran_0B1 = self.stage0_B(x_mb1, tanh_mb1, mm_mb1, acc_layers_0_weight, acc_layers_0_bias)
    posted_OUTPUT_0_1_0 = post(transport, 'OUTPUT 0 1>0')
    got_OUTPUT_0_1_0 = wait(transport, 'OUTPUT 0 1>0')
    getitem = got_OUTPUT_0_1_0[0]
    return (getitem, acc_layers_0_weight, acc_layers_0_bias)""",
    )
    assert_expected_inline(
        readable(second),
        """\
# rank 1
def forward(self, transport, layers_1_weight, layers_1_bias, y_mb0, share_mb0, y_mb1, share_mb1):
    posted_0SEND_F0 = post(transport, '0SEND_F0')
    posted_0SEND_F1 = post(transport, '0SEND_F1')
    got_0SEND_F0 = wait(transport, '0SEND_F0')
    tanh_mb0 = got_0SEND_F0[0]
    ran_1F0 = self.stage1_F(layers_1_weight, layers_1_bias, y_mb0, share_mb0, tanh_mb0)
    addmm_1_mb0 = ran_1F0[0]
    mul_mb0 = ran_1F0[1]
    acc_layers_1_weight = new_accumulator(layers_1_weight)
    acc_layers_1_bias = new_accumulator(layers_1_bias)
    ran_1B0 = self.stage1_B(layers_1_weight, y_mb0, share_mb0, tanh_mb0, addmm_1_mb0, acc_layers_1_weight, acc_layers_1_bias)
    mm_mb0 = ran_1B0[0]
    sent_1SEND_B0 = send(transport, '1SEND_B0', [mm_mb0])
    got_0SEND_F1 = wait(transport, '0SEND_F1')
    tanh_mb1 = got_0SEND_F1[0]
    ran_1F1 = self.stage1_F(layers_1_weight, layers_1_bias, y_mb1, share_mb1, tanh_mb1)
    addmm_1_mb1 = ran_1F1[0]
    mul_mb1 = ran_1F1[1]
    ran_1B1 = self.stage1_B(layers_1_weight, y_mb1, share_mb1, tanh_mb1, addmm_1_mb1, acc_layers_1_weight, acc_layers_1_bias)
    mm_mb1 = ran_1B1[0]
    sent_1SEND_B1 = send(transport, '1SEND_B1', [mm_mb1])
    own_OUTPUT_0_1 = total([mul_mb0, mul_mb1])
    sent_OUTPUT_0_1_0 = send(transport, 'OUTPUT 0 1>0', [own_OUTPUT_0_1])
    return (own_OUTPUT_0_1, acc_layers_1_weight, acc_layers_1_bias)""",  # noqa: E501
    )


def readable(ran: RankProgram) -> str:
    """The printed program without the deletions at the ends of its lines."""
    return re.sub(r";  .* = None$", "", str(ran), flags=re.MULTILINE)


def test_split_backward_runs_w_after_the_send(mlp: Captured) -> None:
    assert_expected_inline(
        calls(lowered(planned(mlp, "zb-h1"))[1]),
        """\
posted_0SEND_F0
posted_0SEND_F1
got_0SEND_F0
ran_1F0
ran_1I0
sent_1SEND_B0
got_0SEND_F1
ran_1F1
ran_1I1
sent_1SEND_B1
acc_layers_1_weight
acc_layers_1_bias
ran_1W0
ran_1W1
own_OUTPUT_0_1
sent_OUTPUT_0_1_0""",
    )


def calls(ran: Any) -> str:
    """The tasks and messages of a rank program in order."""
    skipped = ("getitem", "placeholder", "output")
    return "\n".join(
        node.name
        for node in ran.graph.graph.nodes
        if node.op not in skipped and getattr(node.target, "__name__", "") not in skipped
    )


def test_slots_are_parameters_once_and_batches_per_microbatch(mlp: Captured) -> None:
    first, second = lowered(planned(mlp, "1f1b"))
    assert first.slots == (
        Slot("layers_0_weight"),
        Slot("layers_0_bias"),
        Slot("x", 0),
        Slot("x", 1),
    )
    assert Slot("x", 0) not in second.slots and Slot("y", 1) in second.slots
    assert first.gradients == ("layers_0_weight", "layers_0_bias")
    assert second.gradients == ("layers_1_weight", "layers_1_bias")
    assert first.outputs == second.outputs == (0,)


def test_messages_are_described_alike_on_both_ends(mlp: Captured) -> None:
    first, second = lowered(planned(mlp, "1f1b"))
    assert first.messages == second.messages
    (spec,) = first.messages["0SEND_F1"].specs
    assert spec[:3] == ((2, 3), (3, 1), torch.float64)
    assert first.messages["0SEND_F1"] == Message(0, 1, (spec,))
    assert first.messages["1SEND_B0"][:2] == (1, 0)
    assert first.tags == second.tags


def test_one_rank_runs_both_stages_without_messages(mlp: Captured) -> None:
    program = planned(mlp, "0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1", ranks=1)
    (only,) = lowered(program)
    assert only.messages == {}
    assert "send" not in str(only) and "wait" not in str(only)


def test_outputs_go_to_the_listeners_alone(mlp: Captured) -> None:
    program = planned(mlp, "1f1b")
    ranks = [lower([program] * 2, rank, lambda g: g.forward, listeners=(0,)) for rank in range(2)]
    assert [ran.outputs for ran in ranks] == [(0,), ()]
    assert [name for name in ranks[1].messages if name.startswith("OUTPUT")] == ["OUTPUT 0 1>0"]


def test_unequal_microbatches_call_tasks_of_their_own(mlp: Captured) -> None:
    programs = [planned(mlp, "1f1b", rows=rows) for rows in (2, 1)]
    ran = lower(programs, 1, lambda graph: graph.forward)
    modules = sorted(name for name, _ in ran.graph.named_children())
    assert modules == ["stage1_B_rows1", "stage1_B_rows2", "stage1_F_rows1", "stage1_F_rows2"]
    assert [m.specs[0].shape for n, m in sorted(ran.messages.items()) if "SEND_F" in n] == [
        (2, 3),
        (1, 3),
    ]


def test_without_gradients_there_are_forwards_alone() -> None:
    with torch.no_grad():
        given = captured(MLP(3, 3, 3), *mlp_batch())
    second = lowered(planned(given, "1f1b"))[1]
    assert_expected_inline(
        calls(second),
        """\
posted_0SEND_F0
posted_0SEND_F1
got_0SEND_F0
ran_1F0
got_0SEND_F1
ran_1F1
own_OUTPUT_0_1
sent_OUTPUT_0_1_0""",
    )
    assert second.gradients == ()


def test_model_without_a_loss_pauses_before_its_backward() -> None:
    model = nn.Sequential(*(nn.Linear(3, 3, dtype=torch.float64) for _ in range(2)))
    given = captured(model, mlp_batch()[0])
    second = lowered(planned(given, "gpipe"))[1]
    assert_expected_inline(
        calls(second),
        """\
posted_0SEND_F0
posted_0SEND_F1
got_0SEND_F0
ran_1F0
got_0SEND_F1
ran_1F1
sent_OUTPUT_0_1_0
whole_OUTPUT_0
pause
acc_x_1_weight
acc_x_1_bias
ran_1B0
sent_1SEND_B0
ran_1B1
sent_1SEND_B1""",
    )
    values = [torch.ones(3, 3, dtype=torch.float64) for _ in second.slots]
    boxes: dict[str, tuple[Tensor, ...]] = {"0SEND_F0": (values[0],), "0SEND_F1": (values[0],)}
    with pytest.raises(RuntimeError, match="runs step by step"):
        second.graph(Blocking(boxes, threading.Condition()), *values)


# The graph itself, run as Python.


class Blocking:
    """A transport whose `wait` blocks, so that each rank runs its graph in a thread of its own."""

    def __init__(self, boxes: dict[str, tuple[Tensor, ...]], changed: threading.Condition) -> None:
        self.boxes, self.changed = boxes, changed
        self.status = Status()
        self.posted: list[str] = []

    def send(self, message: str, tensors: Sequence[Tensor]) -> None:
        with self.changed:
            self.boxes[message] = tuple(tensors)
            self.changed.notify_all()

    def post(self, message: str) -> None:
        self.posted.append(message)

    def ready(self, message: str) -> bool:
        return message in self.boxes

    def wait(self, message: str) -> tuple[Tensor, ...]:
        assert message in self.posted, f"{message} was not posted"
        with self.changed:
            assert self.changed.wait_for(lambda: message in self.boxes, timeout=20), message
            return self.boxes.pop(message)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_graph_run_directly_equals_the_executor(
    model: str, schedule: str, request: pytest.FixtureRequest
) -> None:
    given = request.getfixturevalue(model)
    program = planned(given, schedule)
    ranks = lowered(program)
    parts = list(microbatches(given, program, (2, 2)))
    boxes: dict[str, tuple[Tensor, ...]] = {}
    changed = threading.Condition()
    direct: dict[int, Any] = {}

    def run(ran: Any) -> None:
        with torch.no_grad():
            direct[ran.rank] = ran.graph(Blocking(boxes, changed), *slot_values(ran, parts))

    threads = [threading.Thread(target=run, args=(ran,)) for ran in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    with torch.no_grad():
        executed = run_ranks(ranks, parts)
    for rank, results in enumerate(executed):
        torch.testing.assert_close(direct[rank], results, rtol=0, atol=0)
    assert boxes == {}

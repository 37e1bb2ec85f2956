"""Every value that lives between tasks gets a place; nothing is written over what is still read."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given as examples
from hypothesis import settings
from hypothesis import strategies as st

from fxpipe.errors import OptionError, PassError
from fxpipe.lowering.check_memory import check_memory
from fxpipe.lowering.memory_picture import draw_memory
from fxpipe.lowering.memory_plan import MemoryPlan, Storage, plan_memory
from fxpipe.lowering.offsets import Block, colour, height, peak, place
from fxpipe.lowering.rank_program import RankProgram
from fxpipe.program import Program
from fxpipe.schedules import build
from tests.helpers import (
    GPT,
    MLP,
    Captured,
    captured,
    gpt_batch,
    lowered,
    mlp_batch,
    run_until,
)
from tests.numerics.models import UNet


@pytest.fixture(scope="module")
def mlp() -> Captured:
    return captured(MLP(3, 3, 3), *mlp_batch())


@pytest.fixture(scope="module")
def gpt() -> Captured:
    return captured(GPT(), *gpt_batch(8))


@pytest.fixture(scope="module")
def unet() -> Captured:
    images = torch.zeros(8, 1, 8, 8)
    return captured(UNet(), images, images)


Planned = list[tuple[MemoryPlan, Program, RankProgram]]


def planned(given: Captured, schedule: str, stages: int = 2, microbatches: int = 3) -> Planned:
    """The plan of every rank, after it was checked."""
    program = given.with_options(stages=stages, schedule=schedule).program(2, microbatches, 2)
    program = run_until(program, "plan_last_uses")
    found = [(plan_memory(program, ran), program, ran) for ran in lowered(program)]
    for plan, of, ran in found:
        check_memory(plan, of, ran)
    return found


def test_the_last_stage_of_1f1b_keeps_one_microbatch(mlp: Captured) -> None:
    (_, (plan, _, _)) = planned(mlp, "1f1b")
    assert_expected_inline(
        str(plan),
        """\
memory plan of rank 1: bytes, in steps of 64

owned: 768, beside 192 of parameters and buffers
        64  input: y_mb0: f64[2, 3]
        64  input: share_mb0: f64[]
        64  input: y_mb1: f64[2, 3]
        64  input: share_mb1: f64[]
        64  input: y_mb2: f64[2, 3]
        64  input: share_mb2: f64[]
       128  accumulator: acc_layers_1_weight: f64[3, 3]
        64  accumulator: acc_layers_1_bias: f64[3]
        64  result: own_OUTPUT_0_1: f64[]
        64  message, set 0: tanh_mb0: f64[2, 3]
        64  message, set 1: tanh_mb1: f64[2, 3]
        64  message, set 0: tanh_mb2: f64[2, 3]

placed: 384, live at once: 384 (1.00)
        64 at        0  addmm_1_mb0: f64[2, 3]  1F0 .. 1B0
        64 at       64  mul_mb0: f64[]  1F0 .. own_OUTPUT_0_1
        64 at      128  mm_mb0: f64[2, 3]  1B0 .. got_0SEND_F2
        64 at        0  addmm_1_mb1: f64[2, 3]  1F1 .. 1B1
        64 at      192  mul_mb1: f64[]  1F1 .. own_OUTPUT_0_1
        64 at      256  mm_mb1: f64[2, 3]  1B1 .. sent_OUTPUT_0_1_0
        64 at        0  addmm_1_mb2: f64[2, 3]  1F2 .. 1B2
        64 at      128  mul_mb2: f64[]  1F2 .. own_OUTPUT_0_1
        64 at      320  mm_mb2: f64[2, 3]  1B2 .. sent_OUTPUT_0_1_0""",
    )


def test_a_send_holds_its_value_until_the_answer_has_come(mlp: Captured) -> None:
    ((plan, _, _), _) = planned(mlp, "gpipe")
    assert_expected_inline(
        placed_lines(plan),
        """\
        64 at        0  tanh_mb0: f64[2, 3]  0F0 .. 0B0
        64 at       64  tanh_mb1: f64[2, 3]  0F1 .. 0B1
        64 at      128  tanh_mb2: f64[2, 3]  0F2 .. 0B2""",
    )


def placed_lines(plan: MemoryPlan) -> str:
    return str(plan).split("\n\nplaced")[1].split("\n", 1)[1]


def test_w_after_the_last_i_keeps_what_it_reads(mlp: Captured) -> None:
    (_, (plan, _, _)) = planned(mlp, "zb-h1", microbatches=2)
    assert_expected_inline(
        placed_lines(plan),
        """\
        64 at        0  addmm_1_mb0: f64[2, 3]  1F0 .. 1I0
        64 at       64  mul_mb0: f64[]  1F0 .. own_OUTPUT_0_1
        64 at      128  mse_loss_backward_mb0: f64[2, 3]  1I0 .. 1W0
        64 at      192  mm_mb0: f64[2, 3]  1I0 .. sent_OUTPUT_0_1_0
        64 at        0  addmm_1_mb1: f64[2, 3]  1F1 .. 1I1
        64 at      256  mul_mb1: f64[]  1F1 .. own_OUTPUT_0_1
        64 at      320  mse_loss_backward_mb1: f64[2, 3]  1I1 .. 1W1
        64 at      384  mm_mb1: f64[2, 3]  1I1 .. sent_OUTPUT_0_1_0""",
    )


def test_buffer_sets_are_counted_by_microbatches_in_flight(mlp: Captured) -> None:
    for schedule, expected in (("gpipe", 6), ("1f1b", 2)):
        _, (plan, _, _) = planned(mlp, schedule, microbatches=6)
        assert set(plan.sets.values()) == {expected}
    steady = [planned(mlp, "1f1b", microbatches=m)[0][0].placed for m in (3, 6)]
    assert steady[0] == steady[1]


STRAIGHT = [(m, s, 2) for m in ("mlp", "gpt", "unet") for s in ("gpipe", "1f1b", "zb-h1")]
LOOPED = [("gpt", "interleaved-1f1b", 4), ("gpt", "zb-v", 4), ("unet", "zb-v", 4)]


@pytest.mark.parametrize(("model", "schedule", "stages"), STRAIGHT + LOOPED)
def test_plans_of_models_take_what_is_live_at_once(
    model: str, schedule: str, stages: int, request: pytest.FixtureRequest
) -> None:
    for plan, _, _ in planned(request.getfixturevalue(model), schedule, stages, 4):
        assert plan.least <= plan.placed <= 1.05 * plan.least


def test_every_value_has_one_storage(gpt: Captured) -> None:
    for plan, _, _ in planned(gpt, "1f1b"):
        assert len({entry.name for entry in plan.entries}) == len(plan.entries)
        accumulators = [e.name for e in plan.of(Storage.ACCUMULATOR)]
        assert accumulators and all(name.startswith("acc_") for name in accumulators)
        assert all(e.size % plan.alignment == 0 for e in plan.entries)


def test_a_plan_that_reuses_memory_too_early_is_refused(mlp: Captured) -> None:
    (_, (plan, program, ran)) = planned(mlp, "1f1b")
    crowded = replace(plan, entries=tuple(replace(e, offset=0) for e in plan.entries))
    with pytest.raises(PassError, match="lets 1F0 write %mul_mb0 over %addmm_1_mb0, which is need"):
        check_memory(crowded, program, ran)


def test_a_plan_that_writes_over_what_is_still_sent_is_refused(mlp: Captured) -> None:
    (_, (plan, program, ran)) = planned(mlp, "1f1b")
    at = {e.name: e.offset for e in plan.entries}
    moved = [replace(e, offset=at["mm_mb1"]) if e.name == "mm_mb2" else e for e in plan.entries]
    with pytest.raises(PassError, match="1B2 write %mm_mb2 over %mm_mb1.*the end of sent_1SEND_B1"):
        check_memory(replace(plan, entries=tuple(moved)), program, ran)


def test_a_plan_that_receives_over_what_is_still_read_is_refused(mlp: Captured) -> None:
    (_, (plan, program, ran)) = planned(mlp, "1f1b")
    one_set = tuple(replace(e, set=0) for e in plan.entries)
    with pytest.raises(PassError, match="posted_0SEND_F1 write %tanh_mb1 over %tanh_mb0"):
        check_memory(replace(plan, entries=one_set), program, ran)


# Offsets.

blocks = st.builds(
    lambda size, start, length: Block(64 * size, start, start + length),
    st.integers(1, 30),
    st.integers(0, 40),
    st.integers(0, 15),
)


@examples(st.lists(blocks, max_size=25))
@settings(max_examples=60)
def test_live_blocks_never_overlap(made: list[Block]) -> None:
    offsets, colours = place(made), colour(made)
    for i, one in enumerate(made):
        for j in range(i):
            if one.meets(made[j]):
                low, high = sorted((i, j), key=lambda k: offsets[k])
                assert offsets[low] + made[low].size <= offsets[high]
                assert colours[i] != colours[j]
    assert max(colours, default=-1) + 1 == peak([b._replace(size=1) for b in made])


@pytest.mark.parametrize("seed", range(12))
def test_random_lifetimes_take_a_quarter_more_at_most(seed: int) -> None:
    """Values of a schedule drawn at random: microbatches in flight, each with several values."""
    draw = random.Random(seed)
    schedule = build(
        draw.choice(["gpipe", "1f1b", "zb-h1"]), stages=2 + seed % 3, microbatches=4 + seed
    )
    rank = draw.randrange(schedule.num_ranks)
    first: dict[int, int] = {}
    made = []
    for at, action in enumerate(schedule.actions(rank)):
        start = first.setdefault(action.microbatch, at)
        made += [
            Block(64 * draw.randint(1, 40), draw.randint(start, at), at)
            for _ in range(draw.randint(1, 4))
        ]
    assert height(made, place(made)) <= 1.25 * peak(made)


def test_a_picture_is_drawn_of_every_rank(mlp: Captured, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plans = [plan for plan, _, _ in planned(mlp, "1f1b")]
    draw_memory(plans, tmp_path / "memory.svg")
    drawn = (tmp_path / "memory.svg").read_text()
    assert "tanh_mb2" in drawn and "384 live at once" in drawn
    with pytest.raises(OptionError, match="suffix '.txt'"):
        draw_memory(plans, tmp_path / "memory.txt")

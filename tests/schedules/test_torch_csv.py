"""PyTorch's own schedules: dumped by torch, read, written, read by torch again; and beside ours."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from fxpipe.checker import check_schedule
from fxpipe.errors import ScheduleError
from fxpipe.schedule import Kind, Schedule
from fxpipe.schedules import build, from_csv, load, save, to_csv

ALL = [
    "ScheduleLoopedBFS",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
]
FSDP = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")


def torch_schedule(name: str, ranks: int, microbatches: int, chunks: int = 2) -> Any:
    """Torch's schedule of that class over stages that are never run."""
    stages = [
        SimpleNamespace(
            num_stages=ranks * chunks,
            group_size=ranks,
            group_rank=0,
            group=None,
            stage_index=chunk * ranks,
            is_first=False,
            is_last=False,
            has_backward=False,
            submod=None,
            _configure_data_parallel_mode=lambda *_, **__: None,
        )
        for chunk in range(chunks)
    ]
    schedule = getattr(torch_schedules, name)(stages, microbatches, loss_fn=lambda out, _: out)
    schedule._prepare_schedule_with_comms(schedule.pipeline_order)
    return schedule


def cells(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return [[c for c in row if c and not FSDP.fullmatch(c)] for row in csv.reader(file)]


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("name", ALL)
def test_torchs_csv_to_ours_and_back(name: str, form: str, tmp_path: Path) -> None:
    for ranks, microbatches in ((2, 4), (4, 8), (3, 6)):
        theirs, ours = tmp_path / "theirs.csv", tmp_path / "ours.csv"
        torch_schedule(name, ranks, microbatches)._dump_csv(str(theirs), format=form)
        schedule = load(theirs)
        has_messages = any(a.kind is Kind.SEND_F for a in schedule.actions(0))
        assert has_messages == (form == "compute_comms")
        assert (schedule.num_stages, schedule.num_microbatches) == (2 * ranks, microbatches)
        save(schedule, ours)
        assert cells(ours) == cells(theirs)
        assert load(ours) == schedule == Schedule.parse(str(schedule))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-zb", "zb-v", "dualpipev"])
def test_torch_reads_the_csv_of_our_families(name: str, tmp_path: Path) -> None:
    schedule = build(name, stages=8, microbatches=8, ranks=8 if name in ("1f1b", "zb-h1") else 4)
    save(schedule, tmp_path / "ours.csv")
    chunks = 8 // schedule.num_ranks
    reader = torch_schedule("ScheduleInterleaved1F1B", schedule.num_ranks, 8, chunks)
    reader._load_csv(str(tmp_path / "ours.csv"))
    reader._dump_csv(str(tmp_path / "theirs.csv"), format="compute_comms")
    lowered = load(tmp_path / "theirs.csv")
    check_schedule(lowered, 8, 8)
    for rank in range(schedule.num_ranks):
        computing = [a for a in lowered.actions(rank) if a.kind.is_compute]
        # Torch joins an I and its W that are neighbours into one B.
        assert {(a.stage, a.microbatch) for a in computing} == {
            (a.stage, a.microbatch) for a in schedule.actions(rank)
        }


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("ScheduleInterleaved1F1B", "interleaved-1f1b"),
        ("ScheduleInterleavedZeroBubble", "interleaved-zb"),
        ("ScheduleZBVZeroBubble", "zb-v"),
        ("ScheduleDualPipeV", "dualpipev"),
    ],
)
def test_our_families_are_those_of_torch(theirs: str, ours: str) -> None:
    for ranks, microbatches in ((2, 4), (4, 8), (4, 16), (8, 16)):
        order = torch_schedule(theirs, ranks, microbatches).pipeline_order
        text = "\n".join(",".join(str(a or "") for a in order[r]) for r in range(ranks))
        family = build(ours, stages=2 * ranks, microbatches=microbatches, ranks=ranks)
        assert from_csv(text) == family, (ranks, microbatches)


def test_a_pair_may_name_its_backward_first() -> None:
    schedule = from_csv("0F0,(0B0;0F1)OVERLAP_F_B, 0B1,\n")
    assert str(schedule) == "0F0 [0F1|0B0] 0B1"
    assert to_csv(schedule) == "0F0,(0F1;0B0)OVERLAP_F_B,0B1\r\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the CSV is empty"),
        ("0F0,0X0", "row 1 of the CSV: '0X0' is no action"),
        ("0F0\n(0F0;1F0)OVERLAP_F_B", "row 2 of the CSV: [0F0|1F0] pairs no F with a B"),
        ("(0F0;1F0;0B1)OVERLAP_F_B", "row 1 of the CSV: '(0F0;1F0;0B1)OVERLAP_F_B' is no action"),
        ("__import__('os')", "is no action"),
    ],
)
def test_csv_that_is_no_schedule_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ScheduleError) as error:
        from_csv(text)
    assert sentence in str(error.value)


def test_a_message_past_a_neighbour_has_no_place_in_torchs_csv() -> None:
    with pytest.raises(ScheduleError, match="0SEND_F0>2 goes past a neighbour"):
        to_csv(Schedule.parse("0F0 0SEND_F0>2"))

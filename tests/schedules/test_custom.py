"""Schedules that a user writes: registered functions and files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fxpipe.errors import ScheduleError
from fxpipe.schedule import Schedule
from fxpipe.schedules import build, custom, families, load, register, resolve, save
from fxpipe.text_grid import grid
from tests.numerics.models import MLP, pipelined, seeded


@pytest.fixture(autouse=True)
def no_registered_schedules() -> Iterator[None]:
    yield
    custom.REGISTERED.clear()


def one_by_one(stages: int, microbatches: int, ranks: int, reverse: int = 0) -> list[str]:
    order = [*range(microbatches)][:: -1 if reverse else 1]
    return [" ".join(f"{s}F{i} {s}B{i}" for i in order) for s in range(stages)]


def test_a_registered_function_is_built_by_name() -> None:
    register("one-by-one")(one_by_one)
    schedule = build("one-by-one", stages=2, microbatches=2)
    assert str(schedule) == "0F0 0B0 0F1 0B1\n1F0 1B0 1F1 1B1"
    assert schedule.name == "one-by-one"
    by_option = build("one-by-one:reverse=1", stages=1, microbatches=2)
    assert str(by_option) == "0F1 0B1 0F0 0B0"
    assert resolve("one-by-one", stages=2, microbatches=2) == schedule
    with pytest.raises(ScheduleError, match="did you mean 'one-by-one'"):
        build("one-by-on", stages=2, microbatches=2)


def test_a_registered_function_may_return_text_or_a_schedule() -> None:
    register("text")(lambda stages, microbatches, ranks: "0F0 0B0\n1F0 1B0")
    register("object")(lambda stages, microbatches, ranks: Schedule.parse("0F0 0B0\n1F0 1B0"))
    register("family")(
        lambda stages, microbatches, ranks: build(
            "1f1b", stages=stages, microbatches=microbatches, ranks=ranks
        )
    )
    text, parsed, built = (
        build(name, stages=2, microbatches=1) for name in ("text", "object", "family")
    )
    assert text == parsed == built


def no_rank(stages: int, microbatches: int, ranks: int) -> list[str]:
    return [str(1 // (ranks - 2))]


FAULTS = {
    "raises": (
        no_rank,
        ["no_rank of ", "failed for stages=2, microbatches=2, ranks=2 with ZeroDivisionError: ",
         "test_custom.py:", "return [str(1 // (ranks - 2))]"],
        ZeroDivisionError,
    ),
    "takes other names": (
        lambda n: ["0F0 0B0"],
        ["cannot be called with stages, microbatches, ranks by keyword (missing a ",
         "argument: 'n'); write def my_schedule(stages, microbatches, ranks)"],
        TypeError,
    ),
    "returns nothing": (
        lambda stages, microbatches, ranks: None,
        ["returned None; expected a list of one line per rank", "test_custom.py:"],
        type(None),
    ),
    "returns numbers": (
        lambda stages, microbatches, ranks: [[0, 1]],
        ["returned a list of list; expected"],
        type(None),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_registered_function_is_told_as_the_users(name: str) -> None:
    function, words, cause = FAULTS[name]
    register("mine")(function)
    with pytest.raises(ScheduleError, match="the schedule 'mine', ") as told:
        build("mine", stages=2, microbatches=2)
    assert all(word in str(told.value) for word in words), told.value
    assert isinstance(told.value.__cause__, cause)


def test_a_fault_of_a_schedule_is_no_failure_of_a_pass() -> None:
    register("mine")(no_rank)
    x = torch.ones(8, 6, dtype=torch.float64)
    faults = {
        "mine": "^the schedule 'mine', no_rank of .*test_custom.py:",
        "nosuch.txt": "^the schedule cannot be read from nosuch.txt: No such file",
    }
    for schedule, words in faults.items():
        with pytest.raises(ScheduleError, match=words):
            pipelined(seeded(MLP), schedule=schedule)(x, x)
        torch.compiler.reset()


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="read from .*nosuch.csv: No such file") as told:
        load(tmp_path / "nosuch.csv")
    assert isinstance(told.value.__cause__, FileNotFoundError)
    (tmp_path / "binary.txt").write_bytes(b"0F0 \xff")
    with pytest.raises(ScheduleError, match="is no text in UTF-8 .byte 4."):
        resolve(tmp_path / "binary.txt", stages=1, microbatches=1)


def test_a_second_function_of_one_name_counts_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    for function in (one_by_one, one_by_one):
        register("mine")(function)
    assert caplog.text == ""
    register("mine")(lambda stages, microbatches, ranks: "0F0 0F1 0B0 0B1")
    assert "the schedule 'mine' is now <lambda> of " in caplog.text
    assert str(build("mine", stages=1, microbatches=2)) == "0F0 0F1 0B0 0B1"


def test_what_a_registered_function_returns_is_checked() -> None:
    register("short")(lambda stages, microbatches, ranks: "0F0 0B0\n1F0 1B0")
    with pytest.raises(ScheduleError, match="stage 0 has nothing for microbatch 1") as error:
        build("short", stages=2, microbatches=2)
    assert "schedule 'short'" in str(error.value)


def test_branches_are_checked_along_their_own_edges() -> None:
    register("branches")(lambda stages, microbatches, ranks: "0F0 2F0 1F0 3F0 3B0 1B0 2B0 0B0")
    sizes: dict[str, Any] = {"stages": 4, "microbatches": 1}
    edges = {(0, 1), (0, 2), (1, 3), (2, 3)}
    assert build("branches", ranks=1, forward_edges=edges, **sizes).num_ranks == 1
    with pytest.raises(ScheduleError, match="deadlock"):
        build("branches", **sizes)


@pytest.mark.parametrize("name", ["1f1b", "", "a b", "a:b", "a=b"])
def test_a_name_that_cannot_be_used_is_refused(name: str) -> None:
    with pytest.raises(ScheduleError, match="cannot be registered; choose a name"):
        register(name)


@pytest.mark.parametrize("name", families())
@pytest.mark.parametrize("suffix", [".txt", ".csv"])
def test_a_family_to_a_file_and_back(name: str, suffix: str, tmp_path: Path) -> None:
    schedule = build(name, stages=8, microbatches=8, ranks=4)
    path = tmp_path / f"mine{suffix}"
    save(schedule, path)
    assert load(path) == schedule
    assert load(path).name == "mine"
    assert resolve(path, stages=8, microbatches=8) == schedule
    assert resolve(str(path), stages=8, microbatches=8) == schedule


def test_a_file_is_checked_unless_told_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "wrong.txt"
    path.write_text("0F0\n")
    with pytest.raises(ScheduleError, match="schedule 'wrong': stage 0 has 0F0 for microbatch 0"):
        load(path)
    assert str(load(path, check=False)) == "0F0"


def test_reading_a_file_runs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "evil.txt"
    path.write_text("0F0 __import__('pathlib').Path('ran').touch()")
    with pytest.raises(ScheduleError, match="is no action"):
        load(path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("# by hand\n0F0 0B0\n\n1F0 1X0", "line 4 (rank 1): '1X0' is no action"),
        ("rank 0: 0F0\nrank 2: 1F0", "line 2 (rank 1): 'rank 2: 1F0' is labelled rank 2"),
        ("0F0,0F1,0B0", "line 1 (rank 0): '0F0,0F1,0B0' has a comma; separate actions by blanks"),
        (",".join(f"0F{i}" for i in range(99)), "'0F0,0F1,0F2,0F3,0F4,0F5,0F6,0F7,0F8,0...' has"),
        ("0F0;" * 30, "'0F0;0F0;0F0;0F0;0F0;0F0;0F0;0F0;0F0;0...' is no action"),
        (grid(build("1f1b", stages=2, microbatches=1)), "line 1 (rank 0): this is a grid"),
        ("   0  0F0     .\n   1  .       1F0", "paste what print(schedule) shows"),
        ("   0  .  1F0\n> 1  [0F0|1B0]", "this is a grid"),
    ],
)
def test_text_that_cannot_be_read_is_refused_with_its_line(
    text: str, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ScheduleError) as error:
        Schedule.parse(text)
    assert sentence in str(error.value)
    path = tmp_path / "mine.txt"
    path.write_text(text)
    with pytest.raises(ScheduleError) as of_file:
        load(path)
    assert str(of_file.value) == f"mine.txt: {error.value}"

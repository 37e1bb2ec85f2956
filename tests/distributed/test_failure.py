"""A rank that raises, dies or stalls stops all others within seconds, with one story."""

from __future__ import annotations

import random
import re
import socket
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.distributed import failing
from tests.distributed.failing import Told
from tests.distributed.harness import Outcome, run_ranks, run_to_the_end

SECONDS = 10.0  # within which the others must raise, after the death or after the timeout
LIMIT = 3.0  # the option `timeout` where a rank stalls
RANKS = 3


class Ended(NamedTuple):
    """A run with a failure: what the ranks were told, where the victim was, and when."""

    told: dict[int, Told]
    place: str
    delays: list[float]  # until each survivor raised
    seconds: float  # until the last process was gone


def fail(how: str, victim: int, at: int, folder: Path, limit: float = 60.0) -> Ended:
    outcomes = run_to_the_end(
        failing.step_until_told, RANKS, folder, timeout=150.0, how=how, victim=victim, at=at,
        limit=limit, notes=folder,
    )  # fmt: skip
    gone = time.time()
    for rank, outcome in enumerate(outcomes):
        died = rank == victim and how in ("kill", "exit")
        assert (outcome.exit_code == 0) != died and not outcome.left_behind, told(outcomes)
    moment, _, place = (folder / "event").read_text().partition(" ")
    found = {rank: o.value for rank, o in enumerate(outcomes) if o.value is not None}
    delays = [found[rank].at - float(moment) for rank in found if rank != victim]
    for rank, each in found.items():
        assert each.kind == "RankError", told(outcomes)
        print(f"{how} of rank {victim} in {place}; rank {rank}: {each.message}")
    return Ended(found, place, delays, gone - float(moment))


def told(outcomes: list[Outcome]) -> str:
    return "\n".join(f"--- rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes))


def check_death(victim: int, at: int, folder: Path, how: str = "kill") -> None:
    end = fail(how, victim, at, folder)
    assert len(end.told) == RANKS - 1
    assert max(end.delays) < SECONDS and end.seconds < SECONDS + 5
    for rank, each in end.told.items():
        assert each.message.startswith(f"rank {victim} died"), each.message
        for other in set(range(RANKS)) - {victim}:
            assert f"rank {other} was " in each.message, (rank, each.message)


def check_stall(victim: int, at: int, folder: Path, how: str = "stop") -> None:
    end = fail(how, victim, at, folder, LIMIT)
    assert len(end.told) == RANKS
    assert LIMIT <= max(end.delays) < LIMIT + SECONDS
    for each in end.told.values():
        assert each.message.startswith(f"rank {victim} stalled"), each.message


def some_places(number: int, seed: int) -> list[tuple[int, int]]:
    """Victims in turn, each with the number of the call in which it fails."""
    draw = random.Random(seed)
    return [(i % RANKS, draw.randint(1, failing.OPERATIONS)) for i in range(number)]


@pytest.mark.parametrize(("victim", "at"), some_places(4, seed=1))
def test_a_killed_rank_stops_the_others(victim: int, at: int, tmp_path: Path) -> None:
    check_death(victim, at, tmp_path)


@pytest.mark.parametrize(("victim", "at"), some_places(2, seed=2))
def test_a_stopped_rank_stops_the_others(victim: int, at: int, tmp_path: Path) -> None:
    check_stall(victim, at, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_ranks_killed_and_stopped_twenty_times(tmp_path: Path) -> None:
    for number, (victim, at) in enumerate(some_places(20, seed=3)):
        check_death(victim, at, tmp_path / f"kill{number}")
    for number, (victim, at) in enumerate(some_places(20, seed=4)):
        check_stall(victim, at, tmp_path / f"stop{number}")


def test_a_rank_that_sleeps_in_a_task_stops_the_others(tmp_path: Path) -> None:
    check_stall(1, 40, tmp_path, how="sleep")


@pytest.mark.parametrize("how", ["raise", "memory"])
def test_a_rank_that_raises_is_named_with_its_cause_on_all(how: str, tmp_path: Path) -> None:
    end = fail(how, 2, 30, tmp_path)
    assert max(end.delays) < SECONDS and len(end.told) == RANKS
    cause = "ValueError: no such luck" if how == "raise" else "OutOfMemoryError: tried to"
    for each in end.told.values():
        assert each.message.startswith(f"rank 2 failed in {end.place}"), each.message
        assert cause in each.message
        assert "rank 0 was " in each.message and "rank 1 was " in each.message
    assert cause.partition(":")[0] in end.told[2].cause


def test_an_error_in_a_task_names_action_line_and_cause(tmp_path: Path) -> None:
    found = run_ranks(failing.look_up_too_high, RANKS, tmp_path)
    for first, second in found:
        assert re.match(
            r"rank 1 failed in 1F2 \(stage 1, microbatch 2\) at .*failing\.py:\d+: x = x \+ "
            r"self\.table\(ids\): IndexError: index out of range in self; when it stopped: "
            r"rank 0 was .*, rank 2 was waiting for 1SEND_F\d from rank 1 for \d\.\d s",
            first.message,
        ), first.message
        # No later step takes messages of the broken one for its own.
        assert second.message == first.message and second.step == 0
    assert "IndexError" in found[1][0].cause


def test_a_rank_that_raises_at_capture_stops_the_others(tmp_path: Path) -> None:
    waiting, raised = run_to_the_end(failing.raise_at_capture, 2, tmp_path, timeout=60.0)
    assert "ValueError: no such luck" in str(raised.error)
    assert waiting.value is not None, str(waiting)
    assert waiting.value.message.startswith("rank 1 ended before its first step"), str(waiting)


@pytest.mark.parametrize("first", [0, 2])
def test_a_rank_that_does_not_come_to_a_step_is_given_up(first: int, tmp_path: Path) -> None:
    found = run_ranks(failing.come_late, RANKS, tmp_path, limit=2.0, first=first, notes=tmp_path)
    place = "before its first step" if not first else r"outside a step \(it began 2\)"
    for each in found:
        assert re.match(f"rank 1 stalled {place}: ", each.message), each.message
    assert f"rank 0 was waiting for rank 1 to come to step {first + 1} for " in found[2].message


def test_a_rank_that_ends_early_stops_those_who_go_on(tmp_path: Path) -> None:
    going, ended, also = run_ranks(failing.stop_early, RANKS, tmp_path)
    assert ended is None
    for each in (going, also):
        assert re.match(r"rank 1 ended outside a step \(it began 1\): it left", each.message), each


@pytest.mark.parametrize("victim", [0, 1])
def test_the_port_is_free_after_a_failure(victim: int, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    outcomes = run_to_the_end(
        failing.fail_over_tcp, RANKS, tmp_path, port=port, victim=victim, notes=tmp_path
    )
    for rank in set(range(RANKS)) - {victim}:
        assert outcomes[rank].value is not None, told(outcomes)
        message = outcomes[rank].value.message
        assert message.startswith(f"rank {victim} died"), message
    socket.create_server(("127.0.0.1", port)).close()

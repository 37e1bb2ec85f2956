"""Bars are for those who asked, on a terminal, on the lowest rank; and the line per compile."""

from __future__ import annotations

import io
import logging
import sys

import pytest
import torch

from fxpipe import schedules
from fxpipe.choose import choose
from fxpipe.cli import run
from fxpipe.views.progress import each, is_wanted, progress, shown_by_command
from tests.numerics.models import MLP, pipelined, seeded

pytest.importorskip("rich")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Called by the test itself: pytest sets standard error anew when fixtures are made."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("FXPIPE_LOG", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    return screen


def test_library_draws_no_bar_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    assert list(each("things", [1, 2], 2)) == [1, 2]
    choose(2, 4, 2)
    assert screen.getvalue() == ""


@pytest.mark.parametrize(("level", "wanted"), [("info", True), ("2", True), ("warning", False)])
def test_log_level_asks_for_bars(level: str, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal(monkeypatch)
    monkeypatch.setenv("FXPIPE_LOG", level)
    assert is_wanted() == wanted


def test_no_bar_where_the_output_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXPIPE_LOG", "info")
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    with progress("things", 1) as advance:
        advance()
    assert screen.getvalue() == ""


def test_only_the_lowest_rank_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal(monkeypatch)
    monkeypatch.setenv("FXPIPE_LOG", "info")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank in (0, 1):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        assert is_wanted() == (rank == 0)


def test_bar_counts_and_lines_of_log_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    log = logging.getLogger("fxpipe")
    handler = logging.StreamHandler(screen)
    log.addHandler(handler)
    try:
        with shown_by_command():
            for number in each("things made", range(3), 3):
                log.warning("thing %d", number)
                list(each("parts of it", range(2), 2))
    finally:
        log.removeHandler(handler)
    drawn = screen.getvalue()
    assert "things made" in drawn and "3/3" in drawn and "parts of it" not in drawn
    assert all(f"thing {number}" in drawn for number in range(3))
    assert handler.stream is screen


def test_command_that_searches_draws_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    assert run(["schedule", "auto", "--ranks", "2", "--microbatches", "4"]) == 0
    assert "schedules considered" in screen.getvalue()
    assert f"{len(schedules.families())}/{len(schedules.families())}" in screen.getvalue()


def test_compile_is_one_line_of_log(caplog: pytest.LogCaptureFixture) -> None:
    x, fewer = torch.ones(8, 6, dtype=torch.float64), torch.ones(7, 6, dtype=torch.float64)
    with caplog.at_level(logging.INFO, logger="fxpipe"):
        step = pipelined(seeded(MLP), stages=["layers.1", "layers.3"], schedule="gpipe")
        step(x, x).backward()
        step(fewer, fewer).backward()
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("fxpipe")]
    ends = [line.rpartition("(")[2] for line in lines]
    assert ends == ["plan 1 of this trace)", "plan 2 of this trace)"]
    first = lines[0]
    assert first.startswith("compiled 3 stages on 3 ranks, cut before layers.1 and layers.3, ")
    assert "schedule gpipe, microbatches of 3 3 2 rows, bubble about " in first
    # 3 rows of 6 numbers of 8 bytes, there and back.
    assert "0 -> 1: 144 B, 1 -> 0: 144 B, 1 -> 2: 144 B, 2 -> 1: 144 B a microbatch" in first

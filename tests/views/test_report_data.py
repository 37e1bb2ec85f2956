"""A folder -> what its report says, and what it says where parts are missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("jinja2")

from fxpipe.errors import OptionError
from fxpipe.timeline import Span, Timeline
from fxpipe.views.report_page import longest_bubbles, numbers_of, read, write_report


def timeline(name: str, scale: float, step: int = 0) -> Timeline:
    """Two ranks: the second waits for the first, then the first for the second."""
    spans = (
        Span(0, "compute", "F", "0F0", 0.0, 1.0 * scale, None, 0, 0),
        Span(0, "send", "send", "0SEND_F0", scale, 1.1 * scale, None, 0, 0, 64),
        Span(0, "compute", "wait", "1SEND_B0", 1.1 * scale, 3 * scale, "1B0 of rank 1", 1, 0),
        Span(0, "compute", "B", "0B0", 3 * scale, 4 * scale, None, 0, 0),
        Span(1, "compute", "wait", "0SEND_F0", 0.0, 1.1 * scale, "0F0 of rank 0", 0, 0),
        Span(1, "compute", "B", "1B0", 1.1 * scale, 3 * scale, None, 1, 0),
    )
    memory = (((0.0, 0.0), (scale, 100.0)), ((scale, 50.0),))
    return Timeline(name, 2, 4 * scale, spans, memory, step)


def write_trace(folder: Path) -> None:
    measured = [timeline("measured", 2.0, 0), timeline("measured", 3.0, 1)]
    lines = {"planned": timeline("planned", 1.0).to_json(), "measured": []}
    lines["measured"] = [each.to_json() for each in measured]
    (folder / "timelines.json").write_text(json.dumps(lines))


def test_numbers_are_measured_with_the_planned_ones_beside(tmp_path: Path) -> None:
    write_trace(tmp_path)
    shown = {number.label: (number.value, number.note) for number in numbers_of(read(tmp_path))}
    assert shown["Step time"] == ("10 s", "planned 4 s")
    assert shown["Bubble"][1].startswith("planned ")
    assert shown["Peak memory"] == ("100 B", "held by rank 0")
    assert shown["Sent a step"] == ("64 B", "1 message")


def test_longest_bubbles_are_those_of_the_last_step(tmp_path: Path) -> None:
    write_trace(tmp_path)
    first, *_ = longest_bubbles(read(tmp_path))
    assert (first["rank"], first["length"]) == (0, "5.7 s")
    assert first["cause"] == "waits for 1B0 of rank 1"


def test_missing_parts_say_what_to_switch_on(tmp_path: Path) -> None:
    write_trace(tmp_path)
    write_report(tmp_path, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "FXPIPE_DUMP=DIR" in page and "The plan is not there" in page
    assert "No timeline was recorded" not in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")


def test_folder_without_either_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="holds neither a trace nor a dump; make them with"):
        write_report(tmp_path, tmp_path / "report.html")
    with pytest.raises(OptionError, match="is no folder"):
        write_report(tmp_path / "none", tmp_path / "report.html")


def test_hostile_text_in_a_trace_stays_text(tmp_path: Path) -> None:
    write_trace(tmp_path)
    path = tmp_path / "timelines.json"
    path.write_text(path.read_text().replace("1B0 of rank 1", "</script><b>x</b> of rank 1"))
    write_report(tmp_path, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "<b>x</b>" not in page and "&lt;/script&gt;&lt;b&gt;x" in page

"""A folder -> what its report says, and what it says where parts are missing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("jinja2")

from fxpipe.errors import OptionError
from fxpipe.explanation import Explanation, RankFacts
from fxpipe.timeline import Span, Timeline
from fxpipe.views.explanation_text import summary
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
    assert shown["Step time"] == ("10 s", "median of 2 steps; planned 4 s")
    assert shown["Bubble"] == ("50.0 %", "median of 2 steps; planned 50.0 %")
    assert shown["Peak memory"] == ("100 B", "held by rank 0")
    assert shown["Sent a step"] == ("64 B", "measured, step 1; 1 message")


def test_numbers_of_a_prediction_say_that_they_are_one_and_what_it_leaves_out(
    tmp_path: Path,
) -> None:
    write_explanation(tmp_path)
    shown = {number.label: (number.value, number.note) for number in numbers_of(read(tmp_path))}
    assert shown == {
        "Step time": ("500 us", "predicted, without the host's time"),
        "Bubble": ("25.0 %", "predicted, without the host's time"),
        "Peak memory": ("300 B", "predicted, rank 1; weights, gradients, saved values"),
        "Sent a step": ("32 B", "predicted; 2 messages"),
        "Speed": ("8 k rows/s", "4 rows, predicted"),
    }
    assert "without the host's time: 500 us a step" in summary(explanation())


def test_page_says_what_its_numbers_count_where_they_count_differently(tmp_path: Path) -> None:
    write_trace(tmp_path)
    write_explanation(tmp_path)
    (folder := tmp_path / "1").mkdir()
    for path in tmp_path.glob("*.json"):
        path.rename(folder / path.name)
    write_report(folder, folder / "report.html")
    page = (folder / "report.html").read_text()
    assert f"<h1>Report of {tmp_path.name}/1</h1>" in page
    assert (
        "so that the measured bubble may be below the planned one. The timeline opens at step 1."
        in page
    )
    assert "predicted 32 B" in page and "is a third number" in page


def explanation() -> Explanation:
    ranks = (
        RankFacts(0, (0,), 100.0, 200.0, 3e-4, 1, 16.0),
        RankFacts(1, (1,), 150.0, 300.0, 4e-4, 1, 16.0),
    )
    return Explanation("1f1b", True, (2, 2), ("0F0", "1F0"), "step", (), (), ranks, 5e-4, 0.25, ())


def write_explanation(folder: Path) -> None:
    (folder / "explanation.json").write_text(json.dumps(explanation().to_json()))


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


def test_folder_of_folders_names_those_that_hold_something(tmp_path: Path) -> None:
    for name in ("1", "2", "empty"):
        (tmp_path / name).mkdir()
    write_trace(tmp_path / "1")
    (tmp_path / "2" / "microbatch-of-2").mkdir()
    (tmp_path / "2" / "microbatch-of-2" / "00-input.txt").write_text("# 00 input\n\n")
    expected = f"2 folders in it do: {tmp_path}/1, {tmp_path}/2"
    with pytest.raises(OptionError, match=re.escape(expected) + "$"):
        write_report(tmp_path, tmp_path / "report.html")


FORMS = {
    "timelines.json": ['{"planned": null}', "[]", '{"planned": null, "measured": [{"name": 1}]}'],
    "metrics.json": ["[1]", '{"steps": []}'],
    "explanation.json": ["3", '{"schedule": "1f1b"}'],
    "microbatch-of-2/passes.json": ['{"name": "x"}', '[{"name": "x"}]'],
    "microbatch-of-2/00-input.json": [
        "[]",
        '{"places": {}}',
        '{"places": [], "lines": []}',
        '{"places": {"a": [0, 1]}, "lines": []}',
        '{"places": {}, "lines": [], "tags": 1}',
    ],
    "microbatch-of-2/output-code.json": ["[]"],
}


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in FORMS.items() for text in ("{", *texts)]
)
def test_broken_file_is_named_with_what_it_holds(tmp_path: Path, name: str, text: str) -> None:
    write_trace(tmp_path)
    (tmp_path / "microbatch-of-2").mkdir()
    (tmp_path / "microbatch-of-2" / "00-input.txt").write_text("# 00 input\n\n")
    (tmp_path / name).write_text(text)
    found = "is no whole JSON, from character 1 of 1 on" if text == "{" else "but " + text
    with pytest.raises(OptionError) as raised:
        write_report(tmp_path, tmp_path / "report.html")
    message = str(raised.value)
    assert str(tmp_path / name) in message and found in message and "\n" not in message
    assert message.endswith("; remove the file, or let the run write it again")
    assert not (tmp_path / "report.html").exists()


def test_report_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    write_trace(tmp_path)
    (tmp_path / "report.html").mkdir()
    with pytest.raises(OptionError, match=r"report.html' cannot be written: Is a directory"):
        write_report(tmp_path, tmp_path / "report.html")


def test_hostile_text_in_a_trace_stays_text(tmp_path: Path) -> None:
    write_trace(tmp_path)
    path = tmp_path / "timelines.json"
    path.write_text(path.read_text().replace("1B0 of rank 1", "</script><b>x</b> of rank 1"))
    write_report(tmp_path, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "<b>x</b>" not in page and "&lt;/script&gt;&lt;b&gt;x" in page

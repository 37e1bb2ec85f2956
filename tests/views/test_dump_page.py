"""What a dump holds beside its texts, and the page that is made of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fxpipe import log
from fxpipe.errors import PassError
from fxpipe.views import dump_page
from fxpipe.views.differences import stretches
from fxpipe.views.dump_page import read_dump
from fxpipe.views.snapshot import excerpt
from tests.helpers import MLP, mlp_batch


def dumped(folder: Path, **options: Any) -> Path:
    """The dump of one step of an MLP in two stages."""
    options = {"stages": 2, "microbatches": 2, "lowering": "eager", **options}
    step = torch.compile(MLP(3, 3, 3), backend="fxpipe", options={**options, "dump": str(folder)})
    step(*mlp_batch()).backward()
    return folder / "microbatch-of-2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dumped(tmp_path_factory.mktemp("dump"), schedule="zb-h1", passes={"normalize": False})


def apply(before: list[str], after: list[str]) -> list[str]:
    """The second text put together from the first one's equal stretches and its own others."""
    text: list[str] = []
    for tag, a, b, c, d in stretches(before, after):
        text += before[a:b] if tag == "equal" else after[c:d]
    return text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("abc", "abc"),
        ("abc", "axc"),
        ("", "ab"),
        ("ab", ""),
        ("aXb", "ab"),
        ("aab", "ab"),
        ("", ""),
    ],
)
def test_stretches_cover_both_texts_in_order(before: str, after: str) -> None:
    found = stretches(list(before), list(after))
    assert apply(list(before), list(after)) == list(after)
    ends = [(0, 0), *((b, d) for _, _, b, _, d in found)]
    assert [(a, c) for _, a, _, c, _ in found] == ends[:-1]
    assert ends[-1] == (len(before), len(after))


def test_equal_texts_are_one_stretch() -> None:
    assert stretches(["a", "b"], ["a", "b"]) == [("equal", 0, 2, 0, 2)]


def test_each_pass_has_its_time_its_counts_and_the_lines_of_its_values(folder: Path) -> None:
    found = read_dump(folder)
    by_name = {entry["name"]: entry for entry in found["passes"]}
    joint = by_name["trace_joint"]
    assert joint["seconds"] > 0 and joint["total"] == joint["nodes"]["joint"]
    assert set(by_name["split_tasks"]["nodes"]) == {"0F", "0W", "1F", "1I", "1W"}
    line, _ = joint["places"]["tanh"]
    assert "helpers.py" in found["excerpts"][line]["text"]
    assert any("torch.tanh(x)" in text for text in found["excerpts"][line]["source"])
    assert found["off"] == ["normalize"]


def test_stages_and_kinds_are_differences_though_the_text_has_none(folder: Path) -> None:
    by_name = {entry["name"]: entry for entry in read_dump(folder)["passes"]}
    assert any(line.endswith("# stage 1") for line in by_name["assign_stages"]["text"])
    assert any(line.endswith("# stage 1, I") for line in by_name["split_weight_grads"]["text"])
    assert {tag for tag, *_ in by_name["split_weight_grads"]["changes"]} == {"equal", "replace"}


def test_page_stands_alone(folder: Path) -> None:
    page = (folder / "index.html").read_text()
    assert "http://" not in page and "https://" not in page and "<link" not in page
    assert "default-src 'none'" in page
    assert read_dump(folder)["schedule"].startswith("step  rank 0")
    assert [entry["rank"] for entry in read_dump(folder)["ranks"]] == [0, 1]


def test_explanation_lies_beside_the_dump(folder: Path) -> None:
    explained = json.loads((folder / "explanation.json").read_text())
    assert explained["schedule"] == "zb-h1" and len(explained["stages"]) == 2


def test_stopped_and_failed_runs_have_a_page_too(tmp_path: Path) -> None:
    with pytest.raises(PassError):
        dumped(tmp_path / "stopped", stop_after="assign_stages")
    assert "index.html" in [path.name for path in (tmp_path / "stopped").rglob("*")]

    def fails(program: Any) -> Any:
        raise KeyError("no such node")

    with pytest.raises(PassError, match="fails failed: KeyError"):
        dumped(tmp_path / "failed", extra_passes=[("after", "trace_joint", fails)])
    (page,) = (tmp_path / "failed").rglob("index.html")
    assert "trace_joint" in page.read_text()


def test_without_jinja2_there_are_texts_and_a_line_of_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    missing: Callable[[], bool] = lambda: False  # noqa: E731
    monkeypatch.setattr(dump_page, "can_render", missing)
    monkeypatch.setattr(log, "_warned", set())
    with caplog.at_level(logging.WARNING, "fxpipe"):
        folder = dumped(tmp_path)
    assert "pip install 'fxpipe[viz]'" in caplog.text
    assert (folder / "schedule.txt").exists() and not (folder / "index.html").exists()


def test_line_of_a_file_that_is_gone_is_shown_without_its_source() -> None:
    found = excerpt("nowhere/model.py:12: x = f(y)", {})
    assert (found["file"], found["line"], found["source"]) == ("nowhere/model.py", 12, [])


def test_templates_are_part_of_the_package() -> None:
    root = Path(dump_page.__file__).parent
    settings = (root.parent.parent / "pyproject.toml").read_text()
    assert '"fxpipe.views" = ["templates/*"]' in settings
    assert {path.suffix for path in (root / "templates").iterdir()} == {".css", ".html", ".js"}

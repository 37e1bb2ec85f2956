"""Files that a reader sees whole or not at all, and folders that cannot be made."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import fxpipe
from fxpipe import files
from fxpipe.errors import OptionError
from fxpipe.files import make_folder, read_json, write_json, write_text
from tests.helpers import MLP, mlp_batch


def step_with(**options: Any) -> Any:
    options = {"stages": 2, "microbatches": 2, "lowering": "eager", **options}
    return torch.compile(MLP(3, 3, 3), backend="fxpipe", options=options)


def test_reader_sees_the_old_text_or_the_new_one_at_any_time(tmp_path: Path) -> None:
    path, done, found = tmp_path / "a.json", threading.Event(), set[int]()
    values = [[number] * 20_000 for number in range(2)]
    write_json(path, values[0])

    def read() -> None:
        while not done.is_set():
            found.add(len(json.loads(path.read_text())))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(60):
        write_json(path, values[number % 2])
    done.set()
    reader.join()
    assert found == {20_000}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_a_file_is_moved_into_its_place_and_a_failed_one_leaves_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def full(source: Any, target: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(OptionError, match=r"a.txt' cannot be written: No space left .*; name"):
        write_text(path, "new")
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_a_link_stays_a_link_and_a_pipe_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "real.txt").write_text("old")
    (tmp_path / "link.txt").symlink_to(tmp_path / "real.txt")
    write_text(tmp_path / "link.txt", "new")
    assert (tmp_path / "link.txt").is_symlink() and (tmp_path / "real.txt").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_text(tmp_path / "pipe", "to the reader")
    reader.join()
    assert got == ["to the reader"] and (tmp_path / "pipe").is_fifo()


def test_every_file_of_a_dump_and_a_trace_is_moved_into_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved, replace = set[str](), os.replace

    def note(source: Any, target: Any) -> None:
        moved.add(str(Path(target).relative_to(tmp_path)))
        replace(source, target)

    monkeypatch.setattr(files.os, "replace", note)
    step = step_with(dump=str(tmp_path), trace=str(tmp_path))
    step(*mlp_batch()).backward()
    there = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert moved == there
    assert {"timelines.json", "explanation.json", "microbatch-of-2/rank-1.txt"} <= there


def test_absent_file_is_the_default_and_wrong_entries_are_told(tmp_path: Path) -> None:
    assert read_json(tmp_path / "none.json", len, 7) == 7
    write_json(tmp_path / "a.json", {"a": 1})
    with pytest.raises(OptionError, match=r"\(no entry 'b'\), but \{\"a\": 1\}; remove the file"):
        read_json(tmp_path / "a.json", lambda value: value["b"], None)


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/nope"])
def test_folder_that_cannot_be_made_is_refused_alike_by_trace_and_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "file").write_text("mine")
    folder = str(tmp_path / place)

    def refused(what: str, how: str) -> str:
        return rf"{what} cannot go to '{folder}.*': .*; name in {how} a folder that can be made"

    with pytest.raises(OptionError, match=refused("x", "y")):
        make_folder(folder, "x", "y")
    by_dump = refused("the dump", "the option dump, or FXPIPE_DUMP,")
    with pytest.raises(OptionError, match=by_dump):
        step_with(dump=folder)(*mlp_batch())
    torch.compiler.reset()
    with pytest.raises(OptionError, match=refused("the trace", "the option trace")):
        step_with(trace=folder)(*mlp_batch())
    with pytest.raises(OptionError, match=refused("the trace", "fxpipe.trace")):
        with fxpipe.trace(folder):
            raise AssertionError("the block has begun")
    torch.compiler.reset()
    monkeypatch.setenv("FXPIPE_DUMP", folder)
    with pytest.raises(OptionError, match=by_dump):
        step_with()(*mlp_batch())
    assert (tmp_path / "file").read_text() == "mine"

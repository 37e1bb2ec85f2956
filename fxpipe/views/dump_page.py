"""The files of a dump -> `index.html`: the passes side by side, the schedule, the rank programs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fxpipe.log import logger, warn_once
from fxpipe.views.differences import stretches
from fxpipe.views.pages import can_render, render
from fxpipe.views.snapshot import excerpt

log = logger(__name__)
_NODE = re.compile(r"  %(\w+)(?:: .*?)? = ")


def write_page(folder: Path) -> None:
    """Write `index.html` beside the files of a dump, or say how to get it."""
    if not can_render():
        warn_once(
            log,
            "the dump in %s has no index.html, which needs jinja2: pip install 'fxpipe[viz]', or "
            "-e '.[viz]' in a clone",
            folder,
        )
        return
    page = render("index.html", title=folder.name, data=read_dump(folder))
    (folder / "index.html").write_text(page, encoding="utf-8")


def read_dump(folder: Path) -> dict[str, Any]:
    """What the page shows of the files in a folder. Files that are missing are left out."""
    passes, excerpts = read_passes(folder)
    entries = read_json(folder / "passes.json", [])
    return {
        "passes": passes,
        "off": [entry["name"] for entry in entries if not entry["on"]],
        "excerpts": excerpts,
        "schedule": read_text(folder / "schedule.txt"),
        "ranks": read_ranks(folder, "rank"),
        "memory": read_ranks(folder, "memory"),
        "codes": {
            task: {"file": path, "text": read_text(Path(path))}
            for task, path in read_json(folder / "output-code.json", {}).items()
        },
    }


def read_passes(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The passes that ran, each with its text and changes, and the source lines of their nodes."""
    files: dict[str, list[str]] = {}
    excerpts: dict[str, dict[str, Any]] = {}
    passes: list[dict[str, Any]] = []
    before: list[str] = []
    for path in sorted(folder.glob("[0-9][0-9]-*.txt")):
        facts = read_json(path.with_suffix(".json"), {})
        lines, tags = facts.pop("lines", []), facts.pop("tags", {})
        for line in lines:
            if line not in excerpts:
                excerpts[line] = {**excerpt(line, files), "index": len(excerpts)}
        places = {
            name: [None if line is None else excerpts[lines[line]]["index"], stage]
            for name, (line, stage) in facts.get("places", {}).items()
        }
        text = (read_text(path) or "").rstrip("\n").split("\n")[2:]
        after = [with_tag(line, tags) for line in text]
        changes = stretches(before, after)
        facts = {"number": int(path.stem[:2]), "name": path.stem[3:], "file": path.name, **facts}
        passes.append({**facts, "places": places, "text": after, "changes": changes})
        before = after
    return passes, list(excerpts.values())


def with_tag(line: str, tags: Mapping[str, str]) -> str:
    """A line of a graph and, as a comment, what passes have noted of its node."""
    match = _NODE.match(line)
    tag = tags.get(match[1]) if match else None
    return f"{line}    # {tag}" if tag else line


def read_ranks(folder: Path, what: str) -> list[dict[str, Any]]:
    """The files `<what>-R.txt` by rank."""
    found = {int(path.stem.rpartition("-")[2]): path for path in folder.glob(f"{what}-*.txt")}
    return [{"rank": rank, "text": read_text(found[rank])} for rank in sorted(found)]


def read_text(path: Path) -> str | None:
    """None where there is no such file: another process may have removed it."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def read_json(path: Path, default: Any) -> Any:
    text = read_text(path)
    return default if text is None else json.loads(text)

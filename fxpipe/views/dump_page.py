"""The files of a dump -> `index.html`: the passes side by side, the schedule, the rank programs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fxpipe.files import list_of_objects, object_of, read_json, read_text, write_text
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
    write_text(folder / "index.html", page)


def read_dump(folder: Path) -> dict[str, Any]:
    """What the page shows of the files in a folder. Files that are missing are left out.

    Raises OptionError for a file that does not hold what a dump writes.
    """
    passes, excerpts = read_passes(folder)
    entries = read_json(folder / "passes.json", switches, [])
    return {
        "passes": passes,
        "off": [name for name, on in entries if not on],
        "excerpts": excerpts,
        "schedule": read_text(folder / "schedule.txt"),
        "ranks": read_ranks(folder, "rank"),
        "memory": read_ranks(folder, "memory"),
        "codes": {
            task: {"file": path, "text": read_text(Path(path))}
            for task, path in read_json(folder / "output-code.json", codes_of, {}).items()
        },
    }


def read_passes(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The passes that ran, each with its text and changes, and the source lines of their nodes."""
    files: dict[str, list[str]] = {}
    excerpts: dict[str, dict[str, Any]] = {}
    passes: list[dict[str, Any]] = []
    before: list[str] = []
    for path in sorted(folder.glob("[0-9][0-9]-*.txt")):
        facts = read_json(path.with_suffix(".json"), facts_of, {})
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


def facts_of(value: Any) -> dict[str, Any]:
    """Of `NN-<pass>.json`: an object whose lines and places fit each other; see `snapshot`."""
    facts = object_of("places", "lines")(value)
    lines, tags = [str(line) for line in facts["lines"]], object_of()(facts.get("tags", {}))
    for line, _ in object_of()(facts["places"]).values():
        if line is not None:
            lines[line]
    return {**facts, "lines": lines, "tags": tags}


def codes_of(value: Any) -> dict[str, str]:
    """Of `output-code.json`: task -> file."""
    return {task: str(path) for task, path in object_of()(value).items()}


def switches(entries: Any) -> list[tuple[str, bool]]:
    """Of `passes.json`: every pass, and whether it was on."""
    return [(str(entry["name"]), bool(entry["on"])) for entry in list_of_objects(entries)]

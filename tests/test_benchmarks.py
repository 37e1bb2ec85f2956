"""The suite of benchmarks: what its figures are made of, and that all of its parts run."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx

from fxpipe.program import Key
from fxpipe.schedule import Kind
from fxpipe.schedules import build
from fxpipe.simulator import simulate

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a script's module, as the scripts import one another."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def spans_of(load: Any, schedule: str, seconds: dict[Kind, float]) -> list[Any]:
    """One call of each task of two stages."""
    span = load("replay").Span
    return [span((Key(s, kind),), 1.0, 1.0 + t) for s in range(2) for kind, t in seconds.items()]


@pytest.mark.parametrize(
    ("name", "seconds", "expected"),
    [
        ("1f1b", {Kind.F: 1.0, Kind.B: 2.0}, 1 / 9),
        ("gpipe", {Kind.F: 1.0, Kind.B: 3.0}, 1 / 9),
        ("zb-h1", {Kind.F: 1.0, Kind.I: 1.0, Kind.W: 1.0}, 1 / 25),
    ],
)
def test_bubble_of_equal_stages_is_the_closed_form(
    load: Any, name: str, seconds: dict[Kind, float], expected: float
) -> None:
    formulas = load("formulas")
    costs = formulas.costs_of(spans_of(load, name, seconds), 2)
    schedule = build(name, stages=2, microbatches=8, ranks=2)
    assert formulas.closed_form(schedule, costs) == pytest.approx(expected)
    assert simulate(schedule, costs).bubble_flush == pytest.approx(expected)


def test_task_times_are_means_of_their_calls(load: Any) -> None:
    span, key = load("replay").Span, Key(0, Kind.F)
    costs = load("formulas").costs_of([span((key,), 0.0, 1.0), span((key,), 5.0, 8.0)], 1)
    assert costs.F == [2.0]


def test_replay_hands_on_what_an_earlier_task_made(load: Any) -> None:
    replay = load("replay")
    x, seen = torch.tensor(2.0), []

    def square(value: torch.Tensor) -> tuple[torch.Tensor]:
        return (value * value,)

    def note(value: torch.Tensor, other: torch.Tensor) -> tuple[()]:
        seen.append((float(value), float(other)))
        return ()

    graph = fx.GraphModule(torch.nn.Module(), fx.Graph())
    made = torch.tensor(4.0)
    calls = [replay.Call(graph, square, [x], [made]), replay.Call(graph, note, [made, x], [])]
    run = replay.Replay(calls)
    x.fill_(3.0)
    run()
    assert seen == [(9.0, 3.0)]


def test_saved_values_count_while_they_live(load: Any) -> None:
    alive = load("replay").Alive([((), (0,)), ((), (0,)), ((), ())])
    first, second = torch.zeros(4), torch.zeros(4)
    alive.note([], [first])
    alive.note([], [second])
    assert alive.peak == 32
    del first, second
    alive.note([], [])
    assert alive.held == []


def row(name: str, schedule: str, milliseconds: float, cpu: float = 0.0) -> dict[str, Any]:
    steps = [[milliseconds / 1e3]] * 5
    return {
        "name": name,
        "schedule": schedule,
        "whole": steps,
        "inner": steps,
        "cpu": [[cpu / 1e3]] * 5,
        "losses": [1.0, 1.0],
    }


@pytest.fixture
def results() -> dict[str, Any]:
    rows = [
        row("one process, eager", "", 200),
        row("one process, inductor", "", 180),
        row("torch", "1f1b", 120),
        row("torch, inductor", "1f1b", 115),
        row("fxpipe, inductor", "1f1b", 110, cpu=40.0),
        row("fxpipe, inductor", "zb-h1", 100, cpu=41.44),
        row("fxpipe, eager", "zb-h1", 50),
        row("fxpipe, one rank, inductor", "", 171),
        row("fxpipe, inductor, tasks alone", "1f1b", 98, cpu=38.4),
        row("fxpipe, inductor, tasks alone", "zb-h1", 98, cpu=38.4),
    ]
    bubble = {"measured": 0.14, "simulated": 0.11, "closed_form": 0.11}
    tasks = {
        "1f1b": [[{"0B": 2.0}] * 5, [{"1B": 2.0}] * 5],
        "zb-h1": [[{"0F": 9.0, "0W": 2.1}] * 5, [{"1I": 1.0, "1W": 1.0}] * 5],
    }
    medium = {
        "rows": rows,
        "microbatches": 8,
        "bubble": {"1f1b": {"steps": [bubble] * 5, **bubble}},
        "live": {"1f1b": {"measured": [20, 10], "expected": [20, 10]}},
        "tasks": tasks,
    }
    return {"about": {"lowerings": ["inductor", "eager"]}, "presets": {"medium": medium}}


def test_bars_are_ratios_to_what_each_is_asked_of(load: Any, results: dict[str, Any]) -> None:
    started = {"preset": "medium", "how": "inductor", "schedule": "1f1b"}
    ranks = [{"peak": 90, "resident": 80}, {"peak": 99, "resident": 95}]
    results["starts"] = {
        "medium cold": {"start": started, "runs": [{"first": 30.0, "ranks": ranks}]},
        "medium warm": {"start": started, "runs": [{"first": 12.0, "ranks": ranks}]},
        "medium one process cold": {"start": started, "runs": [{"first": 40.0, "ranks": ranks}]},
        "medium 1f1b inductor memory fxpipe": {"start": started, "runs": [{"ranks": ranks}]},
        "medium 1f1b inductor memory torch": {"start": started, "runs": [{"ranks": ranks[:1]}]},
    }
    found = {
        (bar.what.split(" (")[0].split(",")[0], round(bar.figure.median, 3), bar.met)
        for bar in load("bars").bars_of(results)
    }
    assert found == {
        ("speed of zb-h1", 1.15, True),
        ("speed of 1f1b to torch's own", 1.045, False),
        ("step of zb-h1", 1.02, True),
        ("bubble", 3.0, False),
        ("extra CPU for each stage and microbatch", 0.19, True),
        ("I + W / B", 1.025, True),
        ("one rank", 0.95, True),
        ("live activations / formula", 1.0, True),
        ("first step / one process's", 0.75, True),
        ("first step of a second start / cold", 0.4, False),
        ("resident peak", 1.1, False),
        ("peak beyond what is resident between steps", 1.0, True),
    }


def test_tables_have_a_line_for_every_contestant(load: Any, results: dict[str, Any]) -> None:
    lines = load("bars").steps_table(results["presets"]["medium"], "inductor").splitlines()
    assert len(lines) == 12
    assert "0.957" in next(line for line in lines if "fxpipe, inductor  " in line)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_part_of_the_suite_runs(tmp_path: Path) -> None:
    written = tmp_path / "results.json"
    command = [sys.executable, str(FOLDER / "suite.py"), "--quick", "--json", str(written)]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    results = json.loads(written.read_text())
    assert results.keys() == {"about", "presets", "starts", "bars"}
    tiny = results["presets"]["tiny"]
    assert tiny.keys() >= {"rows", "rounds", "losses", "tasks", "bubble", "sent", "live"}
    assert len(results["starts"]) == 7
    asked = " ".join(bar["what"] for bar in results["bars"])
    for part in ("speed of", "tasks alone", "bubble", "extra CPU", "I + W", "one rank", "live"):
        assert part in asked
    for part in ("first step /", "second start", "resident peak"):
        assert part in asked
    assert all(bar["what"] in printed for bar in results["bars"])
    assert "only their ratios say something" in printed


@pytest.mark.long
def test_the_cost_of_a_step_without_its_tasks_is_told_by_part() -> None:
    command = [sys.executable, str(FOLDER / "step_cost.py"), "--preset", "tiny", "--steps", "5"]
    lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    whole, *parts = (int(line.split()[0]) for line in lines.splitlines())
    assert len(parts) == 13 and parts == sorted(parts, reverse=True)
    assert 0 < sum(parts) < 10 * whole

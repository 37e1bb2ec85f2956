"""Recorded steps of ranks in one process: spans that add up, and nothing left behind."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fxpipe
from fxpipe.errors import FxpipeError, OptionError
from fxpipe.lowering.metrics import last_plan
from fxpipe.lowering.recording import held_bytes
from fxpipe.timeline import Timeline
from tests.numerics.models import MLP, pipelined, seeded

X = torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6)


def timelines(folder: Path) -> list[Timeline]:
    data = json.loads((folder / "timelines.json").read_text())
    return [Timeline.from_json(each) for each in data["measured"]]


def train(step: Any) -> float:
    loss = step(X, X)
    loss.backward()
    return float(loss.detach())


def test_ranks_of_one_thread_take_turns(tmp_path: Path) -> None:
    step = pipelined(seeded(MLP), stages=4, schedule="interleaved-1f1b")
    train(step)
    with fxpipe.trace(tmp_path):
        start = time.perf_counter()
        train(step)
        seconds = time.perf_counter() - start
    (timeline,) = timelines(tmp_path)
    assert timeline.shared_thread and timeline.num_ranks == 2
    tasks = sorted((s.start, s.end) for s in timeline.spans if s.kind in ("F", "B"))
    assert len(tasks) == 2 * 4 * 3
    assert all(after[0] >= before[1] for before, after in zip(tasks, tasks[1:]))
    for rank in (0, 1):
        shares = timeline.shares(rank)
        assert sum(shares.values()) == pytest.approx(timeline.duration)
        assert min(shares.values()) >= -1e-9
        for before, after in zip(timeline.of_rank(rank), timeline.of_rank(rank)[1:]):
            assert after.start >= before.end - 1e-9
    assert 0 < timeline.duration < seconds
    # The step as it is timed without recording it.
    measured = fxpipe.metrics(step)["step_seconds"]
    assert sum(shares.values()) == pytest.approx(measured, rel=0.02, abs=5e-4)


def test_block_neither_compiles_nor_changes_what_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = pipelined(seeded(MLP))
    losses = [train(step)]
    plan = last_plan(step)
    before = [list(executor.instructions) for executor in plan.executors]
    with monkeypatch.context() as patch:
        patch.setattr("fxpipe.lowering.runtime.Step.make_plan", None)
        with fxpipe.trace(tmp_path):
            losses.append(train(step))
        losses.append(train(step))
    assert last_plan(step) is plan and plan.recorded is None
    assert [list(executor.instructions) for executor in plan.executors] == before
    assert len(set(losses)) == 1


def test_block_keeps_its_first_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    step = pipelined(seeded(MLP))
    with caplog.at_level(logging.INFO, logger="fxpipe"), fxpipe.trace(tmp_path, steps=2):
        for _ in range(3):
            train(step)
    assert [timeline.step for timeline in timelines(tmp_path)] == [0, 1]
    assert "1 steps after the first 2 were not recorded" in caplog.text


def test_inner_block_takes_the_steps(tmp_path: Path) -> None:
    step = pipelined(seeded(MLP))
    with fxpipe.trace(tmp_path / "outer"):
        train(step)
        with fxpipe.trace(tmp_path / "inner"):
            train(step)
            train(step)
    assert len(timelines(tmp_path / "outer")) == 1
    assert len(timelines(tmp_path / "inner")) == 2


def test_a_block_whose_steps_an_inner_one_took_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = pipelined(seeded(MLP))
    with fxpipe.trace(tmp_path / "outer"):
        with fxpipe.trace(tmp_path / "inner"):
            train(step)
    assert len(timelines(tmp_path / "inner")) == 1
    assert "outer') has recorded nothing: the steps in it ran in a block within" in caplog.text
    assert "ended without a step" not in caplog.text


def test_block_that_raises_writes_what_it_has(tmp_path: Path) -> None:
    step = pipelined(seeded(MLP))
    with pytest.raises(ValueError, match="no such luck"), fxpipe.trace(tmp_path):
        train(step)
        raise ValueError("no such luck")
    assert len(timelines(tmp_path)) == 1


def test_block_without_a_step_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with fxpipe.trace(tmp_path):
        pass
    assert "ended without a step of a pipelined model" in caplog.text
    with pytest.raises(OptionError, match="steps=0"), fxpipe.trace(tmp_path, steps=0):
        pass


def test_steps_without_gradient_are_recorded(tmp_path: Path) -> None:
    step = pipelined(seeded(MLP))
    with torch.no_grad(), fxpipe.trace(tmp_path):
        step(X, X)
    (timeline,) = timelines(tmp_path)
    assert {span.kind for span in timeline.spans} >= {"F", "send", "receive", "wait"}
    assert timeline.shares(0)["B"] == 0


def test_wait_for_the_callers_backward_is_idle(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(6, 6, dtype=torch.float64) for _ in range(2)])
    step = pipelined(model, stages=2, microbatches=2)
    with fxpipe.trace(tmp_path):
        logits = step(X)
        time.sleep(0.02)
        logits.square().mean().backward()
    (timeline,) = timelines(tmp_path)
    for rank in (0, 1):
        (pause,) = (span for span in timeline.of_rank(rank) if span.name == "pause")
        assert pause.seconds >= 0.02
        assert timeline.shares(rank)["idle"] >= 0.02
    assert fxpipe.metrics(step)["step_seconds"] < timeline.duration - 0.02


def test_held_bytes_begin_and_end_with_what_stays(tmp_path: Path) -> None:
    """4 layers of 6 x 6 with biases in float64, two a rank; at the end the sums of gradients."""
    step = pipelined(seeded(MLP), stages=2, schedule="gpipe", microbatches=2)
    train(step)
    for executor in last_plan(step).executors:
        held = held_bytes(executor)
        assert len(held) == len(executor.instructions)
        sums = 2 * (6 * 6 + 6) * 8
        loss = 8 * (executor.program.rank == 0)
        assert held[-1] == sums + loss
        assert max(held) > held[-1]


def test_metrics_need_a_step_and_count_its_bytes() -> None:
    model = seeded(MLP)
    step = pipelined(model, stages=2, microbatches=2)
    with pytest.raises(FxpipeError, match="call it once"):
        fxpipe.metrics(step)
    train(step)
    found = fxpipe.metrics(model, tokens=48)
    # Each microbatch sends 4 rows of 6 there and their gradients back; the loss goes to rank 0.
    assert found["bytes_sent"] == found["bytes_received"] == 2 * 2 * (4 * 6 * 8) + 8
    assert found["tokens_per_second"] == pytest.approx(48 / found["step_seconds"])
    assert found["bubble"] is None and found["waiting_seconds"] is None
    assert json.loads(json.dumps(found)) == found
    for wrong in ("8", -1, True):
        with pytest.raises(OptionError, match=r"metrics.tokens=.* is a (str|int|bool); expected"):
            fxpipe.metrics(model, tokens=wrong)  # type: ignore[arg-type]


def test_metrics_are_of_the_step_that_ran_last(tmp_path: Path) -> None:
    step = pipelined(seeded(MLP), stages=2, microbatches=2)
    with fxpipe.trace(tmp_path):
        train(step)
    traced = fxpipe.metrics(step)
    assert 0 < traced["bubble"] < 1 and traced["waiting_seconds"] > 0
    with torch.no_grad():
        step(X, X)
    assert fxpipe.metrics(step)["bytes_sent"] < traced["bytes_sent"]


def test_steps_that_are_under_way_together_keep_their_own_times(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(6, 6, dtype=torch.float64) for _ in range(2)])
    step = pipelined(model, stages=2, microbatches=2)
    with fxpipe.trace(tmp_path):
        first, second = step(X), step(X)
        (first + second).square().mean().backward()
    for timeline in timelines(tmp_path):
        for rank in (0, 1):
            spans = timeline.of_rank(rank)
            assert all(b.start >= a.end - 1e-9 for a, b in zip(spans, spans[1:]))
            assert all(0 <= s.start <= s.end <= timeline.duration + 1e-9 for s in spans)

"""A minute of random models, cuts, schedules and batches: none differs from unsplit eager."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch.fx as fx

from fxpipe.lowering.tasks import TaskCompiler
from tests.fuzz.models import make_batch
from tests.fuzz.run import Run, fuzz, run

# A part of the seeds starts elsewhere than `make fuzz`, so that both together see more.
FIRST_SEED, RUNS, SECONDS = 1_000_000, 100, 60.0


@pytest.mark.timeout(240)
def test_random_models_give_eagers_loss_and_gradients() -> None:
    done = run(FIRST_SEED, SECONDS, jobs=1, limit=RUNS)
    faults = [str(r) for r in done if r.is_fault]
    assert not faults, "\n".join(faults)
    kinds = Counter(r.outcome.partition(":")[0] for r in done)
    print(f"{len(done)} runs: {dict(kinds)}")
    assert kinds["equal"] > len(done) / 2


def test_a_seed_is_the_same_run_again() -> None:
    assert fuzz(7) == fuzz(7)


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_graph = TaskCompiler.__call__

    def call(self: TaskCompiler, graph: fx.GraphModule) -> Any:
        function = compile_graph(self, graph)

        def wrong(*arguments: Any) -> Any:
            return tuple(v * 1.0001 if v.is_floating_point() else v for v in function(*arguments))

        return wrong

    monkeypatch.setattr(TaskCompiler, "__call__", call)
    outcomes = [fuzz(seed).outcome for seed in range(6)]
    assert any("is off by" in outcome for outcome in outcomes)
    assert not any(outcome == "equal" for outcome in outcomes)


def test_batches_differ_by_their_seed_and_count_every_row() -> None:
    first, again, other = make_batch(3, 1), make_batch(3, 1), make_batch(3, 2)
    assert all(a.equal(b) for a, b in zip(first, again)) and not first.x.equal(other.x)
    assert first.mask[0, 0] and len(first.y) == 3


def test_a_run_says_how_to_do_it_again() -> None:
    text = str(Run(5, "linear[0]", "differs: by 1"))
    assert text == "seed 5: differs: by 1\n  linear[0]"

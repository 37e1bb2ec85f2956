"""Cases of captured steps, on a CPU that captures and replays as CUDA does."""

from __future__ import annotations

import pytest

from tests.cases import graphs
from tests.lowering.bench import Bench


@pytest.fixture(params=["replayed", "step", "task"])
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(request.param, monkeypatch)


def assert_replayed(bench: Bench) -> None:
    assert bench.way == "replayed" or bench.replays > 0


def test_case_66_gradients_add_up_over_replays(bench: Bench) -> None:
    graphs.gradients_add_up_over_steps(bench.compile, "cpu")
    assert_replayed(bench)


def test_case_67_outputs_of_several_calls_live_side_by_side(bench: Bench) -> None:
    graphs.outputs_of_several_calls_live_side_by_side(bench.compile, "cpu")


def test_case_68_weights_that_autocast_casts_are_new_in_each_replay(bench: Bench) -> None:
    graphs.weights_that_autocast_casts_are_new_in_each_replay(bench.compile, "cpu")
    assert_replayed(bench)


def test_case_69_strides_may_change_and_capture_nothing_anew(bench: Bench) -> None:
    graphs.strides_may_change_from_call_to_call(bench.compile, "cpu")
    assert len(bench.plans) <= 3
    assert sum(len(d.graphs) for d in bench.devices if bench.way == "step") <= 3
    assert_replayed(bench)


def test_case_71_kept_losses_of_replays_keep_no_activation(bench: Bench) -> None:
    graphs.kept_losses_keep_no_activation(bench.compile, "cpu")
    assert_replayed(bench)

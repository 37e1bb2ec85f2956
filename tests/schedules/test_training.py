"""Every schedule, however it is given, trains a model with the gradients of eager."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fxpipe import directives
from fxpipe.errors import FxpipeError, ModelError, ScheduleError
from fxpipe.schedule import Schedule
from fxpipe.schedules import build, families, register, save, to_csv
from tests.helpers import ConvNet, captured, convnet_batch, mlp_batch, run_until
from tests.numerics.models import CASES, Gradients, assert_close, gradients_of, pipelined
from tests.numerics.shared import SharedCapture

STEPS = 3
REPLICATED = ("bitpipe", "chimera", "chimera-zb", "dualpipe")


@pytest.fixture(autouse=True, scope="module")
def fresh_dynamo() -> Iterator[None]:
    """The model is traced once for all schedules, so Dynamo forgets after the last one only."""
    yield
    gpt.cache_clear()
    torch._dynamo.reset()


@functools.cache
def gpt() -> SharedCapture:
    """A GPT whose first and last stage share a weight, in float64."""
    return SharedCapture(CASES["gpt"])


@functools.cache
def eager_gradients() -> tuple[torch.Tensor, Gradients]:
    model = CASES["gpt"].model()
    loss = model(*CASES["gpt"].inputs())
    loss.backward()
    return loss.detach(), gradients_of(model)


@functools.cache
def eager_training() -> Gradients:
    model = CASES["gpt"].model()
    return trained(model, lambda: model(*CASES["gpt"].inputs()))


def trained(model: torch.nn.Module, loss_of: Callable[[], torch.Tensor]) -> Gradients:
    """The parameters after a few steps; the model itself is left as it was."""
    start = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()
    after = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.load_state_dict(start)
    return after


def gradients(step: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Gradients]:
    model.zero_grad()
    loss = step(*CASES["gpt"].inputs())
    loss.backward()
    return loss.detach(), gradients_of(model)


def assert_trains(schedule: Any, stages: int = 4, microbatches: int = 5, **options: Any) -> None:
    step = gpt().use(stages=stages, microbatches=microbatches, schedule=schedule, **options)
    assert_eagers(gradients(step, gpt().model))


def assert_eagers(found: tuple[torch.Tensor, Gradients]) -> None:
    loss, expected = eager_gradients()
    assert_close(found[0], loss, 1e-10, "loss")
    for name, gradient in expected.items():
        assert_close(found[1][name], gradient, 1e-10, f"gradient of {name}")


@pytest.mark.parametrize(("stages", "ranks", "microbatches"), [(4, None, 8), (3, 2, 5)])
@pytest.mark.parametrize("name", families())
def test_every_family_trains(name: str, stages: int, ranks: int | None, microbatches: int) -> None:
    assert_trains(name, stages, microbatches, ranks=ranks)


@pytest.mark.parametrize("name", [*REPLICATED, "zb-v", "combined-1f1b"])
def test_a_few_steps_with_momentum_end_where_eager_ends(name: str) -> None:
    step = gpt().use(stages=4, microbatches=8, schedule=name)
    found = trained(gpt().model, lambda: step(*CASES["gpt"].inputs()))
    for parameter, expected in eager_training().items():
        assert_close(found[parameter], expected, 1e-9, parameter)


def test_four_pipelines_at_once_train() -> None:
    assert_trains("chimera:f=2", microbatches=8)


@pytest.mark.parametrize("name", ["dualpipe", "hanayo", "v-half"])
def test_families_train_by_the_backends_name_with_every_check(name: str) -> None:
    model = CASES["gpt"].model()
    options = {"stages": 4, "microbatches": 8, "ranks": 2, "check": True}
    assert_eagers(gradients(pipelined(model, schedule=name, **options), model))


def test_a_batch_of_fewer_rows_than_microbatches_trains_the_replicas_too() -> None:
    """Two of the four pipelines get no microbatch of it, and the sums all the same."""
    capture = gpt()
    step = capture.use(stages=4, microbatches=8, schedule="chimera:f=2")
    model = CASES["gpt"].model()
    tokens, targets = CASES["gpt"].inputs()
    model(tokens[:2], targets[:2]).backward()
    step(tokens, targets)
    capture.model.zero_grad()
    step(tokens[:2], targets[:2]).backward()
    for name, parameter in capture.model.named_parameters():
        expected = model.get_parameter(name).grad
        assert parameter.grad is not None and expected is not None
        assert_close(parameter.grad, expected, 1e-10, name)
    _, plan = capture.step.plans.values()
    assert {r.contributors for r in plan.program.reductions.values()} == {(0, 3), (1, 2)}
    assert {r.receivers for r in plan.program.reductions.values()} == {(0, 1, 2, 3)}


class TwiceNormed(torch.nn.Module):
    """One BatchNorm is used in the first and in the last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3).double()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 3).double() for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x if layer is self.layers[1] else self.norm(x)
        return (x - y).square().mean()


def refused_by_sync_gradients(model: torch.nn.Module, *batch: torch.Tensor, **options: Any) -> str:
    given = captured(model, *batch, **options)
    with pytest.raises(ModelError) as caught:
        run_until(given.program(rows=2), "sync_gradients")
    return str(caught.value)


@pytest.mark.parametrize("name", ["chimera", "dualpipe"])
def test_a_replicated_stage_that_changes_a_buffer_is_refused(name: str) -> None:
    told = refused_by_sync_gradients(
        ConvNet().train(), *convnet_batch(), stages=2, schedule=name, microbatches=2
    )
    assert "changes the buffer 'norm." in told
    assert "runs on ranks [0, 1], whose copies would drift apart" in told


def test_a_buffer_that_two_stages_change_is_refused() -> None:
    told = refused_by_sync_gradients(
        TwiceNormed().train(), *mlp_batch(), stages=["layers.1", "layers.2"], schedule="1f1b"
    )
    assert "stages [0, 2] all use the buffer 'norm." in told
    assert "put what uses it into one stage" in told


# Pairs.


@pytest.mark.parametrize("name", ["dualpipe", "dualpipev", "combined-1f1b"])
def test_pairs_as_one_task_or_as_two_give_the_same_bits(name: str) -> None:
    sizes = {"stages": 4, "microbatches": 8, "schedule": name, "ranks": 2}
    merged = gradients(gpt().use(**sizes), gpt().model)
    apart = gradients(gpt().use(**sizes, passes={"merge_pairs": False}), gpt().model)
    assert torch.equal(merged[0], apart[0])
    assert all(torch.equal(merged[1][key], apart[1][key]) for key in apart[1])


# Schedules of the user's.

MINE = """
    0F0 0F1 0F2 0B0 0B1 0B2
    1F0 1B0 1F1 1I1 1F2 1B2 1W1
    2F0 2I0 2F1 2B1 2W0 2F2 2B2
"""


def test_text_trains() -> None:
    assert_trains(MINE, stages=3, microbatches=3)


def test_a_schedule_object_trains() -> None:
    assert_trains(Schedule.parse(MINE), stages=3, microbatches=3)


@pytest.mark.parametrize("suffix", [".txt", ".csv"])
def test_a_file_trains(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"mine{suffix}"
    save(Schedule.parse(MINE), path)
    assert_trains(str(path), stages=3, microbatches=3)


def test_pytorchs_file_with_communication_trains(tmp_path: Path) -> None:
    lines = [
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1",
        "1RECV_F0,1F0,1I0,1SEND_B0,1RECV_F1,1W0,1F1,1I1,1SEND_B1,1W1",
    ]
    path = tmp_path / "theirs.csv"
    path.write_text("\n".join(lines) + "\n")
    assert_trains(str(path), stages=2, microbatches=2)


def test_what_pytorch_reads_trains(tmp_path: Path) -> None:
    path = tmp_path / "written.csv"
    path.write_text(to_csv(build("interleaved-zb", stages=4, microbatches=4, ranks=2)))
    assert_trains(str(path), microbatches=4)


def test_a_registered_function_trains() -> None:
    @register("forward-then-back")
    def forward_then_back(stages: int, microbatches: int, ranks: int) -> list[str]:
        numbers = range(microbatches)
        return [
            " ".join([f"{s}F{i}" for i in numbers] + [f"{s}B{i}" for i in numbers])
            for s in range(stages)
        ]

    assert_trains("forward-then-back", stages=3)


def test_directives_train() -> None:
    text = """
        stages 4
        microbatches 5
        annotation heavy 1,2
        place stage=0,3 rank=0
        replicate annotation=heavy ranks=1,2
        split stage=1..3
        order kind=F then kind=W rank=0
    """
    assert_trains(directives.parse(text).schedule())


def test_a_schedule_that_would_hang_is_shown_with_the_place_marked() -> None:
    wrong = "0F0 0B0 0F1 0B1\n1F1 1F0 1B1 1B0"
    step = gpt().use(stages=2, microbatches=2, schedule=wrong)
    with pytest.raises(ScheduleError, match="deadlock: rank 0 waits at 0B0") as caught:
        step(*CASES["gpt"].inputs())
    assert ">0B0<" in str(caught.value)


@pytest.mark.parametrize(
    ("schedule", "match"),
    [
        ("0F0 0F1 0B0 0B1\n1F0 1B0 1F1", "1B1"),
        ("0F0 0F1 0B0 0B1", "stage"),
        ("one-f-one-b", "did you mean"),
    ],
)
def test_an_incomplete_or_unknown_schedule_says_what_is_missing(schedule: str, match: str) -> None:
    step = gpt().use(stages=2, microbatches=2, schedule=schedule)
    with pytest.raises(FxpipeError, match=match):
        step(*CASES["gpt"].inputs())

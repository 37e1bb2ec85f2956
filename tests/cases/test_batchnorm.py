"""Running statistics of BatchNorm: of the microbatches in turn, or once a step of the batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpipe.errors import CaptureError
from tests.cases.shared import line_of, normal
from tests.cases.work import Normed, difference_of_statistics
from tests.numerics.models import assert_close, pipelined, seeded

ROWS = (3, 3, 2)  # eight rows in three microbatches


def batch(seed: int) -> tuple[Tensor, Tensor]:
    return 2 + 3 * normal(8, 6, seed=seed), normal(8, 6, seed=10 + seed)


def trained(build: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, nn.Module]:
    """A model after three deferred steps, and the one that it began as."""
    model = seeded(build)
    start, step = copy.deepcopy(model), pipelined(model, batchnorm="defer", **options)
    for seed in range(3):
        step(*batch(seed)).backward()
    return model, start


def update(norm: Any, values: Tensor) -> None:
    """What eager does to the buffers in a step on `values`."""
    with torch.no_grad():
        norm(values)


def assert_same_buffers(actual: nn.Module, expected: nn.Module) -> None:
    found = dict(actual.named_buffers())
    for name, buffer in expected.named_buffers():
        assert found[name].dtype == buffer.dtype
        assert_close(found[name].double(), buffer.double(), 1e-12, name)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_case_55_deferred_statistics_are_those_of_the_whole_batch(schedule: str) -> None:
    model, twin = trained(Normed, schedule=schedule)
    for seed in range(3):
        update(twin.norm1, batch(seed)[0])
        # Each microbatch is normalised on its own; the second norm sees what comes of that.
        parts = [twin.norm1(part) for part in batch(seed)[0].split(ROWS)]
        twin.norm1.load_state_dict(model.norm1.state_dict())
        update(twin.norm2, twin.layers[0](torch.cat(parts)).tanh())
    assert_same_buffers(model.norm2, twin.norm2)
    assert int(model.norm1.num_batches_tracked) == 3


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_case_55_a_deferred_norm_that_sees_the_batch_has_eagers_buffers(schedule: str) -> None:
    model, twin = trained(Normed, schedule=schedule)
    for seed in range(3):
        update(twin.norm1, batch(seed)[0])
    assert_same_buffers(model.norm1, twin.norm1)


def test_case_55_deferring_leaves_loss_and_gradients_as_they_are() -> None:
    both = []
    for setting in ("microbatch", "defer"):
        model = seeded(Normed)
        loss = pipelined(model, schedule="zb-h1", batchnorm=setting)(*batch(0))
        loss.backward()
        both.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*both))


class Images(nn.Module):
    """Two uses of one norm of images, the second of what the first gave."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm2d(3, momentum=0.25, affine=False), nn.Linear(2, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.view(-1, 3, 1, 2)
        return self.head(self.norm(self.norm(x).exp())).square().mean() + 0 * y.mean()


def test_case_55_a_norm_that_is_used_twice_is_updated_twice_a_step() -> None:
    model, twin = trained(Images, stages=1)
    for seed in range(3):
        x = batch(seed)[0].view(-1, 3, 1, 2)
        parts = [F.batch_norm(part, None, None, training=True).exp() for part in x.split(ROWS)]
        update(twin.norm, x)
        update(twin.norm, torch.cat(parts))
    assert_same_buffers(model, twin)
    assert int(model.norm.num_batches_tracked) == 6


def test_case_55_a_norm_in_eval_keeps_its_buffers_beside_one_that_trains() -> None:
    def build() -> nn.Module:
        model = Normed()
        model.norm2.eval()
        return model

    model, twin = trained(build)
    for seed in range(3):
        update(twin.norm1, batch(seed)[0])
    assert_same_buffers(model, twin)


def test_case_55_forwards_alone_update_once_a_step_too() -> None:
    model = seeded(Normed)
    twin, step = copy.deepcopy(model), pipelined(model, batchnorm="defer", microbatches=4)
    with torch.no_grad():
        for seed in range(2):
            step(*batch(seed))
            update(twin.norm1, batch(seed)[0])
    assert_same_buffers(model.norm1, twin.norm1)
    step.eval()
    twin.load_state_dict(model.state_dict())
    assert_close(step(*batch(0)), twin.eval()(*batch(0)), 1e-10, "loss in eval")
    assert_same_buffers(model, twin)


def test_case_55_a_norm_in_half_precision_is_as_near_as_eager() -> None:
    model = seeded(lambda: Normed().bfloat16())
    exact = copy.deepcopy(model).double()
    step = pipelined(model, batchnorm="defer")
    x, y = (value.bfloat16() for value in batch(0))
    step(x, y).backward()
    update(exact.norm1, x.double())
    for name, buffer in exact.norm1.named_buffers():
        found = model.get_buffer(f"norm1.{name}")
        assert found.dtype == (torch.int64 if "tracked" in name else torch.bfloat16)
        assert_close(found.double(), buffer.double(), 1e-2, name)


@pytest.mark.parametrize("setting", ["microbatch", "defer"])
def test_case_55_a_microbatch_of_one_value_per_channel_is_refused(setting: str) -> None:
    with pytest.raises(CaptureError, match="1 row .*Expected more than 1 value per channel"):
        pipelined(seeded(Normed), microbatches=5, batchnorm=setting)(*batch(0))


def test_case_55_a_cumulative_average_is_no_graph_and_refused() -> None:
    # torch reads the number of batches as a Python number, which Dynamo does not trace.
    def build() -> nn.Module:
        model = Normed()
        model.norm1.momentum = None
        return model

    with pytest.raises(CaptureError, match="not one graph") as told:
        pipelined(seeded(build), batchnorm="defer")(*batch(0))
    assert line_of(Normed, "self.norm1(x)") in str(told.value)


def test_case_55_two_ranks_have_the_whole_batchs_statistics(
    two_ranks: list[dict[str, Any]],
) -> None:
    assert [found["statistics"] for found in two_ranks] == [None, None]


def test_case_55_one_process_has_the_whole_batchs_statistics() -> None:
    assert difference_of_statistics(schedule="interleaved-1f1b", stages=4, ranks=2) is None

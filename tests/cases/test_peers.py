"""Faults of torch.distributed.pipelining 2.13, and properties of its own tests, on this backend.

A backward that is split on the graph, not in autograd, has no reason to repeat them.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxpipe
from tests.cases.shared import check, check_step, normal, program_of
from tests.numerics.models import MLP, assert_close, assert_same_gradients, pipelined, seeded


class Beside(nn.Module):
    """Parameters of both stages that no input of their stage leads to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.start, self.end = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        with fxpipe.stage(0):
            h, early = torch.tanh(self.first(x)), self.start.sin()
        with fxpipe.stage(1):
            loss = (self.second(h) + early).square().mean()
            return loss + self.end.exp().sum()


def test_a_parameter_off_the_path_of_the_activations_gets_its_gradient() -> None:
    check(Beside, [normal(8, 6)], stages=None, schedule="zb-h1")


def test_a_hook_after_accumulation_fires_once_a_step_where_backward_is_split() -> None:
    model = seeded(MLP)
    seen: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(name))
    x = normal(8, 6)
    pipelined(model, microbatches=4, schedule="zb-h1")(x, x).backward()
    assert sorted(seen) == sorted(dict(model.named_parameters()))


class Viewing(nn.Module):
    """Stages end in a view, a transposed and an expanded value."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with fxpipe.stage(0):
            h = self.layers[0](x).view(-1, 2, 3)
            wide = h[:, :, :1].expand(-1, 2, 3)
        with fxpipe.stage(1):
            h = torch.tanh(self.layers[1]((h + wide).reshape(-1, 6))).view(-1, 2, 3).transpose(1, 2)
        with fxpipe.stage(2):
            return self.layers[2](h.reshape(-1, 6)).square().mean()


def test_stages_may_end_in_views_where_backward_is_split() -> None:
    check(Viewing, [normal(8, 6)], stages=None, schedule="zb-h1")


@torch.compile(backend="eager")
def compiled(x: Tensor) -> Tensor:
    return torch.tanh(x) * x.sigmoid()


class CallingCompiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.third = torch.compile(nn.Linear(6, 6), backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.third(compiled(self.second(compiled(self.first(x))))).square().mean()


def test_compiled_functions_and_modules_may_be_in_stages_where_backward_is_split() -> None:
    check(CallingCompiled, [normal(8, 6)], schedule="zb-h1")


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipev", "interleaved-zb"])
def test_evaluation_and_training_take_turns(schedule: str) -> None:
    model = seeded(MLP)
    twin, x = copy.deepcopy(model), normal(8, 6)
    step = pipelined(model, stages=4, ranks=2, microbatches=4, schedule=schedule)
    for _ in range(2):
        model.eval()
        with torch.no_grad():
            assert_close(step(x, x.sin()), twin(x, x.sin()), 1e-10, "loss in eval")
        model.train()
        check_step(step, model, twin, x, x.sin())


class Targets(nn.Module):
    """A dict of targets; beside the loss a dict of outputs with an integer and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, targets: dict[str, Tensor]) -> dict[str, Any]:
        logits = self.second(torch.tanh(self.first(x)))
        loss = F.cross_entropy(logits, targets["labels"])
        loss = loss + F.mse_loss(logits.sum(1), targets["sums"])
        right = (logits.argmax(1) == targets["labels"]).sum()
        return {"loss": loss, "logits": logits, "rows": x.shape[0], "right": right}


def test_a_batch_of_seven_in_four_with_dicts_of_targets_and_outputs() -> None:
    model = seeded(Targets)
    twin = copy.deepcopy(model)
    targets = {"labels": torch.arange(7) % 3, "sums": normal(7, seed=1)}
    step = pipelined(model, microbatches=4, schedule="zb-h1")
    found, expected = step(targets=targets, x=normal(7, 6)), twin(normal(7, 6), targets)
    assert list(found) == list(expected) and found["rows"] == 7
    assert found["logits"].shape == (7, 3) and torch.equal(found["right"], expected["right"])
    assert_close(found["logits"], expected["logits"], 1e-10, "logits")
    found["loss"].backward()
    expected["loss"].backward()
    assert_close(found["loss"], expected["loss"], 1e-10, "loss")
    assert_same_gradients(model, twin)


class Ignoring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.second(torch.tanh(self.first(x))), labels)


def test_a_microbatch_without_a_target_adds_nothing() -> None:
    labels = torch.tensor([0, -100, 2, 1, -100, -100, 1, -100])  # the third of four has none
    check(Ignoring, [normal(8, 6), labels], microbatches=4)


class Product(torch.autograd.Function):
    """x @ w, whose backward has an operator of its own to be counted by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient @ w.T * torch.expm1(x), x.T @ gradient


class OwnFunction(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.first, self.recompute = nn.Linear(6, 6), recompute
        self.middle, self.last = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 6))

    def block(self, x: Tensor) -> Tensor:
        return torch.erf(self.middle(torch.erf(x)))

    def forward(self, x: Tensor) -> Tensor:
        with fxpipe.stage(0):
            x = torch.tanh(self.first(x))
        with fxpipe.stage(1):
            if self.recompute:
                x = checkpoint(self.block, x, use_reentrant=False)  # type: ignore[assignment]
            return Product.apply(x, self.last).sin().mean()


def times(model: nn.Module, operator: str) -> dict[str, int]:
    """How often each task runs an operator."""
    program = program_of(model, normal(4, 6), schedule="zb-h1", loss_reduction="mean")
    return {
        str(key): sum(n.op == "call_function" and operator in str(n.target) for n in graph.nodes)
        for key, graph in ((key, task.graph.graph) for key, task in program.tasks.items())
    }


def test_the_backward_of_an_own_function_runs_once_for_i_and_w() -> None:
    counts = times(seeded(OwnFunction), "expm1")
    assert sum(counts.values()) == 1


def test_an_own_function_may_have_a_weight() -> None:
    check(OwnFunction, [normal(8, 6)], stages=None, schedule="zb-h1")


def test_gradients_of_an_own_function_are_its_own() -> None:
    options = {"schedule": "zb-h1", "loss_reduction": "mean", "microbatches": 2}
    check(OwnFunction, [normal(8, 6)], stages=None, **options)


def test_a_recomputed_block_runs_at_most_twice_where_backward_is_split() -> None:
    counts = times(seeded(lambda: OwnFunction(True)), "erf")
    assert counts["1F"] == 2 and counts["1I"] + counts["1W"] <= 2


class Chunks(nn.Module):
    """One operator with two results, each on a way of its own to the next stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(6, 6), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        with fxpipe.stage(0):
            x = torch.tanh(self.first(x))
        with fxpipe.stage(1):
            left, right = self.first(x).chunk(2, 1)
            x = torch.cat([self.left(left), self.right(right).exp()], 1)
        with fxpipe.stage(2):
            return x.square().mean()


def test_an_operator_with_two_results_gets_the_gradient_of_each() -> None:
    check(Chunks, [normal(8, 6)], stages=None, schedule="zb-h1")


def test_gradients_of_ten_steps_add_up_where_backward_is_split() -> None:
    batches = [(normal(8, 6, seed=i), normal(8, 6, seed=i + 50)) for i in range(10)]
    check(lambda: MLP(depth=2), *batches, schedule="zb-h1")


class Aliased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.alias = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.second(torch.tanh(self.first(x)))), self.alias).sin().mean()


def test_a_parameter_with_two_names_keeps_both() -> None:
    _, model = check(Aliased, [normal(8, 6)], schedule="zb-h1")
    assert model.alias is model.first.weight
    assert {"alias", "first.weight"} <= model.state_dict().keys()
    assert len(fxpipe.owned_parameters(model)) == 4

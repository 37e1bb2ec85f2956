"""What adds up over microbatches, and what is refused because it cannot."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from fxpipe.errors import ModelError
from fxpipe.passes import SplitLoss
from fxpipe.program import Join, Program
from fxpipe.text import format_graph
from tests.helpers import MLP, Captured, captured, microbatches, mlp_batch, run_graph
from tests.passes.losses import ADDS_UP, REFUSED, Formulas, batch
from tests.passes.parts import program_of, whole_and_parts


@pytest.fixture(scope="module")
def formulas() -> Captured:
    return captured(Formulas(ADDS_UP, REFUSED), *batch(), loss=0)


@pytest.mark.parametrize("name", ADDS_UP)
def test_parts_add_up_to_loss_and_gradients(formulas: Captured, name: str) -> None:
    whole, parts = whole_and_parts(formulas, program_of(formulas, [*ADDS_UP, *REFUSED].index(name)))
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", REFUSED)
def test_model_is_refused_with_its_line(formulas: Captured, name: str) -> None:
    with pytest.raises(ModelError, match=REFUSED[name][0]) as caught:
        SplitLoss()(program_of(formulas, [*ADDS_UP, *REFUSED].index(name)))
    assert "losses.py" in str(caught.value)


def model_text(program: Program) -> str:
    return format_graph("model", program.model)


def test_mean_is_weighted_by_its_share() -> None:
    before = captured(MLP(3, 3), *mlp_batch()).program(rows=2)
    assert_expected_inline(
        model_text(before),
        """\
graph model(
    %layers_0_weight: f64[3, 3],
    %layers_0_bias: f64[3],
    %x_size_0: int(s17),
    %x: f64[s17, 3],
    %y: f64[s17, 3],
)
  %x_1: f64[s17, 3] = torch.nn.functional.linear(%x, %layers_0_weight, %layers_0_bias)
  %mse_loss: f64[] = torch.nn.functional.mse_loss(%x_1, %y)
  return (%mse_loss,)""",
    )
    after = SplitLoss()(before)
    assert_expected_inline(
        model_text(after),
        """\
graph model(
    %layers_0_weight: f64[3, 3],
    %layers_0_bias: f64[3],
    %x_size_0: int(s17),
    %x: f64[s17, 3],
    %y: f64[s17, 3],
    %share,
)
  %x_1: f64[s17, 3] = torch.nn.functional.linear(%x, %layers_0_weight, %layers_0_bias)
  %mse_loss_1: f64[] = torch.nn.functional.mse_loss(%x_1, %y)
  %to = %share.to(f64)
  %mul: f64[] = operator.mul(%mse_loss_1, %to)
  return (%mul,)""",
    )
    assert after.prologue is None


class Masked(nn.Module):
    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        return (h * mask).sum() / (mask.sum() / h.shape[0])


def test_mask_count_moves_into_the_prologue() -> None:
    rows = torch.ones(5, dtype=torch.float64, requires_grad=True)
    after = SplitLoss()(captured(Masked(), rows, rows.detach().clone()).program(rows=2))
    assert_expected_inline(
        model_text(after),
        """\
graph model(
    %h_size_0: int(s31),
    %h: f64[s31],
    %mask_size_0: int(s31),
    %mask: f64[s31],
    %prologue_1: f64[],
)
  %mul: f64[s31] = operator.mul(%h, %mask)
  %sum_3: f64[] = %mul.sum()
  %truediv_2: f64[] = operator.truediv(%sum_3, %prologue_1)
  return (%truediv_2,)""",
    )
    assert after.prologue is not None
    assert_expected_inline(
        format_graph("prologue", after.prologue),
        """\
graph prologue(%h_size_0: int(s31), %h: f64[s31], %mask_size_0: int(s31), %mask: f64[s31])
  %sum_2: f64[] = %mask.sum()
  %truediv: f64[] = operator.truediv(%sum_2, %mask_size_0)
  return (%truediv,)""",
    )


class Classified(nn.Module):
    def forward(self, h: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(h, labels)


def test_cross_entropy_is_divided_by_the_count_of_the_whole_batch() -> None:
    scores = torch.ones(5, 4, dtype=torch.float64, requires_grad=True)
    after = SplitLoss()(captured(Classified(), scores, batch()[2]).program(rows=2))
    (count,) = (n for n in after.model.graph.nodes if n.name == "prologue_0")
    ((quotient, _),) = ((user, user.args) for user in count.users)
    assert quotient.args[0].kwargs["reduction"] == "sum"
    assert after.prologue is not None
    assert_expected_inline(
        format_graph("prologue", after.prologue),
        """\
graph prologue(%h_size_0: int(s75), %h: f64[s75, 4], %labels: i64[s75])
  %ne = operator.ne(%labels, -100)
  %sum_1 = %ne.sum()
  return (%sum_1,)""",
    )


def test_forward_with_the_rows_in_front_has_nothing_to_split() -> None:
    before = captured(nn.Linear(3, 2, dtype=torch.float64), mlp_batch()[0]).program(rows=2)
    after = SplitLoss()(before)
    assert model_text(after) == model_text(before)
    assert (after.inputs, after.outputs) == (before.inputs, before.outputs)


def test_model_without_a_batch_gives_its_loss_once() -> None:
    given = captured(MLP(3, 3), *mlp_batch(), batch_dims={"x": None, "y": None})
    before = given.program(rows=0, microbatches=1)
    after = SplitLoss()(before)
    assert [o.join for o in after.outputs] == [Join.FIRST]
    assert model_text(after) == model_text(before)


class Reports(nn.Module):
    """A loss, logits, a metric and a number that is the same for every row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4, dtype=torch.float64)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.linear(x)
        correct = (h.argmax(-1) == labels).sum()
        size = self.linear.weight.square().sum()
        return {
            "loss": F.cross_entropy(h, labels),
            "logits": h,
            "correct": correct,
            "size": size,
        }


def test_outputs_beside_the_loss_are_detached_and_joined_by_kind() -> None:
    x, _, _, labels, _ = batch()
    given = captured(Reports(), x, labels, loss=0)
    after = SplitLoss()(given.program(rows=2, microbatches=3))
    joins = [Join.SUM, Join.CONCATENATE, Join.SUM, Join.FIRST]
    assert [o.join for o in after.outputs] == joins
    assert [o.requires_grad for o in after.outputs] == [True, False, False, False]
    parts = [run_graph(after.model, v) for v in microbatches(given, after, (2, 2, 1))]
    assert all(not value.requires_grad for part in parts for value in part[1:])
    whole = run_graph(given.capture.model, dict(zip(names(given), given.values)))
    assert sum(part[2] for part in parts) == whole[2]
    assert all(torch.equal(part[3], whole[3]) for part in parts)


def names(given: Captured) -> list[str]:
    return [entry.name for entry in given.capture.inputs]


class Contrastive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return F.cross_entropy(h @ h.t(), torch.arange(h.shape[0]))


@pytest.mark.parametrize("word", ["mean", "sum"])
def test_loss_reduction_says_how_unsplittable_losses_add_up(word: str) -> None:
    given = captured(Contrastive(), mlp_batch(5)[0], loss_reduction=word)
    after = SplitLoss()(given.program(rows=2, microbatches=2))
    x = given.values[names(given).index("x")]
    (weight, bias) = (v for v in given.values if isinstance(v, nn.Parameter))
    losses = []
    for rows in (x[:3], x[3:]):
        h = F.linear(rows, weight, bias)
        losses.append(F.cross_entropy(h @ h.t(), torch.arange(len(rows))))
    expected = 0.6 * losses[0] + 0.4 * losses[1] if word == "mean" else sum(losses)
    parts = [run_graph(after.model, v)[0] for v in microbatches(given, after, (3, 2))]
    torch.testing.assert_close(sum(parts), expected, rtol=1e-15, atol=0)


def test_batch_in_two_dimensions_of_an_argument_is_refused() -> None:
    class Pairwise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 4, dtype=torch.float64)

        def forward(self, x: Tensor, pairs: Tensor) -> Tensor:
            return (self.linear(x) + pairs.sum(1, keepdim=True)).mean()

    x = mlp_batch(5)[0]
    pairs = torch.ones(5, 5, dtype=torch.float64)
    torch._dynamo.mark_dynamic(pairs, 1)
    given = captured(Pairwise(), x, pairs)
    program = given.program(rows=2)
    assert program.batch_symbol is not None
    node = program.model.graph.find_nodes(op="placeholder", target="pairs")[0]
    value = node.meta["example_value"]
    node.meta["example_value"] = value.new_empty(value.shape[0], value.shape[0])
    with pytest.raises(ModelError, match="has the size of the batch in dimensions"):
        SplitLoss()(program)


def test_counter_of_batches_is_kept() -> None:
    class Counting(nn.Module):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 4, dtype=torch.float64)
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(1)
            return self.linear(x).mean()

    after = SplitLoss()(captured(Counting(), mlp_batch()[0]).program(rows=2))
    assert "%seen.add_(1)" in model_text(after)

"""`stages="auto"`: as many stages as ranks want, cut where the slowest is fastest, cut once."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor, nn

from fxpipe.errors import OptionError
from fxpipe.flops import FLOPS_PER_BYTE_SENT, FLOPS_PER_ELEMENT
from fxpipe.options import Options
from fxpipe.passes import AssignStages
from fxpipe.program import Input, Program, Role
from fxpipe.schedule import Schedule
from fxpipe.schedules import register, stages_for
from tests.helpers import GPT, captured, gpt_batch, run_until

ROWS, F32 = 4, 4


def chain(widths: list[int], **options: Any) -> Program:
    """A program whose joint graph is products with matrices of these widths, a module each."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(ROWS, widths[0], device="meta")
    weights = []
    for i, shape in enumerate(zip(widths, widths[1:])):
        weights.append(graph.placeholder(f"w{i}"))
        weights[-1].meta["val"] = torch.empty(shape, device="meta")
    for i, weight in enumerate(weights):
        x = graph.call_function(torch.ops.aten.mm.default, (x, weight))
        x.meta["val"] = torch.empty(ROWS, widths[i + 1], device="meta")
        x.meta["nn_module_stack"] = {"key": (f"L['self']._modules['layer{i}']", nn.Linear)}
    graph.output((x,))
    inputs = [Input("x", Role.BATCH, "x", 0)]
    inputs += [Input(w.name, Role.PARAMETER, w.name, requires_grad=True) for w in weights]
    joint = fx.GraphModule(nn.Module(), graph)
    given = Options.parse({"stages": "auto"} | options)
    return Program(given, True, None, {}, 2, 2, joint, tuple(inputs), (), joint=joint)


def stages_of(program: Program) -> list[int]:
    return [n.meta["stage"] for n in program.joint.graph.nodes if n.op == "call_function"]


def layer_cost(width: int, following: int) -> int:
    """Forward, twice that for the backward, and the gradient of the weight."""
    product = 2 * ROWS * width * following + FLOPS_PER_ELEMENT * ROWS * following
    return 3 * product + 4 * FLOPS_PER_ELEMENT * width * following


def stage_costs(widths: list[int], starts: tuple[int, ...]) -> list[int]:
    edges = [0, *starts, len(widths) - 1]
    costs = []
    for start, end in zip(edges, edges[1:]):
        inside = sum(layer_cost(widths[i], widths[i + 1]) for i in range(start, end))
        sent = sum(widths[cut] for cut in (start, end) if 0 < cut < len(widths) - 1)
        costs.append(inside + FLOPS_PER_BYTE_SENT * ROWS * F32 * sent)
    return costs


@pytest.mark.parametrize("seed", range(50))
def test_cuts_are_what_brute_force_finds(seed: int) -> None:
    rng = random.Random(seed)
    widths = [rng.choice((1, 3, 8, 20, 60)) for _ in range(rng.randint(4, 9))]
    count = rng.randint(1, min(4, len(widths) - 1))
    program = replace(chain(widths), num_ranks=count)
    after = AssignStages()(program)
    splits = list(combinations(range(1, len(widths) - 1), count - 1))
    best = min(max(stage_costs(widths, starts)) for starts in splits)
    stages = stages_of(after)
    starts = tuple(stages.index(stage) for stage in range(1, count))
    assert after.balance is not None
    assert max(stage_costs(widths, starts)) == best
    assert list(after.balance.costs) == stage_costs(widths, starts)


def test_a_heavy_head_gets_a_stage_of_its_own_and_the_report_says_what_that_gains(
    caplog: pytest.LogCaptureFixture,
) -> None:
    program = chain([16] * 8 + [200])
    with caplog.at_level(logging.INFO, "fxpipe"):
        after = AssignStages()(program)
    assert stages_of(after) == [0] * 7 + [1]
    assert after.balance is not None
    assert max(after.balance.costs) < 0.82 * max(after.balance.equal)
    told = "2 stages of 0.192 0.333 Mflop; equally many modules each: 0.115 0.41, the slowest 1.23"
    assert told in caplog.text
    assert told in str(replace(after, joint=None, model=after.model))


def test_the_gpts_head_is_counted_too() -> None:
    """Embedding, blocks and head all cost; 200 words make the head as heavy as several blocks."""
    model = GPT(layers=4, words=200)
    given = captured(model, *gpt_batch(), stages="auto", schedule="1f1b")
    after = AssignStages()(run_until(given.program(rows=4, ranks=3), "normalize"))
    assert after.num_stages == 3 and after.balance is not None
    assert max(after.balance.costs) < max(after.balance.equal)
    forward = [n for n in after.joint.graph.nodes if not n.meta.get("backward")]
    head = [n for n in forward if "head" in str(n.meta.get("nn_module_stack")) and n.meta]
    blocks = [n for n in forward if "blocks" in str(n.meta.get("nn_module_stack"))]
    assert {n.meta["stage"] for n in head if "stage" in n.meta} == {2}
    assert max(n.meta["stage"] for n in blocks if "stage" in n.meta) == 1


def test_an_expensive_cut_is_moved_to_a_cheap_place() -> None:
    assert stages_of(AssignStages()(chain([8, 8, 4096, 8, 8]))) in ([0, 0, 0, 1], [0, 1, 1, 1])


def test_a_stage_holds_no_more_than_the_memory_limit() -> None:
    widths = [32, 32, 32, 32, 600]
    free = AssignStages()(chain(widths))
    assert stages_of(free) == [0, 0, 0, 1]
    layer = 2 * 32 * 32 * F32
    held = AssignStages()(chain([32, 600, 1, 1, 1], memory_limit=float(2 * 32 * 600 * F32)))
    assert stages_of(held) == [0, 1, 1, 1]
    with pytest.raises(OptionError, match=r"memory_limit=\d+: a stage may hold .* needs \d+"):
        AssignStages()(chain(widths, memory_limit=float(layer)))


# How many.

TEXT = "0F0 0B0\n1F0 2F0 2B0 1B0"


def by_hand(stages: int, microbatches: int, ranks: int) -> str:
    raise AssertionError("the number of stages does not depend on what it returns")


@pytest.mark.parametrize(
    ("schedule", "ranks", "count"),
    [
        ("1f1b", 4, 4),
        ("chimera:f=2", 4, 4),
        ("dualpipe", 4, 4),
        ("interleaved-zb", 4, 8),
        ("zb-v", 4, 8),
        ("bitpipe", 4, 8),
        ("hanayo", 2, 4),
        ("auto", 3, 6),
        (Schedule.parse(TEXT), None, 3),
        (TEXT, 2, 3),
    ],
)
def test_a_schedule_says_how_many_stages_it_wants(schedule: Any, ranks: Any, count: int) -> None:
    assert stages_for(schedule, ranks) == count


def test_a_registered_function_gets_a_stage_a_rank() -> None:
    register("one-a-rank-by-hand")(by_hand)
    assert stages_for("one-a-rank-by-hand", 3) == 3


def test_a_schedule_in_a_file_says_it_too(tmp_path: Any) -> None:
    (tmp_path / "mine.txt").write_text(TEXT)
    assert stages_for(str(tmp_path / "mine.txt"), None) == 3


def test_without_ranks_a_name_does_not_say_how_many() -> None:
    with pytest.raises(OptionError, match=r"do not say how many ranks.*options=\{'ranks': 4\}"):
        AssignStages()(replace(chain([4, 4, 4]), num_ranks=None))


def test_more_stages_than_operations_are_refused() -> None:
    with pytest.raises(OptionError, match="the model has only 2 operations"):
        AssignStages()(replace(chain([4, 4, 4]), num_ranks=3))


# Cut once.


def test_another_trace_keeps_parameters_where_they_are() -> None:
    program = chain([16] * 8 + [200])
    places = {f"w{i}": (int(i >= 3),) for i in range(8)}
    assert stages_of(AssignStages()(replace(program, places=places))) == [0, 0, 0] + [1] * 5


def test_nodes_without_parameters_stay_as_far_as_those_with_them_allow() -> None:
    program = chain([16] * 6)
    places = {"w1": (0,), "w4": (1,), "mm_default_2": (1,), "mm_default_3": (0,)}
    assert stages_of(AssignStages()(replace(program, places=places))) == [0, 0, 1, 1, 1]


def test_a_shared_weight_is_read_in_either_of_its_stages() -> None:
    program = chain([16] * 6)
    places = {"w0": (0, 1), "w1": (0,), "w3": (1,), "w4": (0, 1)}
    assert stages_of(AssignStages()(replace(program, places=places))) == [0, 0, 0, 1, 1]


def test_places_that_no_order_of_stages_gives_are_decided_anew() -> None:
    program = chain([16] * 6)
    after = AssignStages()(replace(program, places={"w0": (1,), "w4": (0,)}))
    assert sorted(stages_of(after)) == stages_of(after)
    assert set(stages_of(after)) == {0, 1}


class Uneven(nn.Module):
    """Cuts fall in other places for 4 rows than for 3: large weights against large activations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [(8, 400), (400, 8), (8, 8), (8, 8), (8, 8)]
        self.layers = nn.ModuleList(nn.Linear(*size).double() for size in sizes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.layers[1](torch.tanh(self.layers[0](x)))
        for layer in self.layers[2:4]:
            x = (layer(x)[:, :, None] * torch.ones(60, dtype=x.dtype)).tanh().sum(-1)
        return F.mse_loss(self.layers[4](x), y)


def numbers() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randn(7, 8, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("stages", [2, "auto"])
def test_microbatches_of_different_sizes_are_cut_alike(stages: Any) -> None:
    model, (x, y) = Uneven(), (value for value, _ in zip(numbers(), range(2)))
    options = {"stages": stages, "ranks": 2, "microbatches": 2, "lowering": "eager"}
    step = torch.compile(model, backend="fxpipe", options=options)
    step(x, y).backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    plain = Uneven()
    plain(x, y).backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-10, atol=1e-12)

"""Gradients added to their accumulators by the operators that make them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from fxpipe.passes._accumulate import accumulate
from fxpipe.passes._graph import aten
from fxpipe.torch_private import inductor_compile
from tests.helpers import captured, run_until


class Table(nn.Module):
    """A table whose row 0 is padding, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, padding_idx=0)
        self.twice = nn.Linear(4, 4)

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        h = self.twice(torch.tanh(self.twice(self.table(ids))))
        return F.mse_loss(h, y)


IDS = torch.tensor([[0, 3, 3], [8, 0, 3], [1, 2, 0], [4, 4, 4]])


def batch() -> tuple[Tensor, Tensor]:
    return IDS, torch.randn(4, 3, 4, dtype=torch.float64)


def targets(model: nn.Module) -> list[str]:
    given = captured(model.double(), *batch(), stages=1)
    program = run_until(given.program(rows=2, ranks=1), "split_tasks")
    graphs = [task.graph.graph for task in program.tasks.values()]
    return [str(node.target) for graph in graphs for node in graph.nodes]


def test_products_and_looked_up_rows_are_added_as_they_are_made() -> None:
    found = targets(Table())
    assert found.count("aten.addmm_.default") == 2
    assert found.count("aten.index_put_.default") == 1
    assert not {"aten.embedding_dense_backward.default"} & set(found)


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_gradients_are_those_of_eager(lowering: str) -> None:
    torch.manual_seed(0)
    model = Table().double()
    reference = copy.deepcopy(model)
    options = {"stages": 2, "microbatches": 3, "schedule": "zb-h1", "lowering": lowering}
    step = torch.compile(model, backend="fxpipe", options=options)
    for _ in range(2):
        given = batch()
        step(*given).backward()
        reference(*given).backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, msg=name)
    assert not model.table.weight.grad[0].any()


def graph_of(text: str) -> tuple[fx.Graph, dict[str, fx.Node]]:
    """Placeholders acc, a, b; then the named values by the operators that text lists."""
    graph, nodes = fx.Graph(), {}
    for name in ("acc", "a", "b"):
        nodes[name] = graph.placeholder(name)
        nodes[name].meta["val"] = torch.ones(2, 2)
    for line in text.splitlines():
        name, operator, *names = line.split()
        target = getattr(aten, operator).Tensor if operator == "add" else None
        target = target or getattr(aten, operator).default
        nodes[name] = graph.call_function(target, tuple(nodes[n] for n in names))
        nodes[name].meta["val"] = target(*(nodes[n].meta["val"] for n in names))
    return graph, nodes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("v mm a b", ["addmm_.default"]),
        ("m mm a b\nt t m\nv t t", ["addmm_.default"]),
        ("m mm a b\nv t m", ["mm.default", "t.default", "add_.Tensor"]),
        ("m mm a b\nn mm b a\nv add m n", ["addmm_.default", "addmm_.default"]),
        ("m mm a b\nv add m m", ["mm.default", "add.Tensor", "add_.Tensor"]),
        ("m mm a b\nv add m a", ["addmm_.default", "add_.Tensor"]),
        ("v tanh a", ["tanh.default", "add_.Tensor"]),
    ],
)
def test_what_is_added_in_place(text: str, expected: list[str]) -> None:
    graph, nodes = graph_of(text)
    accumulate(graph, nodes["acc"], nodes["v"], kept=set())
    graph.output(())
    found = [str(n.target).removeprefix("aten.") for n in graph.nodes if n.op == "call_function"]
    assert sorted(found) == sorted(expected)


def test_a_product_that_is_read_later_stays_a_value() -> None:
    graph, nodes = graph_of("v mm a b")
    accumulate(graph, nodes["acc"], nodes["v"], kept={nodes["v"]})
    assert aten.mm.default in {node.target for node in graph.nodes}


def test_inductor_adds_in_place_without_a_copy() -> None:
    graph, nodes = graph_of("v mm a b")
    accumulate(graph, nodes["acc"], nodes["v"], kept=set())
    graph.output((nodes["b"],))
    given = [torch.ones(2, 2), torch.ones(2, 2), torch.eye(2)]
    (compiled, _), code = run_and_get_code(inductor_compile, fx.GraphModule({}, graph), given)
    compiled(*given)
    assert given[0].tolist() == [[2, 2], [2, 2]]
    assert "addmm_" in code[0]
    assert "cpp_fused_copy" not in code[0]

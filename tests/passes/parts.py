"""A program of many outputs -> one of one output, and the sums of its microbatches' parts."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
import torch.fx as fx
from torch import Tensor, nn

from fxpipe.passes import SplitLoss
from fxpipe.passes._batch import Batch
from fxpipe.program import Join, Program
from tests.helpers import Captured, microbatches, run_graph


@lru_cache(maxsize=1)
def facts_of(given: Captured) -> Batch:
    return Batch(given.program(rows=2), given.capture.model.graph)


def program_of(given: Captured, index: int) -> Program:
    """The program of a model whose one output is that of this number."""
    program = given.program(rows=2, microbatches=3)
    value = program.model.graph.output_node().args[0][index]
    facts = facts_of(given)
    alive = facts.with_writers([value, *facts.writers.get(facts.roots[value], ())])
    graph, environment = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in program.model.graph.nodes:
        if node.op == "placeholder" or node in alive:
            environment[node] = graph.node_copy(node, environment.__getitem__)
    graph.output((environment[value],))
    output = replace(program.outputs[index], is_loss=program.outputs[index].requires_grad)
    return replace(program, model=fx.GraphModule(program.model, graph), outputs=(output,))


def whole_and_parts(given: Captured, before: Program) -> tuple[list[Tensor], list[Tensor]]:
    """Loss and gradients of the whole batch, and the sums of three unequal microbatches' parts."""
    parameters = [value for value in given.values if isinstance(value, nn.Parameter)]
    names = [node.name for node in before.model.graph.find_nodes(op="placeholder")]
    (whole,) = run_graph(before.model, dict(zip(names, given.values)))
    after = SplitLoss()(before)
    assert after.outputs[0].join is Join.SUM
    totals = [torch.zeros(()), *(torch.zeros_like(p) for p in parameters)]
    for values in microbatches(given, after, (2, 2, 1)):
        (part,) = run_graph(after.model, values)
        assert part.dtype == whole.dtype
        gradients = torch.autograd.grad(part, parameters, materialize_grads=True)
        totals = [total + one for total, one in zip(totals, [part.detach(), *gradients])]
    gradients = torch.autograd.grad(whole, parameters, materialize_grads=True)
    return [whole.detach(), *gradients], totals

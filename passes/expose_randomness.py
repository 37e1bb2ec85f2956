"""Random functions of the model graph in the form in which the trace can tell them apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch.fx as fx
import torch.nn.functional as F

from fxpipe import random
from fxpipe.passes._graph import copy_graph
from fxpipe.program import Program, tensors_of
from fxpipe.torch_private import expression

# A function that may run as a fused kernel, the place of its dropout probability, and its formula.
FUSED: dict[Any, tuple[int, Callable[..., Any]]] = {
    F.scaled_dot_product_attention: (4, random.attention),
    F.multi_head_attention_forward: (10, random.multi_head_attention),
}


@dataclass(frozen=True)
class ExposeRandomness:
    """
    %a = scaled_dot_product_attention(%q, %k, %v, dropout_p=0.1); %n = rand(4)

    becomes

    %a = attention(%q, %k, %v, dropout_p=0.1); %n = rand(4), marked

    where `attention` is traced as its formula, whose dropout is an operator of its own; a fused
    kernel would draw inside. A mark says that a value has no rows of the batch: were it random,
    eager would draw it once for the whole batch, so that microbatches must share it.
    """

    def __call__(self, program: Program) -> Program:
        return replace(program, model=expose(program.model, program.batch_symbol))


def expose(gm: fx.GraphModule, batch: sympy.Symbol | None) -> fx.GraphModule:
    """A copy of the graph, and of the graphs that it calls."""
    copy, _ = copy_graph(gm)
    for node in copy.graph.nodes:
        if node.op in ("call_function", "call_method"):
            spell_out(node)
            if batch is not None and not has_rows(node, batch):
                node.meta["custom"] = {**(node.meta.get("custom") or {}), random.WHOLE: True}
        elif node.op == "get_attr":
            inner = getattr(copy, str(node.target), None)
            if isinstance(inner, fx.GraphModule):
                setattr(copy, str(node.target), expose(inner, batch))
    copy.recompile()
    return copy


def spell_out(node: fx.Node) -> None:
    if node.target not in FUSED:
        return
    place, formula = FUSED[node.target]
    given = node.args[place] if len(node.args) > place else node.kwargs.get("dropout_p", 0.0)
    if given != 0.0:
        node.target = formula


def has_rows(node: fx.Node, batch: sympy.Symbol) -> bool:
    """Whether a value's size depends on the batch's; a value that is not known may."""
    values = tensors_of(node.meta.get("example_value"))
    sizes = [expression(size) for value in values for size in value.shape]
    return not values or any(batch in size.free_symbols for size in sizes)

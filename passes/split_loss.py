"""The batch's loss and other reductions to parts that the microbatches' values add up to."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
import torch.fx as fx

from fxpipe.errors import ModelError
from fxpipe.passes._batch import (
    Batch,
    argument,
    is_floating,
    is_tensor,
    name_of,
    operand,
    takes_graph,
    values_of,
)
from fxpipe.passes._graph import copy_graph
from fxpipe.passes._mixing import TAKE_SIZES
from fxpipe.passes._prologue import Prologue
from fxpipe.passes._rows import ADVICE, check_rows_stay_apart
from fxpipe.program import Input, Join, Output, Program, Role, where

SUMS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    **dict.fromkeys(("add", "iadd"), (operator.add, torch.add)),
    **dict.fromkeys(("sub", "isub"), (operator.sub, torch.sub)),
}
PRODUCTS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("mul", "imul", "multiply"), operator.mul),
    **dict.fromkeys(("matmul", "mm", "mv", "dot", "bmm", "inner"), torch.matmul),
}
QUOTIENTS = frozenset("div truediv itruediv divide true_divide".split())
LINEAR = frozenset(
    "neg negative pos positive clone contiguous detach float double half bfloat16 to type type_as "
    "view reshape flatten squeeze unsqueeze permute transpose t expand getitem select sum mean "
    "alias".split()
)
JOINED = frozenset("stack cat concat hstack vstack".split())
# Losses whose reduction="mean" divides by the number of elements, or of rows, alone.
MEAN_LOSSES = frozenset(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div poisson_nll_loss "
    "binary_cross_entropy_with_logits gaussian_nll_loss hinge_embedding_loss margin_ranking_loss "
    "cosine_embedding_loss soft_margin_loss multi_margin_loss multilabel_margin_loss ctc_loss "
    "multilabel_soft_margin_loss triplet_margin_loss triplet_margin_with_distance_loss".split()
)
WEIGHTED_MEAN_LOSSES = frozenset("mse_loss l1_loss smooth_l1_loss huber_loss".split())


@dataclass(frozen=True)
class SplitLoss:
    """
    loss = mean(f(batch))

    becomes, for a microbatch,

    part = mean(f(microbatch)) * share        share: the microbatch's rows / the batch's rows

    so that the parts add up to the loss. A pass walks from every output without a batch dimension
    through operations that are linear in the reductions over the batch (sums, products and
    quotients with values that do not vary between microbatches): a mean is weighted by its share,
    a sum by one, cross entropy by its own count of targets. Values made of the call's arguments
    alone (a mask's sum, a count of targets) move into the prologue, which runs once a step on the
    whole batch. Outputs beside the loss are detached.

    Raises ModelError, with the model's line, where the parts cannot add up. With the option
    `loss_reduction` the user says how they do, and nothing is checked.
    """

    def __call__(self, program: Program) -> Program:
        if program.batch_symbol is None:
            outputs = [
                replace(o, join=Join.FIRST) if o.join is Join.SUM else o for o in program.outputs
            ]
            return detach_beside_loss(replace(program, outputs=tuple(outputs)))
        return detach_beside_loss(_Splitter(program).run())


def detach_beside_loss(program: Program) -> Program:
    """Outputs beside the loss take no gradient: the backward has run when they are returned."""
    if program.loss is None:
        return program
    model, _ = copy_graph(program.model)
    end = model.graph.output_node()
    returned = list(end.args[0])
    for i, output in enumerate(program.outputs):
        if output.requires_grad and not output.is_loss:
            with model.graph.inserting_before(end):
                returned[i] = model.graph.call_method("detach", (returned[i],))
    end.args = (tuple(returned),)
    outputs = (
        o if o.is_loss else replace(o, requires_grad=False, detached=o.requires_grad)
        for o in program.outputs
    )
    return replace(program, model=fx.GraphModule(model, model.graph), outputs=tuple(outputs))


class _Splitter:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.word = program.options.loss_reduction
        self.model, _ = copy_graph(program.model)
        self.graph = self.model.graph
        self.batch = Batch(program, self.graph)
        self.prologue = Prologue(self.model, self.batch)
        self.parts: dict[fx.Node, Any] = {}
        self.share: fx.Node | None = None
        self.counted: frozenset[fx.Node] = frozenset()  # what each microbatch counts for itself

    def run(self) -> Program:
        self.batch.remove_dead(self.graph)
        if self.word is None:
            self.counted = check_rows_stay_apart(self.model, self.batch)
            self.move_sizes_used_as_numbers()
        end = self.graph.output_node()
        returned = list(end.args[0])
        outputs = [self.split(i, o, returned) for i, o in enumerate(self.program.outputs)]
        end.args = (tuple(returned),)
        self.batch.remove_dead(self.graph)
        if self.word is None:
            self.move_arguments_alone()
            self.check_every_reduction_was_split()
        self.batch.remove_dead(self.graph)
        self.prologue.drop_unused()
        prologue = self.prologue.graph()
        return replace(
            self.program,
            model=fx.GraphModule(self.model, self.graph),
            inputs=self.program.inputs + tuple(self.new_inputs()),
            outputs=tuple(outputs),
            prologue=prologue,
        )

    def refuse(self, node: fx.Node) -> ModelError:
        return ModelError(
            f"the output is not linear in its reductions over the batch, at {where(node)}, so the "
            f"microbatches' parts do not add up to it; {ADVICE}"
        )

    def check_every_reduction_was_split(self) -> None:
        for node in self.graph.nodes:
            if node.op not in ("call_function", "call_method") or not is_tensor(node):
                continue
            if node in self.batch.same_at_first or self.batch.is_constant(node):
                continue
            if node in self.counted:
                continue
            if node in self.batch.varying and not self.batch.is_batched(node):
                raise ModelError(
                    f"a reduction over the batch is used before the loss, at {where(node)}, "
                    f"so microbatches would see another value; {ADVICE}"
                )

    # The split.

    def split(self, index: int, output: Output, returned: list[Any]) -> Output:
        node, end = returned[index], self.graph.output_node()
        if output.join is not Join.SUM:
            return output
        if self.word is not None:
            if not isinstance(node, fx.Node) or node not in self.batch.varying:
                return replace(output, join=Join.FIRST)
            returned[index] = self.scaled(node, node, end) if self.word == "mean" else node
        elif self.batch.is_constant(node):
            return replace(output, join=Join.FIRST)
        else:
            returned[index] = self.part(node, end)
        return output

    def part(self, node: Any, user: fx.Node) -> Any:
        """What adds up over the microbatches to the whole batch's `node`, as `user` sees it."""
        if self.batch.is_constant(node, user):
            return self.scaled(node, user if user.op != "output" else node, user)
        if writer := self.batch.changed_between(node, node, user):
            raise self.refuse(writer)
        if node not in self.parts:
            self.parts[node] = self.split_node(node)
        return self.parts[node]

    def split_node(self, node: fx.Node) -> fx.Node:
        name = name_of(node)
        if name in JOINED and node.args and not self.batch.is_batched(node):
            parts = [self.part(item, node) for item in node.args[0]]
            return self.made(node, node.target, (parts, *node.args[1:]), node.kwargs)
        operands = [a for a in node.args[:2] if not self.batch.is_constant(a, node)]
        if any(map(self.batch.is_batched, operands)) or not operands:
            return self.split_reduction(node, name)
        if name in SUMS and len(node.args) == 2:
            by_operator, by_function = SUMS[name]
            args = tuple(self.part(a, node) for a in node.args)
            return self.made(node, by_function if node.kwargs else by_operator, args, node.kwargs)
        if name in PRODUCTS and len(operands) == 1 and len(node.args) == 2:
            args = tuple(self.part(a, node) if a is operands[0] else a for a in node.args)
            return self.made(node, PRODUCTS[name], args)
        if name in QUOTIENTS and operands == [node.args[0]] and not node.kwargs:
            return self.made(node, operator.truediv, (self.part(operands[0], node), node.args[1]))
        return self.split_linear(node, name)

    def split_linear(self, node: fx.Node, name: str) -> fx.Node:
        first, *rest = node.args
        in_words = all(map(self.batch.is_constant, node.all_input_nodes[1:]))
        if name not in LINEAR or not in_words or is_floating(first) > is_floating(node):
            raise self.refuse(node)
        return self.made(node, node.target, (self.part(first, node), *rest), node.kwargs)

    def split_reduction(self, node: fx.Node, name: str) -> fx.Node:
        if name == "sum":
            return self.made(node, node.target, node.args, node.kwargs)
        if name == "mean":
            return self.weighted(node, operand(node))
        if name in MEAN_LOSSES or name in ("cross_entropy", "nll_loss"):
            return self.split_loss_function(node, name)
        raise self.refuse(node)

    def weighted(self, node: fx.Node, reduced: fx.Node) -> fx.Node:
        """A mean over a number of elements that grows with the batch, times the share."""
        for value in values_of(reduced):
            count = sympy.prod(self.batch.sizes(reduced)) if value.dim() else sympy.Integer(1)
            if self.batch.holds_batch(sympy.cancel(count / self.batch.symbol)):
                raise self.refuse(node)
        same = self.made(node, node.target, node.args, node.kwargs)
        return self.scaled(same, node, node)

    def split_loss_function(self, node: fx.Node, name: str) -> fx.Node:
        try:
            bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
        except (TypeError, ValueError):
            raise self.refuse(node) from None
        bound.apply_defaults()
        given = bound.arguments
        if given.get("size_average") is not None or given.get("reduce") is not None:
            raise self.refuse(node)
        batched = next(n for n in node.all_input_nodes if self.batch.is_batched(n))
        outer = given["reduction"] == "batchmean" and 0 not in self.batch.dims(batched)
        if given["reduction"] == "sum" or outer:
            return self.made(node, node.target, node.args, node.kwargs)
        if name in ("cross_entropy", "nll_loss"):
            return self.split_cross_entropy(node, given)
        if name in WEIGHTED_MEAN_LOSSES and given.get("weight") is not None:
            raise self.refuse(node)
        return self.weighted(node, batched)

    def split_cross_entropy(self, node: fx.Node, given: dict[str, Any]) -> fx.Node:
        """mean = sum / (the whole batch's count, or weight, of targets that are not ignored)."""
        target, weight = given["target"], given["weight"]
        if is_floating(target):
            return self.weighted(node, target)
        if target not in self.batch.fixed or (
            weight is not None and weight not in self.batch.fixed
        ):
            raise self.refuse(node)
        total = self.made(node, node.target, (), {**given, "reduction": "sum"})
        count = self.count_targets(node, given)
        return self.made(node, operator.truediv, (total, count))

    def count_targets(self, node: fx.Node, given: dict[str, Any]) -> fx.Node:
        origin, source = self.prologue.origin, self.prologue.source.graph
        target, weight, dtype = origin[given["target"]], given["weight"], torch.int64
        with source.inserting_after(origin[node]):
            made = source.call_function(operator.ne, (target, given["ignore_index"]))
        if weight is not None:  # the weight of each target is its share of the count
            dtype = values_of(weight)[0].dtype
            with source.inserting_after(made):
                index = source.call_function(torch.where, (made, target, 0))
            with source.inserting_after(index):
                picked = source.call_function(operator.getitem, (origin[weight], index))
            with source.inserting_after(picked):
                made = source.call_function(torch.where, (made, picked, 0))
        with source.inserting_after(made):
            count = source.call_method("sum", (made,))
        return self.prologue.give(count, values_of(node)[0].new_empty((), dtype=dtype), "targets")

    def scaled(self, value: Any, like: Any, before: fx.Node) -> Any:
        """value * share, in the type of the value that `like` has."""
        if not isinstance(value, fx.Node) and value == 0:
            return value
        dtype = values_of(like)[0].dtype
        if not dtype.is_floating_point:
            raise self.refuse(like)
        with self.graph.inserting_before(before):
            share = self.graph.call_method("to", (self.share_node(), dtype))
            part = self.graph.call_function(operator.mul, (value, share))
        share.meta = {k: v for k, v in like.meta.items() if k != "example_value"}
        part.meta = dict(like.meta)
        self.batch.order[share] = self.batch.order[part] = self.batch.order[before]
        return part

    def made(self, node: fx.Node, target: Any, args: Any, kwargs: Any = None) -> fx.Node:
        """`node` again with other operands, at the same place."""
        method = isinstance(target, str)
        with self.graph.inserting_before(node):
            create = self.graph.call_method if method else self.graph.call_function
            result = create(
                target.rstrip("_") if method else target, tuple(args), dict(kwargs or {})
            )
        result.meta = dict(node.meta)
        self.batch.order[result] = self.batch.order[node]
        return result

    def share_node(self) -> fx.Node:
        if self.share is None:
            with self.graph.inserting_after(self.graph.find_nodes(op="placeholder")[-1]):
                self.share = self.graph.placeholder("share")
        return self.share

    # The prologue.

    def move_sizes_used_as_numbers(self) -> None:
        """A batch size used as a number is the whole batch's: `x.sum() / x.shape[0]`."""
        for node in list(self.graph.nodes):
            if node.op not in ("call_function", "call_method") or not is_tensor(node):
                continue
            if name_of(node) in TAKE_SIZES or takes_graph(node):
                self.check_fill_value(node)
                continue
            sizes = [
                n for n in node.all_input_nodes if n in self.batch.varying and not is_tensor(n)
            ]
            for size in sizes:
                node.replace_input_with(size, self.prologue.move(size))
            if any(isinstance(n.meta.get("example_value"), (float, torch.SymFloat)) for n in sizes):
                self.keep_type(node)

    def check_fill_value(self, node: fx.Node) -> None:
        place = {"full": 1, "new_full": 2}.get(name_of(node))
        if place is not None and self.batch.is_batched(node):
            if not isinstance(value := argument(node, place, "fill_value"), fx.Node):
                return
            if value in self.batch.varying:
                raise ModelError(
                    f"the batch size fills a tensor, at {where(node)}, and would be the "
                    f"microbatch's; multiply a tensor of ones by it"
                )

    def keep_type(self, node: fx.Node) -> None:
        """A number in a tensor of its own takes part in the choice of the result's type."""
        with self.graph.inserting_after(node):
            same = self.graph.call_method("to", (node, values_of(node)[0].dtype))
        same.meta = dict(node.meta)
        node.replace_all_uses_with(same, lambda user: user is not same)
        self.prologue.origin[same] = self.prologue.origin[node]
        self.batch.stands_for(same, node)

    def move_arguments_alone(self) -> None:
        """Constants that vary with the batch come from the prologue."""
        movable = {
            node
            for node in self.graph.nodes
            if is_tensor(node)
            and node in self.batch.varying
            and node not in self.batch.inputs
            and self.batch.is_constant(node)
        }
        for node in [n for n in self.graph.nodes if n in movable]:
            for user in [user for user in node.users if user not in movable]:
                if self.batch.changed_between(node, user, self.graph.output_node()):
                    raise self.refuse(user)
                user.replace_input_with(node, self.prologue.move(node))

    def new_inputs(self) -> list[Input]:
        """In the order of their placeholders, which all come after the captured ones."""
        found = []
        for node in self.graph.find_nodes(op="placeholder"):
            if node is self.share:
                found.append(Input("share", Role.SHARE, "share"))
            elif entry := self.prologue.input_of(node):
                found.append(entry)
        return found

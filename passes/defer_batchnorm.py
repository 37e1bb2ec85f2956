"""BatchNorm's running statistics: once a step, from the sums of all of its microbatches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx as fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxpipe.passes._graph import (
    BATCH_NORM_BACKWARD,
    batch_norms,
    copy_graph,
    copy_in,
    getitem_of,
    results_of,
)
from fxpipe.program import Input, Program, Result, Role
from fxpipe.torch_private import fake_mode_of

RUNNING_MEAN, RUNNING_VAR = 3, 4  # results of BATCH_NORM that replace its buffers


@dataclass(frozen=True)
class DeferBatchnorm:
    """
    %y, %m, %v = batch_norm(%x, %running_mean, %running_var, momentum=0.1)
    return (%m, %v)                 the new running statistics, microbatch after microbatch

    becomes

    %y, %mean, %var = batch_norm(%x, %running_mean, %running_var, momentum=1.0)
    %count', %mean', %squares' = merge(%count, %mean, %squares; rows of %x, %mean, %var)
    return (0.9 * %running_mean_before + 0.1 * %mean', ..., %count', %mean', %squares')

    with the option batchnorm="defer"; otherwise the program stays as it is. Each microbatch is
    still normalised by its own statistics. The inputs `count`, `mean` and `squares` (of the
    deviations) are zeros at the start of a step and merge its microbatches in whatever order they
    run, by the formula of Chan et al., "Updating Formulae and a Pairwise Algorithm" (1979). So
    after the last one the buffers are what one update by the whole batch's mean and unbiased
    variance gives, and `num_batches_tracked` has grown by one. BatchNorm in eval() is untouched.

    The deferred batch normalization of torchgpipe (Kim et al., "torchgpipe: On-the-fly Pipeline
    Parallelism for Training Giant Models", 2020), but for the variance, which there is biased.
    """

    def __call__(self, program: Program) -> Program:
        if program.options.batchnorm != "defer" or not batch_norms(program.joint):
            return program
        joint, _ = copy_graph(program.joint)
        deferrer = _Deferrer(program, joint)
        for node in batch_norms(joint):
            deferrer.defer(node)
        outputs = (*results_of(joint), *deferrer.written.values())
        joint.graph.output_node().args = (outputs,)
        joint.graph.eliminate_dead_code()
        joint.recompile()
        return replace(
            program,
            joint=joint,
            inputs=(*program.inputs, *deferrer.inputs),
            results=(*program.results, *(Result("mutation", n) for n in deferrer.written)),
        )


def values_per_channel(node: fx.Node) -> int:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    value = source.meta["val"]
    return int(value.numel() // value.shape[1])


@dataclass
class _Deferrer:
    program: Program
    joint: fx.GraphModule
    inputs: list[Input] = field(default_factory=list)
    written: dict[str, fx.Node] = field(default_factory=dict)  # scratch -> its new value
    buffer_of: dict[fx.Node, fx.Node] = field(default_factory=dict)  # running value -> its buffer
    snapshots: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        entries = {i.name: i for i in self.program.inputs if i.role is Role.BUFFER}
        self.buffers = {
            node: entries[node.name]
            for node in self.joint.graph.find_nodes(op="placeholder")
            if node.name in entries
        }
        self.buffer_of |= {node: node for node in self.buffers}

    def defer(self, node: fx.Node) -> None:
        found = [self.buffer_of.get(value) for value in node.args[3:5]]
        mean, var = found
        if mean is None or var is None:
            return  # values made of buffers, as InstanceNorm makes them
        parts = {user.args[1]: user for user in node.users if getitem_of(user)}
        # Backward is given what replaces the buffers; in training it does not read it.
        for user in [u for i in (RUNNING_MEAN, RUNNING_VAR) for u in parts[i].users]:
            if user.target is BATCH_NORM_BACKWARD and user.args[7]:
                user.args = (*user.args[:3], None, None, *user.args[5:])
        self.count_once(mean)
        before = [self.chained(value, buffer) for value, buffer in zip(node.args[3:5], found)]
        momentum = node.args[6]
        # What is replaced counts for nothing then, and what comes out is the microbatch's own.
        node.args = (*node.args[:3], mean, var, True, 1.0, *node.args[7:])
        own = [parts[RUNNING_MEAN], parts[RUNNING_VAR]]
        scratch = self.scratch(node, mean)
        function = merge(values_per_channel(node), momentum)
        made = self.insert(node, own, function, [*scratch, *own, *before])
        self.written |= zip((n.name for n in scratch), made[:3])
        for old, new, buffer in zip(own, made[3:], (mean, var)):
            old.replace_all_uses_with(new, lambda user: user not in self.inserted)
            self.buffer_of[new] = buffer

    def chained(self, value: Any, buffer: fx.Node) -> fx.Node:
        """The running statistics before a BatchNorm: of the step's start, or of an earlier use."""
        return self.snapshot(buffer) if value is buffer else value

    def snapshot(self, buffer: fx.Node) -> fx.Node:
        if buffer not in self.snapshots:
            entry = self.buffers[buffer]
            made = self.placeholder(f"{buffer.name}_before", buffer.meta["val"])
            self.inputs.append(Input(made.name, Role.SNAPSHOT, entry.path, source=buffer.name))
            self.snapshots[buffer] = made
        return self.snapshots[buffer]

    def count_once(self, mean: fx.Node) -> None:
        """num_batches_tracked grows from what it was at the start of the step."""
        module = self.buffers[mean].path.rpartition("running_mean")[0]
        for node, entry in self.buffers.items():
            if entry.path == f"{module}num_batches_tracked" and node not in self.snapshots:
                users = [user for user in node.users if user.op != "output"]
                before = self.snapshot(node)
                for user in users:
                    user.replace_input_with(node, before)

    def scratch(self, node: fx.Node, mean: fx.Node) -> list[fx.Node]:
        like, path = mean.meta["val"], self.buffers[mean].path
        half = like.dtype in (torch.float16, torch.bfloat16)
        with fake_mode_of([like]):
            sums = torch.empty_like(like, dtype=torch.float32 if half else like.dtype)
            count = torch.empty((), dtype=torch.float64, device=like.device)
        name = mean.name.removesuffix("_running_mean")
        made = [
            self.placeholder(f"{name}_{word}", value)
            for word, value in (("count", count), ("mean", sums), ("squares", sums))
        ]
        self.inputs += [Input(n.name, Role.SCRATCH, path) for n in made]
        return made

    def placeholder(self, name: str, like: torch.Tensor) -> fx.Node:
        """A new input, with a fake value of its own: traces tell values apart by identity."""
        graph = self.joint.graph
        inputs = graph.find_nodes(op="placeholder")
        taken = {node.target for node in inputs}
        if name in taken:
            name = next(n for k in itertools.count(1) if (n := f"{name}_{k}") not in taken)
        with graph.inserting_after(inputs[-1]):
            made = graph.placeholder(name)
        with fake_mode_of([like]):
            made.meta = {"val": torch.empty_like(like)}
        return made

    def insert(
        self,
        node: fx.Node,
        after: list[fx.Node],
        function: Callable[..., list[torch.Tensor]],
        operands: list[fx.Node],
    ) -> list[fx.Node]:
        """The results of a function of nodes, computed next to `node`, in its module."""
        values = [operand.meta["val"] for operand in operands]
        with fake_mode_of(values), torch.no_grad():
            body = make_fx(function)(*values)
        order = {n: i for i, n in enumerate(self.joint.graph.nodes)}
        place = max(after, key=order.__getitem__)
        copies = copy_in(self.joint.graph, place.next, body.graph, operands, node.meta)
        self.inserted = set(copies.values()) - set(operands)
        return [copies[result] for result in results_of(body)]


def merge(number: int, momentum: float) -> Callable[..., list[torch.Tensor]]:
    """How `number` values per channel change the step's statistics, and with them the buffers."""

    def merged(
        count: torch.Tensor,
        mean: torch.Tensor,
        squares: torch.Tensor,
        own_mean: torch.Tensor,
        own_var: torch.Tensor,
        mean_before: torch.Tensor,
        var_before: torch.Tensor,
    ) -> list[torch.Tensor]:
        total = count + number
        difference = own_mean.to(mean.dtype) - mean
        mean = mean + difference * number / total
        squares = squares + own_var.to(mean.dtype) * (number - 1)
        squares = squares + difference.square() * (count * number / total)
        running_mean = mean_before * (1 - momentum) + mean * momentum
        running_var = var_before * (1 - momentum) + squares / (total - 1) * momentum
        return [
            total, mean, squares,
            running_mean.to(mean_before.dtype), running_var.to(var_before.dtype),
        ]  # fmt: skip

    return merged

"""The model graph to the joint graph: forward and backward of one microbatch, as ATen operators."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx

from fxpipe.batch import batch_dim
from fxpipe.errors import CaptureError, ModelError
from fxpipe.passes._graph import aten, copy_graph, results_of
from fxpipe.program import Input, Program, Result, Role
from fxpipe.torch_private import describe_outputs, describe_placeholder, export_joint, expression


@dataclass(frozen=True)
class TraceJoint:
    """
    model(inputs) -> outputs

    becomes

    joint(inputs, output_gradients) -> outputs, replaced buffers, input gradients

    on fake tensors of the microbatch's sizes. The gradient of the loss is the constant 1. Nodes of
    the backward have `meta["backward"]`. Without gradients the graph is the forward alone.

    Raises CaptureError where torch cannot trace the model, ModelError for a mutation that a
    microbatch cannot make alone.
    """

    def __call__(self, program: Program) -> Program:
        try:
            traced = export_joint(
                with_sizes(program), lambda mode: make_fakes(program, mode), program.training
            )
        except Exception as error:
            if empty := empty_batch(program):
                raise CaptureError(
                    f"{empty} has a batch of 0 rows, of which torch cannot trace the model "
                    f"({type(error).__name__}: {str(error).strip().splitlines()[0]}); leave empty "
                    f"batches out"
                ) from error
            rows = program.microbatch_size
            raise CaptureError(
                f"torch cannot trace the model with microbatches of {rows} "
                f"{'row' if rows == 1 else 'rows'} ({type(error).__name__}: "
                f"{str(error).strip().splitlines()[0]}); run the model on as many rows in plain "
                f"eager: where that fails too, use fewer microbatches or a larger batch"
            ) from error
        joint, results = rename(program, traced)
        keep_what_backward_reads(joint, results)
        joint.recompile()
        return replace(program, joint=joint, results=tuple(results))


def empty_batch(program: Program) -> str | None:
    """`the argument 'x'` where the call has no row to split, and one that has none."""
    if program.batch_symbol is not None:
        return None
    nodes = program.model.graph.find_nodes(op="placeholder")
    for entry, node in zip(program.inputs, nodes):
        dim = batch_dim(entry.path, program.options)
        if entry.role is Role.WHOLE and dim is not None:
            shape = node.meta["example_value"].shape
            if dim < len(shape) and expression(shape[dim]) == 0:
                return f"the argument {entry.path!r}"
    return None


def with_sizes(program: Program) -> fx.GraphModule:
    """The model, its operators given numbers in the place of integer inputs.

    torch would make symbols of them, which not all operators take: `x.pow(n)` has no backward then.
    """
    model, _ = copy_graph(program.model)
    nodes = model.graph.find_nodes(op="placeholder")
    numbers = {
        node: int(entry.size.subs(program.sizes))
        for node, entry in zip(nodes, program.inputs)
        if entry.role is Role.SIZE
    }
    for user in {user for node in numbers for user in node.users if user.op != "output"}:
        user.args = fx.node.map_arg(user.args, lambda node: numbers.get(node, node))
        user.kwargs = fx.node.map_arg(user.kwargs, lambda node: numbers.get(node, node))
    return fx.GraphModule(model, model.graph)


def make_fakes(program: Program, mode: Any) -> list[Any]:
    """The traced inputs: tensors of a microbatch's sizes, integers as they are."""
    nodes = program.model.graph.find_nodes(op="placeholder")
    with mode:
        return [make_fake(program, entry, node) for entry, node in zip(program.inputs, nodes)]


def make_fake(program: Program, entry: Input, node: fx.Node) -> Any:
    if entry.role is Role.SIZE:
        return int(entry.size.subs(program.sizes))
    if entry.role is Role.SHARE:
        return torch.empty((), dtype=torch.float64)
    example = node.meta["example_value"]
    if not isinstance(example, torch.Tensor):
        return torch.empty((), dtype=torch.int64)
    shape = [int(expression(size).subs(program.sizes)) for size in example.shape]
    made = torch.empty(shape, dtype=example.dtype, device=example.device)
    if entry.role is not Role.BATCH:
        # Microbatches are made contiguous; everything else comes with the strides that it has.
        stride = [int(expression(size).subs(program.sizes)) for size in example.stride()]
        made = torch.empty_strided(shape, stride, dtype=example.dtype, device=example.device)
    return made.requires_grad_(entry.requires_grad)


def rename(program: Program, traced: fx.GraphModule) -> tuple[fx.GraphModule, list[Result]]:
    """The traced graph with the program's names for inputs and without absent outputs."""
    graph = fx.Graph()
    environment: dict[fx.Node, fx.Node] = {}
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            environment[node] = make_placeholder(program, graph, node)
        elif node.op != "output":
            environment[node] = graph.node_copy(node, environment.__getitem__)
            if node.meta.get("partitioner_tag") == "is_backward" or any(
                source.meta.get("backward") for source in environment[node].all_input_nodes
            ):
                environment[node].meta["backward"] = True
    outputs, results = [], []
    for value, described in zip(results_of(traced), describe_outputs(traced)):
        if described is None or value is None:
            continue
        results.append(make_result(program, *described))
        outputs.append(environment[value] if isinstance(value, fx.Node) else value)
    return_inputs_that_are_replaced(graph, outputs, results)
    graph.output(tuple(outputs))
    return fx.GraphModule(traced, graph), results


def return_inputs_that_are_replaced(
    graph: fx.Graph, outputs: list[Any], results: list[Result]
) -> None:
    """An output that is a buffer's new value is the buffer itself: `self.count += 1`."""
    inputs = {node.name: node for node in graph.find_nodes(op="placeholder")}
    replaced = {
        value: inputs[str(result.target)]
        for value, result in zip(outputs, results)
        if result.kind == "mutation"
    }
    for i, result in enumerate(results):
        if result.kind == "output" and outputs[i] in replaced:
            outputs[i] = replaced[outputs[i]]


def make_placeholder(program: Program, graph: fx.Graph, node: fx.Node) -> fx.Node:
    what, number = describe_placeholder(node)
    if what == "input":
        made = graph.placeholder(program.inputs[number].name)
        made.meta = dict(node.meta)
    elif number == program.loss:
        made = graph.call_function(aten.full.default, ((), 1.0), {"dtype": node.meta["val"].dtype})
        made.meta = {"val": node.meta["val"], "backward": True}
    else:
        made = graph.placeholder(f"grad_{program.outputs[number].name}")
        made.meta = {**node.meta, "backward": True, "tangent": number}
    made.meta.pop("desc", None)
    return made


def make_result(program: Program, kind: str, number: int) -> Result:
    if kind == "output":
        return Result(kind, number)
    if kind == "gradient":
        return Result(kind, program.inputs[number].name)
    if kind != "mutation":
        raise ModelError(
            f"the model returns a view of something that it also changes in place ({kind}); return "
            f"a clone of it"
        )
    entry = program.inputs[number]
    if entry.role is not Role.BUFFER:
        raise ModelError(
            f"the model changes its {entry.role.value} {entry.path!r} in place, which microbatches "
            f"cannot do one by one; work on a clone of it, or register it as a buffer"
        )
    return Result(kind, entry.name)


def keep_what_backward_reads(joint: fx.GraphModule, results: list[Result]) -> None:
    """Backward reads a buffer as its own forward saw it, not as later microbatches left it."""
    for name in [r.target for r in results if r.kind == "mutation"]:
        buffer = next(n for n in joint.graph.find_nodes(op="placeholder") if n.name == name)
        readers = [user for user in buffer.users if user.meta.get("backward")]
        if not readers:
            continue
        # Next to its first use, so that both come to be in one stage.
        first = next(n for n in joint.graph.nodes if n in buffer.users)
        with joint.graph.inserting_before(first):
            saved = joint.graph.call_function(aten.clone.default, (buffer,))
        saved.meta = {
            k: v for k, v in first.meta.items() if k in ("stack_trace", "nn_module_stack")
        }
        saved.meta["val"] = buffer.meta["val"]
        for user in readers:
            user.replace_input_with(buffer, saved)

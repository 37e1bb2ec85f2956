"""A Dynamo graph and its inputs to a Program: which inputs hold the batch, what the outputs are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
import torch.fx as fx

from fxpipe import torch_private
from fxpipe.errors import CaptureError, OptionError
from fxpipe.options import Options
from fxpipe.program import Input, Join, Output, Program, Role, tensors_of, where


@dataclass(frozen=True)
class Capture:
    """What one Dynamo graph holds, before a batch size is known."""

    model: fx.GraphModule
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    batch_symbol: sympy.Symbol | None
    symbols: tuple[sympy.Symbol, ...]
    training: bool

    def program(
        self,
        options: Options,
        sizes: Mapping[sympy.Symbol, int],
        num_microbatches: int,
        num_ranks: int | None,
    ) -> Program:
        """The program for microbatches whose symbols have these sizes."""
        return Program(
            options, self.training, self.batch_symbol, sizes, num_microbatches, num_ranks,
            self.model, self.inputs, self.outputs,
        )  # fmt: skip


def capture(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> Capture:
    """Classify the inputs and outputs of a Dynamo graph.

    On the first, static trace this does not return: Dynamo is asked to trace again with the batch
    dimension of the call's tensor arguments symbolic. Raises CaptureError for a graph break.
    """
    refuse_graph_break(gm)
    placeholders = gm.graph.find_nodes(op="placeholder")
    ask_for_symbolic_batch(placeholders, example_inputs, options)
    inputs = [classify(node, value) for node, value in zip(placeholders, example_inputs)]
    check_batch_dims(inputs, options)
    batch_symbol = find_batch_symbol(placeholders, inputs, options)
    inputs = [mark_batch(node, i, batch_symbol, options) for node, i in zip(placeholders, inputs)]
    names = unique_names(inputs)
    inputs = [replace(i, name=name) for i, name in zip(inputs, names)]
    training = torch.is_grad_enabled() and any(i.requires_grad for i in inputs)
    model = rename_placeholders(gm, names)
    symbols = {s for i in inputs if i.size is not None for s in i.size.free_symbols}
    for node in placeholders:
        for tensor in tensors_of(node.meta.get("example_value")):
            for size in tensor.shape:
                symbols |= torch_private.expression(size).free_symbols
    outputs = find_outputs(model, batch_symbol, training, options)
    ordered = tuple(sorted(symbols, key=lambda s: s.name))
    return Capture(model, tuple(inputs), outputs, batch_symbol, ordered, training)


def refuse_graph_break(gm: fx.GraphModule) -> None:
    broken = torch_private.graph_break_reason(gm)
    if broken is None:
        return
    reason, frame = broken
    place = f"{frame.filename}:{frame.lineno}: {frame.line}" if frame else "an unknown line"
    first_line = str(reason).strip().splitlines()[0]
    raise CaptureError(
        f"the model is not one graph: it breaks at {place} ({first_line}); a pipeline needs the "
        f"whole model in one graph, so move that line out of the model or make it traceable"
    )


def ask_for_symbolic_batch(
    placeholders: Sequence[fx.Node], values: Sequence[Any], options: Options
) -> None:
    dims = []
    for node, value in zip(placeholders, values):
        if not isinstance(value, torch.Tensor) or not torch_private.is_call_argument(node):
            continue
        dim = batch_dim(user_path(torch_private.source_name(node)), options)
        if dim is not None and dim < value.dim() and value.shape[dim] > 1:
            dims.append((value, dim))
    if dims:
        torch_private.trace_again_with_dynamic_dims(dims)


def batch_dim(path: str, options: Options) -> int | None:
    """The dimension that may hold the batch: 0 unless `batch_dims` says otherwise."""
    for name, dim in options.batch_dims.items():
        if path == name or path.startswith(f"{name}."):
            return dim
    return 0


def user_path(source: str) -> str:
    """`L['batch'].x` to `batch.x`; in a module, `._modules['a']._parameters['w']` to `a.w`."""
    keys = re.findall(r"\['?([^'\]]+)'?\]|\.(\w+)", source)
    parts = [bracket or attribute for bracket, attribute in keys]
    in_module = any(p in ("_modules", "_parameters", "_buffers") for p in parts)
    hidden = ("_modules", "_parameters", "_buffers", "__closure__", "cell_contents", "__dict__")
    parts = [p for p in parts[in_module:] if p not in hidden]
    return ".".join(parts) or source


def classify(node: fx.Node, value: Any) -> Input:
    example = node.meta.get("example_value")
    source = torch_private.source_name(node)
    path = user_path(source)
    if isinstance(example, (torch.SymInt, int)):
        return Input(node.name, Role.SIZE, path, size=torch_private.expression(example))
    if not isinstance(example, torch.Tensor):
        raise CaptureError(
            f"input {path!r} is a {type(example).__name__}; expected tensors and integers: pass "
            f"other values as attributes of the model or as tensors"
        )
    requires_grad = bool(example.requires_grad)
    if isinstance(value, torch.nn.Parameter):
        role = Role.PARAMETER
    elif torch_private.is_call_argument(node):
        role = Role.WHOLE
    else:
        role = Role.BUFFER
    return Input(node.name, role, path, requires_grad=requires_grad)


def check_batch_dims(inputs: Sequence[Input], options: Options) -> None:
    paths = [i.path for i in inputs if i.role is Role.WHOLE]
    for name in options.batch_dims:
        if not any(path == name or path.startswith(f"{name}.") for path in paths):
            raise OptionError(
                f"batch_dims names {name!r}, which is no tensor argument of the call; "
                f"the tensor arguments are {', '.join(paths) or 'none'}"
            )


def find_batch_symbol(
    placeholders: Sequence[fx.Node], inputs: Sequence[Input], options: Options
) -> sympy.Symbol | None:
    """The symbol that most arguments have in their batch dimension; the first of equals."""
    votes: Counter[sympy.Symbol] = Counter()
    for node, entry in zip(placeholders, inputs):
        size = leading_size(node, entry, options)
        if isinstance(size, sympy.Symbol):
            votes[size] += 1
    return votes.most_common(1)[0][0] if votes else None


def leading_size(node: fx.Node, entry: Input, options: Options) -> sympy.Expr | None:
    if entry.role is not Role.WHOLE:
        return None
    shape = node.meta["example_value"].shape
    dim = batch_dim(entry.path, options)
    if dim is None or dim >= len(shape):
        return None
    return torch_private.expression(shape[dim])


def mark_batch(
    node: fx.Node, entry: Input, batch_symbol: sympy.Symbol | None, options: Options
) -> Input:
    if batch_symbol is None or leading_size(node, entry, options) != batch_symbol:
        return entry
    return replace(entry, role=Role.BATCH, batch_dim=batch_dim(entry.path, options))


def unique_names(inputs: Sequence[Input]) -> list[str]:
    """Names for graphs, made of the users' paths: `blocks_0_attn_weight`."""
    taken: set[str] = set()
    names = []
    for entry in inputs:
        base = re.sub(r"\W+", "_", entry.path).strip("_").lower()
        if not base or base[0].isdigit():
            base = f"x_{base}"
        name, count = base, 1
        while name in taken:
            name, count = f"{base}_{count}", count + 1
        taken.add(name)
        names.append(name)
    return names


def rename_placeholders(gm: fx.GraphModule, names: Sequence[str]) -> fx.GraphModule:
    """A copy of the graph whose placeholders have these names, inner nodes out of their way."""
    graph = fx.Graph()
    environment: dict[fx.Node, fx.Node] = {}
    fresh = iter(names)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            environment[node] = graph.placeholder(next(fresh))
            environment[node].meta = dict(node.meta)
        else:
            environment[node] = graph.node_copy(node, environment.__getitem__)
    return fx.GraphModule(gm, graph)


def find_outputs(
    model: fx.GraphModule,
    batch_symbol: sympy.Symbol | None,
    training: bool,
    options: Options,
) -> tuple[Output, ...]:
    nodes = list(model.graph.output_node().args[0])
    outputs = [describe_output(node, batch_symbol) for node in nodes]
    losses = [
        i for i, (node, o) in enumerate(zip(nodes, outputs)) if training and could_be_loss(node)
    ]
    chosen = choose_loss(losses, nodes, options)
    return tuple(replace(o, is_loss=i == chosen) for i, o in enumerate(outputs))


def could_be_loss(node: Any) -> bool:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.requires_grad


def choose_loss(
    candidates: Sequence[int], nodes: Sequence[fx.Node], options: Options
) -> int | None:
    """The output that is the loss: the one candidate, or the one that the user named."""
    listed = "; ".join(
        f"{k}: {nodes[i].name} at {where(nodes[i])}" for k, i in enumerate(candidates)
    )
    if isinstance(options.loss, str):
        named = [i for i in candidates if nodes[i].name == options.loss]
        if len(named) != 1:
            raise OptionError(f"loss={options.loss!r} names none of the scalar outputs ({listed})")
        return named[0]
    if options.loss is not None:
        if options.loss >= len(candidates):
            raise OptionError(
                f"loss={options.loss} is out of range: the scalar outputs are {listed}"
            )
        return candidates[options.loss]
    if len(candidates) > 1:
        raise OptionError(
            f"the model returns {len(candidates)} differentiable scalars ({listed}); say which one "
            f"is the loss, for instance options={{'loss': 0}}, and detach the others"
        )
    return candidates[0] if candidates else None


def describe_output(node: Any, batch_symbol: sympy.Symbol | None) -> Output:
    if not isinstance(node, fx.Node):
        return Output(repr(node), Join.FIRST)
    value = node.meta.get("example_value")
    if isinstance(value, (torch.SymInt, int)):
        return Output(node.name, Join.SIZE, size=torch_private.expression(value))
    requires_grad = isinstance(value, torch.Tensor) and value.requires_grad
    sizes = [torch_private.expression(s) for s in getattr(value, "shape", ())]
    dims = [d for d, size in enumerate(sizes) if batch_symbol in size.free_symbols]
    if not dims:
        return Output(node.name, Join.SUM, requires_grad=requires_grad)
    if len(dims) > 1 or sizes[dims[0]] != batch_symbol:
        shape = ", ".join(map(str, sizes))
        raise CaptureError(
            f"output {node.name} has shape [{shape}] with {batch_symbol} the batch, so the parts "
            f"of the microbatches cannot be joined; return it with the batch as one dimension of "
            f"its own ({where(node)})"
        )
    return Output(node.name, Join.CONCATENATE, dim=dims[0], requires_grad=requires_grad)

"""A Dynamo graph and its inputs to a Program: which inputs hold the batch, what the outputs are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
import torch.fx as fx

from fxpipe import torch_private
from fxpipe.aliases import Aliases, take_aliases
from fxpipe.batch import (
    batch_sizes,
    check_found,
    check_names,
    check_range,
    find_batch_symbol,
    mark_batch,
)
from fxpipe.errors import CaptureError, OptionError
from fxpipe.options import Options
from fxpipe.program import Input, Join, Output, Program, Role, tensors_of, where

# The model where a decorator of its forward takes whatever it is given: `def wrapper(*args)`.
WRAPPED = re.compile(r"^L\['args'\]\[0\](?=\.\w)(?!\.(?:size|stride|storage_offset)\(\))")


@dataclass(frozen=True)
class Capture:
    """What one Dynamo graph holds, before a batch size is known."""

    model: fx.GraphModule
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    batch_symbol: sympy.Symbol | None
    symbols: tuple[sympy.Symbol, ...]
    training: bool
    aliases: Aliases | None = None  # of outputs that are None in the model

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
    refuse_graph_break(gm)  # its sentence is the more precise one
    refuse_piece_of_a_model()
    placeholders = gm.graph.find_nodes(op="placeholder")
    ask_for_symbolic_batch(placeholders, example_inputs, options)
    tie_sizes(gm, example_inputs)
    inputs = [classify(node, value) for node, value in zip(placeholders, example_inputs)]
    check_names(inputs, options)
    batch_symbol = find_batch_symbol(placeholders, inputs, options)
    check_found(placeholders, inputs, example_inputs, batch_symbol, options)
    inputs = [mark_batch(node, i, batch_symbol, options) for node, i in zip(placeholders, inputs)]
    names = unique_names(inputs)
    inputs = [replace(i, name=name) for i, name in zip(inputs, names)]
    model, aliases = take_aliases(rename_placeholders(gm, names), inputs)
    training = torch.is_grad_enabled() and any(i.requires_grad for i in inputs)
    # Under inference_mode inside of the model nothing that comes out has a gradient.
    training = training and any(
        tensor.requires_grad
        for node in model.graph.output_node().all_input_nodes
        for tensor in tensors_of(node.meta.get("example_value"))
    )
    symbols = {s for i in inputs if i.size is not None for s in i.size.free_symbols}
    for node in placeholders:
        for tensor in tensors_of(node.meta.get("example_value")):
            for size in tensor.shape:
                symbols |= torch_private.expression(size).free_symbols
    outputs = find_outputs(model, batch_symbol, training, options)
    ordered = tuple(sorted(symbols, key=lambda s: s.name))
    return Capture(model, tuple(inputs), outputs, batch_symbol, ordered, training, aliases)


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


def refuse_piece_of_a_model() -> None:
    """A piece would become a pipeline of its own."""
    frame = torch_private.frame_left_to_python()
    if frame is not None:
        raise CaptureError(
            f"the model is not one graph: Dynamo left {frame.filename}:{frame.lineno}: "
            f"{frame.line} to Python, so that a piece of the model alone came here; compile with "
            f"fullgraph=True to see the reason, and move what breaks the graph out of the model"
        )


def ask_for_symbolic_batch(
    placeholders: Sequence[fx.Node], values: Sequence[Any], options: Options
) -> None:
    arguments = {
        user_path(torch_private.source_name(node)): value
        for node, value in zip(placeholders, values)
        if isinstance(value, torch.Tensor) and torch_private.is_call_argument(node)
    }
    check_range(arguments, options)
    sizes = batch_sizes(arguments, options)
    dims = [(arguments[path], dim) for path, (dim, size) in sizes.items() if size > 1]
    if dims:
        torch_private.trace_again_with_dynamic_dims(dims)


def tie_sizes(gm: fx.GraphModule, values: Sequence[Any]) -> None:
    """Let arguments share the symbol of a size where the model reads them row by row.

    `mask[arange(rows), k]` and `scores.gather(1, labels)` ask of `mask` and `labels` only as many
    rows as there are, so the trace gives these sizes symbols of their own. Where they are equal in
    this call, they are the same from here on; a call where they are not is traced anew.
    """
    numbers: dict[sympy.Expr, int] = {}
    sizes: dict[sympy.Expr, Any] = {}
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), values):
        if isinstance(value, torch.Tensor):
            for size, number in zip(node.meta["example_value"].shape, value.shape):
                numbers[torch_private.expression(size)] = int(number)
                sizes[torch_private.expression(size)] = size
    for node in gm.graph.nodes:
        for size, other in sizes_that_meet(node):
            first, second = torch_private.expression(size), torch_private.expression(other)
            for one, two in factors_that_meet(first, second, numbers):
                if one != two and numbers.get(one) == numbers.get(two) is not None:
                    torch_private.tie(sizes[one], sizes[two])


def factors_that_meet(
    first: sympy.Expr, second: sympy.Expr, numbers: Mapping[sympy.Expr, int]
) -> list[tuple[sympy.Expr, sympy.Expr]]:
    """Symbols of the trace that are one where two sizes are.

    `logits.flatten(0, 1)` beside `targets.flatten()`: rows * places of each, in the order in which
    the arguments have them, which `numbers` keeps.
    """
    if first.is_Symbol and second.is_Symbol:
        return [(first, second)]
    sides = [[s for s in numbers if s.is_Symbol and s in e.free_symbols] for e in (first, second)]
    products = all(e == sympy.Mul(*side) for e, side in zip((first, second), sides))
    return list(zip(*sides)) if products and len(sides[0]) == len(sides[1]) else []


def sizes_that_meet(node: fx.Node) -> list[tuple[Any, Any]]:
    """Sizes that are one where an operator picks from each row, and has a number for every row."""
    name = str(getattr(node.target, "__name__", node.target)).strip("_")
    shapes = [shape_of(argument) for argument in node.args]
    if len(shapes) < 2 or shapes[0] is None:
        return []
    if name in ("getitem", "setitem"):
        items = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        plain = [not (item is None or item is Ellipsis) for item in items]
        counts = [count for item in items for count in counts_of_rows(item)]
        if not all(plain) or len(counts) > len(shapes[0]):
            return []
        return [(size, n) for size, n in zip(shapes[0], counts) if n is not None]
    if name in ("cross_entropy", "nll_loss") and shapes[1] is not None:
        return list(zip(shapes[0], shapes[1]))[:1]
    if name in ("gather", "take_along_dim", "scatter", "scatter_add"):
        shape = next((s for s in [shape_of(node.kwargs.get("index")), *shapes[1:]] if s), None)
        return list(zip(shapes[0], shape)) if shape and len(shape) == len(shapes[0]) else []
    return []


def shape_of(node: Any) -> Sequence[Any] | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value.shape if isinstance(value, torch.Tensor) else None


def counts_of_rows(item: Any) -> Sequence[Any]:
    """The sizes that the dimensions which an index picks from have; None where it does not say."""
    value = item.meta.get("example_value") if isinstance(item, fx.Node) else None
    if isinstance(value, torch.Tensor) and value.dtype == torch.bool:
        return value.shape
    return [count_of_rows(item)]


def count_of_rows(item: Any) -> Any:
    """The n of an index that is arange(n), in whatever shape; None for other indices."""
    while shape_of(item) is not None:
        name = str(getattr(item.target, "__name__", item.target))
        if name == "arange":
            return item.meta["example_value"].shape[0]
        if name not in ("getitem", "unsqueeze", "view", "reshape", "expand", "to"):
            return None
        item = item.args[0]
    return None


def user_path(source: str) -> str:
    """`L['batch'].x` to `batch.x`; in a module, `._modules['a']._parameters['w']` to `a.w`."""
    source = WRAPPED.sub("L['self']", source).replace("L['kwargs']", "L", 1)
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
            if stack := node.meta.get("nn_module_stack"):
                own = {
                    k: (WRAPPED.sub("L['self']", path), kind) for k, (path, kind) in stack.items()
                }
                environment[node].meta = {**node.meta, "nn_module_stack": own}
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
            raise OptionError(
                f"loss={options.loss!r} names none of the scalar outputs ({listed}); write the "
                f"number of one, or the name behind it"
            )
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

"""Graphs and programs -> text that is the same bytes for the same program.

    graph 0F(%x: f32[2, 3], %w: f32[4, 3])
      %t: f32[3, 4] = t(%w)
      %mm: f32[2, 4] = mm(%x, %t)
      return (%mm, %x)

Types come from `meta["val"]`, or `meta["example_value"]` in a graph of Dynamo's. The text holds no
address, no path of a file and no order of a set.
"""

from __future__ import annotations

import enum
import operator
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import sympy
import torch
import torch.fx as fx

if TYPE_CHECKING:
    from fxpipe.program import Input, Output, Program, Task

WIDTH = 100

_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.complex64: "c64",
    torch.complex128: "c128",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}
_SYMBOLIC = {torch.SymInt: "int", torch.SymFloat: "float", torch.SymBool: "bool"}
# `str` of these is a name of torch's without an address: torch.strided, torch.channels_last.
_NAMED = (torch.layout, torch.memory_format)
_OPERATORS = (type(torch.ops.aten.mm), type(torch.ops.aten.mm.default))
# Built-in functions know only the private module that they were made in.
_PUBLIC = {"torch._C._nn": "torch.nn.functional"}


def format_graph(name: str, gm: fx.GraphModule) -> str:
    """One line per node under the graph's signature; graphs that it holds follow after it."""
    lines: list[str] = []
    returned = "None"
    parameters: list[str] = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            default = f" = {format_value(node.args[0])}" if node.args else ""
            parameters.append(f"{_typed(node)}{default}")
        elif node.op == "output":
            returned = format_value(node.args[0])
            lines += _wrap("  return ", node.args[0], returned)
        else:
            lines.append(f"  {_typed(node)} = {_call(node)}")
    texts = ["\n".join([*_signature(f"graph {name}", parameters), *lines])]
    texts += [format_graph(f"{name}.{path}", inner) for path, inner in _inner_graphs(gm)]
    return "\n\n".join(texts)


def format_type(value: Any) -> str:
    """`f32[2, s0]` of a tensor, `int(s0)` of a symbolic size, `(f32[2], i64[2])` of a tuple."""
    if isinstance(value, torch.Tensor):
        return f"{format_dtype(value.dtype)}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (tuple, list)):
        inner = ", ".join(map(format_type, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    for symbolic, word in _SYMBOLIC.items():
        if isinstance(value, symbolic):
            return f"{word}({value})"
    return "None" if value is None else type(value).__name__


def format_dtype(dtype: torch.dtype) -> str:
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def format_value(value: Any) -> str:
    """An argument of a node, nested ones included."""
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        shown = ["" if part is None else format_value(part) for part in parts]
        return ":".join(shown if shown[2] else shown[:2])
    if isinstance(value, torch.Size):
        value = list(value)
    if isinstance(value, tuple):
        inner = ", ".join(map(format_value, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, list):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, Mapping):
        items = (f"{format_value(k)}: {format_value(v)}" for k, v in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(format_value, value)))}}}"
    return _format_atom(value)


def _format_atom(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return format_dtype(value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if value is None or value is Ellipsis or isinstance(value, (bool, int, float, complex, str)):
        return "..." if value is Ellipsis else repr(value)
    if isinstance(value, (torch.device, *_SYMBOLIC, *_NAMED, sympy.Basic)):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.Tensor):
        return format_type(value)
    return _target(value) if callable(value) else f"<{type(value).__name__}>"


def _typed(node: fx.Node) -> str:
    for key in ("val", "example_value"):
        if node.meta.get(key) is not None:
            return f"%{node.name}: {format_type(node.meta[key])}"
    return f"%{node.name}"


def _call(node: fx.Node) -> str:
    if node.op == "get_attr":
        return f"get_attr {node.target}"
    if node.target is operator.getitem:
        key = node.args[1]
        shown = ", ".join(map(format_value, key)) if isinstance(key, tuple) else format_value(key)
        return f"{format_value(node.args[0])}[{shown}]"
    arguments = [format_value(argument) for argument in node.args]
    keywords = [f"{key}={format_value(value)}" for key, value in node.kwargs.items()]
    if node.op == "call_method":
        return f"{arguments[0]}.{node.target}({', '.join(arguments[1:] + keywords)})"
    target = f"self.{node.target}" if node.op == "call_module" else _target(node.target)
    return f"{target}({', '.join(arguments + keywords)})"


def _target(target: Any) -> str:
    """`mm`, `sum.dim_IntList`, `prims.iota`, `operator.add`, `torch.nn.functional.linear`.

    An operator goes without `aten.` and without `.default`.
    """
    if isinstance(target, _OPERATORS):
        return str(target).removesuffix(".default").removeprefix("aten.")
    if getattr(target, "namespace", None) == "higher_order":
        return str(target)
    module = (getattr(target, "__module__", None) or "").removeprefix("_")
    module = _PUBLIC.get(module, module)
    name = getattr(target, "__qualname__", None) or type(target).__name__
    name = name.removeprefix("_VariableFunctionsClass.")  # torch's own functions, as in torch.sin
    return name if module in ("", "builtins") else f"{module}.{name}"


def _inner_graphs(gm: fx.GraphModule) -> Iterator[tuple[str, fx.GraphModule]]:
    """The graphs that nodes call or hand to an operator, each once, in the order of the nodes."""
    paths = (n.target for n in gm.graph.nodes if n.op in ("get_attr", "call_module"))
    for path in dict.fromkeys(map(str, paths)):
        try:
            inner: Any = operator.attrgetter(path)(gm)
        except AttributeError:  # a graph may be printed before its constants are attached
            continue
        if isinstance(inner, fx.GraphModule):
            yield path, inner


def _signature(head: str, parameters: Iterable[str]) -> list[str]:
    parameters = list(parameters)
    line = f"{head}({', '.join(parameters)})"
    if len(line) <= WIDTH:
        return [line]
    return [f"{head}(", *(f"    {parameter}," for parameter in parameters), ")"]


def _wrap(head: str, value: Any, text: str) -> list[str]:
    """`head` and the text of a value, or one line per item of the value where that is too long."""
    if len(head + text) <= WIDTH or not isinstance(value, (tuple, list)):
        return [head + text]
    return [f"{head}{text[0]}", *(f"    {format_value(item)}," for item in value), f"  {text[-1]}"]


def format_program(program: Program) -> str:
    """Everything that a pass sees, the graphs in their latest form: model, joint, or tasks."""
    parts = [_summary(program)]
    parts += [f"stages='auto' made {program.balance}"] if program.balance is not None else []
    parts.append("\n".join(["inputs", *map(_input, program.inputs)]))
    parts.append("\n".join(["outputs", *map(_output, program.outputs)]))
    if program.schedule.num_ranks:
        lines = str(program.schedule).splitlines()
        ranks = [f"  rank {rank}: {line}".rstrip() for rank, line in enumerate(lines)]
        parts.append("\n".join([f"schedule {program.schedule.name}", *ranks]))
    for edge, names in program.edges.items():
        parts.append("\n".join(_names(f"edge {edge}:", names)))
    parts += ["\n".join(["ends", *ends])] if (ends := list(_ends(program))) else []
    if program.prologue is not None:
        parts.append(format_graph("prologue", program.prologue))
    if program.tasks:
        for key, task in program.tasks.items():
            parts.append(_task(str(key), task, program.last_uses.get(key, ())))
    elif program.joint is not None:
        parts.append(_joint(program))
    else:
        parts.append(format_graph("model", program.model))
    return "\n\n".join(parts) + "\n"


def _summary(program: Program) -> str:
    counts = {
        "stages": program.num_stages or None,
        "microbatches": program.num_microbatches,
        "ranks": program.num_ranks,
        "batch": program.batch_symbol,
        "microbatch size": program.microbatch_size,
    }
    shown = [f"{what} {value}" for what, value in counts.items() if value is not None]
    return f"program: {', '.join([*shown, 'training' if program.training else 'forward only'])}"


def _input(entry: Input) -> str:
    facts = [f"  %{entry.name}: {entry.role.value}", entry.path]
    facts += [f"batch in dimension {entry.batch_dim}"] if entry.batch_dim is not None else []
    facts += [f"size {entry.size}"] if entry.size is not None else []
    facts += ["gradient"] if entry.requires_grad else []
    return ", ".join(facts)


def _output(entry: Output) -> str:
    facts = [f"  %{entry.name}: {entry.join.value}"]
    facts += [f"dimension {entry.dim}"] if entry.dim is not None else []
    facts += [f"size {entry.size}"] if entry.size is not None else []
    facts += ["loss"] if entry.is_loss else []
    facts += ["gradient"] if entry.requires_grad else []
    return ", ".join(facts)


def _ends(program: Program) -> Iterator[str]:
    """Where the results that leave the tasks come from, and which gradients ranks add up."""
    for number, (stage, value) in program.returns.items():
        yield f"  output {number}: %{value} of stage {stage}"
    for name, (stage, value) in program.input_gradients.items():
        yield f"  gradient of %{name}: %{value} of stage {stage}"
    for name, (contributors, receivers) in program.reductions.items():
        ranks = ", ".join(map(str, contributors))
        holders = ", ".join(map(str, receivers))
        yield f"  gradient of %{name}: summed over ranks {ranks}, for ranks {holders}"


def _joint(program: Program) -> str:
    """The joint graph, and after it what each of its outputs is."""
    outputs = program.joint.graph.output_node().args[0]
    values = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    lines = ["results"]
    for value, result in zip(values, program.results):
        stage = f", stage {result.stage}" if result.stage is not None else ""
        target = f"%{result.target}" if isinstance(result.target, str) else result.target
        lines.append(f"  {format_value(value)}: {result.kind} {target}{stage}")
    return "\n\n".join([format_graph("joint", program.joint), "\n".join(lines)])


def _task(name: str, task: Task, last_uses: Iterable[str]) -> str:
    """The graph of a task, and how it is called where that differs from what the graph shows."""
    lines = [format_graph(name, task.graph)]
    placeholders = [n.name for n in task.graph.graph.find_nodes(op="placeholder")]
    if placeholders != list(task.inputs):
        lines += _names("  takes", task.inputs)
    returned = [getattr(value, "name", None) for value in task.graph.graph.output_node().args[0]]
    if returned != list(task.outputs):
        lines += _names("  gives", task.outputs)
    lines += _names("  adds in place to", (f"acc_{name}" for name in task.accumulates))
    lines += _names("  replaces in place", task.writes)
    lines += _names("  last use of", last_uses)
    return "\n".join(lines)


def _names(head: str, names: Iterable[str]) -> list[str]:
    """`head` and the names of values, over as many lines as it takes; nothing for no names."""
    text = ", ".join(f"%{name}" for name in names)
    return textwrap.wrap(f"{head} {text}", WIDTH, subsequent_indent="    ") if text else []

"""A rank program -> what each of its values is, and which of them share storage."""

from __future__ import annotations

from collections.abc import Iterator
from operator import getitem
from typing import Any

import torch
import torch.fx as fx

from fxpipe.lowering import instructions
from fxpipe.lowering.packing import Spec
from fxpipe.lowering.rank_program import RankProgram

OpOverload = type(torch.ops.aten.mm.default)
# Views by another name: their schemas do not say so.
UNDECLARED_VIEWS = (torch.ops.aten._unsafe_view.default, torch.ops.aten._reshape_alias.default)
UNPACKED = (instructions.wait, instructions.pause)


def is_unpacked(node: Any) -> bool:
    """Whether a call's results are values of their own: a task's, a message's."""
    return node.op == "call_module" or node.target in UNPACKED


def is_call(node: fx.Node) -> bool:
    """Whether a node runs; the others name an input, a result, or a part of what a call gave."""
    if node.op in ("placeholder", "output"):
        return False
    return not (node.target is getitem and is_unpacked(node.args[0]))


def parts_of(call: fx.Node) -> Iterator[tuple[int, fx.Node]]:
    """The values that a call gives, with their numbers; a call with one result is that itself."""
    if not is_unpacked(call):
        yield 0, call
        return
    for user in call.users:
        if user.target is getitem:
            yield user.args[1], user


def task_of(program: RankProgram, call: fx.Node) -> fx.Graph:
    """The graph of the task that a node calls."""
    graph: fx.Graph = program.graph.get_submodule(str(call.target)).graph
    return graph


def specs_of(program: RankProgram) -> dict[fx.Node, Spec]:
    """The shape, strides, dtype and device of every value, as tasks and messages describe them."""
    specs: dict[fx.Node, Spec] = {}
    for call in program.graph.graph.find_nodes(op="call_module"):
        placeholders = task_of(program, call).find_nodes(op="placeholder")
        for argument, placeholder in zip(call.args, placeholders):
            if isinstance(argument, fx.Node):
                add_spec(specs, argument, placeholder.meta["val"])
        results = task_of(program, call).output_node().args[0]
        for number, part in parts_of(call):
            add_spec(specs, part, results[number].meta["val"])
    for node in program.graph.graph.nodes:
        match node.target:
            case instructions.wait:
                for number, part in parts_of(node):
                    specs[part] = program.messages[node.args[1]].specs[number]
            case instructions.total if node.args[0][0] in specs:
                specs.setdefault(node, specs[node.args[0][0]])
            case instructions.join:
                specs[node] = joined([specs[part] for part in node.args[0]], node.args[1])
            case instructions.new_accumulator if node in specs:
                specs.setdefault(node.args[0], specs[node])
    return specs


def add_spec(specs: dict[fx.Node, Spec], node: fx.Node, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        specs.setdefault(node, Spec.of(value))


def joined(parts: list[Spec], dim: int) -> Spec:
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    made = torch.empty(shape, dtype=parts[0].dtype, device="meta")
    return Spec.of(made)._replace(device=parts[0].device)


def bytes_of_spec(spec: Spec) -> int:
    """What the storage of such a tensor takes: holes between its elements count."""
    if 0 in spec.shape:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(spec.shape, spec.stride))
    return (last + 1) * spec.dtype.itemsize


def storages_of(program: RankProgram) -> dict[fx.Node, fx.Node]:
    """Value -> the value in whose storage it lies, where a task gives a view of another one."""
    found: dict[fx.Node, fx.Node] = {}
    for call in program.graph.graph.find_nodes(op="call_module"):
        task = task_of(program, call)
        arguments = dict(zip(task.find_nodes(op="placeholder"), call.args))
        firsts: dict[fx.Node, fx.Node] = {}
        results = task.output_node().args[0]
        for number, part in sorted(parts_of(call), key=lambda item: item[0]):
            base = base_of(results[number])
            if isinstance(arguments.get(base), fx.Node):
                found[part] = found.get(arguments[base], arguments[base])
            elif firsts.setdefault(base, part) is not part:
                found[part] = firsts[base]
    return found


def base_of(node: fx.Node) -> fx.Node:
    """The node whose storage a node of a task's graph shares: what it views or writes to."""
    while shares_first(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def shares_first(node: fx.Node) -> bool:
    target = node.target
    if target is getitem:
        return isinstance(node.args[0], fx.Node) and shares_first(node.args[0])
    if not isinstance(target, OpOverload):
        return False
    in_place = target.overloadpacket.__name__.endswith("_")
    return bool(target.is_view) or target in UNDECLARED_VIEWS or in_place

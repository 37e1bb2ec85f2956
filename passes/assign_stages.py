"""Every node of the joint graph to its stage."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch.fx as fx

from fxpipe.errors import ModelError, OptionError
from fxpipe.flops import cost, flops
from fxpipe.partition import partition
from fxpipe.passes._graph import copy_graph, getitem_of, is_random
from fxpipe.program import Program, Role, where

ANNOTATION = "fxpipe_stage"


@dataclass(frozen=True)
class AssignStages:
    """
    %h = linear(%x, ...)             nn_module_stack: blocks.1
    %g = linear_backward(%grad)      the same seq_nr

    becomes

    %h, %g with meta["stage"] = 1

    Forward nodes get their stage from, in this order: `with fxpipe.stage(k)` in the model; the
    option `stages=["blocks.1", ...]`, each path the beginning of a new stage; the option
    `stages=4`, which cuts the modules in their order of execution so that the costliest stage is
    cheapest. Backward nodes follow their forward. Stages never run against the flow of data.

    Nodes that are cheap, made of arguments and buffers alone and without gradient (masks, position
    tables) have no stage: each stage that uses one computes it.
    """

    def __call__(self, program: Program) -> Program:
        joint, _ = copy_graph(program.joint)
        for node in joint.graph.nodes:
            node.meta.pop("stage", None)
        floating = nodes_without_stage(program, joint)
        forward = [
            n
            for n in joint.graph.nodes
            if n.op not in ("placeholder", "output") and not n.meta.get("backward")
        ]
        staged = [n for n in forward if n not in floating]
        num_stages = assign_forward(program, staged)
        assign_backward(joint, num_stages)
        return replace(program, joint=joint, num_stages=num_stages)


def nodes_without_stage(program: Program, joint: fx.GraphModule) -> set[fx.Node]:
    written = {r.target for r in program.results if r.kind == "mutation"}
    roots = {
        i.name
        for i in program.inputs
        if i.role is not Role.PARAMETER and not i.requires_grad and i.name not in written
    }
    floating: set[fx.Node] = set()
    for node in joint.graph.nodes:
        if node.op == "placeholder" and node.name in roots:
            floating.add(node)
        elif node.op in ("call_function", "get_attr") and not node.meta.get("backward"):
            if all(n in floating for n in node.all_input_nodes):
                if not is_random(node) and not flops(node):
                    floating.add(node)
    return floating


def assign_forward(program: Program, nodes: Sequence[fx.Node]) -> int:
    """Set meta["stage"] of the forward nodes; the number of stages."""
    wanted = program.options.stages
    annotated = {n: k for n in nodes if (k := annotation(n)) is not None}
    if annotated:
        return assign_annotated(nodes, annotated, wanted)
    if isinstance(wanted, (list, tuple)):
        starts = starts_of_paths(nodes, wanted)
    else:
        count = (program.num_ranks or 1) if wanted is None or wanted == "auto" else wanted
        starts = balanced_starts(nodes, int(count))
    for index, node in enumerate(nodes):
        node.meta["stage"] = sum(start <= index for start in starts[1:])
    return len(starts)


def annotation(node: fx.Node) -> int | None:
    return (node.meta.get("custom") or {}).get(ANNOTATION)


def assign_annotated(
    nodes: Sequence[fx.Node], annotated: Mapping[fx.Node, int], wanted: object
) -> int:
    used = sorted(set(annotated.values()))
    count = used[-1] + 1
    if used != list(range(count)):
        missing = sorted(set(range(count)) - set(used))
        raise ModelError(
            f"the model annotates stages {used} and leaves out {missing}; number them from 0 on"
        )
    if wanted not in (None, count):
        raise OptionError(
            f"stages={wanted!r} and the model's fxpipe.stage(...) annotations make {count} stages; "
            f"leave one of them out"
        )
    for node in nodes:
        before = [n.meta["stage"] for n in node.all_input_nodes if "stage" in n.meta]
        own = annotated.get(node)
        if own is not None and before and own < max(before):
            raise ModelError(
                f"stage {own} uses a value of stage {max(before)}, at {where(node)}; stages must "
                f"follow the flow of data"
            )
        if own is not None or before:
            node.meta["stage"] = max(before) if own is None else own
    for node in reversed(nodes):
        if "stage" not in node.meta:
            after = [n.meta["stage"] for n in node.users if "stage" in n.meta]
            node.meta["stage"] = min(after, default=0)
    return count


def module_paths(node: fx.Node) -> list[str]:
    """The paths of the modules that a node is inside of, outermost first, without the model."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = []
    for path, _ in stack.values():
        keys = re.findall(r"\['?([^'\]]+)'?\]|\.(\w+)", re.sub(r"^[LG]\['?\w+'?\]", "", path))
        inner = [a or b for a, b in keys if (a or b) not in ("_modules", "__closure__")]
        if inner:
            paths.append(".".join(inner))
    return paths


def starts_of_paths(nodes: Sequence[fx.Node], paths: Sequence[str]) -> list[int]:
    """Where each stage begins: at the first node inside of each path."""
    first: dict[str, int] = {}
    for index, node in enumerate(nodes):
        for path in module_paths(node):
            parts = path.split(".")
            for end in range(1, len(parts) + 1):
                first.setdefault(".".join(parts[:end]), index)
    for path in paths:
        if path not in first:
            near = difflib.get_close_matches(path, first, n=1, cutoff=0.0)
            raise OptionError(
                f"stages names {path!r}, which is no module that the model calls"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )
    starts = [0, *sorted(first[path] for path in paths if first[path] > 0)]
    if len(set(starts)) < len(starts):
        raise OptionError(f"stages={list(paths)} begins two stages at the same place; drop one")
    return starts


def balanced_starts(nodes: Sequence[fx.Node], num_stages: int) -> list[int]:
    """Cut before modules, descending into those that are too large for one stage."""
    if num_stages == 1:
        return [0]
    costs = [cost(node) for node in nodes]
    expanded: set[str] = {""}
    while True:
        items = items_of(nodes, costs, expanded)
        size = {path: sum(c for p, _, c in items if p == path) for path, _, _ in items}
        inner = [p for p in size if p not in expanded and has_children(nodes, p)]
        largest = max(inner, key=size.__getitem__, default=None)
        if largest is None:
            break
        if len(items) >= num_stages and size[largest] * num_stages <= sum(costs):
            break
        expanded.add(largest)
    if len(items) < num_stages:
        items = [("", i, c) for i, c in enumerate(costs) if not getitem_of(nodes[i])]
    if len(items) < num_stages:
        raise OptionError(
            f"stages={num_stages}, but the model has only {len(items)} operations to cut between; "
            f"use fewer stages"
        )
    starts = partition([c for _, _, c in items], num_stages)
    return [items[start][1] if start else 0 for start in starts]


def items_of(
    nodes: Sequence[fx.Node], costs: Sequence[int], expanded: set[str]
) -> list[tuple[str, int, int]]:
    """(module path, first node, cost) of the pieces between which a stage may begin.

    What runs between two modules (an activation, a residual sum) belongs to the one before.
    """
    items: list[tuple[str, int, int]] = []
    for index, node in enumerate(nodes):
        path = next((p for p in module_paths(node) if p not in expanded), "")
        if not items or (path and path != items[-1][0]):
            items.append((path, index, costs[index]))
        else:
            items[-1] = (*items[-1][:2], items[-1][2] + costs[index])
    return items


def has_children(nodes: Sequence[fx.Node], path: str) -> bool:
    return any(p.startswith(f"{path}.") for n in nodes for p in module_paths(n)[-1:])


def assign_backward(joint: fx.GraphModule, num_stages: int) -> None:
    """A backward node follows the forward node with its seq_nr, never above what it is fed by."""
    stage_of: dict[int, int] = {}
    for node in joint.graph.nodes:
        if "stage" in node.meta and node.meta.get("seq_nr") is not None:
            number = node.meta["seq_nr"]
            stage_of[number] = max(stage_of.get(number, 0), node.meta["stage"])
    for node in joint.graph.nodes:
        if not node.meta.get("backward") or node.op in ("placeholder", "output"):
            continue
        sources = [n for n in node.all_input_nodes if "stage" in n.meta]
        limits = [n.meta["stage"] for n in sources if n.meta.get("backward")]
        own = stage_of.get(node.meta.get("seq_nr", -1))
        if own is None and not limits:
            limits = [n.meta["stage"] for n in sources]
        if own is not None:
            limits.append(own)
        elif node.meta.get("tangent") is None and any(
            "tangent" in n.meta for n in node.all_input_nodes
        ):
            limits.append(num_stages - 1)
        if limits:
            node.meta["stage"] = min(limits)

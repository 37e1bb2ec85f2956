"""Every node of the joint graph to its stage."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch.fx as fx

from fxpipe.errors import ModelError, OptionError
from fxpipe.flops import flops
from fxpipe.modules import module_paths
from fxpipe.passes._balance import balanced_starts, cheapest_starts
from fxpipe.passes._graph import copy_graph, is_random
from fxpipe.program import Balance, Program, Role, where
from fxpipe.schedules import stages_for

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
    cheapest; `stages="auto"`, which cuts modules wherever that makes the slowest stage fastest,
    messages counted, into as many stages as the schedule wants for the ranks, and fills
    `program.balance`. Where `program.places` says where another trace of the model was cut, the
    latter two keep to it, since parameters cannot move. Backward nodes follow their forward. Stages
    never run against the flow of data.

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
        num_stages, balance = assign_forward(program, staged)
        assign_backward(joint, num_stages)
        return replace(program, joint=joint, num_stages=num_stages, balance=balance)


def nodes_without_stage(program: Program, joint: fx.GraphModule) -> set[fx.Node]:
    written = {r.target for r in program.results if r.kind == "mutation"}
    roots = {
        i.name
        for i in program.inputs
        if i.role not in (Role.PARAMETER, Role.SNAPSHOT)
        and not i.requires_grad
        and i.name not in written
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


def assign_forward(program: Program, nodes: Sequence[fx.Node]) -> tuple[int, Balance | None]:
    """Set meta["stage"] of the forward nodes; the number of stages."""
    wanted = program.options.stages
    annotated = {n: k for n in nodes if (k := annotation(n)) is not None}
    if annotated:
        return assign_annotated(nodes, annotated, wanted), None
    if isinstance(wanted, (list, tuple)):
        starts = starts_of_paths(nodes, wanted)
        assign_in_order(nodes, starts)
        return len(starts), None
    if wanted == "auto":
        num_stages = stages_for(program.options.schedule, program.num_ranks)
    else:
        num_stages = wanted or program.num_ranks or 1
    kept = kept_stages(nodes, program.places, num_stages) if program.places else None
    if kept is not None:
        for node, stage in zip(nodes, kept):
            node.meta["stage"] = stage
        return num_stages, None
    if wanted != "auto":
        assign_in_order(nodes, balanced_starts(nodes, num_stages))
        return num_stages, None
    starts, balance = cheapest_starts(program, nodes, num_stages)
    assign_in_order(nodes, starts)
    return num_stages, balance


def assign_in_order(nodes: Sequence[fx.Node], starts: Sequence[int]) -> None:
    for index, node in enumerate(nodes):
        node.meta["stage"] = sum(start <= index for start in starts[1:])


def kept_stages(
    nodes: Sequence[fx.Node], places: Mapping[str, tuple[int, ...]], num_stages: int
) -> list[int] | None:
    """The stage of each node so that parameters and buffers stay where they are, as far as known.

    Nodes without either follow `places` too, within what the others leave. None where no order of
    stages gives that.
    """
    wanted = [demand(node, places) for node in nodes]
    bounds, bound = [], num_stages - 1
    for stages in reversed(wanted):
        bound = min(bound, max(stages, default=0)) if stages is not None else bound
        bounds.append(bound)
    stage, found = 0, []
    for node, stages, bound in zip(nodes, wanted, reversed(bounds)):
        if stages is None:
            before = places.get(node.name, (stage,))[0]
            stages = {max(stage, min(before, bound))}
        fits = [s for s in stages if stage <= s <= bound]
        if not fits:
            return None
        stage = min(fits)
        found.append(stage)
    return found


def demand(node: fx.Node, places: Mapping[str, tuple[int, ...]]) -> set[int] | None:
    """The stages that hold all the parameters and buffers that a node reads; None: any will do."""
    read = [n.name for n in node.all_input_nodes if n.op == "placeholder" and n.name in places]
    held = [set(places[name]) for name in read]
    return set.intersection(*held) if held else None


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
    for earlier, later in zip(paths, paths[1:]):
        if first[later] < first[earlier]:
            raise OptionError(
                f"stages={list(paths)} names {earlier!r} before {later!r}, which the model calls "
                f"first; name the stages in the order of the calls"
            )
    starts = [0, *(first[path] for path in paths if first[path] > 0)]
    if len(set(starts)) < len(starts):
        raise OptionError(f"stages={list(paths)} begins two stages at the same place; drop one")
    return starts


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

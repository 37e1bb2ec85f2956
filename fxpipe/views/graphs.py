"""A program -> the graph of its modules by stage, or of its actions by rank, ready to be drawn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch.fx as fx

from fxpipe.flops import bytes_of, flops
from fxpipe.messages import without_messages
from fxpipe.modules import module_paths
from fxpipe.program import Program, Role
from fxpipe.schedule import Action, Kind, Step, actions_of
from fxpipe.views import palette
from fxpipe.views.units import plural, scaled, size

# Modules are shown at the depth at which there are at most so many of them.
MOST_MODULES = 40
# Of more actions, those of the first microbatches and of the last one are shown.
MOST_ACTIONS, SHOWN_MICROBATCHES = 150, 3


@dataclass(frozen=True)
class Box:
    """A node of a picture. `group`: the name of what it lies in; `colour`: `#RRGGBB`."""

    label: str
    group: str
    colour: str


@dataclass
class Picture:
    """Boxes by name, arrows with a label between them, and the titles and colours of groups.

    order: pairs of boxes of which the second runs after the first for no other reason than the
    order of its rank. direction: where arrows point, down ("TB") or to the right ("LR").
    """

    direction: str = "LR"

    groups: dict[str, tuple[str, str]] = field(default_factory=dict)
    boxes: dict[str, Box] = field(default_factory=dict)
    arrows: dict[tuple[str, str], str] = field(default_factory=dict)
    order: list[tuple[str, str]] = field(default_factory=list)


# Modules.


def modules_picture(program: Program) -> Picture:
    """The forward: a box per module and stage, an arrow where one reads what another makes."""
    nodes = [
        node
        for node in program.joint.graph.nodes
        if node.op == "call_function" and not node.meta.get("backward")
    ]
    depth = depth_for(nodes)
    picture = Picture("TB")
    members: dict[str, list[fx.Node]] = {}
    box_of: dict[fx.Node, str] = {}
    for node in nodes:
        stage = node.meta.get("stage")
        name = f"{stage}/{module_at(node, depth)}"
        box_of[node] = name
        members.setdefault(name, []).append(node)
    for name, inside in members.items():
        stage = inside[0].meta.get("stage")
        group = "any" if stage is None else str(stage)
        colour = palette.IDLE if stage is None else palette.of_stage(stage)
        title = "every stage that needs it" if stage is None else f"stage {stage}"
        picture.groups.setdefault(group, (title, colour))
        work = sum(map(flops, inside))
        facts = plural(len(inside), "operator") + (f", {scaled(work, 'flop')}" if work else "")
        picture.boxes[name] = Box(f"{name.partition('/')[2] or 'model'}\n{facts}", group, colour)
    add_data(picture, program, nodes, box_of)
    return picture


def add_data(
    picture: Picture, program: Program, nodes: list[fx.Node], box_of: dict[fx.Node, str]
) -> None:
    """Arrows between boxes, those between stages with their bytes, and the batch's inputs."""
    crossing: dict[tuple[str, str], set[fx.Node]] = {}
    batch = {entry.name for entry in program.inputs if entry.role is Role.BATCH}
    for node in nodes:
        for source in node.all_input_nodes:
            if source.op == "placeholder" and source.name in batch:
                picture.groups.setdefault("inputs", ("inputs", palette.IDLE))
                label = f"{source.name}\n{size(bytes_of(source.meta.get('val')))}"
                picture.boxes.setdefault(source.name, Box(label, "inputs", palette.IDLE))
                picture.arrows[source.name, box_of[node]] = ""
            elif source in box_of and box_of[source] != box_of[node]:
                ends = box_of[source], box_of[node]
                picture.arrows.setdefault(ends, "")
                if source.meta.get("stage") != node.meta.get("stage"):
                    crossing.setdefault(ends, set()).add(source)
    for ends, sources in crossing.items():
        if not ends[0].startswith("None/"):
            total = sum(bytes_of(source.meta.get("val")) for source in sources)
            picture.arrows[ends] = size(total)


def depth_for(nodes: list[fx.Node]) -> int:
    """How far into the modules to go."""
    deepest = max((len(module_paths(node)) for node in nodes), default=1)
    for depth in range(deepest, 1, -1):
        if len({(n.meta.get("stage"), module_at(n, depth)) for n in nodes}) <= MOST_MODULES:
            return depth
    return 1


def module_at(node: fx.Node, depth: int) -> str:
    """The path of the module that a node is inside of; the outermost is at depth 1."""
    paths = module_paths(node)[:depth]
    return paths[-1] if paths else ""


# Actions.


def actions_picture(program: Program) -> Picture:
    """A box per action in a group per rank, an arrow per value, and the order of each rank.

    Of many microbatches some are shown; runs of the others are one box each.
    """
    schedule = without_messages(program.schedule)
    count = 1 + max((action.microbatch for _, _, action in all_actions(schedule.ranks)), default=0)
    shown = set(range(count))
    if sum(1 for _ in all_actions(schedule.ranks)) > MOST_ACTIONS:
        shown = {*range(SHOWN_MICROBATCHES - 1), count - 1}
    picture = Picture()
    box_of: dict[tuple[int, Kind, int], str] = {}
    ranks: dict[str, int] = {}
    for rank, steps in enumerate(schedule.ranks):
        picture.groups[str(rank)] = (f"rank {rank}", palette.IDLE)
        names: list[str] = []
        for step in steps:
            actions = actions_of(step)
            name = str(step)
            if not any(action.microbatch in shown for action in actions):
                name = names[-1] if names and names[-1].startswith("more") else ""
                name = name or f"more {rank} {len(names)}"
            if not names or names[-1] != name:
                names.append(name)
            for action in actions:
                box_of[action.stage, action.kind, action.microbatch] = name
                ranks[name] = rank
            colour = palette.of_stage(actions[0].stage)
            if name.startswith("more"):
                colour = palette.IDLE
            picture.boxes.setdefault(name, Box(name, str(rank), colour))
        picture.order += list(zip(names, names[1:]))
    label_folded(picture, box_of)
    for (stage, kind, microbatch), target in box_of.items():
        for source, crossing in sources_of(program, stage, kind, microbatch, box_of):
            if source != target:
                picture.arrows[source, target] = crossing if ranks[source] != ranks[target] else ""
    return picture


def all_actions(ranks: tuple[tuple[Step, ...], ...]) -> Iterator[tuple[int, Step, Action]]:
    for rank, steps in enumerate(ranks):
        for step in steps:
            for action in actions_of(step):
                yield rank, step, action


def label_folded(picture: Picture, box_of: dict[tuple[int, Kind, int], str]) -> None:
    """Say of each box that stands for several actions how many."""
    counts: dict[str, int] = {}
    for name in box_of.values():
        counts[name] = counts.get(name, 0) + 1
    for name, box in picture.boxes.items():
        if name.startswith("more"):
            picture.boxes[name] = Box(f"... {counts[name]} actions", box.group, box.colour)


def sources_of(
    program: Program,
    stage: int,
    kind: Kind,
    microbatch: int,
    box_of: dict[tuple[int, Kind, int], str],
) -> Iterator[tuple[str, str]]:
    """The boxes that an action reads from, and for those of other stages the bytes."""
    backward = (Kind.I, Kind.B)
    own = {Kind.F: (), Kind.W: (Kind.I,), Kind.I: (Kind.F,), Kind.B: (Kind.F,)}[kind]
    for of in own:
        if (stage, of, microbatch) in box_of:
            yield box_of[stage, of, microbatch], ""
    for edge, names in program.edges.items():
        if edge.target != stage or kind is Kind.W or edge.forward != (kind is Kind.F):
            continue
        for of in (Kind.F,) if edge.forward else backward:
            if (edge.source, of, microbatch) in box_of:
                yield box_of[edge.source, of, microbatch], bytes_text(program, names)


def bytes_text(program: Program, names: tuple[str, ...]) -> str:
    values = {node.name: node.meta.get("val") for node in program.joint.graph.nodes}
    return size(sum(bytes_of(values[name]) for name in names))

"""The joint graph to tasks: a graph per stage and kind, and the values that cross between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx as fx

from fxpipe.passes._accumulate import accumulate
from fxpipe.passes._graph import aten, is_view, results_of
from fxpipe.program import Edge, Join, Key, Program, Role, Task
from fxpipe.schedule import Kind


@dataclass(frozen=True)
class SplitTasks:
    """
    joint graph, every node with a stage and a kind

    becomes

    0F(inputs) -> saved, sent    1F(received, inputs) -> saved, outputs
    1B(saved) -> sent            0B(saved, received)                     (B as I and W: 1I, 1W)

    A task's inputs are program inputs, values that an earlier task of its stage keeps, or values
    received from another stage: `edges` names those. Views are not kept but made again from what
    they view, and so are nodes without a stage. Gradients of parameters are added in place to the
    input `acc_<name>`; a replaced buffer is written in place.
    """

    def __call__(self, program: Program) -> Program:
        return _Splitter(program).run()


@dataclass
class _Draft:
    """A task while its needs are still being collected."""

    key: Key
    nodes: list[fx.Node]
    inputs: dict[str, fx.Node] = field(default_factory=dict)
    outputs: dict[str, fx.Node] = field(default_factory=dict)
    copied: dict[fx.Node, None] = field(default_factory=dict)
    gradients: list[tuple[str, fx.Node]] = field(default_factory=list)
    writes: list[tuple[str, fx.Node]] = field(default_factory=list)


class _Splitter:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.joint = program.joint
        self.order = {node: i for i, node in enumerate(self.joint.graph.nodes)}
        kinds = {
            Key(action.stage, action.kind)
            for rank in range(program.schedule.num_ranks)
            for action in program.schedule.actions(rank)
        }
        self.drafts = {key: _Draft(key, self.nodes_of(key)) for key in sorted(kinds, key=order_of)}
        self.edges: dict[Edge, dict[str, None]] = {}
        self.returns: dict[int, tuple[int, str]] = {}
        self.input_gradients: dict[str, tuple[int, str]] = {}

    def nodes_of(self, key: Key) -> list[fx.Node]:
        return [node for node in self.joint.graph.nodes if self.belongs(node, key)]

    def belongs(self, node: fx.Node, key: Key) -> bool:
        if node.op in ("placeholder", "output") or node.meta.get("stage") != key.stage:
            return False
        if not node.meta.get("backward"):
            return key.kind is Kind.F
        return key.kind is Kind.B or node.meta.get("kind") is key.kind

    def run(self) -> Program:
        self.place_results()
        # Later kinds first: what they need decides what earlier ones must give.
        for draft in reversed(self.drafts.values()):
            self.collect(draft)
        drafts = {k: d for k, d in self.drafts.items() if d.nodes or d.copied or d.gradients}
        return replace(
            self.program,
            tasks={key: self.build(draft) for key, draft in drafts.items()},
            edges={edge: tuple(names) for edge, names in sorted(self.edges.items())},
            returns=self.returns,
            input_gradients=self.input_gradients,
        )

    # Results of the joint graph: outputs, gradients, replaced buffers.

    def place_results(self) -> None:
        roles = {i.name: i.role for i in self.program.inputs}
        for value, result in zip(results_of(self.joint), self.program.results):
            if result.kind == "output":
                self.place_output(int(result.target), value)
            elif result.kind == "mutation":
                self.place_write(str(result.target), value)
            elif roles[str(result.target)] is Role.BATCH:
                stage = value.meta.get("stage", 0)
                self.input_gradients[str(result.target)] = (stage, value.name)
                self.give(stage, value)
            else:
                for key in self.finishing(result.stage, value):
                    self.drafts[key].gradients.append((str(result.target), value))

    def place_output(self, index: int, value: Any) -> None:
        if not isinstance(value, fx.Node) or self.program.outputs[index].join is Join.SIZE:
            return
        stage = value.meta.get("stage", self.program.num_stages - 1)
        self.returns[index] = (stage, value.name)
        if value.op != "placeholder":
            draft = self.drafts[Key(stage, Kind.F)]
            draft.outputs[value.name] = value
            if "stage" not in value.meta:
                self.copy(value, draft)

    def place_write(self, buffer: str, value: fx.Node) -> None:
        self.drafts[Key(value.meta.get("stage", 0), Kind.F)].writes.append((buffer, value))

    def give(self, stage: int, value: fx.Node) -> None:
        for key in self.finishing(stage, value):
            self.drafts[key].outputs[value.name] = value

    def finishing(self, stage: int | None, value: fx.Node) -> list[Key]:
        """The tasks that make a backward value: B, or the one of I and W that it belongs to."""
        kind = value.meta.get("kind", Kind.W)
        kind = Kind.W if kind is Kind.F else kind
        return [key for key in self.drafts if key.stage == stage and key.kind in (Kind.B, kind)]

    # Needs.

    def collect(self, draft: _Draft) -> None:
        inside = set(draft.nodes)
        needed = [n for node in draft.nodes for n in node.all_input_nodes if n not in inside]
        ends = [node for _, node in draft.gradients + draft.writes]
        # A buffer is written in place even where only another stage's value of it is read.
        buffers = {name for name, _ in draft.writes}
        ends += [n for n in self.joint.graph.find_nodes(op="placeholder") if n.name in buffers]
        for node in needed + [n for n in ends if n not in inside]:
            self.need(node, draft, inside)

    def need(self, node: fx.Node, draft: _Draft, inside: set[fx.Node]) -> None:
        """Make `node` available in a task: made again there, or an input."""
        if node in inside or node in draft.copied or node.name in draft.inputs:
            return
        if node.op == "placeholder":
            draft.inputs[node.name] = node
        elif self.is_made_again(node, draft):
            for source in node.all_input_nodes:
                self.need(source, draft, inside)
            draft.copied[node] = None
        else:
            draft.inputs[node.name] = node
            self.supply(node, draft.key)

    def is_made_again(self, node: fx.Node, draft: _Draft) -> bool:
        stage, kind = draft.key
        if node.op == "get_attr":
            return True
        if "stage" in node.meta:
            return node.meta["stage"] == stage and is_view(node)
        forward = self.drafts.get(Key(stage, Kind.F))
        kept = forward is not None and any(
            user.meta.get("stage") == stage and not user.meta.get("backward")
            for user in users_through(node)
        )
        return kind is Kind.F or is_view(node) or not node.all_input_nodes or not kept

    def supply(self, node: fx.Node, consumer: Key) -> None:
        """Let the tasks that make `node` give it to `consumer`, over an edge where need be."""
        stage = node.meta.get("stage", consumer.stage)
        if stage != consumer.stage:
            self.edges.setdefault(Edge(stage, consumer.stage), {})[node.name] = None
        if not node.meta.get("backward"):
            forward = self.drafts[Key(stage, Kind.F)]
            forward.outputs[node.name] = node
            if "stage" not in node.meta:
                self.copy(node, forward)
            return
        for key in self.drafts:
            if key.stage == stage and key.kind in (Kind.I, Kind.B):
                if not (key.kind is Kind.B and stage == consumer.stage):
                    self.drafts[key].outputs[node.name] = node

    def copy(self, node: fx.Node, draft: _Draft) -> None:
        inside = set(draft.nodes)
        for source in node.all_input_nodes:
            self.need(source, draft, inside)
        draft.copied[node] = None

    # Graphs.

    def build(self, draft: _Draft) -> Task:
        graph = fx.Graph()
        environment: dict[fx.Node, fx.Node] = {}
        inputs = sorted(draft.inputs.values(), key=self.order.__getitem__)
        for node in inputs:
            environment[node] = graph.placeholder(node.name)
            environment[node].meta = {"val": node.meta["val"]}
        accumulators = self.accumulators(draft, graph)
        for node in sorted({*draft.nodes, *draft.copied}, key=self.order.__getitem__):
            environment[node] = graph.node_copy(node, environment.__getitem__)
        made = [environment[node] for _, node in draft.gradients]
        kept = {environment[node] for node in draft.outputs.values()}
        kept |= {environment[node] for _, node in draft.writes}
        kept |= {value for value in made if made.count(value) > 1}
        for (name, _), value in zip(draft.gradients, made):
            accumulate(graph, accumulators[name], value, kept)
        for name, node in draft.writes:
            buffer = next(n for n in graph.find_nodes(op="placeholder") if n.name == name)
            written = graph.call_function(aten.copy_.default, (buffer, environment[node]))
            written.meta = dict(node.meta)
        outputs = sorted(draft.outputs.values(), key=self.order.__getitem__)
        graph.output(tuple(environment[node] for node in outputs))
        return Task(
            fx.GraphModule(self.joint, graph, class_name=f"Task{draft.key}"),
            tuple(n.name for n in inputs) + tuple(f"acc_{name}" for name in accumulators),
            tuple(n.name for n in outputs),
            tuple(accumulators),
            tuple(name for name, _ in draft.writes),
        )

    def accumulators(self, draft: _Draft, graph: fx.Graph) -> Mapping[str, fx.Node]:
        made: dict[str, fx.Node] = {}
        inputs = {n.name: n for n in self.joint.graph.find_nodes(op="placeholder")}
        for name, _ in draft.gradients:
            if name not in made:
                made[name] = graph.placeholder(f"acc_{name}")
                made[name].meta = {"val": torch.empty_like(inputs[name].meta["val"])}
        return made


def order_of(key: Key) -> tuple[int, int]:
    return key.stage, (Kind.F, Kind.B, Kind.I, Kind.W).index(key.kind)


def users_through(node: fx.Node) -> Iterable[fx.Node]:
    """The users of a node, and those of users that have no stage of their own."""
    for user in node.users:
        if "stage" in user.meta or user.op == "output":
            yield user
        else:
            yield from users_through(user)

"""A forward and a backward that the schedule pairs become one task."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.fx as fx

from fxpipe.passes._graph import results_of
from fxpipe.program import Key, PairTask, Program, Role
from fxpipe.schedule import Pair

SHARED = frozenset({Role.PARAMETER, Role.BUFFER, Role.WHOLE, Role.SIZE, Role.PROLOGUE})


@dataclass(frozen=True)
class MergePairs:
    """
    [2F5|3B1] with tasks 2F(%x) -> %h and 3B(%saved, %grad) -> %grad_x

    becomes

    one graph (%x, %saved, %grad) -> %h, %grad_x

    so that a compiler, or two streams, may run one's computation under the other's memory traffic
    or communication. What both read that does not depend on the microbatch (parameters) is one
    input. A schedule without pairs stays as it is; with the pass off a pair runs as F, then B.
    """

    def __call__(self, program: Program) -> Program:
        keys = {
            (
                Key(step.forward.stage, step.forward.kind),
                Key(step.backward.stage, step.backward.kind),
            )
            for steps in program.schedule.ranks
            for step in steps
            if isinstance(step, Pair)
        }
        shared = {i.name for i in program.inputs if i.role in SHARED}
        pairs = {
            pair: merge(program, pair, shared)
            for pair in sorted(keys)
            if all(key in program.tasks for key in pair)
        }
        return replace(program, pairs=pairs)


def merge(program: Program, pair: tuple[Key, Key], shared: set[str]) -> PairTask:
    graph = fx.Graph()
    inputs: list[tuple[int, str]] = []
    outputs: list[tuple[int, str]] = []
    returned: list[fx.Node] = []
    common: dict[str, fx.Node] = {}
    for side, key in enumerate(pair):
        task = program.tasks[key]
        environment: dict[fx.Node, fx.Node] = {}
        names = iter(task.inputs)
        for node in task.graph.graph.nodes:
            if node.op == "placeholder":
                name = next(names)
                if name in common:
                    environment[node] = common[name]
                    continue
                environment[node] = graph.placeholder(name if name in shared else f"{name}_{key}")
                environment[node].meta = dict(node.meta)
                inputs.append((side, name))
                if name in shared:
                    common[name] = environment[node]
            elif node.op != "output":
                environment[node] = graph.node_copy(node, environment.__getitem__)
        outputs += [(side, name) for name in task.outputs]
        returned += [environment[node] for node in results_of(task.graph)]
    graph.output(tuple(returned))
    module = fx.GraphModule(program.joint, graph, class_name=f"Pair{pair[0]}{pair[1]}")
    return PairTask(module, tuple(inputs), tuple(outputs))

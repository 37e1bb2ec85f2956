"""The gradient of a parameter that several stages use to gradients that one stage makes each."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.fx as fx

from fxpipe.passes._graph import aten, copy_graph, results_of
from fxpipe.program import Program, Result, Role


@dataclass(frozen=True)
class PartialGradients:
    """
    %g = add(%from_stage_3, %from_stage_0)        gradient of a tied weight

    becomes

    two gradients, %from_stage_3 of stage 3 and %from_stage_0 of stage 0

    so that the sum is made once a step, between ranks, and not once a microbatch along the
    pipeline. A gradient that one stage makes stays as it is.
    """

    def __call__(self, program: Program) -> Program:
        joint, _ = copy_graph(program.joint)
        split_of_batch = {i.name for i in program.inputs if i.role is Role.BATCH}
        outputs: list[object] = []
        results: list[Result] = []
        for value, result in zip(results_of(joint), program.results):
            if result.kind == "gradient" and result.target not in split_of_batch:
                for stage, part in parts_by_stage(value):
                    outputs.append(part)
                    results.append(replace_stage(program, joint, result, stage))
            else:
                outputs.append(value)
                results.append(result)
        joint.graph.output_node().args = (tuple(outputs),)
        joint.graph.eliminate_dead_code()
        joint.recompile()
        return replace(program, joint=joint, results=tuple(results))


def parts_by_stage(value: fx.Node) -> list[tuple[int | None, fx.Node]]:
    """The terms of a sum over stages, each as large as its stage makes it."""
    is_sum = value.op == "call_function" and value.target is aten.add.Tensor
    terms = [term for term in value.args if isinstance(term, fx.Node)]
    if not is_sum or len(terms) < 2 or len(value.users) > 1 or "alpha" in value.kwargs:
        return [(value.meta.get("stage"), value)]
    if len({stage for term in terms for stage, _ in parts_by_stage(term)}) == 1:
        return [(value.meta.get("stage"), value)]
    return [part for term in terms for part in parts_by_stage(term)]


def replace_stage(
    program: Program, joint: fx.GraphModule, result: Result, stage: int | None
) -> Result:
    """A gradient without a stage (a constant) belongs to the first stage that uses its input."""
    if stage is None:
        node = next(n for n in joint.graph.find_nodes(op="placeholder") if n.name == result.target)
        stages = [user.meta["stage"] for user in node.users if "stage" in user.meta]
        stage = min(stages, default=program.num_stages - 1)
    return result._replace(stage=stage)

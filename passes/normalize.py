"""The joint graph without what computes nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fxpipe.passes._graph import aten, copy_graph
from fxpipe.program import Program

IDENTITIES = frozenset({aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default})


@dataclass(frozen=True)
class Normalize:
    """
    %a = detach(%x); %b = f(%a); %c = g(%x)        (%c unused)

    becomes

    %b = f(%x)

    Autograd's bookkeeping (detach, alias) and dead code go. A graph without them stays as it is.
    """

    def __call__(self, program: Program) -> Program:
        joint, _ = copy_graph(program.joint)
        for node in joint.graph.nodes:
            if node.target in IDENTITIES:
                node.replace_all_uses_with(node.args[0])
        joint.graph.eliminate_dead_code()
        joint.recompile()
        return replace(program, joint=joint)

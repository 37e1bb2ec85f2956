"""A pass of one's own among those of fxpipe: what is computed twice is computed once.

python examples/write_a_pass.py
python examples/write_a_pass.py --lowering eager --dump dumps     open dumps/*/index.html afterwards

The model computes the softmax of its mixture's weights in both of its layers, as models do whose
parts know nothing of each other. The pass finds such operators in the joint graph. docs/
writing-a-pass.md goes through it line by line.
"""

from __future__ import annotations

import argparse
import copy
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxpipe.passes import copy_graph
from fxpipe.program import Program

ROUNDING = 1e-5  # float32 keeps 7 digits, and the microbatches' sums are made in another order


@dataclass(frozen=True)
class ShareEqualOperators:
    """
    %a = exp(%x)
    %b = exp(%x)
    %c = add(%a, %b)

    becomes

    %a = exp(%x)
    %c = add(%a, %a)

    Operators that draw random numbers or write to their inputs stay.
    """

    def __call__(self, program: Program) -> Program:
        joint, _ = copy_graph(program.joint)
        seen: dict[Any, fx.Node] = {}
        for node in list(joint.graph.nodes):
            if node.op != "call_function" or not is_pure(node):
                continue
            key = (node.target, repr(node.args), repr(node.kwargs))
            first = seen.setdefault(key, node)
            if first is not node:
                node.replace_all_uses_with(first)
                joint.graph.erase_node(node)
        joint.recompile()
        return replace(program, joint=joint)


def is_pure(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    name = getattr(node.target, "__name__", "").partition(".")[0]
    return torch.Tag.nondeterministic_seeded not in tags and not name.endswith("_")


class Mixture(nn.Module):
    """Each layer weighs its features by the same learned mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.mixture = nn.Parameter(torch.randn(32))
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) * self.mixture.softmax(0)
        x = torch.tanh(self.second(x)) * self.mixture.softmax(0)
        return F.mse_loss(self.head(x), y)


def main() -> int:
    parser = argparse.ArgumentParser(description="A pass of one's own, beside eager.")
    parser.add_argument("--lowering", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--dump", help="folder for the program after every pass")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = Mixture()
    plain = copy.deepcopy(model)
    x, y = torch.randn(12, 8), torch.randn(12, 4)

    counts = []

    def count_before(program: Program) -> Program:
        counts.append(len(program.joint.graph.nodes))
        return program

    def count_after(program: Program) -> Program:
        counts.append(len(program.joint.graph.nodes))
        return program

    options = {
        "stages": 2,
        "microbatches": 3,
        "extra_passes": [
            ("after", "normalize", count_before),
            ("after", "normalize", ShareEqualOperators()),
            ("after", "normalize", count_after),
        ],
        **vars(arguments),
    }
    step = torch.compile(model, backend="fxpipe", options=options)
    step(x, y).backward()
    plain(x, y).backward()
    print(f"the joint graph had {counts[0]} nodes, and has {counts[1]}")
    pairs = zip(model.parameters(), plain.parameters())
    worst = max(float((p.grad - q.grad).norm() / q.grad.norm()) for p, q in pairs)
    agrees = worst < ROUNDING and counts[1] < counts[0]
    print(f"largest relative difference of a gradient: {worst:.1e}")
    print("the pipeline agrees with eager" if agrees else "the pipeline DIFFERS from eager")
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())

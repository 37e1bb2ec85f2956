"""What is wrong with a user's own pass is said with its name, at once or where it is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.fx as fx

from fxpipe.errors import PassError
from fxpipe.passes import copy_graph, default_pipeline
from fxpipe.pipeline import name_of
from fxpipe.program import Program
from tests.helpers import MLP, Captured, captured, mlp_batch

Pass = Callable[[Program], Program]


@pytest.fixture(scope="module")
def mlp() -> Captured:
    return captured(MLP(3, 3, 3), *mlp_batch())


def run(given: Captured, **options: Any) -> Program:
    program = given.with_options(stages=2, schedule="zb-h1", **options).program(2, ranks=2)
    return default_pipeline(program.options)(program)


def as_it_was(program: Program) -> Program:
    return program


def with_joint(program: Program, change: Callable[[fx.Graph], None]) -> Program:
    joint, _ = copy_graph(program.joint)
    change(joint.graph)
    return replace(program, joint=joint)


def named(graph: fx.Graph, name: str) -> fx.Node:
    return next(node for node in graph.nodes if node.name == name)


def forgets_val(program: Program) -> Program:
    def change(graph: fx.Graph) -> None:
        tanh = named(graph, "tanh")
        with graph.inserting_after(tanh):
            twice = graph.call_function(torch.ops.aten.mul.Tensor, (tanh, 1.0))
        tanh.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not twice)

    return with_joint(program, change)


def stage_seven(program: Program) -> Program:
    return with_joint(program, lambda graph: named(graph, "tanh").meta.update(stage=7))


def tanh_later(program: Program) -> Program:
    return with_joint(program, lambda graph: named(graph, "addmm").meta.update(stage=1))


def gradient_later(program: Program) -> Program:
    return with_joint(program, lambda graph: named(graph, "mse_loss_backward").meta.update(stage=0))


def kind_as_text(program: Program) -> Program:
    return with_joint(program, lambda graph: named(graph, "mm").meta.update(kind="I"))


def reads_later_value(program: Program) -> Program:
    def change(graph: fx.Graph) -> None:
        named(graph, "addmm").append(named(graph, "view"))
        graph.output_node().prepend(named(graph, "addmm"))

    return with_joint(program, change)


@pytest.mark.parametrize(
    ("where", "pass_", "message"),
    [
        (
            "normalize",
            forgets_val,
            r'mul_tensor in the joint graph has no meta\["val"\] \(.*set it to',
        ),
        (
            "assign_stages",
            stage_seven,
            r'tanh has meta\["stage"\] 7, but stages are 0 to 1 \(.*tanh',
        ),
        ("assign_stages", tanh_later, r"tanh of stage 0 reads addmm of stage 1, but .* to higher"),
        (
            "assign_stages",
            gradient_later,
            r"mm of stage 1 reads mse_loss_backward of stage 0.* to lower",
        ),
        ("split_weight_grads", kind_as_text, r"mm has meta\[\"kind\"\] 'I', expected one of Kind"),
        ("normalize", reads_later_value, "the joint graph is malformed: .*used before"),
    ],
)
def test_broken_graph_of_an_extra_pass_is_an_error_of_that_pass(
    mlp: Captured, where: str, pass_: Pass, message: str
) -> None:
    with pytest.raises(PassError, match=f"^after {name_of(pass_)}: .*{message}"):
        run(mlp, extra_passes=[("after", where, pass_)])


def test_failure_of_a_later_pass_names_the_extra_passes_before_it(mlp: Captured) -> None:
    def loses_results(program: Program) -> Program:
        return replace(program, results=tuple(r._replace(target="?") for r in program.results))

    expected = (
        r"pass \d+/19 \w+\(.*\) failed: .*; before it ran what extra_passes adds, loses_results, "
        r"which may be the cause: try passes=\{'loses_results': False\}"
    )
    entries = [
        ("after", "split_weight_grads", loses_results),
        ("before", "normalize", as_it_was),
    ]
    off = {"as_it_was": False}
    with pytest.raises(PassError, match=expected):
        run(mlp, extra_passes=entries, passes=off)

"""`check`: a model beside plain eager, as a function, as an option and as a command."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor, nn

from fxpipe.cli import run
from fxpipe.errors import ModelError, OptionError, ParityError
from fxpipe.lowering.tasks import TaskCompiler
from fxpipe.parity import check
from fxpipe.passes import copy_graph
from fxpipe.program import Program
from fxpipe.target import make_input, read_options

OPTIONS = {"stages": 3, "microbatches": 2, "schedule": "zb-h1", "lowering": "eager"}


class Net(nn.Module):
    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.middle = middle or nn.Identity()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.middle(torch.tanh(self.a(x)))
        h = torch.relu(self.b(h))
        return F.cross_entropy(self.c(h), y)


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(5, 8, generator=random).to(dtype)
    return x, torch.randint(4, (5,), generator=random)


@pytest.fixture
def wrong_relu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward task that has the relu gives one part in a thousand too much."""
    compile_graph = TaskCompiler.__call__

    def call(self: TaskCompiler, graph: fx.GraphModule) -> Any:
        function, names = compile_graph(self, graph), {node.name for node in graph.graph.nodes}
        if "relu" not in names or any("threshold" in name for name in names):
            return function

        def wrong(*arguments: Any) -> Any:
            return tuple(v * 1.001 if v.is_floating_point() else v for v in function(*arguments))

        return wrong

    monkeypatch.setattr(TaskCompiler, "__call__", call)


def test_a_model_agrees_in_losses_gradients_and_parameters() -> None:
    found = check(Net(), batch(), options=OPTIONS)
    assert found.agrees and not found.note
    kinds = [" ".join(row.what.split()[:2]) for row in found.rows]
    assert kinds == ["loss of", "loss of", "gradient of", "after 2"]
    assert all(row.error < 1e-13 for row in found.rows)
    assert str(found).endswith("fxpipe agrees with plain eager")


def test_a_model_without_a_loss_is_checked_on_the_sum_of_what_it_returns() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    assert check(model, batch()[:1], options=OPTIONS | {"schedule": "1f1b"}).agrees


@pytest.mark.usefixtures("wrong_relu")
def test_the_first_task_that_differs_is_named_with_the_models_line() -> None:
    found = check(Net(), batch(), options=OPTIONS)
    assert not found.agrees
    assert "1F0 (stage 1, microbatch 0) gives relu with an error of 1.0e-03" in found.place
    assert "h = torch.relu(self.b(h))" in found.place
    assert "gradient of b.weight" in str(found)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Net(nn.Dropout(0.5)), "draws random numbers"),
        (Net(nn.BatchNorm1d(16)), "BatchNorm in training"),
    ],
    ids=["dropout", "batchnorm"],
)
def test_what_eager_gives_otherwise_by_contract_is_compared_with_the_joint_graph(
    model: nn.Module, reason: str
) -> None:
    found = check(model, batch(), options=OPTIONS)
    assert found.agrees and reason in found.note
    assert str(found).endswith("fxpipe agrees with its joint graph")


@pytest.mark.usefixtures("wrong_relu")
def test_a_model_with_dropout_is_not_let_off() -> None:
    found = check(Net(nn.Dropout(0.5)), batch(), options=OPTIONS)
    assert not found.agrees and "gives relu" in found.place


@pytest.mark.usefixtures("wrong_relu")
@pytest.mark.parametrize("schedule", ["1f1b", "combined-1f1b"])
def test_the_option_refuses_the_first_step(schedule: str) -> None:
    options = OPTIONS | {"check": "first", "schedule": schedule}
    step = torch.compile(Net().double(), backend="fxpipe", options=options)
    with pytest.raises(ParityError, match="differs from plain eager: the .* is off by"):
        step(*batch(torch.float64))


@pytest.mark.parametrize("middle", [nn.Identity, partial(nn.BatchNorm1d, 16)])
def test_a_checked_step_is_the_step_that_it_would_have_been(middle: Any) -> None:
    found = []
    for how in (False, "first"):
        model = Net(middle()).double()
        step = torch.compile(model, backend="fxpipe", options=OPTIONS | {"check": how})
        loss = step(*batch(torch.float64))
        loss.backward()
        state = [loss, *(p.grad for p in model.parameters()), *model.buffers()]
        found.append([value.detach().clone() for value in state])
        torch._dynamo.reset()
    assert all(map(torch.equal, *found))


def test_evaluation_is_checked_too() -> None:
    options = OPTIONS | {"check": "first"}
    step = torch.compile(Net().double().eval(), backend="fxpipe", options=options)
    with torch.no_grad():
        assert step(*batch(torch.float64)).shape == ()


def test_nothing_to_train_is_said() -> None:
    model = Net().requires_grad_(False)
    with pytest.raises(ModelError, match="has a gradient, so there is nothing to train"):
        check(model, batch(), options=OPTIONS)


def test_parameters_without_storage_cannot_be_checked() -> None:
    model = Net().double()
    step = torch.compile(model, backend="fxpipe", options=OPTIONS | {"check": "first"})
    model.c.weight.untyped_storage().resize_(0)
    with pytest.raises(ParityError, match="'c.weight' has no storage here"):
        step(*batch(torch.float64))


SCRIPT = """
import torch
from torch import nn
from tests.test_parity import Net, batch

def make():
    return Net(), batch()

def model():
    return nn.Linear(8, 4)

def number():
    return 3
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "user_script.py"
    path.write_text(SCRIPT)
    return str(path)


COMMAND = ["-o", "stages=2", "-o", "microbatches=2", "-o", "lowering=eager"]


def test_the_command_prints_the_table(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", f"{script}:make", *COMMAND, "--steps", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("loss of step 1") and "limit 1.5e-08" in lines[0]
    assert lines[-1] == "fxpipe agrees with plain eager"


def test_the_command_makes_a_batch(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", f"{script}:model", "-i", "float:5x8", *COMMAND]) == 0
    assert "agrees" in capsys.readouterr().out


@pytest.mark.usefixtures("wrong_relu")
def test_the_command_fails_where_there_is_a_difference(script: str) -> None:
    assert run(["check", f"{script}:make", *COMMAND]) == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nothing"], "names no model; write path/script.py:name"),
        (["nothing.py:x"], "there is no file nothing.py"),
        (["no.such.module:x"], "there is no module 'no.such.module'"),
        (["{script}:nothing"], "has no 'nothing'; it has Net, batch, make, model, number"),
        (["{script}:number"], "gave a int; expected a torch.nn.Module"),
        (["{script}:model"], "without a batch; return (model, args) from it"),
        (["{script}:model", "-i", "float"], "the input 'float' cannot be read"),
        (["{script}:make", "-o", "stages"], "the option 'stages' has no value"),
        (["{script}:make", "-o", "stage=2"], "did you mean 'stages'?"),
        (["{script}:make", "--dtype", "int64"], "--dtype int64 is no floating point type"),
    ],
)
def test_a_wrong_wish_is_one_line(
    arguments: list[str], complaint: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["check", *(a.format(script=script) for a in arguments)]) == 2
    assert complaint in capsys.readouterr().err


def test_inputs_and_options_are_read_from_text() -> None:
    made = make_input("int:3x2:5")
    assert made.shape == (3, 2) and made.dtype == torch.int64 and int(made.max()) < 5
    assert make_input("bool:4").dtype == torch.bool
    assert read_options(["stages=2", "schedule=1f1b", 'stages=["a"]']) == {
        "stages": ["a"],
        "schedule": "1f1b",
    }
    with pytest.raises(OptionError, match="int:sizes:below"):
        make_input("float:axb")


# Passes of the user's.


def without_relu(program: Program) -> Program:
    joint, _ = copy_graph(program.joint)
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
        node.replace_all_uses_with(node.args[0])
        joint.graph.erase_node(node)
    return replace(program, joint=joint)


def with_half_relu(program: Program) -> Program:
    tasks = dict(program.tasks)
    for key, task in tasks.items():
        graph, _ = copy_graph(task.graph)
        for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
            node.target = torch.ops.aten.neg.default
        graph.recompile()
        tasks[key] = replace(task, graph=graph)
    return replace(program, tasks=tasks)


@pytest.mark.parametrize(
    ("where", "blamed", "innocent"),
    [("normalize", "without_relu", "as_it_is"), ("split_tasks", "with_half_relu", "as_it_was")],
)
def test_a_difference_names_the_extra_passes_that_may_have_made_it(
    where: str, blamed: str, innocent: str
) -> None:
    def as_it_was(program: Program) -> Program:
        return program

    def as_it_is(program: Program) -> Program:
        return program

    passes = {"without_relu": without_relu, "with_half_relu": with_half_relu}
    others = {"as_it_was": ("before", "normalize"), "as_it_is": ("after", "plan_last_uses")}
    extra = [("after", where, passes[blamed]), (*others[innocent], locals()[innocent])]
    options = OPTIONS | {"check": "first", "extra_passes": extra}
    step = torch.compile(Net().double(), backend="fxpipe", options=options)
    expected = f"; before it ran what extra_passes adds, {blamed}, which may be the cause: try"
    with pytest.raises(ParityError, match=re.escape(expected)):
        step(*batch(torch.float64))
    torch.compiler.reset()
    options |= {"passes": {blamed: False}}
    torch.compile(Net().double(), backend="fxpipe", options=options)(*batch(torch.float64))

"""The frame around the passes: order, switches, checks, dumps, errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx
from expecttest import assert_expected_inline

from fxpipe.errors import ModelError, OptionError, PassError
from fxpipe.options import Options
from fxpipe.passes import default_pipeline
from fxpipe.pipeline import Pipeline, name_of
from fxpipe.program import Edge, Key, Program
from fxpipe.schedule import Kind
from tests.helpers import (
    GPT,
    MLP,
    Captured,
    captured,
    gpt_batch,
    lowered,
    microbatches,
    mlp_batch,
    run_ranks,
)

Pass = Callable[[Program], Program]


@pytest.fixture(scope="module")
def mlp() -> Captured:
    return captured(MLP(3, 3, 3), *mlp_batch())


@pytest.fixture(scope="module")
def gpt() -> Captured:
    return captured(GPT(), *gpt_batch())


def start(given: Captured, **options: Any) -> Program:
    return given.with_options(**{"stages": 2, **options}).program(2, ranks=2)


def run(given: Captured, **options: Any) -> Program:
    program = start(given, **options)
    return default_pipeline(program.options)(program)


def test_order_of_the_passes() -> None:
    options = Options.parse({"passes": {"normalize": False}})
    names = [name_of(p) for p in default_pipeline(options).passes]
    assert names[0] == "split_loss" and names[-1] == "plan_last_uses"
    assert names.index("trace_joint") < names.index("assign_stages")
    assert names.index("build_schedule") < names.index("split_tasks")
    assert names.index("split_tasks") < names.index("insert_communication")
    text = str(default_pipeline(options)).splitlines()
    assert text[0] == " 1 SplitLoss()"
    assert [line for line in text if "off" in line] == [
        f"{names.index('normalize') + 1:>2} Normalize()   (off)"
    ]


@dataclass(frozen=True)
class DropDeadCode:
    limit: int = 3

    def __call__(self, program: Program) -> Program:
        return program


def double_weights(program: Program) -> Program:
    return program


def test_name_of_a_pass_is_its_class_or_function_in_snake_case() -> None:
    assert name_of(DropDeadCode()) == "drop_dead_code"
    assert name_of(double_weights) == "double_weights"


def pipeline(*passes: Pass, **options: Any) -> Pipeline:
    optional = frozenset(map(name_of, passes))
    return Pipeline(passes, optional, Options.parse(options))


def test_passes_run_in_order_and_those_switched_off_do_not(mlp: Captured) -> None:
    seen = []

    def first(program: Program) -> Program:
        seen.append("first")
        return program

    def second(program: Program) -> Program:
        seen.append("second")
        return program

    program = start(mlp)
    assert str(pipeline(first, second)(program)) == str(program)
    pipeline(first, second, passes={"first": False})(program)
    assert seen == ["first", "second", "second"]


# Names that fit nothing.


def test_unknown_pass_is_refused_with_the_nearest() -> None:
    options = Options.parse({"passes": {"split_weight_grad": False}})
    with pytest.raises(OptionError, match="did you mean 'split_weight_grads'"):
        default_pipeline(options)


def test_pass_that_makes_the_pipeline_cannot_be_switched_off() -> None:
    options = Options.parse({"passes": {"split_tasks": False}})
    with pytest.raises(OptionError, match=r"'split_tasks' cannot be .* these can: .*normalize"):
        default_pipeline(options)


def test_stop_after_an_unknown_pass_is_refused_with_the_nearest() -> None:
    options = Options.parse({"stop_after": "asign_stages"})
    with pytest.raises(OptionError, match="did you mean 'assign_stages'"):
        default_pipeline(options)


def test_stop_after_stops(mlp: Captured, tmp_path: Path) -> None:
    with pytest.raises(PassError, match="stopped after assign_stages, .* in "):
        run(mlp, stop_after="assign_stages", dump=str(tmp_path))
    files = [path.name for path in sorted(tmp_path.rglob("*.txt"))]
    assert files[0] == "00-input.txt" and files[-1].endswith("assign_stages.txt")


# A pass that is off leaves a correct program.


OPTIONAL = sorted(default_pipeline(Options()).optional)


@pytest.mark.parametrize("off", [None, *OPTIONAL])
def test_program_without_a_pass_gives_the_same_numbers(gpt: Captured, off: str | None) -> None:
    passes = {off: False} if off else {}
    # One rank has a pair, the other splits its backward.
    schedule = "0F0 0F1 0I0 0W0 0I1 0W1\n1F0 [1F1|1I0] 1W0 1I1 1W1"
    program = run(gpt, passes=passes, schedule=schedule, check=True)
    parts = list(microbatches(gpt, program, (2, 2)))
    with torch.no_grad():
        ranks = lowered(program)
        results = run_ranks(ranks, parts)
    (loss,) = fx.Interpreter(gpt.capture.model).run(*gpt.values)
    leaves = {i.name: v for i, v in zip(gpt.capture.inputs, gpt.values) if i.requires_grad}
    expected = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))
    for ran, (its_loss, *gradients) in zip(ranks, results):
        torch.testing.assert_close(its_loss, loss.detach(), rtol=1e-13, atol=0)
        for name, gradient in zip(ran.gradients, gradients):
            torch.testing.assert_close(gradient, expected[name], rtol=1e-11, atol=1e-14)


# Passes of the user's.


def added(*entries: Any, **options: Any) -> list[str]:
    parsed = Options.parse({"extra_passes": list(entries), **options})
    return [name_of(p) for p in default_pipeline(parsed).passes]


def test_extra_passes_stand_where_they_are_put() -> None:
    names = added(
        ("after", "assign_stages", double_weights),
        ("after", "assign_stages", DropDeadCode()),
        ("before", "double_weights", drop_an_edge),
    )
    at = names.index("assign_stages")
    assert names[at + 1 : at + 4] == ["drop_an_edge", "double_weights", "drop_dead_code"]


def test_extra_pass_runs_and_is_dumped_like_any_other(mlp: Captured, tmp_path: Path) -> None:
    entry = ("after", "trace_joint", double_weights)
    with pytest.raises(PassError, match="stopped after double_weights"):
        run(mlp, extra_passes=[entry], stop_after="double_weights", dump=str(tmp_path))
    assert [path.stem for path in sorted(tmp_path.rglob("*.txt"))][-1] == "04-double_weights"
    program = run(mlp, extra_passes=[entry], passes={"double_weights": False})
    assert ("double_weights", False) in program.passes


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (("after", "asign_stages", double_weights), "no pass; did you mean 'assign_stages'"),
        (("after", "normalize", lambda program: program), "a pass with no name; write a def"),
        (("behind", "normalize", double_weights), "expected a list of tuples of 'before' or"),
        (("after", "normalize", DropDeadCode), "expected a list of tuples of 'before' or"),
        (("after", "normalize"), "expected a list of tuples of 'before' or"),
    ],
)
def test_wrong_extra_pass_is_refused(entry: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        added(entry)
    with pytest.raises(OptionError, match="a pass with the name of another one"):
        added(("after", "normalize", double_weights), ("after", "normalize", double_weights))


def test_extra_pass_is_checked_without_being_asked(mlp: Captured) -> None:
    with pytest.raises(PassError, match="drop_an_edge: task .* reads"):
        run(mlp, extra_passes=[("after", "split_tasks", drop_an_edge)], schedule="zb-h1")

    def forgets(program: Program) -> None:
        return None

    with pytest.raises(PassError, match="forgets returned NoneType, expected a Program"):
        run(mlp, extra_passes=[("after", "normalize", forgets)])


# Errors.


def test_error_in_a_pass_names_the_pass(mlp: Captured) -> None:
    def fails(program: Program) -> Program:
        raise KeyError("no such node")

    with pytest.raises(PassError, match=r"pass 2/2 .*fails.* failed: KeyError: 'no such node'"):
        pipeline(double_weights, fails)(start(mlp))


def test_refusal_of_a_pass_comes_through_as_it_is(mlp: Captured) -> None:
    def refuses(program: Program) -> Program:
        raise ModelError("line 7 mixes microbatches")

    with pytest.raises(ModelError, match="^line 7 mixes microbatches$"):
        pipeline(refuses)(start(mlp))


# Checks after every pass.


def test_whole_pipeline_keeps_its_promises(gpt: Captured) -> None:
    checked = run(gpt, check=True, schedule="zb-h1")
    assert str(checked) == str(run(gpt, schedule="zb-h1"))


def test_pass_that_changes_its_input_is_caught() -> None:
    def edits(program: Program) -> Program:
        (add,) = [n for n in program.model.graph.nodes if n.name == "mse_loss"]
        add.kwargs = {**add.kwargs, "reduction": "sum"}
        return program

    program = captured(MLP(3, 3), *mlp_batch()).program(2)
    with pytest.raises(PassError, match="edits.* changed the program that it was given"):
        pipeline(edits, check=True)(program)


@pytest.fixture(scope="module")
def planned() -> Program:
    return run(captured(MLP(3, 3, 3), *mlp_batch()), schedule="zb-h1")


def drop_an_edge(program: Program) -> Program:
    return replace(program, edges={Edge(0, 1): program.edges[Edge(0, 1)]})


def drop_an_output(program: Program) -> Program:
    key = Key(0, Kind.F)
    task = replace(program.tasks[key], outputs=())
    return replace(program, tasks={**program.tasks, key: task})


def forget_an_input(program: Program) -> Program:
    key = Key(1, Kind.W)
    task = replace(program.tasks[key], inputs=program.tasks[key].inputs[1:])
    return replace(program, tasks={**program.tasks, key: task})


def forget_a_result(program: Program) -> Program:
    return replace(program, results=program.results[1:])


@pytest.mark.parametrize(
    "broken, message",
    [
        (drop_an_edge, "after drop_an_edge: task 0W reads mm, which no task before it gives"),
        (drop_an_output, "carries .*tanh.*, which stage 0 does not give|reads tanh"),
        (forget_an_input, r"task 1W takes 4 inputs, but 3 are described"),
        (forget_a_result, r"the joint graph has 5 outputs, but 4 are described"),
    ],
)
def test_broken_promise_is_caught(planned: Program, broken: Pass, message: str) -> None:
    with pytest.raises(PassError, match=message):
        pipeline(broken, check=True)(planned)
    pipeline(broken)(planned)


# Dumps.


def dumped(folder: Path) -> dict[str, str]:
    """Name of a file -> its text without the head, which holds the time."""
    return {p.name: p.read_text().partition("\n")[2] for p in sorted(folder.rglob("*.txt"))}


def test_dump_has_a_file_per_pass_with_its_name_and_time(mlp: Captured, tmp_path: Path) -> None:
    program = run(mlp, dump=str(tmp_path), passes={"normalize": False})
    files = sorted(tmp_path.rglob("*.txt"))
    names = [path.name for path in files]
    assert names[0] == "00-input.txt" and "01-split_loss.txt" in names
    assert not any("normalize" in name for name in names)
    head = files[1].read_text().splitlines()[0]
    assert head.startswith("# 01 split_loss (") and head.endswith(" ms)")
    (last,) = (path for path in files if path.name.endswith("plan_last_uses.txt"))
    assert str(program) in last.read_text()


def test_same_program_gives_the_same_bytes(tmp_path: Path) -> None:
    texts = []
    for name in ("first", "second"):
        given = captured(GPT(), *gpt_batch())
        run(given, dump=str(tmp_path / name))
        texts.append(dumped(tmp_path / name))
    assert texts[0] == texts[1]


def test_dump_of_an_earlier_run_is_replaced(mlp: Captured, tmp_path: Path) -> None:
    run(mlp, dump=str(tmp_path))
    (tmp_path / "notes.md").write_text("mine")
    count = len(dumped(tmp_path))
    with pytest.raises(PassError):
        run(mlp, dump=str(tmp_path), stop_after="split_loss")
    assert len(dumped(tmp_path)) < count
    assert (tmp_path / "notes.md").read_text() == "mine"


def test_forward_only_programs_are_dumped_beside_the_others(mlp: Captured, tmp_path: Path) -> None:
    run(mlp, dump=str(tmp_path))
    with torch.no_grad():
        given = captured(MLP(3, 3, 3), *mlp_batch())
    run(given, dump=str(tmp_path))
    folders = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert_expected_inline(" ".join(folders), """microbatch-of-2 microbatch-of-2-forward""")

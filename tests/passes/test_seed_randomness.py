"""Random operators become functions of a seed: the same wherever and whenever they are computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fxpipe import random
from fxpipe.errors import ModelError
from fxpipe.lowering.tasks import structure_of
from fxpipe.options import Options
from fxpipe.passes import SeedRandomness
from fxpipe.program import Input, Program, Result, Role
from fxpipe.random import Made
from tests.helpers import (
    Captured,
    captured,
    joint_text,
    microbatches,
    mlp_batch,
    run_graph,
    run_joint,
    run_tasks,
    run_until,
    task,
)

aten = torch.ops.aten
SEED = 5


def program_of(function: Callable[..., Any], *inputs: Tensor) -> Program:
    """A program whose joint graph is a function of tensors, written in ATen operators."""
    joint = make_fx(function, tracing_mode="fake")(*inputs)
    nodes = joint.graph.find_nodes(op="placeholder")
    entries = tuple(Input(node.name, Role.WHOLE, node.name) for node in nodes)
    returned = joint.graph.output_node().args[0]
    if not isinstance(returned, (tuple, list)):
        joint.graph.output_node().args = ((returned,),)
    count = len(joint.graph.output_node().args[0])
    results = tuple(Result("output", i) for i in range(count))
    return Program(
        Options(), False, None, {}, 1, 1, joint, entries, (), joint=joint, results=results
    )


def seeds_of(program: Program, microbatch: int = 0) -> dict[str, Tensor]:
    """What the program's random operators draw from in a microbatch, by the inputs' names."""
    entries = [i for i in program.inputs if i.role in (Role.SEED, Role.WHOLE_SEED)]
    table = random.seeds_of_step(SEED, microbatch + 1, len(entries))
    rows = {Role.SEED: table[microbatch + 1], Role.WHOLE_SEED: table[0]}
    return {entry.name: rows[entry.role][i] for i, entry in enumerate(entries)}


def run(program: Program, *inputs: Tensor, microbatch: int = 0) -> tuple[Any, ...]:
    names = [i.name for i in program.inputs if i.role is Role.WHOLE]
    return run_graph(program.joint, dict(zip(names, inputs)) | seeds_of(program, microbatch))


def test_a_dropout_becomes_arithmetic_with_a_seed() -> None:
    program = program_of(lambda x: aten.native_dropout(x, 0.25, True), torch.randn(2, 4))
    assert_expected_inline(
        joint_text(program),
        """\
graph joint(%x_1: f32[2, 4])
  %native_dropout: (f32[2, 4], bool[2, 4]) = native_dropout(%x_1, 0.25, True)
  %getitem: f32[2, 4] = %native_dropout[0]
  %getitem_1: bool[2, 4] = %native_dropout[1]
  return (%getitem, %getitem_1)""",
    )
    seeded = SeedRandomness()(program)
    assert seeded.inputs[-1] == Input("seed_0", Role.SEED, "native_dropout")
    assert_expected_inline(
        joint_text(seeded),
        """\
graph joint(%x_1: f32[2, 4], %seed_0: i64[])
  %arange: i64[8] = arange.start(0, 8, device=cpu, pin_memory=False)
  %view: i64[2, 4] = view(%arange, [2, 4])
  %mul: i64[2, 4] = mul.Tensor(%view, %seed_0)
  %add: i64[2, 4] = add.Tensor(%mul, %seed_0)
  %mul_1: i64[2, 4] = mul.Tensor(%mul, %mul)
  %add_1: i64[2, 4] = add.Tensor(%mul_1, %mul)
  %lshift: i64[2, 4] = __lshift__.Scalar(%add_1, 32)
  %rshift: i64[2, 4] = __rshift__.Scalar(%add_1, 32)
  %bitwise_and: i64[2, 4] = bitwise_and.Scalar(%rshift, 4294967295)
  %bitwise_or: i64[2, 4] = bitwise_or.Tensor(%lshift, %bitwise_and)
  %mul_2: i64[2, 4] = mul.Tensor(%bitwise_or, %bitwise_or)
  %add_2: i64[2, 4] = add.Tensor(%mul_2, %add)
  %lshift_1: i64[2, 4] = __lshift__.Scalar(%add_2, 32)
  %rshift_1: i64[2, 4] = __rshift__.Scalar(%add_2, 32)
  %bitwise_and_1: i64[2, 4] = bitwise_and.Scalar(%rshift_1, 4294967295)
  %bitwise_or_1: i64[2, 4] = bitwise_or.Tensor(%lshift_1, %bitwise_and_1)
  %mul_3: i64[2, 4] = mul.Tensor(%bitwise_or_1, %bitwise_or_1)
  %add_3: i64[2, 4] = add.Tensor(%mul_3, %mul)
  %lshift_2: i64[2, 4] = __lshift__.Scalar(%add_3, 32)
  %rshift_2: i64[2, 4] = __rshift__.Scalar(%add_3, 32)
  %bitwise_and_2: i64[2, 4] = bitwise_and.Scalar(%rshift_2, 4294967295)
  %bitwise_or_2: i64[2, 4] = bitwise_or.Tensor(%lshift_2, %bitwise_and_2)
  %mul_4: i64[2, 4] = mul.Tensor(%bitwise_or_2, %bitwise_or_2)
  %add_4: i64[2, 4] = add.Tensor(%mul_4, %add)
  %rshift_3: i64[2, 4] = __rshift__.Scalar(%add_4, 32)
  %bitwise_and_3: i64[2, 4] = bitwise_and.Scalar(%rshift_3, 4294967295)
  %lt: bool[2, 4] = lt.Scalar(%bitwise_and_3, 3221225472)
  %mul_5: f32[2, 4] = mul.Tensor(%x_1, %lt)
  %mul_6: f32[2, 4] = mul.Tensor(%mul_5, 1.3333333333333333)
  return (%mul_6, %lt)""",
    )


def drawn_by(operator: Callable[..., Any], *arguments: Any) -> Callable[[Tensor, Made], Tensor]:
    return lambda seed, made: operator(seed, made, *arguments)


x = torch.linspace(0.1, 0.9, 8, dtype=torch.float64).view(2, 4)
# What a model may call, and the function of a seed that takes its place.
OPERATORS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor, Made], Any]]] = {
    "native_dropout": (
        lambda x: aten.native_dropout(x, 0.3, True),
        drawn_by(random.native_dropout, x, 0.3, True),
    ),
    "rand": (lambda x: aten.rand([2, 4], dtype=torch.float64), random.rand),
    "rand_like": (aten.rand_like, random.rand),
    "randn": (lambda x: aten.randn([2, 4], dtype=torch.float64), random.randn),
    "randn_like": (aten.randn_like, random.randn),
    "randint": (lambda x: aten.randint.low(3, 9, [2, 4]), drawn_by(random.randint_from, 3, 9, ())),
    "randint from 0": (lambda x: aten.randint(9, [2, 4]), drawn_by(random.randint, 9, ())),
    "randint_like": (
        lambda x: aten.randint_like.low_dtype(x, 3, 9),
        drawn_by(random.randint_from, 3, 9, ()),
    ),
    "randint_like from 0": (
        lambda x: aten.randint_like(x, 9),
        drawn_by(random.randint, 9, ()),
    ),
    "randperm": (lambda x: aten.randperm(8), drawn_by(random.randperm, 8)),
    "random": (lambda x: aten.random.to(x, 7), drawn_by(random.random, x, 7)),
    "random, default": (aten.random, drawn_by(random.random, x)),
    "bernoulli": (aten.bernoulli, drawn_by(random.bernoulli, x)),
    "bernoulli of a number": (
        lambda x: aten.bernoulli.p(x, 0.3),
        drawn_by(random.bernoulli_of_number, x, 0.3),
    ),
    "bernoulli of a tensor": (
        lambda x: aten.bernoulli.Tensor(x, x * x),
        drawn_by(random.bernoulli, x, x * x),
    ),
    "uniform": (lambda x: aten.uniform(x, -1.0, 3.0), drawn_by(random.uniform, x, -1.0, 3.0)),
    "normal": (
        lambda x: aten.normal.float_float(1.0, 2.0, [2, 4], dtype=torch.float64),
        drawn_by(random.normal, 1.0, 2.0),
    ),
    "normal, tensors": (
        lambda x: aten.normal.Tensor_Tensor(x, x * x),
        drawn_by(random.normal, x, x * x),
    ),
    "normal, default": (aten.normal.Tensor_float, drawn_by(random.normal, x)),
    "normal_functional": (
        lambda x: aten.normal_functional(x, 1.0, 2.0),
        drawn_by(random.normal, 1.0, 2.0),
    ),
    "log_normal": (lambda x: aten.log_normal(x), drawn_by(random.log_normal, x)),
    "exponential": (lambda x: aten.exponential(x, 2.0), drawn_by(random.exponential, x, 2.0)),
    "cauchy": (lambda x: aten.cauchy(x, sigma=2.0), drawn_by(random.cauchy, x, 0.0, 2.0)),
    "geometric": (lambda x: aten.geometric(x, 0.4), drawn_by(random.geometric, x, 0.4)),
    "multinomial": (lambda x: aten.multinomial(x, 3), drawn_by(random.multinomial, x, 3)),
    "multinomial, replaced": (
        lambda x: aten.multinomial(x, 6, True),
        drawn_by(random.multinomial, x, 6, True),
    ),
    "rrelu": (
        lambda x: aten.rrelu_with_noise_functional(x - 0.5, x, 0.2, 0.4, True),
        drawn_by(random.rrelu_with_noise, x - 0.5, x, 0.2, 0.4, True),
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_draws_what_its_function_says(name: str) -> None:
    function, expected = OPERATORS[name]
    before = program_of(function, x)
    after = SeedRandomness()(before)
    values = [n.meta["val"] for n in before.joint.graph.output_node().args[0]]
    first = run(after, x)
    seed = seeds_of(after)["seed_0"]
    wanted = expected(seed, Made(tuple(values[0].shape), values[0].dtype))
    for found, own, value in zip(first, wanted if isinstance(wanted, tuple) else [wanted], values):
        assert torch.equal(found, own)
        assert (found.dtype, found.shape, found.stride()) == (
            value.dtype,
            value.shape,
            value.stride(),
        )
    other = run(after, x, microbatch=1)
    assert not all(torch.equal(a, b) for a, b in zip(first, other))


def test_every_random_operator_has_a_seed_of_its_own() -> None:
    def three(x: Tensor) -> tuple[Tensor, ...]:
        return aten.rand_like(x), aten.rand_like(x), aten.randn_like(x)

    seeded = SeedRandomness()(program_of(three, x))
    assert [(i.name, i.path) for i in seeded.inputs[1:]] == [
        ("seed_0", "rand_like"),
        ("seed_1", "rand_like_1"),
        ("seed_2", "randn_like"),
    ]
    first, second, _ = run(seeded, x)
    assert not torch.equal(first, second)


def test_a_marked_value_is_shared_by_all_microbatches() -> None:
    program = program_of(lambda x: (aten.rand_like(x), aten.rand([4])), x)
    next(n for n in program.joint.graph.nodes if n.target is aten.rand.default).meta["custom"] = {
        random.WHOLE: True
    }
    seeded = SeedRandomness()(program)
    assert [i.role for i in seeded.inputs[1:]] == [Role.SEED, Role.WHOLE_SEED]
    own, shared = run(seeded, x, microbatch=0)
    others, again = run(seeded, x, microbatch=1)
    assert not torch.equal(own, others) and torch.equal(shared, again)


def test_what_is_drawn_lies_in_memory_as_the_graph_expects() -> None:
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    seeded = SeedRandomness()(program_of(lambda x: aten.native_dropout(x, 0.5, True), images))
    dropped, mask = run(seeded, images)
    assert dropped.stride() == mask.stride() == images.stride()
    plain = random.native_dropout(
        seeds_of(seeded)["seed_0"], Made((2, 3, 4, 5), images.dtype), images.contiguous(), 0.5, True
    )
    assert torch.equal(dropped, plain[0])


@pytest.mark.parametrize(
    "function",
    [lambda x: x * 2, lambda x: aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)[0]],
    ids=["no operator", "attention without dropout"],
)
def test_a_program_that_draws_nothing_stays_as_it_is(function: Callable[[Tensor], Tensor]) -> None:
    program = program_of(function, torch.randn(1, 2, 3, 4))
    assert SeedRandomness()(program) is program


def test_a_dropout_of_nothing_takes_no_seed() -> None:
    program = program_of(lambda x: aten.native_dropout(x, 0.3, False)[0], x)
    seeded = SeedRandomness()(program)
    assert seeded.inputs == program.inputs
    assert torch.equal(run(seeded, x)[0], x)


# Refusals.


def nested(x: Tensor) -> Program:
    """A program with an operator that calls a graph, in which something is drawn."""
    program = program_of(lambda x: x * 2, x)
    inner = make_fx(lambda x: aten.rand_like(x), tracing_mode="fake")(x)
    program.joint.add_module("true_graph_0", inner)
    with program.joint.graph.inserting_before(program.joint.graph.output_node()):
        program.joint.graph.get_attr("true_graph_0")
    return program


def noisy(x: Tensor) -> Tensor:
    return aten.poisson(x)


REFUSED: dict[str, tuple[Callable[[], Program], str]] = {
    "poisson": (lambda: program_of(noisy, x), r"poisson draws random numbers, at "),
    "complex": (
        lambda: program_of(lambda x: aten.randn([2], dtype=torch.complex64), x),
        "randn of torch.complex64 draws random numbers",
    ),
    "fused attention": (
        lambda: program_of(
            lambda x: aten._scaled_dot_product_flash_attention_for_cpu(x, x, x, 0.5)[0],
            torch.randn(1, 2, 3, 4),
        ),
        "_scaled_dot_product_flash_attention_for_cpu draws random numbers",
    ),
    "nested graph": (lambda: nested(x), "inside of a nested graph"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_replayed_is_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(ModelError, match=message):
        SeedRandomness()(make())


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.layer(x) + torch.poisson(y.abs()), y)  # the line in question


def test_a_refusal_names_the_models_line() -> None:
    program = captured(Noisy(), *mlp_batch(4)).program(2)
    with pytest.raises(ModelError, match=r"test_seed_randomness.py:\d+: return F.mse_loss\(self"):
        run_until(program, "seed_randomness")


# With the passes that follow.


class Dropping(nn.Module):
    """Equal layers with a dropout each."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 3, dtype=torch.float64) for _ in range(depth))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x)), 0.4)
        return F.mse_loss(x, y)


@pytest.fixture(scope="module")
def dropping() -> Captured:
    return captured(Dropping(4), *mlp_batch(4), stages=4, schedule="zb-h1")


def test_tasks_compute_what_the_graph_computes(dropping: Captured) -> None:
    program = run_until(dropping.program(2, ranks=4), "split_tasks")
    for number, values in enumerate(microbatches(dropping, program, [2, 2])):
        values |= seeds_of(program, number)
        loss, gradients = run_tasks(program, values)
        whole = run_joint(program, values)
        assert torch.equal(loss[0], whole[0])
        for result, value in zip(program.results, whole):
            if result.kind == "gradient":
                assert torch.equal(gradients[str(result.target)], value)


def test_backward_gets_the_mask_and_no_seed(dropping: Captured) -> None:
    program = run_until(dropping.program(2, ranks=4), "split_tasks")
    inputs = task(program, "1I").inputs
    assert not [name for name in inputs if name.startswith("seed")]
    nodes = {n.name: n for n in program.joint.graph.nodes}
    kinds = [nodes[name].meta["val"].dtype for name in inputs]
    assert kinds.count(torch.bool) == 1 and torch.int64 not in kinds


def test_equal_stages_stay_equal(dropping: Captured) -> None:
    program = run_until(dropping.program(2, ranks=4), "split_tasks")
    assert structure_of(task(program, "1F").graph) == structure_of(task(program, "2F").graph)


def test_the_place_does_not_depend_on_the_number_of_stages(dropping: Captured) -> None:
    found = []
    for stages in (1, 4):
        options = replace(dropping.options, stages=stages, schedule="1f1b")
        program = replace(dropping.program(2, ranks=stages), options=options)
        program = run_until(program, "split_tasks")
        values = next(iter(microbatches(dropping, program, [2, 2])))
        found.append(run_tasks(program, values | seeds_of(program))[0][0])
    assert torch.equal(*found)

"""Random operators to pure functions of a seed, which is an input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import getitem
from typing import Any

import torch
import torch.fx as fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxpipe.errors import ModelError
from fxpipe.passes._graph import OpOverload, copy_graph, copy_in, is_random, results_of
from fxpipe.program import Input, Program, Role, is_dense, tensors_of, where
from fxpipe.random import FRACTION_BITS, OPERATORS, WHOLE, Made
from fxpipe.torch_private import fake_mode_of

# Random operators that torch does not tag as such.
UNTAGGED = frozenset("binomial random normal_functional philox_rand uniform".split())


@dataclass(frozen=True)
class SeedRandomness:
    """
    %y, %mask = native_dropout(%x, 0.1, True)

    becomes

    %bits = f(%seed_0, arange(numel(%x)))        f: integer arithmetic
    %mask = lt(%bits, 0.9 * 2**32); %y = mul(mul(%x, %mask), 1 / 0.9)

    for every random operator, with the input `seed_<n>` of role SEED for the n-th of them. So what
    is drawn depends on the step's seed, the microbatch, the place in the model and the position in
    the tensor, and on nothing else: no stage, rank, schedule or lowering, and computing it again
    gives it again. A value without rows of the batch is drawn once for all microbatches, as eager
    does (WHOLE_SEED). Without random operators the program stays as it is.

    Raises ModelError, with the model's line, for a random operator without such a function.
    """

    def __call__(self, program: Program) -> Program:
        refuse_inner_graphs(program.joint)
        if not any(map(draws, program.joint.graph.nodes)):
            return program
        joint, _ = copy_graph(program.joint)
        seeder = _Seeder(joint)
        for node in [n for n in joint.graph.nodes if draws(n)]:
            seeder.replace(node)
        joint.graph.eliminate_dead_code()
        joint.recompile()
        return replace(program, joint=joint, inputs=(*program.inputs, *seeder.inputs))


def draws(node: fx.Node) -> bool:
    """Whether a node of a joint graph draws random numbers."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    if not (is_random(node) or name_of(node.target) in UNTAGGED):
        return False
    # Fused attention and recurrent layers are tagged whether they drop anything or not.
    given = arguments_of(node)
    rates = [given[name] for name in ("dropout_p", "dropout") if name in given]
    return not rates or any(rate != 0.0 for rate in rates)


def name_of(target: Any) -> str:
    return str(target.overloadpacket.__name__)


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operator by name, defaults included."""
    found = {}
    for place, argument in enumerate(node.target._schema.arguments):
        if place < len(node.args) and not argument.kwarg_only:
            found[argument.name] = node.args[place]
        else:
            found[argument.name] = node.kwargs.get(argument.name, argument.default_value)
    return found


def refuse_inner_graphs(joint: fx.GraphModule) -> None:
    """What an operator such as `cond` calls cannot take a seed of its own."""
    for node in joint.graph.find_nodes(op="get_attr"):
        inner = getattr(joint, str(node.target), None)
        if isinstance(inner, fx.GraphModule):
            refuse_inner_graphs(inner)
            for drawing in filter(draws, inner.graph.nodes):
                raise ModelError(
                    f"{name_of(drawing.target)} draws random numbers inside of a nested graph (a "
                    f"condition, a loop), at {where(drawing)}, which cannot be seeded for each "
                    f"microbatch; draw them before it"
                )


@dataclass
class _Seeder:
    joint: fx.GraphModule
    inputs: list[Input] = field(default_factory=list)
    traced: dict[Any, fx.GraphModule] = field(default_factory=dict)

    def replace(self, node: fx.Node) -> None:
        check(node)
        operands = node.all_input_nodes
        body = self.body(node, operands)
        results = self.insert(node, body, [self.seed(node, body), *operands])
        if isinstance(node.meta["val"], (tuple, list)):
            for user in list(node.users):
                assert user.target is getitem
                user.replace_all_uses_with(results[user.args[1]])
                self.joint.graph.erase_node(user)
        else:
            node.replace_all_uses_with(results[0])
        self.joint.graph.erase_node(node)

    def seed(self, node: fx.Node, body: fx.GraphModule) -> fx.Node | None:
        """The new input that `body` draws from; None where it does not (a dropout of nothing)."""
        graph = self.joint.graph
        if not next(iter(body.graph.nodes)).users:
            return None
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            made = graph.placeholder(f"seed_{len(self.inputs)}")
        made.meta = {"val": fake_seed(node)}
        whole = WHOLE in (node.meta.get("custom") or {})
        self.inputs.append(Input(made.name, Role.WHOLE_SEED if whole else Role.SEED, node.name))
        return made

    def body(self, node: fx.Node, operands: Sequence[fx.Node]) -> fx.GraphModule:
        """The node's function as a graph of seed and operands, traced once per signature."""
        values = [fake_seed(node), *(operand.meta["val"] for operand in operands)]
        key = str(
            (
                node.target,
                [described(value) for value in values],
                [described(value) for value in tensors_of(node.meta["val"])],
                fx.node.map_arg((node.args, node.kwargs), lambda n: operands.index(n)),
            )
        )
        if key not in self.traced:
            with fake_mode_of(values), torch.no_grad():
                self.traced[key] = make_fx(function_of(node, operands))(*values)
        return self.traced[key]

    def insert(
        self, node: fx.Node, body: fx.GraphModule, operands: Sequence[fx.Node | None]
    ) -> list[fx.Node]:
        """The results of `body`, copied in before the node."""
        copies = copy_in(self.joint.graph, node, body.graph, operands, node.meta)
        return [copies[result] for result in results_of(body)]


def check(node: fx.Node) -> None:
    """Refuse a node that has no function of a seed."""
    name = name_of(node.target)
    kinds = {value.dtype for value in tensors_of(node.meta["val"])}
    strange = [k for k in kinds if (k.is_floating_point or k.is_complex) and k not in FRACTION_BITS]
    if node.target not in OPERATORS or strange:
        of = f" of {strange[0]}" if strange else ""
        raise ModelError(
            f"{name}{of} draws random numbers, at {where(node)}, in a way that microbatches and "
            f"ranks cannot replay; draw with dropout, rand, randn, bernoulli or multinomial, or "
            f"pass what is drawn as an argument"
        )


def fake_seed(node: fx.Node) -> Any:
    made = tensors_of(node.meta["val"])[0]
    with fake_mode_of([made]):
        return torch.empty((), dtype=torch.int64, device=made.device)


def described(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.dtype, tuple(value.shape), value.stride(), value.device


def function_of(node: fx.Node, operands: Sequence[fx.Node]) -> Callable[..., list[torch.Tensor]]:
    """The seed and the operands' values to the node's results, laid out as they are in memory."""
    expected = tensors_of(node.meta["val"])
    made = Made(tuple(expected[0].shape), expected[0].dtype)
    schema = node.target._schema.arguments
    names = [a.name for a in schema if not a.kwarg_only and a.name != "generator"]
    given = arguments_of(node)
    operator = OPERATORS[node.target]

    def function(seed: torch.Tensor, *values: torch.Tensor) -> list[torch.Tensor]:
        arguments = fx.node.map_arg(
            [given[name] for name in names], lambda n: values[operands.index(n)]
        )
        results = operator(seed, made, *arguments)
        results = results if isinstance(results, tuple) else (results,)
        return [laid_out(result, like) for result, like in zip(results, expected)]

    return function


def laid_out(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The value with the strides that the graph goes on with."""
    if value.stride() == like.stride() or not is_dense(like):
        return value
    strides = like.stride()
    order = sorted(range(like.dim()), key=lambda d: (-strides[d], d))
    back = sorted(range(like.dim()), key=order.__getitem__)
    return value.permute(order).contiguous().permute(back)

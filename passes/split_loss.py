"""The batch's loss and other reductions to parts that the microbatches' values add up to."""

from __future__ import annotations

import inspect
import operator
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
import torch.fx as fx

from fxpipe.errors import ModelError
from fxpipe.passes._graph import ancestors, copy_graph, is_random
from fxpipe.program import Input, Join, Output, Program, Role, tensors_of, where
from fxpipe.torch_private import expression

ADD = {"add": operator.add, "iadd": operator.add, "sub": operator.sub, "isub": operator.sub}
SCALE = {"mul": operator.mul, "imul": operator.mul, "multiply": operator.mul}
DIVIDE = dict.fromkeys(("div", "truediv", "itruediv", "divide", "true_divide"), operator.truediv)
LINEAR = frozenset(
    "neg negative pos positive clone contiguous detach float double half bfloat16 to type type_as "
    "view reshape flatten squeeze unsqueeze permute transpose t expand getitem select stack cat "
    "concat sum mean alias".split()
)
# Losses whose reduction="mean" divides by the number of elements, or of rows, alone.
MEAN_LOSSES = frozenset(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div poisson_nll_loss "
    "binary_cross_entropy_with_logits gaussian_nll_loss hinge_embedding_loss margin_ranking_loss "
    "cosine_embedding_loss soft_margin_loss multi_margin_loss multilabel_margin_loss ctc_loss "
    "multilabel_soft_margin_loss triplet_margin_loss triplet_margin_with_distance_loss".split()
)
WEIGHTED_MEAN_LOSSES = frozenset("mse_loss l1_loss smooth_l1_loss huber_loss".split())
# Operators that mix what lies along their `dim`: along the batch they would mix microbatches.
ALONG_DIM = frozenset(
    "softmax log_softmax softmin cumsum cumprod cummax cummin logcumsumexp sort argsort topk flip "
    "roll normalize diff glu kthvalue mode median std var".split()
)
POSITIONS = frozenset("arange linspace range eye tril_indices triu_indices".split())
INDEXING = frozenset("getitem gather index_select take_along_dim index scatter setitem".split())
ARITHMETIC = frozenset({*ADD, *SCALE, *DIVIDE, "pow", "floordiv", "mod", "rsub", "fmod"})
ADVICE = "options={'loss_reduction': 'mean'} (or 'sum') says that microbatch losses may be averaged"


@dataclass(frozen=True)
class SplitLoss:
    """
    loss = mean(f(batch))

    becomes, for a microbatch,

    part = mean(f(microbatch)) * share        share: the microbatch's rows / the batch's rows

    so that the parts add up to the loss. A pass walks from every output without a batch dimension
    through operations that are linear in the reductions over the batch (sums, products and
    quotients with values that do not vary between microbatches): a mean is weighted by its share,
    a sum by one, cross entropy by its own count of targets. Values made of the call's arguments
    alone (a mask's sum, a count of targets) move into the prologue, which runs once a step on the
    whole batch. Outputs beside the loss are detached.

    Raises ModelError, with the model's line, where the parts cannot add up. With the option
    `loss_reduction` the user says how they do, and nothing is checked.
    """

    def __call__(self, program: Program) -> Program:
        if program.batch_symbol is None:
            outputs = (
                replace(o, join=Join.FIRST) if o.join is Join.SUM else o for o in program.outputs
            )
            return detach_beside_loss(replace(program, outputs=tuple(outputs)))
        return _Splitter(program).run()


def detach_beside_loss(program: Program) -> Program:
    """Outputs beside the loss carry no gradient: the backward has run when they are returned."""
    if program.loss is None:
        return program
    model, _ = copy_graph(program.model)
    end = model.graph.output_node()
    returned = list(end.args[0])
    for i, output in enumerate(program.outputs):
        if output.requires_grad and not output.is_loss:
            with model.graph.inserting_before(end):
                returned[i] = model.graph.call_method("detach", (returned[i],))
    end.args = (tuple(returned),)
    outputs = (replace(o, requires_grad=o.requires_grad and o.is_loss) for o in program.outputs)
    return replace(program, model=fx.GraphModule(model, model.graph), outputs=tuple(outputs))


class _Splitter:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.symbol = program.batch_symbol
        self.word = program.options.loss_reduction
        self.model, _ = copy_graph(program.model)
        self.graph = self.model.graph
        placeholders = self.graph.find_nodes(op="placeholder")
        self.inputs = dict(zip(placeholders, program.inputs))
        self.varying: set[fx.Node] = set()
        self.fixed: set[fx.Node] = set()  # made of arguments alone: the prologue may compute it
        for node in self.graph.nodes:
            self.classify(node)
        self.parts: dict[fx.Node, fx.Node] = {}
        self.hoisted: dict[fx.Node, fx.Node] = {}
        self.share: fx.Node | None = None

    def run(self) -> Program:
        if self.word is None:
            self.graph.eliminate_dead_code()
            self.check_rows_stay_apart()
            self.replace_batch_sizes_in_arithmetic()
        end = self.graph.output_node()
        returned = list(end.args[0])
        outputs = [self.split(i, o, returned) for i, o in enumerate(self.program.outputs)]
        end.args = (tuple(returned),)
        self.graph.eliminate_dead_code()
        self.hoist_arguments_alone()
        if self.word is None:
            self.check_every_reduction_was_split()
        prologue = self.make_prologue()
        self.graph.eliminate_dead_code()
        inputs = self.program.inputs + tuple(self.new_inputs())
        model = fx.GraphModule(self.model, self.graph)
        return detach_beside_loss(
            replace(
                self.program, model=model, inputs=inputs, outputs=tuple(outputs), prologue=prologue
            )
        )

    # What each node is.

    def classify(self, node: fx.Node) -> None:
        if node in self.inputs:
            entry = self.inputs[node]
            of_batch = entry.role is Role.SIZE and self.symbol in entry.size.free_symbols
            if entry.role is Role.BATCH or of_batch:
                self.varying.add(node)
            if entry.role is not Role.PARAMETER and not entry.requires_grad:
                self.fixed.add(node)
        elif node.op != "output":
            sources = node.all_input_nodes
            if any(source in self.varying for source in sources):
                self.varying.add(node)
            known = node.op in ("call_function", "call_method") and not is_random(node)
            if known and all(source in self.fixed for source in sources):
                self.fixed.add(node)

    def batch_dims(self, node: Any) -> list[sympy.Expr]:
        """The sizes of a node's value that hold the batch."""
        values = tensors_of(node.meta.get("example_value")) if isinstance(node, fx.Node) else []
        sizes = [expression(size) for value in values for size in value.shape]
        return [size for size in sizes if self.symbol in size.free_symbols]

    def is_batched(self, node: Any) -> bool:
        return bool(self.batch_dims(node))

    def is_tensor(self, node: Any) -> bool:
        return isinstance(node, fx.Node) and bool(tensors_of(node.meta.get("example_value")))

    def is_constant(self, node: Any) -> bool:
        """Whether a value is the same for every microbatch, once the prologue has run."""
        if not isinstance(node, fx.Node) or node not in self.varying:
            return True
        return node in self.fixed and not self.is_batched(node) and self.word is None

    # Refusals.

    def check_rows_stay_apart(self) -> None:
        for node in self.graph.nodes:
            if node.op not in ("call_function", "call_method") or not self.is_tensor(node):
                continue
            for value in tensors_of(node.meta["example_value"]):
                dims = [s for s in map(expression, value.shape) if self.symbol in s.free_symbols]
                if len(dims) > 1:
                    raise ModelError(
                        f"a value compares every row of the batch with every other, at "
                        f"{where(node)}, so the batch cannot be split; {ADVICE}"
                    )
            if name_of(node) in ALONG_DIM:
                self.check_dim(node)
            if name_of(node) in POSITIONS and self.is_batched(node):
                self.check_positions(node)

    def check_dim(self, node: fx.Node) -> None:
        source = node.args[0] if node.args else None
        if not self.is_tensor(source):
            return
        shape = [expression(size) for size in tensors_of(source.meta["example_value"])[0].shape]
        dims = dims_of(node)
        along = range(len(shape)) if dims is None else [d % len(shape) for d in dims]
        if any(self.symbol in shape[d].free_symbols for d in along):
            raise ModelError(
                f"{name_of(node)} along the batch dimension mixes microbatches, at {where(node)}; "
                f"compute it outside of the model, or use one microbatch"
            )

    def check_positions(self, node: fx.Node) -> None:
        """`arange(batch)` may pick each row's own entries; as a number it would start over."""
        for user in node.users:
            if name_of(user) in LINEAR - {"sum", "mean", "getitem"}:
                self.check_positions(user)
            elif name_of(user) not in INDEXING:
                raise ModelError(
                    f"the row's position in the batch is used as a number, at {where(user)}, which "
                    f"differs inside a microbatch; pass the positions as an argument"
                )

    def check_every_reduction_was_split(self) -> None:
        for node in self.graph.nodes:
            if node.op == "output" or not self.is_tensor(node) or node in self.inputs:
                continue
            if node in self.varying and not self.is_batched(node) and node not in self.fixed:
                raise ModelError(
                    f"a reduction over the batch is used before the loss, at {where(node)}, so "
                    f"microbatches would see another value; {ADVICE}"
                )

    def refuse(self, node: fx.Node) -> ModelError:
        return ModelError(
            f"the output is not linear in its reductions over the batch, at {where(node)}, so the "
            f"microbatches' parts do not add up to it; {ADVICE}"
        )

    # The split.

    def split(self, index: int, output: Output, returned: list[Any]) -> Output:
        node = returned[index]
        if output.join is not Join.SUM:
            return output
        if self.is_constant(node):
            return replace(output, join=Join.FIRST)
        if self.word is not None:
            returned[index] = self.scaled(node) if self.word == "mean" else node
        else:
            returned[index] = self.part(node)
        return output

    def part(self, node: Any) -> Any:
        """A value whose sum over the microbatches is the whole batch's value of `node`."""
        if not isinstance(node, fx.Node) or self.is_constant(node):
            return self.scaled(node)
        if node not in self.parts:
            self.parts[node] = self.split_node(node)
        return self.parts[node]

    def split_node(self, node: fx.Node) -> fx.Node:
        name = name_of(node)
        first = node.args[0] if node.args else None
        operands = [a for a in node.args[:2] if not self.is_constant(a)]
        if name in ADD and not any(map(self.is_batched, operands)):
            return self.redo(node, ADD[name], tuple(map(self.part, node.args)))
        if name in SCALE and len(operands) == 1 and not self.is_batched(operands[0]):
            args = tuple(a if self.is_constant(a) else self.part(a) for a in node.args)
            return self.redo(node, SCALE[name], args)
        if name in DIVIDE and operands == [first] and not self.is_batched(first):
            return self.redo(node, DIVIDE[name], (self.part(first), *node.args[1:]))
        if name in LINEAR and not any(map(self.is_batched, node.all_input_nodes)):
            args = fx.node.map_arg(node.args, lambda n: n if self.is_constant(n) else self.part(n))
            return self.redo(node, node.target, args)
        if name == "sum" and self.is_batched(first):
            return self.counted(node)
        if name == "mean" and self.is_batched(first):
            return self.weighted(node, first)
        if name in MEAN_LOSSES or name in ("cross_entropy", "nll_loss"):
            return self.split_loss_function(node, name)
        raise self.refuse(node)

    def counted(self, node: fx.Node) -> fx.Node:
        """The microbatch's own value, marked as split."""
        return self.redo(node, node.target, node.args)

    def weighted(self, node: fx.Node, reduced: fx.Node) -> fx.Node:
        for value in tensors_of(reduced.meta["example_value"]):
            count = sympy.prod([expression(size) for size in value.shape])
            if self.symbol in sympy.simplify(count / self.symbol).free_symbols:
                raise self.refuse(node)
        return self.scaled(self.counted(node))

    def split_loss_function(self, node: fx.Node, name: str) -> fx.Node:
        try:
            bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
        except (TypeError, ValueError):
            raise self.refuse(node) from None
        bound.apply_defaults()
        given = bound.arguments
        if given.get("size_average") is not None or given.get("reduce") is not None:
            raise self.refuse(node)
        if given["reduction"] == "sum":
            return self.counted(node)
        if name in ("cross_entropy", "nll_loss"):
            return self.split_cross_entropy(node, given)
        if name in WEIGHTED_MEAN_LOSSES and given.get("weight") is not None:
            raise self.refuse(node)
        return self.weighted(node, next(n for n in node.all_input_nodes if self.is_batched(n)))

    def split_cross_entropy(self, node: fx.Node, given: dict[str, Any]) -> fx.Node:
        """mean = sum / (the whole batch's count, or weight, of targets that are not ignored)."""
        target = given["target"]
        if target.meta["example_value"].is_floating_point():
            return self.weighted(node, target)
        if target not in self.fixed:
            raise self.refuse(node)
        arguments = {**given, "reduction": "sum"}
        total = self.redo(node, node.target, (), arguments)
        with self.graph.inserting_before(total):
            kept = self.graph.call_function(operator.ne, (target, given["ignore_index"]))
            if given["weight"] is not None:  # the weight of each target is its share of the count
                index = self.graph.call_function(torch.where, (kept, target, 0))
                picked = self.graph.call_function(operator.getitem, (given["weight"], index))
                kept = self.graph.call_function(torch.where, (kept, picked, 0))
            count = self.graph.call_method("sum", (kept,))
        for made in sorted(ancestors([count]) - ancestors([target]), key=self.position):
            made.meta = {k: v for k, v in node.meta.items() if k != "example_value"}
            self.classify(made)
        if given["weight"] is not None and given["weight"] not in self.fixed:
            raise self.refuse(node)
        dtype = (
            torch.int64 if given["weight"] is None else given["weight"].meta["example_value"].dtype
        )
        count.meta["example_value"] = node.meta["example_value"].new_empty((), dtype=dtype)
        return self.redo(node, operator.truediv, (total, count), {}, after=total)

    def scaled(self, value: Any) -> fx.Node:
        """value * share, in the value's own type."""
        if not isinstance(value, fx.Node):
            if value == 0:
                return value
            after, dtype = self.share_node(), torch.get_default_dtype()
        else:
            after, dtype = value, value.meta["example_value"].dtype
            if not dtype.is_floating_point:
                raise self.refuse(value)
        with self.graph.inserting_after(max(after, self.share_node(), key=self.position)):
            share = self.graph.call_method("to", (self.share_node(), dtype))
        with self.graph.inserting_after(share):
            part = self.graph.call_function(operator.mul, (value, share))
        for made in (share, part):
            made.meta = dict(after.meta) if isinstance(value, fx.Node) else {}
            self.parts.setdefault(made, made)
        return part

    def redo(
        self,
        node: fx.Node,
        target: Any,
        args: Any,
        kwargs: Any = None,
        after: fx.Node | None = None,
    ) -> fx.Node:
        """`node` again with other operands, after all that it needs."""
        kwargs = dict(node.kwargs) if kwargs is None else kwargs
        needs = [n for n in (node, after) if n is not None]
        fx.node.map_arg(args, lambda n: needs.append(n))
        with self.graph.inserting_after(max(needs, key=self.position)):
            method = node.op == "call_method" and isinstance(target, str)
            create = self.graph.call_method if method else self.graph.call_function
            if not method and target in (operator.add, operator.sub) and kwargs.get("alpha"):
                target = torch.add if target is operator.add else torch.sub
            made = create(target, args, kwargs)
        made.meta = dict(node.meta)
        self.parts.setdefault(made, made)
        return made

    def position(self, node: fx.Node) -> int:
        return {n: i for i, n in enumerate(self.graph.nodes)}[node]

    def share_node(self) -> fx.Node:
        if self.share is None:
            last = self.graph.find_nodes(op="placeholder")[-1]
            with self.graph.inserting_after(last):
                self.share = self.graph.placeholder("share")
        return self.share

    # The prologue.

    def replace_batch_sizes_in_arithmetic(self) -> None:
        """A batch size used as a number is the whole batch's: `x.sum() / x.shape[0]`."""
        for node in list(self.graph.nodes):
            if name_of(node) not in ARITHMETIC or not self.is_tensor(node):
                continue
            for source in node.all_input_nodes:
                if source in self.varying and not self.is_tensor(source):
                    node.replace_input_with(source, self.hoist(source))

    def hoist_arguments_alone(self) -> None:
        """Constants that vary with the batch come from the prologue."""
        if self.word is not None:
            return
        end = self.graph.output_node()
        for node in list(self.graph.nodes):
            if node in self.inputs or node in self.hoisted or not self.is_tensor(node):
                continue
            if not (node in self.varying and self.is_constant(node)):
                continue
            if any(user is end or user not in self.fixed for user in node.users):
                keep = [user for user in node.users if user in self.fixed and user is not end]
                made = self.hoist(node)
                node.replace_all_uses_with(made, lambda user, keep=keep: user not in keep)

    def hoist(self, node: fx.Node) -> fx.Node:
        if node not in self.hoisted:
            last = self.graph.find_nodes(op="placeholder")[-1]
            with self.graph.inserting_after(last):
                made = self.graph.placeholder(f"prologue_{len(self.hoisted)}")
            made.meta["example_value"] = node.meta.get("example_value")
            self.hoisted[node] = made
        return self.hoisted[node]

    def make_prologue(self) -> fx.GraphModule | None:
        if not self.hoisted:
            return None
        graph = fx.Graph()
        environment: dict[fx.Node, fx.Node] = {}
        for node in self.inputs:
            environment[node] = graph.placeholder(node.name)
        needed = ancestors(self.hoisted)
        for node in self.graph.nodes:
            if node in needed and node not in environment:
                environment[node] = graph.node_copy(node, environment.__getitem__)
        graph.output(tuple(environment[node] for node in self.hoisted))
        return fx.GraphModule(self.model, graph)

    def new_inputs(self) -> list[Input]:
        """In the order of their placeholders, which all come after the captured ones."""
        sources = {made.name: node.name for node, made in self.hoisted.items()}
        found = []
        for node in self.graph.find_nodes(op="placeholder"):
            if node is self.share:
                found.append(Input(node.name, Role.SHARE, "share"))
            elif node.name in sources:
                found.append(Input(node.name, Role.PROLOGUE, sources[node.name]))
        return found


def name_of(node: fx.Node) -> str:
    """`add` for operator.add, operator.iadd's target, Tensor.add and Tensor.add_ alike."""
    if node.op == "call_method":
        return str(node.target).rstrip("_")
    return getattr(node.target, "__name__", str(node.target)).strip("_")


def dims_of(node: fx.Node) -> list[int] | None:
    """The `dim` of an operator, or None where it takes all of them."""
    given = node.kwargs.get("dim", node.kwargs.get("dims"))
    default: dict[str, int] = {"sort": -1, "argsort": -1, "topk": -1, "diff": -1, "glu": -1}
    default |= {"normalize": 1, "kthvalue": -1, "mode": -1}
    position = {"topk": 2, "kthvalue": 2, "roll": 2, "normalize": 2, "diff": 2}.get(
        name_of(node), 1
    )
    if given is None and len(node.args) > position:
        given = node.args[position]
    if given is None:
        fallback = default.get(name_of(node))
        return None if fallback is None else [fallback]
    if isinstance(given, (tuple, list)):
        return [d for d in given if isinstance(d, int)]
    return [given] if isinstance(given, int) else None

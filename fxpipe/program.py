"""The program: everything that a pass sees. A pass takes one and returns a new one.

A program is about one microbatch size. It starts with the model graph as Dynamo captured it, gains
the joint graph (forward and backward of one microbatch as ATen operators), then tasks (a graph per
stage and kind), edges (which values cross stages) and a schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import sympy
import torch
import torch.fx as fx

from fxpipe.options import Options
from fxpipe.schedule import Kind, Schedule

TORCH = str(Path(torch.__file__).parent)


class Role(str, Enum):
    """What an input of the model graph is."""

    PARAMETER = "parameter"  # accumulates a gradient where it requires one
    BUFFER = "buffer"  # state of a module: replicated, may be written
    BATCH = "batch"  # an argument of the call that is split along its batch dimension
    WHOLE = "whole"  # an argument of the call that every microbatch gets as it is
    SIZE = "size"  # an integer
    PROLOGUE = "prologue"  # computed once a step from the whole batch, then a constant
    SHARE = "share"  # the microbatch's rows / the batch's rows
    SEED = "seed"  # of a random operator: another number each step, for each microbatch
    WHOLE_SEED = "whole seed"  # the same number for all microbatches of a step
    SNAPSHOT = "snapshot"  # a buffer as the step found it
    SCRATCH = "scratch"  # zeros at the start of a step, which its tasks write to


@dataclass(frozen=True)
class Input:
    """One input of the model graph.

    `name` is its name in every graph, `path` the user's: `blocks.0.attn.weight`, `batch.tokens`.
    `size` is the value of a SIZE as an expression of the trace's symbols, `source` the name of the
    buffer that a SNAPSHOT is of.
    """

    name: str
    role: Role
    path: str
    batch_dim: int | None = None
    size: sympy.Expr = None
    requires_grad: bool = False
    source: str = ""


class Join(str, Enum):
    """How the microbatches' parts of an output become the batch's."""

    SUM = "sum"
    CONCATENATE = "concatenate"
    FIRST = "first"  # the same for every microbatch
    SIZE = "size"  # an integer known from the sizes


@dataclass(frozen=True)
class Output:
    """One output of the model graph, in the order in which the user gets them."""

    name: str
    join: Join
    dim: int | None = None
    size: sympy.Expr = None
    is_loss: bool = False
    requires_grad: bool = False
    detached: bool = False  # beside a loss: it would need a gradient, and takes none


class Result(NamedTuple):
    """What one output of the joint graph is.

    kind "output": `target` is the number of the model's output. "mutation": the name of the input
    that the value replaces. "gradient": the name of the input; `stage` once it is known.
    """

    kind: str
    target: int | str
    stage: int | None = None


class Key(NamedTuple):
    """Names a task."""

    stage: int
    kind: Kind

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}"


@dataclass(frozen=True)
class Task:
    """The graph of one stage and kind for one microbatch.

    `inputs` and `outputs` name the values in the order of the graph's placeholders and outputs.
    For each parameter in `accumulates`, the input `acc_<parameter>` is a gradient that the graph
    adds to in place; the buffers in `writes` are inputs that it replaces in place.
    """

    graph: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    accumulates: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PairTask:
    """A forward's and a backward's graph as one; values are named by side (0: forward) and name."""

    graph: fx.GraphModule
    inputs: tuple[tuple[int, str], ...]
    outputs: tuple[tuple[int, str], ...]


class Edge(NamedTuple):
    """Stage to stage. Forward messages run to higher stages, backward messages to lower ones."""

    source: int
    target: int

    @property
    def forward(self) -> bool:
        return self.source < self.target

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}"


class Reduction(NamedTuple):
    """The ranks whose sums of a gradient are added, and those that get the total."""

    contributors: tuple[int, ...]
    receivers: tuple[int, ...]


class Balance(NamedTuple):
    """What each stage costs, and would with equally many modules each: floating point operations.

    Messages are counted on both sides; see fxpipe.flops for how bytes become operations.
    """

    costs: tuple[float, ...]
    equal: tuple[float, ...]

    def __str__(self) -> str:
        costs, equal = (" ".join(f"{cost / 1e6:.3g}" for cost in side) for side in self)
        slower = max(self.equal) / max(1, *self.costs)
        return (
            f"{len(self.costs)} stages of {costs} Mflop; equally many modules each: {equal}, the "
            f"slowest {slower:.2f} times as slow"
        )


@dataclass(frozen=True, eq=False)
class Program:
    """See the module. Fields are empty until the pass that fills them has run."""

    options: Options
    training: bool
    batch_symbol: sympy.Symbol | None
    sizes: Mapping[sympy.Symbol, int]  # the microbatch's value of every symbol of the trace
    num_microbatches: int
    num_ranks: int | None
    model: fx.GraphModule
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    prologue: fx.GraphModule | None = None  # whole-batch inputs -> PROLOGUE inputs
    joint: fx.GraphModule = None  # from TraceJoint on
    results: tuple[Result, ...] = ()  # of the joint graph's outputs
    num_stages: int = 0
    balance: Balance | None = None  # of `stages="auto"`
    # Node, parameter or buffer -> its stages in an earlier trace of the model, where they stay.
    places: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    schedule: Schedule = Schedule(())  # without ranks until BuildSchedule
    # stage -> the ranks that hold it; a batch of few microbatches may use only some of them
    holders: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    tasks: Mapping[Key, Task] = field(default_factory=dict)
    pairs: Mapping[tuple[Key, Key], PairTask] = field(default_factory=dict)
    edges: Mapping[Edge, tuple[str, ...]] = field(default_factory=dict)
    # number of an output, or name of an argument -> (stage, value) that is it, or its gradient
    returns: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    input_gradients: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    reductions: Mapping[str, Reduction] = field(default_factory=dict)
    last_uses: Mapping[Key, tuple[str, ...]] = field(default_factory=dict)
    passes: tuple[tuple[str, bool], ...] = ()  # all by name, in order, and whether each is on

    @property
    def microbatch_size(self) -> int | None:
        """Rows of a microbatch; None where no input is split."""
        return self.sizes[self.batch_symbol] if self.batch_symbol is not None else None

    @property
    def loss(self) -> int | None:
        """The number of the output that is the loss, if one is."""
        return next((i for i, o in enumerate(self.outputs) if o.is_loss), None)

    def input(self, name: str) -> Input:
        return next(i for i in self.inputs if i.name == name)

    def __str__(self) -> str:
        from fxpipe.text import format_program

        return format_program(self)


def where(node: fx.Node) -> str:
    """The user's line that made a node: `train.py:12: loss = a + b`, or the node's own text."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines()]
    frames = [i for i in range(len(lines) - 1, -1, -1) if lines[i].startswith("File ")]
    for i in sorted(frames, key=lambda i: TORCH in lines[i]):  # what torch does inside comes last
        file, line, *_ = lines[i].removeprefix("File ").split(", ")
        code = lines[i + 1] if i + 1 < len(lines) else ""
        return f"{file.strip(chr(34))}:{line.removeprefix('line ')}: {code}".rstrip(": ")
    return f"{node.name} = {getattr(node.target, '__name__', node.target)}(...)"


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes and all that they are computed from."""
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def tensors_of(value: Any) -> list[Any]:
    """The tensors in a node's example value: the value itself, or those in its tuple or list."""
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_of(item)]
    return [value] if hasattr(value, "dtype") and hasattr(value, "shape") else []


def is_dense(value: Any) -> bool:
    """Whether a tensor's elements fill one block of memory, in some order of its dimensions."""
    if not hasattr(value, "stride"):
        return True
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape)):
        if size != 1 and stride != expected:
            return False
        expected *= int(size)
    return True

"""A model -> the program that a pass sees, and programs run without any lowering."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor, nn

from fxpipe.capture import Capture, capture
from fxpipe.lowering.executor import Executor
from fxpipe.lowering.lower import lower
from fxpipe.lowering.rank_program import RankProgram
from fxpipe.lowering.transport import LocalTransport
from fxpipe.options import Options
from fxpipe.passes import default_pipeline
from fxpipe.pipeline import name_of
from fxpipe.program import Key, Program, Role, Task
from fxpipe.schedule import Kind
from fxpipe.text import format_graph
from fxpipe.torch_private import expression


@dataclass(frozen=True, eq=False)
class Captured:
    """A model's Dynamo graph, and the values of its inputs for the whole batch."""

    capture: Capture
    options: Options
    values: tuple[Any, ...]

    def program(self, rows: int, microbatches: int = 2, ranks: int | None = None) -> Program:
        """The program for microbatches of `rows` rows, before the first pass."""
        sizes = self.sizes
        if self.capture.batch_symbol is not None:
            sizes[self.capture.batch_symbol] = rows
        return self.capture.program(self.options, sizes, microbatches, ranks)

    def with_options(self, **options: Any) -> Captured:
        """The same graph for passes with other options."""
        return replace(self, options=Options.parse(options))

    @property
    def sizes(self) -> dict[Any, int]:
        """The value of every symbol of the trace."""
        found: dict[Any, int] = {}
        for node, value in zip(self.capture.model.graph.find_nodes(op="placeholder"), self.values):
            example = node.meta["example_value"]
            shapes = (
                (example.shape, value.shape) if isinstance(value, Tensor) else ([example], [value])
            )
            found |= {expression(size): int(number) for size, number in zip(*shapes)}
        return {symbol: number for symbol, number in found.items() if symbol.is_Symbol}


def captured(model: Callable[..., Any], *arguments: Any, **options: Any) -> Captured:
    """What the backend sees of `model(*arguments)`; the model runs as it is."""
    parsed = Options.parse(options)
    found: list[Any] = []

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        found.append(capture(gm, examples, parsed))

        def run(*values: Any) -> Any:
            found.append(values)
            return gm(*values)

        return run

    torch.compile(model, backend=backend)(*arguments)
    return Captured(found[0], parsed, found[-1])


def run_until(program: Program, last: str) -> Program:
    """The program after the pass of this name and all before it."""
    for pass_ in default_pipeline(program.options).passes:
        program = pass_(program)
        if name_of(pass_) == last:
            return program
    raise ValueError(f"{last!r} is no pass")


def joint_text(program: Program) -> str:
    assert program.joint is not None
    return format_graph("joint", program.joint)


def task_text(program: Program, key: str) -> str:
    """The graph of the task named `1F`."""
    return format_graph(key, task(program, key).graph)


def task(program: Program, key: str) -> Task:
    return program.tasks[Key(int(key[:-1]), Kind(key[-1]))]


def staged_text(program: Program, *marks: str) -> str:
    """One line per node of the joint graph: its name, and what `meta` says of it under `marks`."""
    assert program.joint is not None
    lines = []
    for node in program.joint.graph.nodes:
        shown = [str(node.meta.get(mark, "-")) for mark in marks]
        if node.op not in ("placeholder", "output"):
            lines.append(f"{node.name}: {' '.join(shown)}")
    return "\n".join(lines)


# Running a program, microbatch by microbatch.


def microbatches(
    given: Captured, program: Program, rows: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Per microbatch, the value of every input of the model graph by name."""
    whole = dict(zip((i.name for i in given.capture.inputs), given.values))
    if program.prologue is not None:
        names = [i.name for i in program.inputs if i.role is Role.PROLOGUE]
        with torch.no_grad():
            whole |= zip(names, map(torch.as_tensor, program.prologue(*given.values)))
    start = 0
    for count in rows:
        sizes = {**given.sizes, program.batch_symbol: count}
        values = dict(whole)
        for entry in program.inputs:
            if entry.role is Role.BATCH:
                part = whole[entry.name].narrow(entry.batch_dim, start, count)
                values[entry.name] = part.detach().requires_grad_(entry.requires_grad)
            elif entry.role is Role.SHARE:
                values[entry.name] = torch.tensor(count / sum(rows), dtype=torch.float64)
            elif entry.role is Role.SIZE:
                values[entry.name] = int(entry.size.subs(sizes))
        start += count
        yield values


def run_graph(gm: fx.GraphModule, values: Mapping[str, Any]) -> tuple[Any, ...]:
    """The results of a graph whose placeholders take the values of their names."""
    arguments = [values[node.name] for node in gm.graph.find_nodes(op="placeholder")]
    return tuple(fx.Interpreter(gm).run(*arguments))


def run_joint(program: Program, values: Mapping[str, Any]) -> tuple[Any, ...]:
    assert program.joint is not None
    with torch.no_grad():
        return run_graph(program.joint, values)


def run_tasks(
    program: Program, values: Mapping[str, Any]
) -> tuple[dict[int, Any], dict[str, Tensor]]:
    """The outputs by number and the gradients by input of one microbatch, task by task.

    A task sees the inputs, what its stage kept and what edges brought, and nothing else.
    """
    kept: dict[int, dict[str, Any]] = {}
    sums: dict[tuple[int, str], Tensor] = {}
    order = sorted(program.tasks, key=lambda k: k.stage if k.kind is Kind.F else 1000 - k.stage)
    for key in sorted(order, key=lambda k: k.kind is Kind.W):
        ran = program.tasks[key]
        visible = {**values, **kept.setdefault(key.stage, {})}
        for name in ran.accumulates:
            sums.setdefault((key.stage, name), torch.zeros_like(values[name]))
            visible[f"acc_{name}"] = sums[key.stage, name]
        with torch.no_grad():
            results = ran.graph(*[visible[name] for name in ran.inputs])
        made = dict(zip(ran.outputs, results))
        kept[key.stage] |= made
        for edge, names in program.edges.items():
            if edge.source == key.stage:
                carried = {name: made[name] for name in names if name in made}
                kept.setdefault(edge.target, {}).update(carried)
    found = {n: {**values, **kept[s]}[name] for n, (s, name) in program.returns.items()}
    gradients = {n: kept[stage][name] for n, (stage, name) in program.input_gradients.items()}
    for (_, name), total in sums.items():
        gradients[name] = gradients[name] + total if name in gradients else total
    return found, gradients


# Running rank programs, all ranks in this process.


def lowered(
    program: Program, compile_graph: Any = lambda graph: graph.forward
) -> list[RankProgram]:
    """The rank program of every rank, for microbatches of equal sizes."""
    programs = [program] * program.num_microbatches
    return [lower(programs, rank, compile_graph) for rank in range(program.schedule.num_ranks)]


def slot_values(ran: RankProgram, parts: Sequence[Mapping[str, Any]]) -> list[Any]:
    """What fills a rank program's placeholders, of the values of each microbatch."""
    return [parts[slot.microbatch or 0][slot.name] for slot in ran.slots]


def run_ranks(
    ranks: Sequence[RankProgram], parts: Sequence[Mapping[str, Any]], free: bool = True
) -> list[tuple[Any, ...]]:
    """The results of every rank; ranks take turns where they wait for a message."""
    boxes: dict[str, tuple[Tensor, ...]] = {}
    steps = {
        ran.rank: Executor(ran, free).run(LocalTransport(boxes), slot_values(ran, parts))
        for ran in ranks
    }
    results: dict[int, tuple[Any, ...]] = {}
    for _ in range(1000):
        for rank in [rank for rank in steps if rank not in results]:
            try:
                next(steps[rank])
            except StopIteration as stop:
                results[rank] = stop.value
        if len(results) == len(ranks):
            return [results[ran.rank] for ran in ranks]
    raise AssertionError(f"only ranks {sorted(results)} came to an end")


# Small models, double precision.


class MLP(nn.Module):
    """Linear layers with a tanh between, and a mean squared error."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(a, b, dtype=torch.float64) for a, b in zip(widths, widths[1:])]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(torch.tanh(x) if number else x)
        return F.mse_loss(x, y)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.project = nn.Linear(dim, dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows, length, dim = x.shape
        qkv = self.qkv(self.norm(x)).view(rows, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) / (dim // self.heads) ** 0.5).masked_fill(mask, -1e9)
        x = x + self.project((scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, length, dim))
        return x + self.down(F.gelu(self.up(x)))


class GPT(nn.Module):
    """A GPT with tied embedding and head, and cross entropy that ignores the padding -100."""

    def __init__(self, layers: int = 2, dim: int = 8, length: int = 4, words: int = 11) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(words, dim)
        self.positions = nn.Embedding(length, dim)
        self.blocks = nn.ModuleList([Block(dim, 2) for _ in range(layers)])
        self.head = nn.Linear(dim, words, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("causal", torch.ones(length, length).triu(1).bool())
        self.double()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, self.causal)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class ConvNet(nn.Module):
    """Convolutions with a residual, and BatchNorm in the mode that the caller sets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)
        self.double()

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(images)))
        x = x + self.second(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def mlp_batch(rows: int = 4, width: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (rows, width)
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    return x, torch.randn(shape, dtype=torch.float64, generator=generator)


def gpt_batch(rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 11, (rows, 4), generator=generator)
    targets = torch.randint(0, 11, (rows, 4), generator=generator)
    targets[0, 1:] = -100
    return tokens, targets


def convnet_batch(rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(rows, 2, 4, 4, dtype=torch.float64, generator=generator)
    return images, torch.randint(0, 3, (rows,), generator=generator)

"""Forward nodes and their cost -> where stages begin, so that the slowest is fastest. No pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch.fx as fx

from fxpipe.errors import OptionError
from fxpipe.flops import FLOPS_PER_BYTE_SENT, FLOPS_PER_ELEMENT, bytes_of, cost, elements
from fxpipe.log import logger
from fxpipe.memory import bytes_of_limit
from fxpipe.modules import module_paths
from fxpipe.partition import equal_split, partition, stage_times
from fxpipe.passes._graph import getitem_of, is_view
from fxpipe.program import Balance, Program, Role

log = logger(__name__)


class Piece(NamedTuple):
    """What runs from one place where a stage may begin to the next."""

    path: str  # of the module that begins there
    start: int  # its first node
    cost: int


def balanced_starts(nodes: Sequence[fx.Node], num_stages: int) -> list[int]:
    """Where stages begin: before modules, inside of those alone that are too large for a stage."""
    if num_stages == 1:
        return [0]
    pieces = module_pieces(nodes, num_stages)
    return starts_of(pieces, partition([piece.cost for piece in pieces], num_stages))


def cheapest_starts(
    program: Program, nodes: Sequence[fx.Node], num_stages: int
) -> tuple[list[int], Balance]:
    """Where stages begin: before any module, messages and the option `memory_limit` counted."""
    paths = [module_paths(node) for node in nodes]
    costs = training_costs(program, nodes)
    pieces = pieces_of(paths, costs, expanded={"", *containers(paths)})
    if len(pieces) < num_stages:
        pieces = operation_pieces(nodes, costs, num_stages)
    sent = [size * FLOPS_PER_BYTE_SENT for size in bytes_across(nodes)]
    cuts = [sent[piece.start] for piece in pieces[1:]]
    memory, limit = memory_of(program, nodes, pieces, num_stages)
    found = partition(
        [p.cost for p in pieces], num_stages, cuts, memory, limit,
        ranks=program.num_ranks or num_stages, names=[p.path for p in pieces],
    )  # fmt: skip
    modules = module_pieces(nodes, num_stages, costs)
    naive = equal_split(len(modules), num_stages)
    equal = stage_times(
        [p.cost for p in modules], naive, [sent[piece.start] for piece in modules[1:]]
    )
    costs_of_stages = stage_times([p.cost for p in pieces], found, cuts)
    balance = Balance(tuple(costs_of_stages), tuple(equal))
    log.info("stages='auto' made %s", balance)
    return starts_of(pieces, found), balance


def starts_of(pieces: Sequence[Piece], found: Sequence[int]) -> list[int]:
    return [pieces[index].start if index else 0 for index in found]


# Pieces.


def module_pieces(
    nodes: Sequence[fx.Node], num_stages: int, costs: Sequence[int] | None = None
) -> list[Piece]:
    """The outermost modules, and in place of those too large for one stage what they consist of."""
    costs = [work(node) for node in nodes] if costs is None else costs
    paths = [module_paths(node) for node in nodes]
    inner, expanded = containers(paths), {""}
    while True:
        pieces = pieces_of(paths, costs, expanded)
        size = {piece.path: 0 for piece in pieces}
        for piece in pieces:
            size[piece.path] += piece.cost
        large = [path for path in size if path in inner and path not in expanded]
        largest = max(large, key=size.__getitem__, default=None)
        enough = len(pieces) >= num_stages
        if largest is None or (enough and size[largest] * num_stages <= sum(costs)):
            break
        expanded.add(largest)
    return pieces if enough else operation_pieces(nodes, costs, num_stages)


def pieces_of(
    paths: Sequence[Sequence[str]], costs: Sequence[int], expanded: set[str]
) -> list[Piece]:
    """The runs of nodes in the same module, `expanded` ones replaced by what they consist of.

    What runs between two modules (an activation, a residual sum) belongs to the one before.
    """
    pieces: list[Piece] = []
    for index, (inside, cost_of_node) in enumerate(zip(paths, costs)):
        path = next((p for p in inside if p not in expanded), "")
        if not pieces or (path and path != pieces[-1].path):
            pieces.append(Piece(path, index, cost_of_node))
        else:
            pieces[-1] = pieces[-1]._replace(cost=pieces[-1].cost + cost_of_node)
    return pieces


def operation_pieces(
    nodes: Sequence[fx.Node], costs: Sequence[int], num_stages: int
) -> list[Piece]:
    """A piece per operation, for models with fewer modules than stages."""
    pieces = [Piece("", i, costs[i]) for i, node in enumerate(nodes) if not getitem_of(node)]
    if len(pieces) < num_stages:
        raise OptionError(
            f"stages={num_stages}, but the model has only {len(pieces)} operations to cut between; "
            f"use fewer stages"
        )
    return pieces


def containers(paths: Iterable[Sequence[str]]) -> set[str]:
    """The modules that have modules inside which run something."""
    found: set[str] = set()
    for inside in paths:
        for path in inside[-1:]:
            parts = path.split(".")
            found.update(".".join(parts[:end]) for end in range(1, len(parts)))
    return found


# Costs.


def work(node: fx.Node) -> int:
    """A node's cost; views and parts of tuples cost nothing."""
    return 0 if is_view(node) or getitem_of(node) else cost(node)


def training_costs(program: Program, nodes: Sequence[fx.Node]) -> list[int]:
    """Forward and backward, estimated from the forward alone.

    Backward makes two products for each of the forward, one for either factor. Per parameter its
    gradient is written, read, and added to the sum, beside its own reading. An evaluation is cut
    as the training is, so that it finds parameters where they were trained.
    """
    trained = {i.name for i in program.inputs if i.role is Role.PARAMETER and i.requires_grad}
    costs = []
    for node in nodes:
        parameters = [n for n in node.all_input_nodes if n.name in trained]
        size = sum(elements(n.meta["val"]) for n in parameters)
        costs.append(3 * work(node) + 4 * FLOPS_PER_ELEMENT * size)
    return costs


def bytes_across(nodes: Sequence[fx.Node]) -> list[int]:
    """Per node, the bytes of the values made before it that it or later nodes read."""
    place = {node: i for i, node in enumerate(nodes)}
    change = [0] * (len(nodes) + 2)
    for index, node in enumerate(nodes):
        last = max((place[user] for user in node.users if user in place), default=index)
        if last > index and not isinstance(node.meta.get("val"), (tuple, list)):
            change[index + 1] += bytes_of(node.meta.get("val"))
            change[last + 1] -= bytes_of(node.meta.get("val"))
    return list(accumulate(change))[: len(nodes)]


def memory_of(
    program: Program, nodes: Sequence[fx.Node], pieces: Sequence[Piece], num_stages: int
) -> tuple[list[int] | None, float | None]:
    """The bytes of each piece and those that a stage may have, where the user gives a limit.

    Parameters count with their gradients, saved values for as many microbatches as 1F1B holds.
    """
    device = nodes[0].meta["val"].device if hasattr(nodes[0].meta.get("val"), "device") else None
    limit = bytes_of_limit(program.options.memory_limit, device)
    if limit is None:
        return None, None
    ranks = program.num_ranks or num_stages
    in_flight = min(program.options.microbatches, ranks)
    parameters = {i.name for i in program.inputs if i.role is Role.PARAMETER}
    memory = []
    ends = [piece.start for piece in pieces[1:]] + [len(nodes)]
    for piece, end in zip(pieces, ends):
        inside = nodes[piece.start : end]
        read = {n for node in inside for n in node.all_input_nodes if n.name in parameters}
        saved = {stored(node) for node in inside if any("backward" in u.meta for u in node.users)}
        memory.append(
            2 * sum(bytes_of(n.meta["val"]) for n in read)
            + in_flight * sum(bytes_of(n.meta.get("val")) for n in saved if n.op != "placeholder")
        )
    return memory, limit


def stored(node: fx.Node) -> fx.Node:
    """The node whose memory a view shows."""
    while is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node

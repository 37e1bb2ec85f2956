"""A finished program of each microbatch -> every message that its ranks send in a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from fxpipe.flops import bytes_of
from fxpipe.messages import place_sends, without_messages
from fxpipe.program import Edge, Join, Program
from fxpipe.schedule import Schedule

Sizes = Sequence[Mapping[str, int]]  # per microbatch, bytes of the joint graph's values


class Message(NamedTuple):
    source: int  # rank
    target: int
    nbytes: int


def messages_of(programs: Sequence[Program], listeners: Sequence[int]) -> list[Message]:
    """What rank programs send: values of edges, sums of gradients, and results.

    programs[k]: of microbatch k. listeners: the ranks that get the model's outputs. The same as
    fxpipe.lowering.lower makes of them, without making it.
    """
    of = {
        id(p): {n.name: bytes_of(n.meta.get("val")) for n in p.joint.graph.nodes} for p in programs
    }
    sizes = [of[id(program)] for program in programs]
    schedule = without_messages(programs[0].schedule)
    found = [
        *edge_messages(programs, schedule, sizes),
        *sum_messages(programs[0], sizes),
    ]
    for places, join in results_of(programs):
        found += result_messages(places, join, schedule, sizes, listeners)
    return found


def edge_messages(
    programs: Sequence[Program], schedule: Schedule, sizes: Sizes
) -> Iterator[Message]:
    for rank in range(schedule.num_ranks):
        for _, send in place_sends(schedule, rank, lambda k: programs[k].edges):
            k, edge = send.microbatch, Edge(send.stage, send.other)
            size = sum(sizes[k][name] for name in programs[k].edges[edge])
            yield Message(rank, schedule.rank_of[send.other, k], size)


def sum_messages(program: Program, sizes: Sizes) -> Iterator[Message]:
    """Of parameters that several ranks use: see the pass sync_gradients."""
    for name, reduction in program.reductions.items():
        for source in reduction.contributors:
            for target in reduction.receivers:
                if source != target:
                    yield Message(source, target, sizes[0][name])


def results_of(programs: Sequence[Program]) -> Iterator[tuple[Sequence[tuple[int, str]], Join]]:
    """The places (stage, name), per microbatch, of outputs and of the gradients of arguments."""
    first = programs[0]
    inputs = {entry.name for entry in first.inputs}
    for name in first.input_gradients:
        yield [program.input_gradients[name] for program in programs], Join.CONCATENATE
    for number, output in enumerate(first.outputs):
        if number in first.returns and first.returns[number][1] not in inputs:
            yield [program.returns[number] for program in programs], output.join


def result_messages(
    places: Sequence[tuple[int, str]],
    join: Join,
    schedule: Schedule,
    sizes: Sizes,
    listeners: Sequence[int],
) -> Iterator[Message]:
    """Each rank that has parts of a result sends them at once; of a sum it sends one."""
    owned: dict[int, list[int]] = {}
    for k, (stage, name) in enumerate(places[:1] if join is Join.FIRST else places):
        owned.setdefault(schedule.rank_of[stage, k], []).append(sizes[k][name])
    for owner, parts in owned.items():
        size = parts[0] if join is Join.SUM else sum(parts)
        yield from (Message(owner, other, size) for other in listeners if other != owner)

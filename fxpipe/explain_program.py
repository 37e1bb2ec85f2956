"""A finished program and its passes -> an Explanation."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version

import torch

from fxpipe.estimate import estimated_costs, flops_of, operators
from fxpipe.explanation import EdgeFacts, Explanation, PassFacts, RankFacts, StageFacts
from fxpipe.flops import bytes_of, elements
from fxpipe.messages import without_messages
from fxpipe.messages_of_step import Message, messages_of
from fxpipe.modules import modules_by_stage
from fxpipe.options import Options
from fxpipe.program import Program
from fxpipe.schedule import Schedule
from fxpipe.simulator import Timeline, simulate
from fxpipe.sizes import kept, size_of, weights_of
from fxpipe.text import format_type
from fxpipe.text_grid import grid


def explain_program(
    program: Program, rows: Sequence[int], programs: Sequence[Program] = ()
) -> Explanation:
    """program: of the first microbatch, after the last pass. rows: of every microbatch.

    programs: of every microbatch; where they are not given, each counts as the first.
    """
    schedule = without_messages(program.schedule)
    messages = messages_of(programs or (program,) * program.num_microbatches, listeners(schedule))
    timeline = simulate(schedule, estimated_costs(program))
    edges = {(min(e.source, e.target), max(e.source, e.target)) for e in program.edges}
    return Explanation(
        schedule.name,
        program.training,
        tuple(rows),
        tuple(str(schedule).splitlines()),
        grid(schedule, forward_edges=edges),
        tuple(stages_of(program)),
        tuple(edges_of(program)),
        tuple(ranks_of(schedule, timeline, messages)),
        float(timeline.makespan),
        float(timeline.bubble_flush),
        tuple(PassFacts(name, on) for name, on in program.passes),
        options_of(program.options),
        environment(),
    )


def stages_of(program: Program) -> list[StageFacts]:
    values = {n.name: n.meta.get("val") for n in program.joint.graph.find_nodes(op="placeholder")}
    forward = [n for n in program.joint.graph.nodes if not n.meta.get("backward")]
    modules = modules_by_stage(n for n in forward if n.op == "call_function")
    found = []
    for stage in range(program.num_stages):
        tasks = {str(key.kind): t for key, t in program.tasks.items() if key.stage == stage}
        names = weights_of(program, stage)
        found.append(
            StageFacts(
                stage,
                tuple(program.holders.get(stage, program.schedule.holders.get(stage, ()))),
                modules.get(stage, ()),
                sum(elements(values[name]) for name in names),
                sum(bytes_of(values[name]) for name in names),
                {kind: flops_of(task) for kind, task in tasks.items()},
                {kind: len(operators(task)) for kind, task in tasks.items()},
                size_of(program, kept(program, stage)) if program.training else 0,
            )
        )
    return found


def edges_of(program: Program) -> list[EdgeFacts]:
    values = {node.name: node.meta.get("val") for node in program.joint.graph.nodes}
    return [
        EdgeFacts(
            edge.source,
            edge.target,
            tuple((name, format_type(values[name]), bytes_of(values[name])) for name in names),
            size_of(program, names),
        )
        for edge, names in program.edges.items()
    ]


def listeners(schedule: Schedule) -> Sequence[int]:
    """The ranks that get the model's outputs: all processes, or the first rank of the only one."""
    group = torch.distributed
    alone = not group.is_available() or not group.is_initialized() or group.get_world_size() == 1
    return (0,) if alone else range(schedule.num_ranks)


def ranks_of(
    schedule: Schedule, timeline: Timeline, messages: Sequence[Message]
) -> list[RankFacts]:
    return [
        RankFacts(
            rank,
            tuple(schedule.stages_of(rank)),
            float(timeline.weights[rank]),
            float(timeline.weights[rank] + timeline.peak_activations[rank]),
            float(timeline.busy[rank]),
            sum(message.source == rank for message in messages),
            float(sum(message.nbytes for message in messages if message.source == rank)),
        )
        for rank in range(schedule.num_ranks)
    ]


def options_of(options: Options) -> Mapping[str, str]:
    """The options that are not the default, as text; a schedule by its name."""
    default, found = Options(), {}
    for entry in fields(Options):
        value = getattr(options, entry.name)
        if value != getattr(default, entry.name):
            found[entry.name] = value.name if isinstance(value, Schedule) else str(value)
    return found


def environment() -> Mapping[str, str]:
    """What runs here."""
    found = {"fxpipe": _version("fxpipe"), "torch": torch.__version__}
    found |= {"python": platform.python_version(), "system": platform.platform(terse=True)}
    if torch.version.cuda and torch.cuda.is_available():
        found |= {"cuda": torch.version.cuda, "device": torch.cuda.get_device_name()}
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"

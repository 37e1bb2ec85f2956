"""Values that cross ranks become messages in the schedule."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fxpipe.checker import check_schedule
from fxpipe.messages import with_messages
from fxpipe.program import Program


@dataclass(frozen=True)
class InsertCommunication:
    """
    rank 0: 0F0 0B0
    rank 1: 1F0 1B0                         edges 0 -> 1: %h, 1 -> 0: %grad_h

    becomes

    rank 0: 0F0 0SEND_F0 0RECV_B0 0B0
    rank 1: 1RECV_F0 1F0 1B0 1SEND_B0

    Receives are posted ahead of their use. Edges between stages of one rank need no message.
    """

    def __call__(self, program: Program) -> Program:
        schedule = with_messages(program.schedule, lambda microbatch: program.edges)
        edges = {(min(e.source, e.target), max(e.source, e.target)) for e in program.edges}
        check_schedule(
            schedule,
            program.num_stages,
            program.num_microbatches,
            edges,
            training=program.training,
        )
        return replace(program, schedule=schedule)

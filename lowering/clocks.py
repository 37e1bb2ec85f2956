"""The clocks of all ranks -> what to add to each, so that they tell the same time as rank 0's.

Processes of one machine share their monotonic clock, which time.perf_counter_ns reads: nothing is
added. Across machines each rank's offset is half the difference of the two ways of a ping-pong with
rank 0, the quickest of some; it is right to half of that one's time (Cristian, 1989).
"""

from __future__ import annotations

import platform
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from fxpipe.lowering.collect import TAG
from fxpipe.lowering.transport import start, wait_for
from fxpipe.lowering.watch import watch

ROUNDS = 16
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine() -> str:
    """A text that is equal for processes that share a monotonic clock."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return f"{platform.node()} {uuid.getnode()}"


def offsets(machines: Sequence[str], limit: float) -> list[int]:
    """Nanoseconds to add to the clock of each rank; on ranks other than 0 only the own is right.

    Every rank calls this with the machines of all, in their order.
    """
    if len(set(machines)) == 1:
        return [0] * len(machines)
    return measure_offsets(limit)


def measure_offsets(limit: float) -> list[int]:
    """`offsets` by ping-pong, whichever machines the ranks are on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = [0] * size
    for other in range(1, size):
        if rank in (0, other):
            found[other] = ping_pong(other if rank == 0 else 0, first=rank == 0, limit=limit)
    return found


def ping_pong(other: int, first: bool, limit: float) -> int:
    """On rank 0 (`first`) what to add to the other's clock; on the other one 0.

    The other rank answers each message with its time.
    """
    device = "cpu" if "gloo" in str(dist.get_backend_config()) else "cuda"
    best, offset = float("inf"), 0
    for _ in range(ROUNDS):
        begin = time.perf_counter_ns()
        if first:
            exchange(torch.zeros(1, dtype=torch.int64, device=device), other, dist.isend, limit)
            answer = torch.zeros(1, dtype=torch.int64, device=device)
            exchange(answer, other, dist.irecv, limit)
            end = time.perf_counter_ns()
            if end - begin < best:
                best, offset = end - begin, (begin + end) // 2 - int(answer.item())
        else:
            ping = torch.zeros(1, dtype=torch.int64, device=device)
            exchange(ping, other, dist.irecv, limit)
            now = torch.tensor([time.perf_counter_ns()], dtype=torch.int64, device=device)
            exchange(now, other, dist.isend, limit)
    return offset


def exchange(tensor: torch.Tensor, other: int, function: object, limit: float) -> None:
    work = start(watch(), function, tensor, other, TAG)
    wait_for(watch(), [work], f"the clock of rank {other}", limit)

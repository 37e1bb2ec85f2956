"""What each rank holds -> what every rank, or rank 0, holds: between steps, over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from fxpipe.errors import RankError
from fxpipe.lowering.group import compiling, gather_objects, num_ranks, this_rank
from fxpipe.lowering.transport import MESSAGES, STEPS_IN_FLIGHT, start, wait_for
from fxpipe.lowering.watch import watch

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

CHUNK = 1 << 28  # bytes in a message: each must come within the timeout
TAG = STEPS_IN_FLIGHT * MESSAGES  # above those of steps, of which one may be under way


def together(label: str, work: Callable[[], Value], limit: float) -> list[Value]:
    """What `work()` gave on every rank, in their order; `work` may take long.

    Where it raises on one rank, all raise: RankError with its sentence, or its own error. Also
    RankError, on all ranks, where one does not come within `limit` seconds or calls another thing.
    """
    if num_ranks() == 1:
        return [work()]
    said, value, failure = "", None, None
    try:
        with compiling(num_ranks()):
            value = work()
    except Exception as error:
        said, failure = f"{type(error).__name__}: {error}", error
    try:
        parts = gather_objects(label, (said, value), limit)
    except RankError:
        if failure is None:
            raise
        raise failure from None
    if failure is not None:
        raise failure
    for rank, (reason, _) in enumerate(parts):
        if reason:
            raise RankError(f"{label} failed on rank {rank}: {reason}")
    return [part for _, part in parts]


class Described(NamedTuple):
    """A tensor to be sent, or another value as it is."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    device: str
    value: Any = None

    @staticmethod
    def of(value: Any) -> Described:
        if isinstance(value, torch.Tensor):
            return Described(tuple(value.shape), value.dtype, value.device.type)
        return Described((), None, "", value)


def collect(
    label: str,
    held: Mapping[Key, Any],
    limit: float,
    rank0_only: bool = False,
    cpu: bool = False,
) -> dict[Key, Any]:
    """The union of what the ranks hold, on every rank; what several hold is the lowest one's.

    Tensors that a rank holds itself stay the ones they are, or go to the CPU where `cpu` is set.
    With `rank0_only` the others get an empty dict. Sent tensor by tensor, in parts: a rank needs no
    memory beyond what it returns. Raises RankError on all ranks: see `together`.
    """
    mine = {key: Described.of(value) for key, value in held.items()}
    tables = together(label, lambda: mine, limit)
    sources: dict[Key, int] = {}
    for rank, table in enumerate(tables):
        for key in table:
            sources.setdefault(key, rank)
    receivers = range(1 if rank0_only else len(tables))
    found: dict[Key, Any] = {}
    for key, source in sources.items():
        about = tables[source][key]
        lacking = [r for r in receivers if key not in tables[r]]
        what = f"{label}: {key}"
        if this_rank() in lacking:
            value = receive(about, source, what, limit, cpu) if about.dtype else about.value
        else:
            value = held.get(key)
            if isinstance(value, torch.Tensor):
                if this_rank() == source and lacking:
                    send(value, lacking, what, limit)
                value = value.cpu() if cpu else value
        if this_rank() in receivers:
            found[key] = value
    return found


def carrier() -> torch.device:
    """Where the tensors of messages must lie."""
    if watch().is_gloo:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def chunks(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """A contiguous tensor as bytes; not every transport knows every dtype."""
    return tensor.reshape(-1).view(torch.uint8).split(CHUNK) if tensor.numel() else ()


def send(tensor: torch.Tensor, targets: Sequence[int], what: str, limit: float) -> None:
    whole = tensor.detach().to(carrier()).contiguous()
    for chunk in chunks(whole):
        works = [start(watch(), dist.isend, chunk, target, TAG) for target in targets]
        wait_for(watch(), works, f"{what} to be sent", limit)


def receive(about: Described, source: int, what: str, limit: float, cpu: bool) -> torch.Tensor:
    whole = torch.empty(about.shape, dtype=about.dtype, device=carrier())
    for chunk in chunks(whole):
        work = start(watch(), dist.irecv, chunk, source, TAG)
        wait_for(watch(), [work], f"{what} from rank {source}", limit)
    return whole.to("cpu" if cpu else about.device)

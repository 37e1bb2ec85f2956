"""What ranks agree on before the first message of a step, and how errors reach all of them."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fxpipe.errors import RankError
from fxpipe.lowering.mailboxes import machine_and_processes
from fxpipe.lowering.watch import watch

CHUNK = 1 << 20
LENGTH = struct.Struct("<I")
START = struct.Struct("<qq")  # the digest of a step, the seed


def start_group() -> int:
    """The number of ranks; under torchrun the process group is made if the user made none."""
    if not dist.is_available():
        return 1
    if not dist.is_initialized():
        if not dist.is_torchelastic_launched():
            return 1
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if dist.get_world_size() > 1:
        watch()
    return dist.get_world_size()


def num_ranks() -> int:
    """The ranks that take part. One where no process group was made, or before it is."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def this_rank() -> int:
    return dist.get_rank() if num_ranks() > 1 else 0


def digest(text: str) -> int:
    """63 bits of a text's hash, the same in every process; never 0, which stands for a failure."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1 | 1


@contextlib.contextmanager
def compiling(world_size: int) -> Iterator[None]:
    """Others are patient with this process as long as it is in here and alive."""
    if world_size == 1:
        yield
        return
    status = watch().status
    status.compiling = True
    try:
        yield
    finally:
        status.compiling = False


def gather(label: str, data: bytes, limit: float, failure: str = "") -> list[bytes]:
    """Every rank's data, in their order, once all ranks have come to the same label.

    `failure` says why this rank will not go on, for those who have come to another label. Raises
    RankError, as all ranks do from then on, where labels differ or a rank stalls, raises or dies.
    """
    watching = watch()
    said = failure.encode()
    parts = watching.round(label, LENGTH.pack(len(said)) + said + data, limit)
    found = []
    for other, (theirs, message) in sorted(parts.items()):
        end = LENGTH.size + LENGTH.unpack_from(message)[0]
        if theirs != label:
            reason = message[LENGTH.size : end].decode()
            watching.fail(*out_of_step((watching.rank, label, failure), (other, theirs, reason)))
            raise watching.error()
        found.append(message[end:])
    return found


def out_of_step(mine: tuple[int, str, str], theirs: tuple[int, str, str]) -> tuple[int, str]:
    for rank, label, failure in (mine, theirs):
        if failure:
            return rank, f"rank {rank} could not come to {label}: {failure}"
    return mine[0], (
        f"rank {mine[0]} came to {mine[1]} while rank {theirs[0]} came to {theirs[1]}; every rank "
        f"must make the same calls in the same order"
    )


def gather_objects(label: str, value: Any, limit: float) -> list[Any]:
    """Every rank's value, in their order; see `gather`."""
    return [pickle.loads(data) for data in gather(label, pickle.dumps(value), limit)]


def gather_numbers(label: str, numbers: Sequence[int], limit: float) -> list[tuple[int, ...]]:
    """Every rank's numbers of 64 bits, equally many on each; see `gather`."""
    packing = struct.Struct(f"<{len(numbers)}q")
    return [packing.unpack(part) for part in gather(label, packing.pack(*numbers), limit)]


def open_mailboxes(senders: Iterable[int], limit: float) -> None:
    """Let ranks that send to this one do so through memory, where both are on one machine.

    Every rank calls this at the same place, with its own `senders`.
    """
    watching = watch()
    here, boxes = machine_and_processes(), watching.mailboxes
    offers = gather_objects("mailboxes", (here, boxes.offer(senders) if here else {}), limit)
    own = {
        rank: addresses[watching.rank]
        for rank, (place, addresses) in enumerate(offers)
        if place == here and watching.rank in addresses
    }
    answers = gather_objects("answers to mailboxes", boxes.accept(own), limit)
    for rank in offers[watching.rank][1]:
        if watching.rank not in answers[rank]:
            del boxes.inboxes[rank]


def agree(
    text: str, number: int, limit: float, failure: Exception | None = None, seed: int = 0
) -> int:
    """Compare what all ranks are about to do, before any of them does it; rank 0's `seed`.

    `number` is `digest(text)`, or 0 together with the `failure` of this rank. Where ranks differ or
    one failed, every rank raises: RankError with the first difference, or its own failure. `limit`
    are the seconds after which the ranks that have not come are given up.
    """
    status = watch().status
    said = "" if failure is None else f"{type(failure).__name__}: {failure}"
    try:
        label = f"step {status.step + 1}"
        parts = gather(label, START.pack(number, seed) + said.encode(), limit, said)
    except RankError:
        if failure is None:
            raise
        raise failure from None
    starts = [START.unpack_from(part) for part in parts]
    if number and all(other == number for other, _ in starts):
        status.step += 1
        return int(starts[0][1])
    if failure is not None:
        raise failure
    for rank, (other, _) in enumerate(starts):
        if not other:
            reason = parts[rank][START.size :].decode()
            raise RankError(f"rank {rank} could not start the step: {reason}")
    texts = gather("the comparison of steps", text.encode(), limit)
    raise RankError(first_difference([data.decode() for data in texts]))


def compare_parameters(
    copies: Mapping[str, tuple[torch.Tensor, set[int]]],
    users: Mapping[str, set[int]],
    limit: float,
) -> None:
    """Refuse to start where ranks hold different values of a parameter that they share.

    copies: path -> this rank's tensor and the ranks whose values must be equal; users: path -> the
    ranks that are about to read it. Raises the same RankError on every rank.
    """
    if not copies:
        return
    rank = dist.get_rank()
    sums = [checksum(t) if rank in ranks else 0 for t, ranks in copies.values()]
    rows = gather_numbers("the comparison of parameters", sums, limit)
    for index, (path, (_, ranks)) in enumerate(copies.items()):
        by_rank = {r: rows[r][index] for r in sorted(ranks)}
        freed = [r for r, value in by_rank.items() if not value]
        if missing := sorted(users[path].intersection(freed)):
            raise RankError(
                f"rank {missing[0]} needs the parameter {path!r}, whose memory it has freed; "
                f"load its values on that rank again, or keep to the stages of the earlier step"
            )
        kept = {r: value for r, value in by_rank.items() if value}
        first = min(kept)
        if other := [r for r, value in kept.items() if value != kept[first]]:
            raise RankError(
                f"the parameter {path!r} has other values on rank {other[0]} than on rank {first}, "
                f"and both must hold the same: give every rank the same start, by the same "
                f"torch.manual_seed or the same state_dict, before the first step"
            )


def compare_batch(arguments: Mapping[str, torch.Tensor], limit: float) -> None:
    """Refuse to start where ranks were called with other values; the same RankError on every rank.

    Each rank takes its part of the batch itself: parts of different batches would make a loss that
    is nobody's. arguments: path -> this rank's tensor, the same paths on every rank.
    """
    sums = [checksum(tensor) for tensor in arguments.values()]
    rows = gather_numbers("the comparison of batches", sums, limit)
    for index, path in enumerate(arguments):
        other = [rank for rank, row in enumerate(rows) if row[index] != rows[0][index]]
        if other:
            raise RankError(
                f"the argument {path!r} has other values on rank {other[0]} than on rank 0, and "
                f"every rank takes the whole batch, the same one: use no DistributedSampler, and "
                f"the same seed for data that is drawn"
            )


def checksum(tensor: torch.Tensor) -> int:
    """An odd number that tells values apart by their bits; 0 for a tensor without memory."""
    if tensor.numel() and not tensor.untyped_storage().size():
        return 0
    flat = tensor.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    total = 0
    for number, chunk in enumerate(flat.view(integers[flat.dtype.itemsize]).split(CHUNK)):
        # A weight for each place: else an exchange of two values would go unseen.
        weights = torch.arange(1, 2 * chunk.numel(), 2, device=chunk.device)
        total += (2 * number + 1) * int((chunk.to(torch.int64) * weights).sum())
    return (total % 2**62) | 1


def what_must_be_the_same(mine: str, theirs: str) -> str:
    """What the first lines in which two plans differ are made of."""
    rows = [line.split()[2:-1] for line in (mine, theirs) if line.startswith("microbatches of ")]
    if len(rows) < 2:
        return "the same options, such as stages and schedule, and a batch of the same shape"
    if len(rows[0]) != len(rows[1]):
        return "the same option microbatches, and a batch of the same shape"
    return "a batch of the same shape"


def first_difference(texts: list[str]) -> str:
    for rank, other in enumerate(texts):
        for mine, theirs in zip(texts[0].splitlines(), other.splitlines()):
            if mine != theirs:
                return (
                    f"the ranks are about to run different steps: rank 0 has {mine!r} where rank "
                    f"{rank} has {theirs!r}; every rank must make the same call, with "
                    f"{what_must_be_the_same(mine, theirs)}"
                )
        if texts[0] != other:
            return f"the ranks are about to run different steps: rank {rank}'s has another length"
    return "the ranks disagreed a moment ago and agree now"

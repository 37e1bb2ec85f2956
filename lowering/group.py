"""What ranks agree on before the first message of a step, and how errors reach all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist

from fxpipe.errors import RankError

CHUNK = 1 << 20


def start_group() -> int:
    """The number of ranks; under torchrun the process group is made if the user made none."""
    if not dist.is_available():
        return 1
    if not dist.is_initialized():
        if not dist.is_torchelastic_launched():
            return 1
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_world_size()


def digest(text: str) -> int:
    """63 bits of a text's hash, the same in every process; never 0, which stands for a failure."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1 | 1


def agree(
    text: str, number: int, device: torch.device, failure: Exception | None = None, seed: int = 0
) -> int:
    """Compare what all ranks are about to do, before any of them does it; rank 0's `seed`.

    `number` is `digest(text)`, or 0 together with the `failure` of this rank. Where ranks differ or
    one failed, every rank raises: RankError with the first difference, or its own failure.
    """
    numbers = [
        torch.zeros(2, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())
    ]
    dist.all_gather(numbers, torch.tensor([number, seed], device=device))
    values = [int(n[0]) for n in numbers]
    if all(value == number for value in values) and number:
        return int(numbers[0][1])
    texts: list[tuple[bool, str] | None] = [None] * len(values)
    said = text if failure is None else f"{type(failure).__name__}: {failure}"
    dist.all_gather_object(texts, (failure is not None, said))
    if failure is not None:
        raise failure
    for rank, (failed, other) in enumerate(t for t in texts if t is not None):
        if failed:
            raise RankError(f"rank {rank} could not start the step: {other}")
    raise RankError(first_difference([t[1] for t in texts if t is not None]))


def compare_parameters(
    copies: Mapping[str, tuple[torch.Tensor, set[int]]], users: Mapping[str, set[int]]
) -> None:
    """Refuse to start where ranks hold different values of a parameter that they share.

    copies: path -> this rank's tensor and the ranks whose values must be equal; users: path -> the
    ranks that are about to read it. Raises the same RankError on every rank.
    """
    if not copies:
        return
    rank = dist.get_rank()
    sums = [checksum(t) if rank in ranks else 0 for t, ranks in copies.values()]
    device = next(iter(copies.values()))[0].device
    gathered = [
        torch.zeros(len(sums), dtype=torch.int64, device=device)
        for _ in range(dist.get_world_size())
    ]
    dist.all_gather(gathered, torch.tensor(sums, dtype=torch.int64, device=device))
    rows = [part.tolist() for part in gathered]
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


def first_difference(texts: list[str]) -> str:
    for rank, other in enumerate(texts):
        for mine, theirs in zip(texts[0].splitlines(), other.splitlines()):
            if mine != theirs:
                return (
                    f"the ranks are about to run different steps: rank 0 has {mine!r} where rank "
                    f"{rank} has {theirs!r}; every rank must make the same call, with a batch of "
                    f"the same shape"
                )
        if texts[0] != other:
            return f"the ranks are about to run different steps: rank {rank}'s has another length"
    return "the ranks disagreed a moment ago and agree now"

"""What ranks agree on before the first message of a step, and how errors reach all of them."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

from fxpipe.errors import RankError


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


def agree(text: str, number: int, device: torch.device, failure: Exception | None = None) -> None:
    """Compare what all ranks are about to do, before any of them does it.

    `number` is `digest(text)`, or 0 together with the `failure` of this rank. Where ranks differ or
    one failed, every rank raises: RankError with the first difference, or its own failure.
    """
    numbers = [
        torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())
    ]
    dist.all_gather(numbers, torch.tensor([number], device=device))
    values = [int(n) for n in numbers]
    if all(value == number for value in values) and number:
        return
    texts: list[tuple[bool, str] | None] = [None] * len(values)
    said = text if failure is None else f"{type(failure).__name__}: {failure}"
    dist.all_gather_object(texts, (failure is not None, said))
    if failure is not None:
        raise failure
    for rank, (failed, other) in enumerate(t for t in texts if t is not None):
        if failed:
            raise RankError(f"rank {rank} could not start the step: {other}")
    raise RankError(first_difference([t[1] for t in texts if t is not None]))


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

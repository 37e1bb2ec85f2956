"""The option `memory_limit` to bytes."""

from __future__ import annotations

import torch

from fxpipe.errors import OptionError


def bytes_of_limit(limit: float | None, device: torch.device | None) -> float | None:
    """A limit above 1 is in bytes; up to 1 it is a fraction of the memory of a rank's device.

    Raises OptionError for a fraction where the memory is unknown.
    """
    if limit is None or limit > 1:
        return limit
    if device is not None and device.type == "cuda":
        return limit * torch.cuda.get_device_properties(device).total_memory
    try:
        with open("/proc/meminfo") as lines:
            kibibytes = next(int(line.split()[1]) for line in lines if line.startswith("MemTotal"))
    except OSError as error:
        raise OptionError(
            f"memory_limit={limit} is a fraction, but this machine's memory is unknown ({error}); "
            f"give it in bytes"
        ) from error
    return limit * kibibytes * 1024

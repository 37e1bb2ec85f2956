"""What captures calls and replays them: CUDA's graphs, or a stand-in for them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch

from fxpipe.errors import OptionError

Value = TypeVar("Value")


class Graph(Protocol):
    """Calls that were captured."""

    def replay(self) -> None:
        """Run them on the memory that they were captured on."""

    def reset(self) -> None:
        """Give their memory back."""


class Device(Protocol):
    """Captures calls. The memory that they allocate is a pool's, which is this device's own."""

    def aside(self) -> AbstractContextManager[Any]:
        """A block whose work runs on the stream that captures; the caller's stream waits for it."""

    def capture(self, work: Callable[[], Value]) -> tuple[Graph, Value]:
        """The calls that `work` makes, and what it returns. Nothing is computed yet."""


class CudaDevice:
    """CUDA graphs. The graphs of one of these share a pool, so they must be replayed in the order
    in which they were captured.

    Written after CUDA's documentation; not yet run on a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def aside(self) -> AbstractContextManager[Any]:
        return Aside(self.stream)

    def capture(self, work: Callable[[], Value]) -> tuple[Graph, Value]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(self.stream):
            # The threads of a process group ask for the state of events while this one captures.
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                value = work()
            finally:
                graph.capture_end()
        return graph, value


class Aside:
    """A block on another stream, between what the current stream has and will get to do."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream, self.block = stream, torch.cuda.stream(stream)

    def __enter__(self) -> None:
        self.before = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(self.before)
        self.block.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.block.__exit__(*error)
        self.before.wait_stream(self.stream)


def make_device(mode: str, device: torch.device | None) -> Device:
    """The device of `cuda_graphs=mode`, for a model on `device`. Raises OptionError without one."""
    if not torch.cuda.is_available():
        raise OptionError(
            f"cuda_graphs={mode!r} needs a GPU with CUDA, and torch finds none here; leave the "
            f"option out"
        )
    if device is None or device.type != "cuda":
        raise OptionError(
            f"cuda_graphs={mode!r} needs a model on a GPU, and this one is on {device}; move it "
            f"with model.cuda(), or leave the option out"
        )
    return CudaDevice(device)

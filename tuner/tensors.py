"""torch, where it is installed: tensors on GPU memory that is held here, and CUDA graphs of what is done with them.

The only module that imports torch, and only when it is asked to. It runs in the process that holds the CUDA context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tuner.device import Resident
from tuner.errors import LaunchFailed, MissingTool

Array = np.ndarray[Any, np.dtype[Any]]
Step = tuple[Array, Array, Array]  # x f16 [M, H], ids int [M, k], route weights f32 [M, k]


class Replay:
    """A captured graph of so many calls."""

    def __init__(self, torch: Any, graph: Any, calls: int, keeps: Sequence[Any]) -> None:
        self._graph, self._calls, self._keeps = graph, calls, keeps
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def time_us(self) -> float:
        """Microseconds a call, as device.Replay.time_us."""
        start, stop = self._events
        with faults("replaying"):
            self._graph.replay()
            start.record()
            self._graph.replay()
            stop.record()
            stop.synchronize()
            return float(start.elapsed_time(stop)) * 1e3 / self._calls


def load() -> Any:
    """The module torch. Raises MissingTool where it is not, or without CUDA."""
    try:
        import torch
    except ImportError as error:
        raise MissingTool(f"torch cannot be imported ({error}): install a PyTorch with CUDA to have its arm") from error
    if not torch.cuda.is_available():
        raise MissingTool(f"torch {torch.__version__} sees no GPU: install a build with CUDA to have its arm")
    return torch


def capture(torch: Any, first: Sequence[Callable[[], Any]], calls: Sequence[Callable[[], Any]]) -> Replay:
    """A CUDA graph of the calls. `first` are called before: they load code and make handles, which a capture cannot."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # what the calls' tensors are still being filled on
    with torch.cuda.stream(stream):
        for call in first:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
        for call in calls:
            call()
    torch.cuda.synchronize()
    return Replay(torch, graph, len(calls), (*first, *calls))


class _View:
    """GPU memory as the CUDA array interface tells of it. Words are signed: torch computes little with others."""

    def __init__(self, held: Resident) -> None:
        kind = held.dtype.str.replace("u4", "i4")
        self.__cuda_array_interface__ = {
            "shape": held.shape,
            "typestr": kind,
            "data": (held.address, False),
            "version": 3,
        }
        self._held = held


def views(torch: Any, weights: Mapping[str, Resident]) -> dict[str, Any]:
    """Tensors on the weights where they are."""
    return {name: torch.as_tensor(_View(held), device="cuda") for name, held in weights.items()}


@contextmanager
def faults(doing: str) -> Iterator[None]:
    """LaunchFailed for what torch raises: CUDA's errors, memory that does not suffice, an op that refuses."""
    try:
        yield
    except RuntimeError as error:
        raise LaunchFailed(f"torch, {doing}: {error}") from error

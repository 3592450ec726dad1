"""Graphs of torch.cuda, and of torch_npu, which has the same functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")


class Graph(Protocol):
    """A record of a function on the device, to be run again."""

    def replay(self) -> None: ...

    def reset(self) -> None: ...


class Graphs(Protocol):
    """The functions of a device that this package calls; tests record operators in their place."""

    def pool(self) -> Any:
        """A memory pool. Graphs that share it use the same memory, so only one of them may wait for its backward."""

    def warm_up(self, function: Callable[[], object]) -> None:
        """Run a function on the stream that records, for what libraries set up at their first call on a stream."""

    def record(self, function: Callable[[], T], pool: Any) -> tuple[Graph, T]:
        """Run a function, and return a graph of it and its results, which each replay overwrites."""


class DeviceGraphs:
    """Graphs of one device.

    Source: torch.cuda.make_graphed_callables, which takes no keyword arguments and no module with hooks, and records
    backward under the caller's autocast.
    """

    def __init__(self, device: torch.device) -> None:
        self.backend: Any = torch.get_device_module(device.type)
        self.stream = self.backend.Stream(device)

    def pool(self) -> Any:
        return self.backend.graph_pool_handle()

    def warm_up(self, function: Callable[[], object]) -> None:
        self.stream.wait_stream(self.backend.current_stream())
        with self.backend.stream(self.stream):
            function()
        self.backend.current_stream().wait_stream(self.stream)

    def record(self, function: Callable[[], T], pool: Any) -> tuple[Graph, T]:
        graph: Any = getattr(self.backend, "CUDAGraph", None) or self.backend.NPUGraph
        graph = graph()
        # Threads that pin memory or write snapshots call the device meanwhile: only this thread's calls are checked.
        with self.backend.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"):
            results = function()
        return graph, results

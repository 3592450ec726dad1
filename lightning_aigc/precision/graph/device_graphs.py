"""Graphs of a device: what this package calls of them, how one is recorded, and whether they can be trusted."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

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

    def reserved_bytes(self) -> int:
        """Bytes that the device's allocator holds, without those that it can give back."""

    def free_bytes(self) -> int:
        """Bytes of the device that nobody holds."""


class DeviceGraphs:
    """Graphs of one device.

    Source: torch.cuda.make_graphed_callables, which takes no keyword arguments and no module with hooks, and records
    backward under the caller's autocast.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
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
        recording = self.backend.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local")
        raised: list[Exception] = []
        try:
            with self._restored_on_error(pool), _without_garbage_collection(), _with_own_workspaces(), recording:
                try:
                    results = function()
                except Exception as error:  # whatever the module raises: the end of the capture may hide it
                    raised.append(error)
                    raise
        except Exception as error:  # the function's, or that of an invalid capture's end
            raise (raised or [error])[0] from None
        return graph, results

    def reserved_bytes(self) -> int:
        self.backend.empty_cache()
        return int(self.backend.memory_reserved(self.device))

    def free_bytes(self) -> int:
        return int(self.backend.mem_get_info(self.device)[0])

    @contextlib.contextmanager
    def _restored_on_error(self, pool: Any) -> Iterator[None]:
        """Undo what an invalid capture leaves: torch's exit raises before it restores anything."""
        current = self.backend.current_stream()
        generators = getattr(self.backend, "default_generators", ())
        generator: Any = generators[self.device.index or 0] if generators else None
        state = None if generator is None else generator.clone_state()
        try:
            yield
        except Exception:  # is raised again
            self.backend.set_stream(current)
            if state is not None:
                generator.graphsafe_set_state(state)  # the old one waits for the end of the capture
            with contextlib.suppress(AttributeError, RuntimeError):  # RuntimeError: the capture ended on its own
                torch._C._cuda_endAllocateToPool(self.device.index or 0, pool)
                torch._C._cuda_releasePool(self.device.index or 0, pool)
            raise


@contextlib.contextmanager
def _with_own_workspaces() -> Iterator[None]:
    """Let cuBLAS work in the graphs' memory: workspaces of eager calls, 32 MiB a thread and stream, are freed for it.

    Source: clear_cublas_manager in torch/_inductor/cudagraph_trees.py.
    """
    clear: Callable[[], None] = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)  # a torch for CPUs
    clear()
    try:
        yield
    finally:
        clear()


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Collect now and not inside: what a collection frees may call the device, which invalidates a capture."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def reason_against_graphs(graphs: Graphs, device: torch.device) -> str:
    """The reason why graphs of this device cannot be trusted; empty if a small one gives eager's numbers."""
    x = torch.linspace(-1, 1, 64, device=device).view(8, 8)
    weight = x.sin().requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        y = torch.nn.functional.silu(x @ weight)
        return y.detach(), torch.autograd.grad(y.sum(), weight)[0]

    try:
        graphs.warm_up(step)
        graph, found = graphs.record(step, graphs.pool())
        x.copy_(x.cos())
        graph.replay()
        is_same = all(
            torch.allclose(ours, eager, rtol=1e-3, atol=1e-5) for ours, eager in zip(found, step(), strict=True)
        )
        graph.reset()
    except Exception as error:  # what a device or its driver raises
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return "" if is_same else "the replay of a small graph gave other numbers than eager operators"

"""The module of a simulated "npu" device: two devices, streams, memory, random numbers, graphs, a gradient scaler."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from fakes.npu.npu_streams import NpuEvent, NpuStream
from fakes.recorded_graphs import RecordedGraph, recording


class NpuGradScaler(torch.amp.GradScaler):
    """torch_npu's: the reciprocal of the scale in float32, where torch's own takes float64."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        dynamic: bool = True,
        enabled: bool = True,
    ) -> None:
        super().__init__("npu", init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("unscale_")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is not OptState.READY:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        found_inf = torch.zeros((), device=scale.device)
        state["found_inf_per_device"] = self._unscale_grads_(optimizer, scale.reciprocal(), found_inf, False)
        state["stage"] = OptState.UNSCALED


class NpuGraph:
    """A graph, whose operators a CPU runs again."""

    recorded: RecordedGraph | None = None

    def replay(self) -> None:
        assert self.recorded is not None, "nothing was recorded"
        self.recorded.replay()

    def capture_end(self) -> None:
        pass

    def reset(self) -> None:
        self.recorded = None


class NpuModule(types.ModuleType):
    """The fake `torch.npu`: two devices, of which one is current."""

    count = 2
    current = 0
    allocated = 0
    """Bytes that the allocator claims to have handed out: nothing is counted, a test puts a number here."""
    total = 64 * 2**30
    Stream = NpuStream
    Event = NpuEvent
    NPUGraph = NpuGraph
    amp = types.SimpleNamespace(GradScaler=NpuGradScaler)
    _default_stream = _current_stream = NpuStream.__new__(NpuStream)

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def init(self) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return self.count

    def current_device(self) -> int:
        return self.current

    def set_device(self, device: Any) -> None:
        self.current = device if isinstance(device, int) else torch.device(device).index or 0

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = self.current
        self.set_device(device)
        try:
            yield
        finally:
            self.current = before

    def get_device_name(self, device: Any = None) -> str:
        return "FakeAscend910B"

    def synchronize(self, device: Any = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        kinds = ("allocated_bytes.all", "reserved_bytes.all")
        counted = {f"{kind}.{when}": self.allocated for kind in kinds for when in ("current", "peak")}
        return counted | {"num_alloc_retries": 0, "num_ooms": 0}

    def memory_allocated(self, device: Any = None) -> int:
        return self.allocated

    def memory_reserved(self, device: Any = None) -> int:
        return self.allocated

    def max_memory_allocated(self, device: Any = None) -> int:
        return self.allocated

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return self.total - self.allocated, self.total

    def utilization(self, device: Any = None) -> int:
        return 0

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        pass

    def manual_seed_all(self, seed: int) -> None:
        pass

    # Operators draw from the CPU's generator.
    def get_rng_state(self, device: Any = "npu") -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = "npu") -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def is_bf16_supported(self, including_emulation: bool = False) -> bool:
        return True

    def current_stream(self, device: Any = None) -> NpuStream:
        return self._current_stream

    def default_stream(self, device: Any = None) -> NpuStream:
        return self._default_stream

    def set_stream(self, stream: NpuStream) -> None:
        self._current_stream = stream

    @contextlib.contextmanager
    def stream(self, stream: NpuStream | None) -> Iterator[None]:
        before = self._current_stream
        self._current_stream = stream or before
        try:
            yield
        finally:
            self._current_stream = before

    def graph_pool_handle(self) -> tuple[int, int]:
        return 0, 1

    @contextlib.contextmanager
    def graph(
        self,
        npu_graph: NpuGraph,
        pool: Any = None,
        stream: NpuStream | None = None,
        capture_error_mode: str = "global",
    ) -> Iterator[None]:
        """Record what runs inside on CPU tensors."""
        assert capture_error_mode in ("global", "thread_local", "relaxed")
        before = self._current_stream
        self.set_stream(stream or before)
        with recording() as recorder:
            try:
                yield
            finally:  # in torch's order: an invalid capture raises before the stream is restored
                npu_graph.capture_end()
                self.set_stream(before)
        npu_graph.recorded = RecordedGraph(recorder)

"""Streams and events of the fake npu; all work is done when a call returns, so they only record an order."""

from __future__ import annotations

import time
from typing import Any

import torch


class NpuStream:
    """A stream that is always idle."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = torch.device("npu", 0)
        self.priority = priority

    def wait_event(self, event: NpuEvent) -> None:
        assert isinstance(event, NpuEvent)

    def wait_stream(self, stream: NpuStream) -> None:
        assert isinstance(stream, NpuStream)

    def record_event(self, event: NpuEvent | None = None) -> NpuEvent:
        event = event or NpuEvent()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class NpuEvent:
    """The wall clock where it was recorded."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.enable_timing = enable_timing
        self.recorded_s: float | None = None

    def record(self, stream: NpuStream | None = None) -> None:
        self.recorded_s = time.perf_counter()

    def wait(self, stream: NpuStream | None = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: NpuEvent) -> float:
        """Milliseconds between two recorded events that were made with `enable_timing=True`."""
        if (
            self.recorded_s is None
            or end_event.recorded_s is None
            or not (self.enable_timing and end_event.enable_timing)
        ):
            raise RuntimeError("elapsed_time needs two recorded events with enable_timing=True")
        return (end_event.recorded_s - self.recorded_s) * 1e3

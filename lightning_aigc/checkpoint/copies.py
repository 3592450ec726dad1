"""The copies of one snapshot: some before training goes on, the rest beside it."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_aigc.checkpoint.host_buffer import HostBuffer
from lightning_aigc.devices import accelerator_module

Copy: TypeAlias = tuple[HostBuffer, Tensor, int]
"""Where to, what, and at which offset."""


class Copies:
    """Begun on construction, complete after `finish`.

    Tensors on the CPU are copied at once, those in `late` by `finish`. Tensors on a device are copied by a stream of
    their own; what the device is asked to do after this waits for those copies, unless they are in `late`.
    """

    def __init__(self, copies: Iterable[Copy], late: Container[int]) -> None:
        self._later: list[Copy] = []
        self._events: list[Any] = []
        self._sources: list[Tensor] = []  # their memory must not be given to others before the device has read it
        on_devices: dict[torch.device, tuple[list[Copy], list[Copy]]] = {}
        for copy in copies:
            buffer, source, offset = copy
            is_late = late and source.data_ptr() in late
            if not source.is_cpu:
                on_devices.setdefault(source.device, ([], []))[bool(is_late)].append(copy)
            elif is_late:
                self._later.append(copy)
            else:
                buffer.copy_from(source, offset)
        for device, (now, later) in on_devices.items():
            self._on_device(device, now, later)

    def finish(self) -> None:
        for buffer, source, offset in self._later:
            buffer.copy_from(source, offset)
        for event in self._events:
            event.synchronize()
        self._later, self._events, self._sources = [], [], []

    def _on_device(self, device: torch.device, now: list[Copy], later: list[Copy]) -> None:
        module: Any = accelerator_module(device)
        training, beside = module.current_stream(device), module.Stream(device)
        beside.wait_stream(training)
        for copies in (now, later):
            with module.stream(beside):
                for buffer, source, offset in copies:
                    buffer.copy_from(source, offset)
                    self._sources.append(source)
            event = module.Event(blocking=True)  # the thread sleeps until then
            event.record(beside)
            self._events.append(event)
            if copies is now:
                training.wait_event(event)

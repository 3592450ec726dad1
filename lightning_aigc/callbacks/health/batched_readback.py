"""Copy tensors of many kinds to the host together, with one wait for the device."""

from __future__ import annotations

from torch import Tensor, cat


class BatchedReadback:
    """Collects tensors by name; `read` copies them to the host together, as float32."""

    def __init__(self) -> None:
        self._parts: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor | None) -> None:
        """Add a tensor; None adds nothing."""
        if tensor is not None:
            self._parts[name] = tensor.detach().reshape(-1).float()

    def read(self) -> dict[str, list[float]]:
        """Return every tensor's values by its name. Waits for the device once."""
        if not self._parts:
            return {}
        device = next(iter(self._parts.values())).device
        numbers = cat([p if p.device == device else p.to(device) for p in self._parts.values()]).tolist()
        values, at = {}, 0
        for name, part in self._parts.items():
            values[name] = numbers[at : at + part.numel()]
            at += part.numel()
        return values

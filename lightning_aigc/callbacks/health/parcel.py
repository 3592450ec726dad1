"""Numbers of many kinds on one device, read with one wait."""

from __future__ import annotations

from torch import Tensor, cat


class Parcel:
    """Collects tensors by name; `open` copies them to the host together, as float32."""

    def __init__(self) -> None:
        self._parts: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor | None) -> None:
        """Put a tensor in; None is left out."""
        if tensor is not None:
            self._parts[name] = tensor.detach().reshape(-1).float()

    def open(self) -> dict[str, list[float]]:
        """Every tensor's values. Waits for the device, once."""
        if not self._parts:
            return {}
        device = next(iter(self._parts.values())).device
        numbers = cat([p if p.device == device else p.to(device) for p in self._parts.values()]).tolist()
        opened, at = {}, 0
        for name, part in self._parts.items():
            opened[name] = numbers[at : at + part.numel()]
            at += part.numel()
        return opened

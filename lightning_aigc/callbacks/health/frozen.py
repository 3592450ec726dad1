"""Frozen weights that moved."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_aigc.callbacks.health.alert import Finding
from lightning_aigc.callbacks.health.measurement import Named, sample_rows


class FrozenSamples:
    """Entries of every frozen parameter, kept to be compared with later; a change between two samples is not seen."""

    def __init__(self, named: Named) -> None:
        self.named = [(name, p) for name, p in named if p.numel() and p.device.type != "meta"]
        self._kept = self._take()

    @torch.no_grad()
    def _take(self) -> Tensor | None:
        return sample_rows([p for _, p in self.named]).view(torch.int32) if self.named else None  # NaN equals itself

    @torch.no_grad()
    def changed(self) -> Tensor | None:
        """Which have changed since they were taken, bool [P] on the device; None without frozen parameters."""
        now = self._take()
        if now is None or self._kept is None:
            return None
        self._kept = self._kept.to(now.device)
        return (now != self._kept).any(dim=1)

    def findings(self, changed: Tensor) -> list[Finding]:
        """What to say about them; each is told once, since the new values are the ones to compare with from now on."""
        found = [
            Finding(
                "frozen_moved",
                name,
                "error",
                "it is frozen, and its values have changed",
                "an EMA swap, a weight copy, or an optimizer that was given it before it was frozen",
                f"give the optimizer trainable parameters only, without {name}",
            )
            for (name, _), is_changed in zip(self.named, changed.tolist(), strict=True)
            if is_changed
        ]
        if found:
            self._kept = self._take()
        return found

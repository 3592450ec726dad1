"""Frozen weights that moved."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_aigc.callbacks.health.alert import Finding
from lightning_aigc.callbacks.health.measurement import Named, Sampler, sample_rows

FOLLOWS = 0.3
"""Cosine between a frozen weight's move and the way to its trained twin from which it is a copy that follows."""


class FrozenSamples:
    """Entries of every frozen parameter, kept to be compared with later; a change between two samples is not seen.

    Args:
        named: Frozen parameters.
        trained: Trained ones: a frozen parameter that has the end of its name in common with one of them, and its
            shape, may be its copy, such as the teacher or the target network that an EMA moves on purpose.
    """

    def __init__(self, named: Named, trained: Named = ()) -> None:
        self.named = [(name, p) for name, p in named if p.numel() and p.device.type != "meta"]
        self._twins: dict[str, Tensor] = {}
        by_end = {(_end(name), p.shape): p.detach() for name, p in trained if _end(name)}
        for name, p in self.named:
            twin = by_end.get((_end(name), p.shape))
            if twin is not None:
                self._twins[name] = twin
        self._sampler = Sampler([p for _, p in self.named])
        self._kept = self._take()

    def _take(self) -> Tensor | None:
        return self._sampler.rows().view(torch.int32) if self.named else None  # NaN equals itself

    @torch.no_grad()
    def changed(self) -> Tensor | None:
        """Which have changed since they were taken, bool [P] on the device; None without frozen parameters."""
        now = self._take()
        if now is None or self._kept is None:
            return None
        self._kept = self._kept.to(now.device)
        return (now != self._kept).any(dim=1)

    def findings(self, changed: Sequence[float]) -> list[Finding]:
        """What to say about them; each is told once, since the new values are the ones to compare with from now on."""
        found = [
            Finding(
                "frozen_moved",
                name,
                "info" if self._is_following(i) else "error",
                "it is frozen, and its values have changed",
                "an EMA swap, a weight copy, or an optimizer that was given it before it was frozen",
                f"give the optimizer trainable parameters only, without {name}",
            )
            for i, ((name, _), is_changed) in enumerate(zip(self.named, changed, strict=True))
            if is_changed
        ]
        if found:
            self._kept = self._take()
        return found

    @torch.no_grad()
    def _is_following(self, i: int) -> bool:
        """Whether it moved towards its trained twin, as an average or a copy does."""
        name, parameter = self.named[i]
        if name not in self._twins or self._kept is None:
            return False
        before = self._kept[i].view(torch.float32).double()
        now, twin = (sample_rows([t])[0].double().to(before.device) for t in (parameter, self._twins[name]))
        move, way = now - before, twin - before
        return bool(move @ way >= FOLLOWS * move.norm() * way.norm())


def _end(name: str) -> str:
    """A name without its first part; empty where less than two parts would be left, which many layers share."""
    end = name.partition(".")[2]
    return end if "." in end else ""

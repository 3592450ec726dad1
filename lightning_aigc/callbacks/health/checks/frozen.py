"""Frozen weights that moved, and trainable weights that no optimizer holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_aigc.callbacks.health.alerts.alerts import Finding, Policy
from lightning_aigc.callbacks.health.checks.interface import Check, Findings
from lightning_aigc.callbacks.health.parameter_stats import Named, Sampler, sample_rows
from lightning_aigc.callbacks.health.step_reading import BatchedReadback, StepReading
from lightning_aigc_kernels import PackedWeight

FOLLOWS = 0.3
"""Cosine between a frozen weight's move and the direction to its trained twin, from which it is a copy that follows."""


class FrozenCheck(Check):
    """Compares samples of the weights that stay frozen from look to look.

    `requires_grad` is read at every step: a callback or the module may unfreeze weights, for good or in turns.
    """

    policies: ClassVar = {"frozen_moved": Policy()}

    def attach(self, model: nn.Module, trained: Named, frozen: Named) -> None:
        self._named = [*frozen, *trained]
        self._sample()

    def _sample(self) -> None:
        """Sample what is frozen now; the rest may be what it follows."""
        self._samples = FrozenSamples(
            [(name, p) for name, p in self._named if not p.requires_grad],
            [(name, p) for name, p in self._named if p.requires_grad],
        )

    def request(self, readback: BatchedReadback, *, is_due: bool) -> None:
        self._samples.leave_out_trainable()
        if is_due:
            readback.add("frozen", self._samples.changed())

    def run(self, reading: StepReading) -> Findings | None:
        changed = reading.numbers.get("frozen")
        found = [] if changed is None else self._samples.findings(changed)
        if reading.is_due and self._samples.frozen != {id(p) for _, p in self._named if not p.requires_grad}:
            self._sample()
        return None if changed is None else Findings(found, self.policies)


class FrozenSamples:
    """Samples of every frozen parameter, to compare with later ones; a change between two entries is not seen.

    Args:
        named: Frozen parameters.
        trained: Trained parameters. A frozen one of the same shape whose name ends alike may be a copy of it, such as a
            teacher or a target network that an EMA moves on purpose.
    """

    def __init__(self, named: Named, trained: Named = ()) -> None:
        self.named = [(name, p) for name, p in named if p.numel() and p.device.type != "meta"]
        self.frozen = {id(p) for _, p in named}
        """Identities of those that have been frozen since these samples were taken."""
        self._parameters = [p for _, p in named]
        self._twins: dict[str, Tensor] = {}
        by_end = {(_end(name), p.shape): p.detach() for name, p in trained if _end(name)}
        for name, p in self.named:
            twin = by_end.get((_end(name), p.shape))
            if twin is not None:
                self._twins[name] = twin
        # A packed weight shows its scales: to look at its numbers would unpack all of them.
        self._sampler = Sampler([p.scales if isinstance(p, PackedWeight) else p for _, p in self.named])
        self._kept = self._take()

    def leave_out_trainable(self) -> None:
        """Judge no more those that are trainable now."""
        if True in [p.requires_grad for p in self._parameters]:  # a generator takes twice the time of a list
            self.frozen -= {id(p) for p in self._parameters if p.requires_grad}
            self._parameters = [p for p in self._parameters if not p.requires_grad]

    def _take(self) -> Tensor | None:
        return self._sampler.rows().view(torch.int32) if self.named else None  # NaN equals itself

    @torch.no_grad()
    def changed(self) -> Tensor | None:
        """Flags of changed parameters since the last samples, bool [P] on the device; None without frozen ones."""
        now = self._take()
        if now is None or self._kept is None:
            return None
        self._kept = self._kept.to(now.device)
        return (now != self._kept).any(dim=1)

    def findings(self, changed: Sequence[float]) -> list[Finding]:
        """Findings for those that changed; the next samples are compared with the new values."""
        found = [
            Finding(
                "frozen_moved",
                name,
                "info" if self._is_following(i) else "error",
                "it is frozen, and its values have changed",
                "an EMA swap, a weight copy, or an optimizer that was given it before it was frozen",
                f"give the optimizer trainable parameters only, without {name}",
            )
            for i, ((name, p), is_changed) in enumerate(zip(self.named, changed, strict=True))
            if is_changed and id(p) in self.frozen
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
        move, direction = now - before, twin - before
        return bool(move @ direction >= FOLLOWS * move.norm() * direction.norm())


def _end(name: str) -> str:
    """A name without its first part; empty where less than two parts would be left, which many layers share."""
    end = name.partition(".")[2]
    return end if "." in end else ""


NOT_IN_OPTIMIZER = "not_in_optimizer"


def check_optimizers(named: Named, optimizers: Sequence[Optimizer]) -> list[Finding]:
    """Find trainable parameters that no optimizer holds."""
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    return [
        Finding(
            NOT_IN_OPTIMIZER,
            name,
            "error",
            "it is trainable, and no optimizer holds it",
            "configure_optimizers collected the parameters before this one existed, or chose among them",
            f"give it to the optimizer, or {name}.requires_grad_(False)",
        )
        for name, p in named
        if id(p) not in held
    ]

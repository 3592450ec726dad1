"""Numbers of an optimizer step: the global gradient norm, the loss, and how the last step looks from this gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer


class LastStep(NamedTuple):
    """What the step before said about the rate."""

    agreement: float
    """Cosine between it and the negative gradient that followed it."""
    share: float
    """Its length over that of all trained weights."""


class StepMeasure:
    """Keeps a copy of the weights between two steps for as long as the agreement is asked for."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []
        """The weights before the last step, in the order of the optimizer's groups; empty before the first."""

    def __call__(
        self,
        optimizer: Optimizer,
        with_last_step: bool,
        reduce: Callable[[Tensor], Tensor] | None = None,
        loss: Tensor | float | None = None,
    ) -> tuple[float, LastStep | None, float]:
        """Wait for the device once and read what the decisions need.

        Args: reduce: a mean over ranks, for those whose gradients or shards are not alike.
            loss: the step's loss, read along with the rest.
        Returns: the gradient norm, NaN where there are no gradients; the last step, None where none was made; the loss,
            NaN where there is none.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        with_gradient = [p for p in parameters if p.grad is not None]
        if not with_gradient:
            self.weights = []
            return math.nan, None, math.nan
        gradients = [p.grad.coalesce().values() if p.grad.is_sparse else p.grad for p in with_gradient]
        device = gradients[0].device
        norms = [n.to(device, torch.float32) for n in torch._foreach_norm(gradients, 2, torch.float32)]
        known = torch.as_tensor(math.nan if loss is None else loss, dtype=torch.float32, device=device)
        numbers = [torch.stack(norms).square().sum(), known.detach().reshape(())]
        if with_last_step and len(self.weights) == len(parameters):
            products, lengths, sizes = [], [], []
            for parameter, before in zip(parameters, self.weights, strict=True):
                if parameter.grad is None or parameter.grad.is_sparse:
                    continue
                step = (parameter.detach() - before).float().flatten()
                products.append(torch.dot(step, parameter.grad.float().flatten()).to(device))
                lengths.append(step.square().sum().to(device))
                sizes.append(before.float().square().sum().to(device))
            numbers += [torch.stack(values).sum() for values in (products, lengths, sizes)]
        self._keep(parameters if with_last_step else [])
        together = torch.stack(numbers)
        square, loss_now, *others = (together if reduce is None else reduce(together)).tolist()
        if not others or not others[1] > 0 or not square > 0:
            return math.sqrt(square), None, loss_now
        product, length, size = others
        share = math.sqrt(length / size) if size > 0 else math.inf
        return math.sqrt(square), LastStep(-product / math.sqrt(length * square), share), loss_now

    def _keep(self, parameters: list[Tensor]) -> None:
        if len(self.weights) != len(parameters):
            self.weights = [p.detach().clone() for p in parameters]
        elif parameters:
            torch._foreach_copy_(self.weights, [p.detach() for p in parameters])

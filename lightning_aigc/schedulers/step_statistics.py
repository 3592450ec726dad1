"""The global gradient norm, the loss, and the cosine of the last step with this step's gradient, in one wait."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_aigc.sharding.local_parts import local_part, local_parts, norms_of_parts, shards_of


class LastStep(NamedTuple):
    """Statistics of the last step that control the rate."""

    agreement: float
    """Cosine between the step and the negative gradient after it."""
    update_ratio: float
    """Norm of the step over the norm of all trained weights."""


class StepStatistics:
    """Reads the statistics of each step, and copies the weights between two steps while the agreement is wanted."""

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
        """Read a step's statistics; waits for the device once.

        Args: reduce: a mean over ranks, whose gradients or shards may differ.
            loss: the step's loss, to be read with the rest.
        Returns: the gradient norm, NaN without gradients; the last step, None if there was none; the loss, NaN if it
            is not given.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        with_gradient = [p for p in parameters if p.grad is not None]
        if not with_gradient:
            self.weights = []
            return math.nan, None, math.nan
        gradients = [p.grad.coalesce().values() if p.grad.is_sparse else local_part(p.grad) for p in with_gradient]
        device = gradients[0].device
        norms = [norm.to(device) for norm in norms_of_parts(gradients)]
        known = torch.as_tensor(math.nan if loss is None else loss, dtype=torch.float32, device=device)
        numbers = [torch.stack(norms).square().sum(), known.detach().reshape(())]
        if with_last_step and len(self.weights) == len(parameters):
            products, lengths, sizes = [], [], []
            for parameter, before in zip(parameters, self.weights, strict=True):
                if parameter.grad is None or parameter.grad.is_sparse:
                    continue
                step = _flat(local_part(parameter.detach()) - local_part(before))
                products.append(torch.dot(step, _flat(local_part(parameter.grad))).to(device))
                lengths.append(step.square().sum().to(device))
                sizes.append(_flat(local_part(before)).square().sum().to(device))
            numbers += [torch.stack(values).sum() for values in (products, lengths, sizes)]
        self._keep(parameters if with_last_step else [])
        together = torch.stack(numbers)
        shards = shards_of(parameters)
        if shards > 1:  # sums over parts, whose mean over the ranks is reduced; the loss is each rank's own
            together[torch.arange(len(numbers)) != 1] *= shards
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
            torch._foreach_copy_(local_parts(self.weights), local_parts([p.detach() for p in parameters]))


def _flat(part: Tensor) -> Tensor:
    """A part as float32 [N]; a complex number gives two."""
    return (torch.view_as_real(part) if part.is_complex() else part).float().flatten()

"""Two numbers an optimizer step: the global gradient norm, and how far the last step agrees with this gradient."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer


class StepMeasure:
    """Keeps a copy of the weights between two steps for as long as the agreement is asked for."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []
        """The weights before the last step, in the order of the optimizer's groups; empty before the first."""

    def __call__(
        self, optimizer: Optimizer, with_agreement: bool, reduce: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[float, float | None]:
        """The norm, and the cosine of the last step with the negative gradient; NaN and None where there are none.

        Args: reduce: a mean over ranks, for those whose gradients or shards are not alike.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        with_gradient = [p for p in parameters if p.grad is not None]
        if not with_gradient:
            self.weights = []
            return math.nan, None
        gradients = [p.grad.coalesce().values() if p.grad.is_sparse else p.grad for p in with_gradient]
        device = gradients[0].device
        norms = [n.to(device, torch.float32) for n in torch._foreach_norm(gradients, 2, torch.float32)]
        numbers = [torch.stack(norms).square().sum()]
        if with_agreement and len(self.weights) == len(parameters):
            products, lengths = [], []
            for parameter, before in zip(parameters, self.weights, strict=True):
                if parameter.grad is None or parameter.grad.is_sparse:
                    continue
                step = (parameter.detach() - before).float().flatten()
                products.append(torch.dot(step, parameter.grad.float().flatten()).to(device))
                lengths.append(torch.dot(step, step).to(device))
            numbers += [torch.stack(products).sum(), torch.stack(lengths).sum()]
        self._keep(parameters if with_agreement else [])
        together = torch.stack(numbers)
        square, *others = (together if reduce is None else reduce(together)).tolist()
        agreement = None
        if others and others[1] > 0 and square > 0:
            agreement = -others[0] / math.sqrt(others[1] * square)
        return math.sqrt(square), agreement

    def _keep(self, parameters: list[Tensor]) -> None:
        if len(self.weights) != len(parameters):
            self.weights = [p.detach().clone() for p in parameters]
        elif parameters:
            torch._foreach_copy_(self.weights, [p.detach() for p in parameters])

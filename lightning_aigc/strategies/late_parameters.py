"""LateParameters: parameters that become trainable after the strategy was set up, as when a callback unfreezes a layer.

DDP makes its buckets of the parameters that are trainable when it wraps a model, and does not sync any others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_aigc._lightning import rank_zero_info
from lightning_aigc.errors import ConfigError

MOST_NAMED = 3
FIND_UNUSED = "use strategy npu_sparse_find_unused_parameters_true"
WAITED_FOR = "Expected to have finished reduction in the prior iteration"
"""Begin of what torch's DDP says where a step left some gradients out."""


class LateParameters:
    """Averages over all ranks the gradients of a wrapped model's parameters that are in no DDP bucket."""

    def __init__(self, module: nn.Module, label: str, find_unused: bool) -> None:
        """Note the parameters that are trainable now; call it when DDP has wrapped the module."""
        self._module, self._label, self._find_unused = module, label, find_unused
        self._ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._in_buckets = {id(p) for p in module.parameters() if p.requires_grad}
        self._late: list[nn.Parameter] = []
        self.is_finite = True
        """Whether the last mean gradients were finite, the same answer on every rank."""

    def refuse_frozen(self) -> None:
        """Check that the parameters that DDP waits for are still trainable.

        Raises: ConfigError for a parameter that has been frozen since; DDP would wait for its gradient.
        """
        if self._find_unused:
            return
        frozen = [n for n, p in self._module.named_parameters() if id(p) in self._in_buckets and not p.requires_grad]
        if frozen:
            raise ConfigError(
                f"{self._label}: {named(frozen)} was frozen after the first step was set up, and all ranks wait for "
                f"its gradient; freeze it before the fit, or {FIND_UNUSED}"
            )

    def explain_unused(self, error: RuntimeError) -> ConfigError | None:
        """A sentence on the parameters that DDP waited for in vain; None for another error."""
        if WAITED_FOR not in str(error):
            return None
        own = [name for name, p in self._module.named_parameters() if id(p) in self._in_buckets]
        own = [name for name in own if name not in self._ignored]
        listed = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        places = [int(place) for place in listed[1].split()] if listed is not None else []
        shown = named([own[place] for place in places if place < len(own)]) if places else "some of its parameters"
        return ConfigError(
            f"{self._label}: the loss does not depend on {shown}, and all ranks wait for these gradients; freeze them"
            f" with requires_grad_(False), or {FIND_UNUSED}"
        )

    @torch.no_grad()
    def average(self) -> None:
        """Give the late parameters their mean gradients. Collective where there are any."""
        trained = [(n, p) for n, p in self._module.named_parameters() if p.requires_grad]
        late = {n: p for n, p in trained if id(p) not in self._in_buckets and n not in self._ignored}
        if not late:
            return
        if len(late) != len(self._late):
            rank_zero_info(
                f"{self._label}: {named(list(late))} began to be trained after the first step was set up; the "
                f"gradients of these {sum(p.numel() for p in late.values())} values are sent "
                "uncompressed, after each backward"
            )
        self._late = list(late.values())
        self.is_finite = average_gradients(self._late)


def average_gradients(parameters: Sequence[nn.Parameter]) -> bool:
    """Replace each gradient by its mean over the ranks, where a rank has one; returns whether all are finite.

    Collective: one message for each dtype.
    """
    world, finite = dist.get_world_size(), True
    of_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        of_dtype.setdefault(parameter.dtype, []).append(parameter)
    for some in of_dtype.values():
        has = torch.tensor([p.grad is not None for p in some], device=some[0].device).to(some[0].dtype)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in some]
        flat = torch.cat([has, *(g.reshape(-1) for g in grads)])
        dist.all_reduce(torch.view_as_real(flat) if flat.is_complex() else flat)
        counts: list[Tensor] = list(flat[: len(some)].real.unbind())
        means = torch.split(flat[len(some) :] / world, [p.numel() for p in some])
        finite = finite and bool(flat.isfinite().all())
        for parameter, count, mean in zip(some, counts, means, strict=True):
            if float(count) > 0:
                parameter.grad = mean.view(parameter.shape).clone(memory_format=torch.contiguous_format)
    return finite


def named(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" * (len(names) > MOST_NAMED)
    return ", ".join(names[:MOST_NAMED]) + more

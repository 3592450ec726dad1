"""Numbers of every parameter in one fused pass and one copy to the host.

Legend: P parameters, S sampled entries of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

SAMPLES = 256
"""Entries of a tensor that are looked at where looking at all would cost too much."""
SMALLEST_SAMPLED = 32
"""Gradients of fewer values are not called alike."""
ALIKE = 1e-3
"""Relative difference up to which two values are alike."""

Named = Sequence[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Measurement:
    """What one look found, one number a parameter; NaN where its gradient is None."""

    names: tuple[str, ...]
    gradient_norm: tuple[float, ...]
    """L2, unscaled."""
    weight_norm: tuple[float, ...]
    is_missing: tuple[bool, ...]
    """The gradient is None."""
    is_alike: tuple[bool, ...]
    """A share of the gradient's sampled values have one size, and not zero."""
    zero_share: tuple[float, ...]
    """Share of the gradient's sampled values that are zero."""
    sizes: tuple[int, ...]
    """Values in the parameter."""
    dims: tuple[int, ...]

    def by_name(self, what: tuple[float, ...]) -> dict[str, float]:
        return dict(zip(self.names, what, strict=True))


class Look:
    """A measurement that is still on the device: `numbers` travel to the host, and `read` makes sense of them there.

    Args:
        named: Trainable parameters.
        alike_share: Share of values of one size from which a gradient is alike.
        inverse_scale: Multiplies gradients that are still under a loss scale.
    """

    @torch.no_grad()
    def __init__(self, named: Named, alike_share: float = 0.9, inverse_scale: Tensor | None = None) -> None:
        self.named = named
        self._with_gradient = [i for i, (_, p) in enumerate(named) if p.grad is not None]
        gradients = [values_of(named[i][1].grad) for i in self._with_gradient]
        parts = [torch.stack(norms([p.detach() for _, p in named]))] if named else []
        if gradients:
            of_gradients = torch.stack(norms(gradients))
            if inverse_scale is not None:
                of_gradients = of_gradients * inverse_scale.to(of_gradients.device)
            alike, zeros = alike_and_zero(sample_rows(gradients), alike_share)
            parts += [of_gradients, alike.float(), zeros]
        self.numbers = torch.cat([part.to(parts[0].device) for part in parts]) if parts else torch.empty(0)

    def read(self, numbers: Sequence[float]) -> Measurement:
        """The measurement, from `self.numbers` on the host."""
        named, here = self.named, set(self._with_gradient)
        rest = iter(numbers[len(named) :])

        def row() -> tuple[float, ...]:
            return tuple(next(rest) if i in here else float("nan") for i in range(len(named)))

        gradient_norm, alike_row, zero_share = row(), row(), row()
        sizes = tuple(p.numel() for _, p in named)
        return Measurement(
            names=tuple(name for name, _ in named),
            gradient_norm=gradient_norm,
            weight_norm=tuple(numbers[: len(named)]),
            is_missing=tuple(i not in here for i in range(len(named))),
            is_alike=tuple(a == 1 and n >= SMALLEST_SAMPLED for a, n in zip(alike_row, sizes, strict=True)),
            zero_share=zero_share,
            sizes=sizes,
            dims=tuple(p.dim() for _, p in named),
        )


def measure(named: Named, alike_share: float = 0.9) -> Measurement:
    """Measure gradients and weights now; one wait for the device."""
    look = Look(named, alike_share)
    return look.read(look.numbers.tolist())


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The float32 L2 norm of each tensor, fused where their device can; half precision does not overflow."""
    if not tensors:
        return []
    device = tensors[0].device
    # bfloat16 has float32's range, and asking for float32 takes many times as long on a CPU; three digits will do.
    dtype = torch.float32 if any(t.dtype == torch.float16 for t in tensors) else None
    found = torch._foreach_norm(list(tensors), 2, dtype=dtype)
    return [norm.to(device, torch.float32) for norm in found]


def values_of(tensor: Tensor | None) -> Tensor:
    """A gradient's values; a sparse one's are those that it holds."""
    assert tensor is not None
    return tensor.coalesce().values() if tensor.is_sparse else tensor.detach()


def sample_rows(tensors: Sequence[Tensor], count: int = SAMPLES) -> Tensor:
    """Evenly spread entries of each tensor, float32 [P, S]; small ones repeat. Views and one concatenation."""
    device = tensors[0].device
    rows = []
    for tensor in tensors:
        flat = _flat(tensor.detach())
        row = flat[:: max(1, flat.numel() // count)][:count]
        if len(row) < count:
            row = row.repeat(-(-count // max(1, len(row))))[:count] if len(row) else flat.new_zeros(count)
        rows.append(row.to(device))
    return torch.cat([row if row.is_floating_point() else row.float() for row in rows]).float().view(len(rows), count)


def _flat(tensor: Tensor) -> Tensor:
    """The entries in the order in which they lie in memory, without a copy where they lie densely."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor.permute(0, 2, 3, 1).reshape(-1)
    return tensor.reshape(-1)


def alike_and_zero(rows_PS: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Whether a share of each row's values have one size other than zero, bool [P], and the share of zeros, [P]."""
    sorted_PS = rows_PS.abs().sort(dim=1).values
    run = max(2, round(share * rows_PS.shape[1]))
    first, last = sorted_PS[:, : rows_PS.shape[1] - run + 1], sorted_PS[:, run - 1 :]
    is_alike_P = ((last - first <= ALIKE * last) & (first > 0)).any(dim=1)
    return is_alike_P, (rows_PS == 0).float().mean(dim=1)

"""Norms and samples of every parameter and its gradient, in one fused pass and one copy to the host.

Legend: P parameters, S sampled entries of each.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_aigc.sharding.local_parts import gradient_norm, local_parts, total_squares

SAMPLES = 256
"""Entries of a tensor that are read where reading all would cost too much."""
SMALLEST_SAMPLED = 32
"""Gradients of fewer values are not called alike."""
ALIKE = 1e-3
"""Relative difference up to which two values are alike."""

PLAIN = (Tensor, nn.Parameter)
"""Tensors that own their storage; a subclass may hold its values elsewhere."""

Named = Sequence[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class ParameterStats:
    """One look at every parameter, one number each; NaN where its gradient is None."""

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


class PendingStats:
    """Statistics that are still on the device: copy `numbers` to the host, and `read` decodes them there.

    Args:
        named: Trainable parameters.
        alike_share: Share of values of one size from which a gradient is alike.
        inverse_scale: Multiplies gradients that are still under a loss scale.
    """

    @torch.no_grad()
    def __init__(self, named: Named, alike_share: float = 0.9, inverse_scale: Tensor | None = None) -> None:
        self.named = named
        self._with_gradient = [i for i, (_, p) in enumerate(named) if p.grad is not None]
        gradients = gradients_of(named)
        parts = [norms([p for _, p in named])] if named else []
        if gradients:
            of_gradients = norms(gradients)
            if inverse_scale is not None:
                of_gradients = of_gradients * inverse_scale.to(of_gradients.device)
            alike, zeros = alike_and_zero(sample_rows(gradients), alike_share)
            sizes = [part.numel() for part in local_parts(gradients)]
            if 0 in sizes:  # a small tensor's rows are all on other ranks
                zeros = zeros * torch.tensor([float(size > 0) for size in sizes], device=zeros.device)
            parts += [of_gradients, alike.float(), zeros]
        self.numbers = torch.cat([part.to(parts[0].device) for part in parts]) if parts else torch.empty(0)

    def read(self, numbers: Sequence[float]) -> ParameterStats:
        """Decode `self.numbers`, copied to the host."""
        named, here = self.named, set(self._with_gradient)
        rest = iter(numbers[len(named) :])

        def row() -> tuple[float, ...]:
            return tuple(next(rest) if i in here else float("nan") for i in range(len(named)))

        gradient_norm, alike_row, zero_share = row(), row(), row()
        sizes = tuple(p.numel() for _, p in named)
        return ParameterStats(
            names=tuple(name for name, _ in named),
            gradient_norm=gradient_norm,
            weight_norm=tuple(numbers[: len(named)]),
            is_missing=tuple(i not in here for i in range(len(named))),
            is_alike=tuple(a == 1 and n >= SMALLEST_SAMPLED for a, n in zip(alike_row, sizes, strict=True)),
            zero_share=zero_share,
            sizes=sizes,
            dims=tuple(p.dim() for _, p in named),
        )


def measure(named: Named, alike_share: float = 0.9, inverse_scale: Tensor | None = None) -> ParameterStats:
    """Measure gradients and weights now; waits for the device once."""
    pending = PendingStats(named, alike_share, inverse_scale)
    return pending.read(pending.numbers.tolist())


def norms(tensors: Sequence[Tensor], dtypes: Set[torch.dtype] = frozenset()) -> Tensor:
    """The L2 norm of each tensor, float32 [P], fused where their device can; half precision does not overflow.

    Args:
        dtypes: The tensors' dtypes, where the caller knows them: asking each tensor takes its time.

    Collective where they are sharded: each rank's parts, and one all_reduce of P numbers.
    """
    if isinstance(tensors[0], DTensor):
        return total_squares(norms(local_parts(tensors), dtypes).square(), tensors).sqrt()
    # bfloat16 has float32's range, and asking for float32 takes many times as long on a CPU; three digits will do.
    dtypes = dtypes or {tensor.dtype for tensor in tensors}
    found: Sequence[Tensor] = torch._foreach_norm(
        list(tensors), 2, dtype=torch.float32 if torch.float16 in dtypes else None
    )
    if len(dtypes) > 1:
        found = [norm.float() for norm in found]
    try:
        return torch.stack(found).float()  # type: ignore[arg-type]
    except RuntimeError:  # on several devices: asking each tensor first takes longer than the norms
        return torch.stack([norm.to(found[0].device) for norm in found]).float()


def gradients_of(named: Named) -> list[Tensor]:
    """The gradients that are not None; of a sparse gradient its values."""
    gradients = [g for _, p in named if (g := p.grad) is not None]
    if {g.layout for g in gradients} <= {torch.strided}:
        return gradients
    return [g.coalesce().values() if g.is_sparse else g for g in gradients]


class Sampler:
    """Evenly spread entries of the same tensors at every look. The views into them are made once.

    Args:
        tensors: Their values and their storage may change.
        count: Entries of each; small tensors repeat theirs.
    """

    def __init__(self, tensors: Sequence[Tensor], count: int = SAMPLES) -> None:
        self.tensors, self.count = list(tensors), count
        self._views: list[Tensor] = []
        self._addresses: list[int] = []

    @torch.no_grad()
    def rows(self) -> Tensor:
        """The entries now, float32 [P, S]."""
        tensors = local_parts(self.tensors)
        addresses = [t.data_ptr() if type(t) in PLAIN else -1 for t in tensors]
        if addresses != self._addresses or -1 in addresses:
            self._views, self._addresses = [_sampled(t, self.count) for t in tensors], addresses
        return _as_rows(self._views, self.count)


@torch.no_grad()
def sample_rows(tensors: Sequence[Tensor], count: int = SAMPLES) -> Tensor:
    """Evenly spread entries of each tensor, float32 [P, S]; small ones repeat. Views and one concatenation.

    Of a sharded tensor these are entries of this rank's part.
    """
    return _as_rows([_sampled(t, count) for t in local_parts(tensors)], count)


def _sampled(tensor: Tensor, count: int) -> Tensor:
    """At most `count` entries, in the order in which they lie in memory; a view where they lie densely."""
    tensor, size = tensor.detach(), tensor.numel()
    step = _step(size // count)
    is_dense = tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
    if is_dense and type(tensor) in PLAIN:
        return tensor.as_strided((min(size, count),), (step,))
    return tensor.reshape(-1)[::step][:count]


@functools.lru_cache(maxsize=4096)
def _step(most: int) -> int:
    """The largest step up to `most` that visits every tap of a small kernel: no multiple of 2, 3, 5 or 7."""
    return next((step for step in range(most, 1, -1) if math.gcd(step, 210) == 1), 1)


def _as_rows(samples: Sequence[Tensor], count: int) -> Tensor:
    device = samples[0].device
    if any(s.device != device for s in samples):
        samples = [s.to(device) for s in samples]
    if any(not s.is_floating_point() for s in samples):
        samples = [(s.real + s.imag if s.is_complex() else s).float() for s in samples]
    flat, sizes = torch.cat(list(samples)).float(), tuple(s.numel() for s in samples)
    if min(sizes) == count:
        return flat.view(len(sizes), count)
    return torch.cat([flat, flat.new_zeros(1)])[_repeated(sizes, count, device)]


@functools.lru_cache(maxsize=16)
def _repeated(sizes: tuple[int, ...], count: int, device: torch.device) -> Tensor:
    """Indices of each row's entries in the concatenation, int64 [P, S]; an empty tensor gets the zero at the end."""
    size_P = torch.tensor(sizes)
    start_P = size_P.cumsum(0) - size_P
    index_PS = start_P[:, None] + torch.arange(count) % size_P.clamp(min=1)[:, None]
    return index_PS.masked_fill(size_P[:, None] == 0, int(size_P.sum())).to(device)


def alike_and_zero(rows_PS: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Whether a share of each row's values have one size other than zero, bool [P], and the share of zeros, [P]."""
    sorted_PS = rows_PS.abs().sort(dim=1).values
    run = max(2, round(share * rows_PS.shape[1]))
    first, last = sorted_PS[:, : rows_PS.shape[1] - run + 1], sorted_PS[:, run - 1 :]
    is_alike_P = ((last - first <= ALIKE * last) & (first > 0)).any(dim=1)
    return is_alike_P, (rows_PS == 0).float().mean(dim=1)


PROBED, PROBE_SAMPLES = 64, 16
"""Gradients of a large model's probe, and values of each. A sample is enough: backward carries what is not finite on to
every layer before it."""
GRADIENT = operator.attrgetter("grad")


class GradientNorm:
    """The norm of one optimizer's gradients. What does not change from step to step is looked up once.

    Args:
        named: The optimizer's parameters.
        is_exact: Whether to read all gradients and not a sample.
    """

    def __init__(self, named: Named, is_exact: bool) -> None:
        self._all = named
        self.named, self.is_exact = named if is_exact else named[:: max(1, len(named) // PROBED)], is_exact
        self._parameters = [p for _, p in self.named]
        self._dtypes = {p.dtype for p in self._parameters}  # a gradient has its parameter's
        self._may_be_sparse = True

    @torch.no_grad()
    def norm_or_probe(self, is_due: bool, loss: Tensor | None = None) -> Tensor | None:
        """Return the norm of all gradients, or for a large model a number that is finite if a sample of them is.

        Where they are sharded it is the norm of all ranks' parts, by one collective, and finite on no rank if one
        rank's `loss` is not: what follows asks all ranks alike.

        A gradient's layout is looked up at the first step and at each look.
        """
        if is_due or self._may_be_sparse:
            gradients = gradients_of(self.named)
            self._may_be_sparse = any(g.is_sparse for p in self._parameters if (g := p.grad) is not None)
        else:
            gradients = [g for g in map(GRADIENT, self._parameters) if g is not None]
        if not gradients:
            return None
        if isinstance(gradients[0], DTensor):
            return gradient_norm(gradients_of(self._all), loss)
        if self.is_exact:
            norm: Tensor = torch.linalg.vector_norm(norms(gradients, self._dtypes))
            return norm
        return sample_rows(gradients, PROBE_SAMPLES).sum()

"""Keep the largest magnitudes of each row and zero the rest, for lossy gradients; without autograd."""

from __future__ import annotations

from torch import Tensor

from lightning_aigc_kernels.dispatch import check_density, kernel_for
from lightning_aigc_kernels.keep_largest import reference


def keep_largest(rows_RL: Tensor, density: float) -> Tensor:
    """Keep each row's ceil(density * L) largest magnitudes, ties included, and zero the rest.

    NaN counts as infinite: it is kept, and stays NaN.
    Raises: ValueError for a density outside (0, 1] or a tensor that is not [R, L].
    """
    check_density(density, "density")
    if rows_RL.dim() != 2:
        raise ValueError(f"keep_largest wants rows [R, L], got {tuple(rows_RL.shape)}")
    kernel = kernel_for("keep_largest", rows_RL)
    implementation = reference if kernel is None else kernel
    kept_RL: Tensor = implementation.keep_largest(rows_RL.contiguous(), density)
    return kept_RL


def keep_largest_per_head(gradient_NHTD: Tensor, density: float) -> Tensor:
    """Keep the ceil(density * T * D) largest magnitudes of each sample's head and zero the rest."""
    samples, heads, tokens, features = gradient_NHTD.shape
    kept = keep_largest(gradient_NHTD.reshape(samples * heads, tokens * features), density)
    return kept.view(gradient_NHTD.shape)

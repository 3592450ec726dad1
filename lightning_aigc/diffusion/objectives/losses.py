"""Loss of each example, and the loss of a batch with class images.

Legend: B batch, C channels, H and W latent height and width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_aigc.diffusion.objectives.settings import LossType


def example_losses(
    predicted_BCHW: Tensor,
    target_BCHW: Tensor,
    loss_type: LossType = "l2",
    huber_c: float = 0.1,
    mask_B1HW: Tensor | None = None,
) -> Tensor:
    """The loss of each example, float32 [B]; with a mask in 0..1, the weighted mean.

    `mask_B1HW` may have the image's size; it is resized to the latents' by area.
    """
    predicted_BCHW, target_BCHW = predicted_BCHW.float(), target_BCHW.float()
    if loss_type == "l2":
        loss_BCHW = F.mse_loss(predicted_BCHW, target_BCHW, reduction="none")
    elif loss_type == "huber":
        loss_BCHW = F.huber_loss(predicted_BCHW, target_BCHW, reduction="none", delta=huber_c)
    else:
        loss_BCHW = F.smooth_l1_loss(predicted_BCHW, target_BCHW, reduction="none", beta=huber_c)
    if mask_B1HW is None:
        return loss_BCHW.mean(dim=(1, 2, 3))
    mask_B1HW = F.interpolate(mask_B1HW.float(), size=loss_BCHW.shape[-2:], mode="area")
    return (loss_BCHW * mask_B1HW).mean(dim=(1, 2, 3)) / mask_B1HW.mean(dim=(1, 2, 3)).clamp(min=1e-6)


def with_prior(loss_B: Tensor, is_prior: Sequence[bool] | None, weight: float) -> tuple[Tensor, Tensor, Tensor | None]:
    """The loss of a batch with class images: (total, mean of user images, mean of class images or None).

    `is_prior` says of each of the B images whether it is a class image. It is a list and no tensor, because the host
    reads it: on a card, that would wait for the step so far. Source: prior preservation, arXiv:2208.12242, equation 2.
    """
    if is_prior is None or not any(is_prior):
        mean = loss_B.mean()
        return mean, mean, None
    priors_B = torch.tensor(is_prior)
    users, priors = (rows_B.nonzero().flatten().to(loss_B.device) for rows_B in (~priors_B, priors_B))
    user_loss, prior_loss = loss_B[users].mean(), loss_B[priors].mean()
    return user_loss + weight * prior_loss, user_loss, prior_loss

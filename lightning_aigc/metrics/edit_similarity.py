"""EditSimilarity: how far images follow an edit, and how much they keep of what it leaves, from its true targets.

Legend: N images, D channels of an embedding, H and W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric

from lightning_aigc.errors import DataError
from lightning_aigc.metrics.clip_similarity import CLIPSimilarity

ROUNDING = 1e-4
"""Length of a difference of unit vectors up to which it is their rounding."""
SAME = 0.05
"""Mean difference to the target, in 0..1 around a pixel, up to which an edit leaves the pixel as it is."""
BLUR_SHARE = 64
"""Pixels of the longer side for each pixel of the square over which that mean is taken."""
LEAST_SHARE = 0.1
"""Share of pixels from which what an edit leaves is compared by pixels; below it, as whole images by CLIP."""


def edit_direction(images_ND: Tensor, sources_ND: Tensor, targets_ND: Tensor) -> Tensor:
    """CLIP directional similarity, `cos(image - source, target - source)` of their embeddings: [N], in -1..1.

    1 is the change of the target, 0 no change or an unrelated one. After StyleGAN-NADA (arXiv 2108.00946), with the
    target's embedding where that has a text's.

    >>> edit_direction(torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0]]))
    tensor([1.])
    """
    changes_ND, wanted_ND = images_ND - sources_ND, targets_ND - sources_ND
    is_change_N = changes_ND.norm(dim=-1) > ROUNDING
    return torch.where(is_change_N, F.cosine_similarity(changes_ND, wanted_ND, dim=-1), 0.0)


def left_alone(source_3HW: Tensor, target_3HW: Tensor) -> Tensor:
    """The pixels that an edit leaves as they are, bool [H, W]; source and target in 0..1.

    Compares means over small squares, because an edited image that was saved as JPEG or drawn by a model differs a
    little everywhere.
    """
    side = max(1, max(source_3HW.shape[-2:]) // BLUR_SHARE) // 2 * 2 + 1
    difference_11HW = (source_3HW - target_3HW).abs().amax(0)[None, None]
    return F.avg_pool2d(difference_11HW, side, 1, side // 2, count_include_pad=False)[0, 0] <= SAME


class EditSimilarity(Metric):
    """Mean scores of edits against their true targets, over all images of all ranks.

    `direction` is `edit_direction` of CLIP's embeddings. `kept` is 1 minus the root mean square difference to the
    source over the pixels that the target leaves alone; where the sizes differ or the target changes nearly all
    pixels, it is CLIP's cosine of image and source. Each alone can be fooled, the first by ruin and the second by doing
    nothing: read both.

    Args:
        model: an open_clip name, `hf-hub:ORG/REPO`, a local folder with open_clip_config.json, or `embedded:clip`.
        pretrained: an open_clip weights tag or a local weights file; a folder's own weights where None.

    Raises: ModelError, at first use or by `check`, if the model cannot be had.

    >>> metric = EditSimilarity(model="embedded:clip")  # doctest: +SKIP
    >>> metric.update(images, sources, targets)  # doctest: +SKIP
    >>> metric.compute()  # doctest: +SKIP
    {'direction': tensor(0.61), 'kept': tensor(0.96)}
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    sums: Tensor
    count: Tensor

    def __init__(self, model: str = "ViT-B-32", pretrained: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.clip = CLIPSimilarity(model, pretrained)
        self.add_state("sums", torch.zeros(2), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def check(self) -> None:
        """Load the model now. Raises: ModelError if it cannot be had."""
        self.clip.check()

    def scores(self, images: Tensor, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> dict[str, Tensor]:
        """Each image's scores, without counting them.

        images: [N, 3, H, W] in 0..1. sources, targets: N each, [3, h, w] in 0..1, of any sizes.
        Returns: {"direction": [N], "kept": [N]} in float32 on the metric's device. Raises: DataError for other counts.
        """
        if not len(images) == len(sources) == len(targets):
            raise DataError(
                f"got {len(images)} images, {len(sources)} sources and {len(targets)} targets; wanted as many of each"
            )
        images = images.to(self.device)
        sources, targets = ([each.to(self.device) for each in given] for given in (sources, targets))
        embedded_ND = self.clip.embed_images(images)
        sources_ND, targets_ND = (
            torch.cat([self.clip.embed_images(each[None]) for each in given]) for given in (sources, targets)
        )
        resemblance_N = F.cosine_similarity(embedded_ND, sources_ND, dim=-1)
        kept = [
            _kept(image, source, target, resemblance)
            for image, source, target, resemblance in zip(images, sources, targets, resemblance_N, strict=True)
        ]
        return {"direction": edit_direction(embedded_ND, sources_ND, targets_ND), "kept": torch.stack(kept)}

    def update(self, images: Tensor, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Count images with their sources and true targets, as in `scores`."""
        found = self.scores(images, sources, targets)
        self.sums += torch.stack([found["direction"].sum(), found["kept"].sum()])
        self.count += len(images)

    def compute(self) -> dict[str, Tensor]:
        """{"direction": mean, "kept": mean} as tensors."""
        direction, kept = self.sums / self.count
        return {"direction": direction, "kept": kept}


def _kept(image_3HW: Tensor, source_3HW: Tensor, target_3HW: Tensor, resemblance: Tensor) -> Tensor:
    if image_3HW.shape == source_3HW.shape == target_3HW.shape:
        mask_HW = left_alone(source_3HW, target_3HW)
        if mask_HW.float().mean() >= LEAST_SHARE:
            square_HW = (image_3HW.nan_to_num() - source_3HW).square().mean(0)
            return 1 - square_HW[mask_HW].mean().sqrt()
    return resemblance

"""CLIPSimilarity: how well images fit their prompts (CLIP-T) and resemble reference images (CLIP-I)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize
from torchmetrics import Metric

from lightning_aigc.errors import DataError, ImageWarning
from lightning_aigc.metrics.clip_model import CLIPModel, shared_clip_model
from lightning_aigc.metrics.image_problems import find_image_problems, require_images

_REMEMBERED_PROMPTS = 4096


def clip_similarity(
    image_embeddings_ND: Tensor, text_embeddings_ND: Tensor, reference_embeddings_MD: Tensor | None = None
) -> dict[str, Tensor]:
    """Each image's raw cosine (-1..1, not times 100) to its text, and to the mean of the references.

    `clip_t[n] = cos(image[n], text[n])`, and `clip_i[n]` is the cosine of `image[n]` and the mean of the references'
    unit vectors.

    Returns: {"clip_t": [N]}, and "clip_i": [N] if there are references.

    >>> import torch
    >>> clip_similarity(torch.eye(2), torch.tensor([[2.0, 0.0], [1.0, 0.0]]), torch.tensor([[5.0, 0.0]]))
    {'clip_t': tensor([1., 0.]), 'clip_i': tensor([1., 0.])}
    """
    scores = {"clip_t": cosine_similarity(image_embeddings_ND, text_embeddings_ND, dim=-1)}
    if reference_embeddings_MD is not None:
        mean_D = normalize(reference_embeddings_MD, dim=-1).mean(dim=0)
        scores["clip_i"] = cosine_similarity(image_embeddings_ND, mean_D[None], dim=-1)
    return scores


def recognition(similarity_NP: Tensor, own_N: Tensor) -> tuple[float, float]:
    """Score of images on their own prompt above chance: the mean over the prompts, and its standard error.

    A prompt's value is the mean score of its own images, minus that of the other prompts' images on it: what shuffled
    prompts would score. It is near 0 where the judge knows neither the words nor what the images show.

    similarity_NP: cosine of each image to each prompt. own_N: the column of each image's own prompt.
    Returns: NaN and NaN for fewer than two prompts.

    >>> recognition(torch.tensor([[0.75, 0.25], [0.25, 0.75]]), torch.tensor([0, 1]))
    (0.5, 0.0)
    """
    gains = [
        similarity_NP[own_N == p, p].mean() - similarity_NP[own_N != p, p].mean()
        for p in sorted(set(own_N.tolist()))
        if bool((own_N != p).any())
    ]
    if len(gains) < 2:
        return math.nan, math.nan
    gains_P = torch.stack(gains)
    return float(gains_P.mean()), float(gains_P.std() / len(gains) ** 0.5)


class CLIPSimilarity(Metric):
    """Mean CLIP-T and CLIP-I over all images of all ranks, as raw cosines.

    The CLIP model is loaded at first use (`check()` does it early), stays frozen and in float32, follows `.to`,
    and is in no state dict. A black, constant or not finite image counts with the score it gets (not finite
    values as black) and is named in an `ImageWarning`.

    Args:
        model: an open_clip name, `hf-hub:ORG/REPO`, a local folder with open_clip_config.json, or `embedded:clip`.
        pretrained: an open_clip weights tag or a local weights file; a folder's own weights where None.
        reference_images: [N, 3, H, W] in 0..1, or a list of [3, H, W] of any sizes; "clip_i" is NaN without.
        batch_size: images or prompts embedded at once.

    >>> metric = CLIPSimilarity(model="embedded:clip")  # doctest: +SKIP
    >>> metric.update(images, ["a red cup"] * len(images))  # doctest: +SKIP
    >>> metric.compute()  # doctest: +SKIP
    {'clip_t': tensor(0.31), 'clip_i': tensor(nan)}
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    clip_t_sum: Tensor
    clip_i_sum: Tensor
    count: Tensor

    def __init__(
        self,
        model: str = "ViT-B-32",
        pretrained: str | None = None,
        reference_images: Tensor | Sequence[Tensor] | None = None,
        batch_size: int = 32,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.model = model
        self.pretrained = pretrained
        self.batch_size = batch_size
        self.reference_images = _as_list(reference_images)
        # Not a submodule: a metric inside a LightningModule would otherwise put CLIP into its checkpoints.
        self._loaded: list[CLIPModel] = []
        self._reference_embeddings: list[Tensor] = []
        self._prompt_embeddings: dict[str, Tensor] = {}
        for name in ("clip_t_sum", "clip_i_sum"):
            self.add_state(name, torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def check(self) -> None:
        """Load the model and embed the references now. Raises: ModelError if they cannot be had."""
        self._clip()
        self._references()

    def set_reference_images(self, images: Tensor | Sequence[Tensor] | None) -> None:
        """Compare with these images from now on; reset() first if some were counted already."""
        self.reference_images = _as_list(images)
        self._reference_embeddings.clear()

    def scores(self, images: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Each image's scores, without counting them.

        images: [N, 3, H, W] in 0..1. prompts: N strings.
        Returns: {"clip_t": [N], "clip_i": [N]} in float32 on the metric's device.
        """
        require_images(images, "images")
        if isinstance(prompts, str) or len(prompts) != len(images):
            got = "one string" if isinstance(prompts, str) else f"{len(prompts)} prompts"
            raise DataError(f"got {got} for {len(images)} images; wanted a list with one prompt for each image")
        if len(images) == 0:
            raise DataError("got no images to score; wanted at least one")
        for problem in find_image_problems(images, list(prompts)):
            warnings.warn(
                f"image {problem.index} ({problem.name!r}) is {problem.problem}; it counts in the score as it is",
                ImageWarning,
                stacklevel=2,
            )
        scores = clip_similarity(self.embed_images(images), self._texts(prompts), self._references())
        return {"clip_i": torch.full_like(scores["clip_t"], torch.nan)} | scores

    def embed_images(self, images_N3HW: Tensor) -> Tensor:
        """The model's embeddings of images in 0..1, [N, D] float32; values that are not finite count as black."""
        return self._clip().embed_images(images_N3HW, self.batch_size)

    def similarity(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Cosine of each image [N, 3, H, W] to each of P prompts, float32 [N, P] on the CPU."""
        embeddings_ND = self.embed_images(images)
        texts_PD = self._texts(prompts)
        return cosine_similarity(embeddings_ND[:, None], texts_PD[None], dim=-1).float().cpu()

    def update(self, images: Tensor, prompts: Sequence[str]) -> None:
        """Count images [N, 3, H, W] in 0..1 with their N prompts."""
        scores = self.scores(images, prompts)
        self.clip_t_sum += scores["clip_t"].sum()
        self.clip_i_sum += scores["clip_i"].sum()
        self.count += len(images)

    def compute(self) -> dict[str, Tensor]:
        """{"clip_t": mean, "clip_i": mean} as tensors; "clip_i" is NaN without reference images."""
        return {"clip_t": self.clip_t_sum / self.count, "clip_i": self.clip_i_sum / self.count}

    def _clip(self) -> CLIPModel:
        if not self._loaded:
            self._loaded.append(shared_clip_model(self.model, self.pretrained, torch.device(self.device)))
        self._loaded[0] = self._loaded[0].on(torch.device(self.device))
        return self._loaded[0]

    def _references(self) -> Tensor | None:
        if not self.reference_images:
            return None
        if not self._reference_embeddings:
            clip = self._clip()
            embeddings = [clip.embed_images(image[None], 1) for image in self.reference_images]
            self._reference_embeddings.append(torch.cat(embeddings))
        return self._reference_embeddings[0].to(self.device)

    def _texts(self, prompts: Sequence[str]) -> Tensor:
        new = list(dict.fromkeys(prompt for prompt in prompts if prompt not in self._prompt_embeddings))
        if len(self._prompt_embeddings) + len(new) > _REMEMBERED_PROMPTS:
            self._prompt_embeddings.clear()
            new = list(dict.fromkeys(prompts))
        if new:
            self._prompt_embeddings.update(zip(new, self._clip().embed_prompts(new, self.batch_size), strict=True))
        return torch.stack([self._prompt_embeddings[prompt].to(self.device) for prompt in prompts])

    def _apply(self, fn: Callable[..., Any], exclude_state: Sequence[str] = "") -> CLIPSimilarity:
        super()._apply(fn, exclude_state)
        if self._loaded:
            self._loaded[0] = self._loaded[0].on(torch.device(self.device))
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Leave the model out: a copy or another process loads it at its first use."""
        return super().__getstate__() | {"_loaded": [], "_reference_embeddings": [], "_prompt_embeddings": {}}


def _as_list(images: Tensor | Sequence[Tensor] | None) -> list[Tensor]:
    if images is None:
        return []
    singles = list(images)
    for image in singles:
        require_images(image[None] if isinstance(image, Tensor) else image, "reference_images")
        if not image.isfinite().all():
            raise DataError("got reference_images with values that are not finite; take that image out")
    if not singles:
        raise DataError("got no reference_images; wanted at least one, or None for no image-to-image score")
    return singles

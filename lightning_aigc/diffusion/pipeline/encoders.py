"""FrozenEncoders: encode images to latents and captions to embeddings; move unused encoders to the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL.Image import Image, fromarray
from torch import Tensor

from lightning_aigc.data.cache.encoder import SEEN_BY, autoencoder_remedy
from lightning_aigc.devices import float32_region
from lightning_aigc.diffusion.families import Components, Family
from lightning_aigc.diffusion.families.tokens import source_name
from lightning_aigc.diffusion.pipeline.loading import fingerprint
from lightning_aigc.errors import ModelError

PIXELS_ENCODED_AT_ONCE = 512 * 512
LARGEST_PIXEL = 1.01
"""Magnitude up to which a pixel counts as one in -1..1: bfloat16 rounds, and resizing overshoots."""


def _entry(batch: Any, key: str, wanted: str) -> Any:
    """The batch's entry of this name. Raises: ModelError that says what a batch must have."""
    if not isinstance(batch, dict) or key not in batch:
        got = f"the keys {', '.join(map(str, batch))}" if isinstance(batch, dict) else f"a {type(batch).__name__}"
        raise ModelError(f"a batch must be a dict with {wanted}; got {got}. ImageCaptionData makes such batches")
    return batch[key]


def seen_sources(sources: Sequence[Tensor]) -> list[list[Image]]:
    """The sources of each example as images, from pixels [B, 3, h, w] in -1..1 by number."""
    shown = [each.add(1).mul(127.5).round().byte().permute(0, 2, 3, 1).cpu().numpy() for each in sources]
    return [[fromarray(pixels) for pixels in of_example] for of_example in zip(*shown, strict=True)]


@dataclass(frozen=True)
class FrozenEncoders:
    """The autoencoder and text encoders of `components`, on `device`."""

    components: Components
    device: torch.device

    @property
    def family(self) -> Family:
        return self.components.family

    def encoder_identity(self) -> dict[str, str]:
        """The entries of the cache key for the weights and dtypes."""
        components = self.components
        pictures = {} if components.vae is None else {"vae": f"{fingerprint(components.vae)}-{components.vae.dtype}"}
        if components.stored_texts is not None:
            return {**pictures, "text": components.stored_texts.identity}
        text = "+".join(fingerprint(e) for e in components.text_encoders)
        empty = "-zeros" if components.zeros_for_empty else ""
        seen = {SEEN_BY: self.family.pipeline} if self.family.text_sees_sources else {}
        return {**pictures, "text": f"{text}-{components.text_encoders[0].dtype}{empty}", **seen}

    @torch.no_grad()
    def encode_pixels(self, pixels_B3HW: Tensor) -> Tensor:
        """Encode pixels in -1..1 to the latents' mean and log-variance, float32 [B, 2C, H, W], unscaled.

        Encodes at most PIXELS_ENCODED_AT_ONCE at a time: the float32 autoencoder's activations of four images of 512
        pixels would set the peak memory of the whole step.
        """
        vae = self.components.vae.to(self.device)
        pixels = pixels_B3HW.to(self.device, vae.dtype)
        at_once = max(1, PIXELS_ENCODED_AT_ONCE // (pixels.shape[-2] * pixels.shape[-1]))
        with float32_region(self.device):
            encoded = [self.family.encode(vae, chunk).float() for chunk in torch.split(pixels, at_once)]
        return torch.cat(encoded)

    @torch.no_grad()
    def round_trip(self, pixels_B3HW: Tensor) -> Tensor:
        """Encode pixels in -1..1 to the latents' means and decode these, float32 [B, 3, H, W] in 0..1 on the CPU."""
        mean = self.encode_pixels(pixels_B3HW).chunk(2, dim=1)[0]
        vae = self.components.vae
        with float32_region(self.device):
            decoded = [self.family.decode(vae, each.to(vae.dtype)[None]) for each in mean]
        return torch.cat(decoded).float().div(2).add(0.5).clamp(0, 1).cpu()

    @torch.no_grad()
    def encode_captions(
        self, captions: Sequence[str], sources: Sequence[Sequence[Image]] | None = None
    ) -> dict[str, Tensor]:
        """Encode captions to `prompt_embeds` [B, T, D], and the denoiser's other inputs.

        sources: those of each caption, for a family whose text encoder sees them.
        """
        return self.family.encode_prompts(self.components, list(captions), self.device, sources)

    def latents(self, batch: dict[str, Any], draw: Callable[[Tensor], Tensor] = torch.randn_like) -> Tensor:
        """Sample the batch's latents [B, C, H, W], scaled as the denoiser expects, from cached moments or images.

        `draw` returns Gaussian noise with the shape of its argument.

        Raises: ModelError with the names of the images whose latents are not finite.
        """
        is_cached = isinstance(batch, dict) and "latent_moments" in batch
        moments = batch["latent_moments"] if is_cached else self._finite_moments(batch)
        return self.family.latents(self.components.vae, moments.to(self.device), draw)

    def condition(self, batch: dict[str, Any], *, with_gradients: bool) -> dict[str, Tensor]:
        """The batch's text embeddings, cached or encoded from its captions, and the sources of an edit."""
        if "prompt_embeds" in batch:
            keys = ("prompt_embeds", "pooled_prompt_embeds", "prompt_lengths", "prompt_attention_mask")
            return {k: batch[k].to(self.device) for k in keys if k in batch} | self.sources(batch)
        captions = _entry(batch, "captions", "`prompt_embeds`, or `captions`, a list of texts")
        with torch.set_grad_enabled(with_gradients and torch.is_grad_enabled()):
            seen = seen_sources(batch["sources"]) if self.family.text_sees_sources and "sources" in batch else None
            texts = self.family.encode_prompts(self.components, captions, self.device, seen)
        return texts | self.sources(batch)

    def sources(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """The scaled latents of an edit's sources by `source_name`: the autoencoder's mean, in every family."""
        means = batch.get("source_latents")
        if means is None:
            means = [self.encode_pixels(each).chunk(2, dim=1)[0] for each in batch.get("sources", ())]
        vae, scale = self.components.vae, self.family.scale
        return {source_name(n): scale(vae, mean.to(self.device)) for n, mean in enumerate(means, start=1)}

    def offload(self, batch: dict[str, Any]) -> None:
        """Move to host memory the encoders that this batch's caches replace; sampling moves them back for its time."""
        if "latent_moments" in batch:
            self.components.vae.to("cpu")
        if "prompt_embeds" in batch:
            for encoder in self.components.text_encoders:
                encoder.to("cpu")

    def _finite_moments(self, batch: dict[str, Any]) -> Tensor:
        """Encode the batch's images and check both, as the cache does."""
        pixels_B3HW = _entry(batch, "pixel_values", "`latent_moments`, or `pixel_values` float [B, 3, H, W] in -1..1")
        if not pixels_B3HW.is_floating_point():
            raise ModelError(
                f"pixel_values must be floats in -1..1, got {pixels_B3HW.dtype}; convert them: x.float() / 127.5 - 1"
            )
        moments = self.encode_pixels(pixels_B3HW)
        is_finite_B = moments.isfinite().flatten(1).all(dim=1)
        largest, is_finite = torch.stack([pixels_B3HW.abs().amax().to(moments), is_finite_B.all().to(moments)]).tolist()
        if largest > LARGEST_PIXEL:
            raise ModelError(
                f"pixel_values must lie in -1..1, got values up to {largest:.4g}; scale them, for example"
                " x / 127.5 - 1 where they lie in 0..255"
            )
        if not is_finite:
            bad = is_finite_B.logical_not().nonzero().flatten().tolist()
            names = [str(batch["names"][i]) if "names" in batch else f"number {i} of its batch" for i in bad]
            raise ModelError(
                f"the latents of {', '.join(names[:3])} are not finite and would ruin the training;"
                f" {autoencoder_remedy(self)}"
            )
        return moments

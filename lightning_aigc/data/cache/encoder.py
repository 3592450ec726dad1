"""Encoder: the three methods that a model needs to fill the caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from PIL.Image import Image
from torch import Tensor

from lightning_aigc.errors import DataError

SEEN_BY = "sources_seen_by"
"""Entry of an identity whose text encoder sees the sources of an edit: the pipeline that shows them to it."""


@runtime_checkable
class Encoder(Protocol):
    """Encodes images to latent moments and captions to embeddings; any LightningModule may implement it.

    Shapes: B batch, H W pixels, C latent channels, h w latent pixels, T tokens, D width.
    The methods run without gradients, outside the Trainer's precision context, in the model's current mode.
    """

    def encoder_identity(self) -> dict[str, str]:
        """The parts of the cache key that name the weights: {"vae": "<weights hash or id> <dtype>", "text": "..."}."""
        ...

    def encode_pixels(self, pixels_B3HW: Tensor) -> Tensor:
        """Encode pixels in -1..1 to latent moments (mean, then log-variance) [B, 2C, h, w] in float32."""
        ...

    def encode_captions(self, captions: list[str]) -> dict[str, Tensor]:
        """Encode captions to embeddings by batch key, for example {"prompt_embeds": [B, T, D]}; B is always first.

        Where captions have unequal lengths, `prompt_lengths` int64 [B] counts the tokens before the padding.
        """
        ...


@runtime_checkable
class MakesConditions(Protocol):
    """Makes conditions of images, which are cached with the latents; the identity names them as `condition`."""

    def make_conditions(self, pixels_B3HW: Tensor) -> Tensor | None:
        """Make conditions of pixels in -1..1, uint8 [B, C, H, W]; None where they are files."""
        ...


@runtime_checkable
class EncodesInstructions(Protocol):
    """Encodes instructions together with the sources of their edits, where its identity has `SEEN_BY`."""

    def encode_instructions(self, captions: list[str], sources: Sequence[Sequence[Image]]) -> dict[str, Tensor]:
        """Encode each caption with its sources, otherwise as `encode_captions`."""
        ...


def autoencoder_remedy(encoder: Encoder) -> str:
    """Remedy for latents that are not finite, by the dtype that the autoencoder has now."""
    if encoder.encoder_identity().get("vae", "").endswith("float32"):
        return "the autoencoder is in float32 already: look at the image, and copy the base's vae/ again"
    return "set model.init_args.vae_dtype: float32"


def require_encoder(model: object) -> Encoder:
    """Return the model if it is an Encoder. Raises: DataError naming the missing methods."""
    if isinstance(model, Encoder):
        return model
    wanted = ("encoder_identity", "encode_pixels", "encode_captions")
    missing = [name for name in wanted if not callable(getattr(model, name, None))]
    raise DataError(
        f"{type(model).__name__} cannot fill the caches: it lacks {', '.join(missing)}. Add the methods of "
        "lightning_aigc.data.Encoder, or set cache_latents and cache_text_embeddings of data.init_args to false"
    )


def can_cache_captions(encoder: Encoder) -> bool:
    """Whether caption embeddings stay fixed in training: the model's `can_cache_captions()`, True without it."""
    method = getattr(encoder, "can_cache_captions", None)
    return bool(method()) if callable(method) else True


def frozen_text_setting(module: object) -> str:
    """For an error message: DiffusionLoRA has `train_text_encoder`, whole fine-tuning has `trained_parts`."""
    if "trained_parts" in getattr(module, "hparams", {}):
        return "model.init_args.trained_parts: [unet]"
    return "model.init_args.train_text_encoder: false"

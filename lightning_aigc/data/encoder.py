"""What the caches need from a model: three methods, which StableDiffusionLoRA has and any LightningModule may add."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from lightning_aigc.errors import DataError


@runtime_checkable
class Encoder(Protocol):
    """Turns pictures into latent moments and captions into embeddings.

    Shapes: B batch, H W pixels, C latent channels, h w latent pixels, T tokens, D width.
    The methods run without gradients, outside the Trainer's precision context, in the model's current mode.
    """

    def encoder_identity(self) -> dict[str, str]:
        """What the encodings depend on, for the cache key: {"vae": "<weights hash or id> <dtype>", "text": "..."}."""
        ...

    def encode_pixels(self, pixels_B3HW: Tensor) -> Tensor:
        """The latent moments (mean, then log-variance) [B, 2C, h, w] in float32 of pixels in -1..1."""
        ...

    def encode_captions(self, captions: list[str]) -> dict[str, Tensor]:
        """Embeddings by batch key, for example {"prompt_embeds": [B, T, D]}; every value has B first."""
        ...


def require_encoder(model: object) -> Encoder:
    """The model, if it has the three methods. Raises: DataError that names the missing ones."""
    if isinstance(model, Encoder):
        return model
    wanted = ("encoder_identity", "encode_pixels", "encode_captions")
    missing = [name for name in wanted if not callable(getattr(model, name, None))]
    raise DataError(
        f"{type(model).__name__} cannot fill the caches: it lacks {', '.join(missing)}. Add the methods of "
        "lightning_aigc.data.Encoder, or set cache_latents and cache_text_embeddings of data.init_args to false"
    )


def can_cache_captions(encoder: Encoder) -> bool:
    """Whether a caption's embedding stays the same; a model that trains its text encoder says no by this method."""
    method = getattr(encoder, "can_cache_captions", None)
    return bool(method()) if callable(method) else True

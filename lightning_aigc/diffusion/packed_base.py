"""Pack a pipeline's frozen denoiser and text encoders; check that a checkpoint was trained beside the same bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_aigc.diffusion.components import Components
from lightning_aigc.diffusion.packed_cache import packing_for
from lightning_aigc.errors import ConfigError, ModelError
from lightning_aigc.quantization.frozen import PackedBase, ignore_in_ddp, pack_layers
from lightning_aigc.quantization.layers import FORMATS, Layer, check_kind, check_patterns, check_skip, frozen_layers
from lightning_aigc_kernels.packed_weight import Format

CHECKPOINT_KEY = "base_quantization"


def check_base_quantization(args: Any) -> None:
    """Check the arguments before weights are read. Raises: ConfigError."""
    if args.base_quantization is None:
        if args.base_quantization_skip is not None:
            raise ConfigError("model.init_args.base_quantization_skip does nothing without base_quantization; set both")
        return
    check_kind(args.base_quantization)
    check_skip(args.base_quantization_skip)
    if getattr(args, "use_dora", False):
        raise ConfigError(
            "model.init_args.use_dora reads the base's weights at every step, which base_quantization packs; use plain"
            " LoRA (use_dora: false), or base_quantization: null"
        )


def pack_base(module: nn.Module, parts: Components, kind: str, skip: list[str] | None) -> PackedBase:
    """Pack the frozen weights of the denoiser and of the text encoders, whose linears stay int8 with `nf4`.

    The autoencoder stays whole: it makes the latents and the pictures. Names are `unet.` and `text_encoders.0.`.

    Raises: ConfigError for a pattern that covers nothing, or a base that is packed already.
    """
    holder = nn.Module()  # gives both parts their names, for patterns and the digest
    holder.unet = parts.unet
    holder.text_encoders = nn.ModuleList(parts.text_encoders)
    layers = frozen_layers(holder, skip)
    check_patterns(skip, (layer.name for layer in layers))
    linear, convolution = FORMATS[kind]
    text: Format = "int8" if kind == "nf4" else linear

    def format_of(layer: Layer) -> Format:
        if not layer.is_linear:
            return convolution
        return text if layer.name.startswith("text_encoders") else linear

    packing = packing_for(sum(layer.weight.numel() for layer in layers if not layer.why_not))
    packed = pack_layers(holder, layers, format_of, packing)
    packed.kind = kind
    ignore_in_ddp(module)
    return packed


def checkpoint_entry(packed: PackedBase) -> dict[str, str]:
    """What a checkpoint says about the base that its weights were trained beside."""
    return {"kind": packed.kind, "digest": packed.digest}


def check_same_base(checkpoint: Mapping[str, Any], packed: PackedBase | None) -> None:
    """Raise ModelError if a checkpoint was trained beside a base of the same kind with other bytes."""
    saved = checkpoint.get(CHECKPOINT_KEY)
    if saved and packed is not None and saved["kind"] == packed.kind and saved["digest"] != packed.digest:
        raise ModelError(
            f"the checkpoint was trained on another base: packed as {packed.kind}, its bytes differ from this one's;"
            " use the pretrained_model_name_or_path, base_dtype and base_quantization_skip that it was trained with"
        )

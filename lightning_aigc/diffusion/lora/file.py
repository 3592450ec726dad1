"""Write, read and convert LoRA files that diffusers, ComfyUI and A1111 load.

All three load the kohya layout, with DoRA as the exception: diffusers 0.42 drops `dora_scale` from kohya files, ComfyUI
divides by the base weight's norm and A1111 normalises over inputs. So a DoRA's kohya file holds ComfyUI's magnitudes
and is for ComfyUI alone, diffusers' layout (`layout="diffusers"`) is for diffusers, and A1111 needs a merged pipeline.
"""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors
import torch
from torch import Tensor, nn

from lightning_aigc.diffusion.families import TRANSFORMERS
from lightning_aigc.diffusion.lora import base_model as base_models
from lightning_aigc.diffusion.lora import dora_magnitudes, layouts, lycoris, original_names, reading
from lightning_aigc.diffusion.lora import layers as lora_layers
from lightning_aigc.diffusion.lora import names as lora_names
from lightning_aigc.diffusion.lora.entries import not_lora
from lightning_aigc.diffusion.lora.layers import LoRALayer
from lightning_aigc.diffusion.lora.layouts import ADAPTER_METADATA_KEY
from lightning_aigc.diffusion.lora.lycoris import FactorLayer
from lightning_aigc.diffusion.lora.metadata import HASH_KEYS, LoRAMetadata, serialize, write_atomically
from lightning_aigc.diffusion.lora.names import COMPONENTS, TEXT_ENCODER, TEXT_ENCODER_2, TRANSFORMER, UNET
from lightning_aigc.errors import ModelError

__all__ = ["LoRAFile", "LoRAMetadata", "convert", "read_lora", "save_lokr", "save_lora"]

Layout = Literal["kohya", "diffusers", "other"]
SDXL_TEXT_WIDTH = 2048
LOKR_MODULE = "lycoris.kohya"
"""The header's `ss_network_module` of a LoKr."""
DORA_IN_KOHYA = (
    "DoRA in the kohya layout is for ComfyUI alone: diffusers ignores its magnitudes, and A1111 takes them over inputs,"
    " which wrecks the model. A run writes a .diffusers.safetensors next to it; `lightning export FILE --to diffusers"
    " --output OTHER` makes one, and for A1111 `lightning export FILE --merge_into PIPELINE --output FOLDER`"
)
"""Warning, which Python shows once, whatever the number of files."""
_LAYERS_PER_BLOCK_KEY = "lightning_aigc.layers_per_block"  # written only if it differs from SDXL's 2


@dataclass(frozen=True)
class LoRAFile:
    """The contents of a LoRA file, unconverted."""

    state: dict[str, Tensor]
    """Entries under the file's own names."""
    layout: Layout
    """Layout of the entries' names; `other` is read too."""
    metadata: dict[str, str]
    """The safetensors header."""

    def layers(self, base_model: str | None = None) -> list[LoRALayer]:
        """The file's layers in layout-independent form.

        base_model: whose LoRA it is; None takes it from the header, else from names and sizes.
        Raises: ModelError for weights that are not LoRA or DoRA, or layers of no known model.
        """
        layers = reading.read_layers(
            self.state,
            self.metadata,
            _adapter_metadata(self.metadata),
            base_model=base_model,
            layers_per_block=_layers_per_block(self.metadata),
        )
        return dora_magnitudes.from_header(layers, self.metadata)

    @property
    def has_factors(self) -> bool:
        """Whether it is a LoKr or LoHa, whose layers `factor_layers` returns."""
        return lycoris.is_lycoris(self.state)

    def factor_layers(self, base_model: str | None = None) -> list[FactorLayer]:
        """The layers of a LoKr or LoHa. Raises: as `layers`."""
        per_block = _layers_per_block(self.metadata)
        return lycoris.read_factors(self.state, self.metadata, base_model=base_model, layers_per_block=per_block)


def save_lokr(
    path: str | Path,
    component: str,
    network: nn.Module,
    metadata: LoRAMetadata,
    dtype: torch.dtype = torch.float16,
    adapter_name: str = "default",
    layout: Literal["kohya", "diffusers"] = "kohya",
) -> Path:
    """Write a denoiser's LoKr as one file, in kohya's layout for ComfyUI, or in diffusers'; returns its path.

    Raises: ModelError if there is none, a weight is not finite in `dtype`, or the file cannot be written.
    """
    found = lycoris.collect(component, network, adapter_name)
    layers = [lycoris.cast(layer, dtype) for layer in found]
    base_model = metadata.base_model or _base_model_of(network if component == UNET else None, [])
    config: Any = getattr(network, "peft_config", {})[adapter_name]
    arguments = {"algo": "lokr", "factor": str(config.decompose_factor)}
    header = metadata.to_header(base_model=base_model, rank=config.r, alpha=config.alpha, network_args=arguments)
    header |= {"format": "pt", "ss_network_module": LOKR_MODULE} | _unusual_depth(network, base_model)
    return _write_factors(Path(path), layers, header, layout)


def _write_factors(path: Path, layers: list[FactorLayer], header: Mapping[str, str], layout: str) -> Path:
    named, family = base_models.named_base_model(header), None
    of_transformer = {layer.module: layer.shape[1] for layer in layers if layer.component == TRANSFORMER}
    if of_transformer and layout == "kohya":  # a family without names of its own has diffusers'
        has_names = named not in TRANSFORMERS or bool(TRANSFORMERS[named].original_layers)
        family = original_names.family_to_write(of_transformer, named) if has_names else None
    state = lycoris.to_state(
        layers, layout=layout, sdxl=named == "sdxl", layers_per_block=_layers_per_block(header), family=family
    )
    write_atomically(path, serialize(state, {k: v for k, v in header.items() if k not in HASH_KEYS}))
    return path


def save_lora(
    path: str | Path,
    *,
    unet: nn.Module | None = None,
    transformer: nn.Module | None = None,
    text_encoders: Sequence[nn.Module | None] = (),
    metadata: LoRAMetadata | Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float16,
    layout: Literal["kohya", "diffusers"] = "kohya",
    adapter_name: str = "default",
) -> Path:
    """Write the peft LoRA of a U-Net or transformer and its text encoders as one safetensors file; returns its path.

    A text encoder without an adapter is omitted. The write is atomic.
    Raises: ModelError if no layer is adapted, a weight is not finite in `dtype`, or the file cannot be written.
    Warns: UserWarning for DoRA in the kohya layout (see the module's docstring).
    """
    metadata = metadata if isinstance(metadata, LoRAMetadata) else LoRAMetadata.from_mapping(metadata or {})
    denoisers = {UNET: unet, TRANSFORMER: transformer}
    layers = [
        layer
        for component, model in denoisers.items()
        if model is not None
        for layer in lora_layers.collect_layers(component, model, adapter_name)
    ]
    for component, model in zip((TEXT_ENCODER, TEXT_ENCODER_2), text_encoders, strict=False):
        if model is not None and adapter_name in getattr(getattr(model, "_orig_mod", model), "peft_config", {}):
            layers += lora_layers.collect_layers(component, model, adapter_name)
    if not layers:
        raise ModelError("got no LoRA to save; wanted a unet or text encoder with a peft adapter")
    layers = lora_layers.with_transformers_scale_one(layers)
    base_model = metadata.base_model or _base_model_of(unet, layers)
    header = {"format": "pt"} | metadata.to_header(base_model=base_model, **_network_summary(layers))
    header |= _unusual_depth(unet, base_model)
    if layout == "kohya":
        layers = lora_layers.with_one_alpha(layers)
    return _write_layers(Path(path), [_cast(layer, dtype) for layer in layers], header, layout)


def read_lora(path: str | Path) -> LoRAFile:
    """Read a LoRA file's tensors (on the CPU), layout and header.

    Raises: ModelError for a missing, truncated or foreign file.
    """
    path = Path(path)
    if not path.is_file():
        found = "a folder" if path.is_dir() else "nothing"
        raise ModelError(f"got {path}, where there is {found}; wanted a LoRA .safetensors file")
    try:
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:
            metadata = dict(file.metadata() or {})
            state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise ModelError(
            f"cannot read {path} as safetensors ({error}); it is truncated or another format: copy or export it again"
        ) from error
    return LoRAFile(state, _layout_of(path, state), metadata)


def convert(
    path_in: str | Path,
    path_out: str | Path,
    layout: Literal["kohya", "diffusers"] = "kohya",
    base_model: str | None = None,
) -> Path:
    """Rewrite a LoRA file in another layout, with bit-identical weights and the same scales.

    Per-layer alphas are kept. If they differ, diffusers reads its own layout correctly, but not kohya's. In diffusers'
    layout a transformer's alpha is folded into its weights, because ComfyUI does not read the header.
    base_model: whose LoRA it is, where the file does not tell.
    Raises: ModelError as `read_lora` and `save_lora` do, and where the base model cannot be told.
    """
    base_models.check_base_model(base_model)
    file = read_lora(path_in)
    header = file.metadata if base_model is None else {**file.metadata, "ss_base_model_version": base_model}
    try:
        if file.has_factors:
            return _write_factors(Path(path_out), file.factor_layers(base_model), header, layout)
        layers = file.layers(base_model)
        if layout == "diffusers":
            layers = lora_layers.with_transformers_scale_one(layers)
        return _write_layers(Path(path_out), layers, header, layout)
    except ModelError as error:
        raise ModelError(f"{path_in}: {error}") from error


def _write_layers(
    path: Path, layers: list[LoRALayer], header: Mapping[str, str], layout: Literal["kohya", "diffusers"]
) -> Path:
    written_anew = (*HASH_KEYS, ADAPTER_METADATA_KEY, dora_magnitudes.TRAINED_KEY, dora_magnitudes.COMFYUI_KEY)
    header = {key: value for key, value in header.items() if key not in written_anew}
    if layout == "diffusers":
        state, header[ADAPTER_METADATA_KEY] = layouts.to_diffusers(layers)
    elif layout == "kohya":
        of_transformer = [layer for layer in layers if layer.component == TRANSFORMER]
        others = lora_layers.with_out_proj(layer for layer in layers if layer.component != TRANSFORMER)
        is_sdxl = bool(of_transformer) or _is_sdxl(header, layers)  # CLIP is lora_te1_ for transformers too
        state = layouts.to_kohya(others, sdxl=is_sdxl, layers_per_block=_layers_per_block(header))
        if of_transformer:
            base_model = base_models.named_base_model(header)
            family = original_names.family_to_write({each.module: each.shape[1] for each in of_transformer}, base_model)
            state |= original_names.to_original(of_transformer, family)
        if any(layer.magnitude is not None for layer in layers):
            warnings.warn(DORA_IN_KOHYA, stacklevel=3)
    else:
        raise ModelError(f"got layout {layout!r}; wanted 'kohya' or 'diffusers'")
    header |= dora_magnitudes.to_header(layers, layout)
    write_atomically(path, serialize(state, header))
    return path


def _layout_of(path: Path, state: Mapping[str, Tensor]) -> Layout:
    if any(key.startswith(("lora_unet_", "lora_te")) for key in state):
        return "kohya"
    if any("lora" in key or key.startswith("lycoris_") for key in state) or lycoris.is_lycoris(state):
        is_diffusers = any(key.startswith(tuple(f"{component}." for component in COMPONENTS)) for key in state)
        return "diffusers" if is_diffusers else "other"
    raise ModelError(f"{path}: {not_lora(state)}")


def _cast(layer: LoRALayer, dtype: torch.dtype) -> LoRALayer:
    magnitude = None if layer.magnitude is None else layer.magnitude.float()  # a half would round away what was learned
    cast = dataclasses.replace(layer, down=layer.down.to(dtype), up=layer.up.to(dtype), magnitude=magnitude)
    weights = [cast.down, cast.up] if magnitude is None else [cast.down, cast.up, magnitude]
    lora_layers.check_cast(f"{layer.component}.{layer.module}", [layer.down, layer.up], weights)
    return dora_magnitudes.with_comfyui_magnitude(cast)


def _network_summary(layers: Sequence[LoRALayer]) -> dict[str, Any]:
    """The most common rank and alpha, and those of the convolutions, as sd-scripts' network arguments."""
    linear = [layer for layer in layers if layer.down.ndim == 2 or layer.down.shape[-1] == 1] or list(layers)
    (rank, alpha), _ = Counter((layer.rank, layer.alpha) for layer in linear).most_common(1)[0]
    convolutions = Counter(
        (layer.rank, layer.alpha) for layer in layers if layer.down.ndim == 4 and layer.down.shape[-1] > 1
    )
    network_args = {}
    if convolutions:
        (conv_rank, conv_alpha), _ = convolutions.most_common(1)[0]
        network_args = {"conv_dim": str(conv_rank), "conv_alpha": f"{conv_alpha:.9g}"}
    if any(layer.magnitude is not None for layer in layers):
        network_args |= {"dora_wd": "True", "wd_on_output": "True"}
    return {"rank": rank, "alpha": alpha, "network_args": network_args}


def _base_model_of(unet: nn.Module | None, layers: Sequence[LoRALayer]) -> str:
    if any(layer.component == TRANSFORMER for layer in layers):
        return "sd3"
    config = getattr(getattr(unet, "_orig_mod", unet), "config", None)
    if getattr(config, "addition_embed_type", None) == "text_time" or any(
        layer.component == TEXT_ENCODER_2 for layer in layers
    ):
        return "sdxl"
    return "sd2" if getattr(config, "cross_attention_dim", None) == 1024 else "sd1"


def _unusual_depth(unet: nn.Module | None, base_model: str) -> dict[str, str]:
    """The header's entry for a U-Net of SDXL's kind with another number of layers in a block."""
    config = getattr(getattr(unet, "_orig_mod", unet), "config", None)
    layers_per_block = getattr(config, "layers_per_block", lora_names.SDXL_LAYERS_PER_BLOCK)
    if base_model != "sdxl" or layers_per_block == lora_names.SDXL_LAYERS_PER_BLOCK:
        return {}
    return {_LAYERS_PER_BLOCK_KEY: str(layers_per_block)}


def _is_sdxl(header: Mapping[str, str], layers: Sequence[LoRALayer]) -> bool:
    named = base_models.named_base_model(header)
    if named is not None:
        return named == "sdxl"
    return any(
        layer.component == TEXT_ENCODER_2
        or layer.module.startswith("add_embedding.")
        or ".transformer_blocks.1." in layer.module
        or (layer.module.endswith(("attn2.to_k", "attn2.to_v")) and layer.down.shape[1] == SDXL_TEXT_WIDTH)
        for layer in layers
    )


def _layers_per_block(header: Mapping[str, str]) -> int:
    given = header.get(_LAYERS_PER_BLOCK_KEY, str(lora_names.SDXL_LAYERS_PER_BLOCK))
    if not given.isdecimal():
        raise ModelError(f"got a header whose {_LAYERS_PER_BLOCK_KEY} is {given!r}, no number; export the file again")
    return int(given)


def _adapter_metadata(header: Mapping[str, str]) -> dict[str, Any]:
    """peft's settings by component, as diffusers writes them."""
    try:
        found = json.loads(header.get(ADAPTER_METADATA_KEY) or "{}")
        alphas = [value for key, value in found.items() if key.endswith(".lora_alpha")]
        alphas += [each for key, value in found.items() if key.endswith(".alpha_pattern") for each in value.values()]
        if not all(isinstance(alpha, (int, float)) and math.isfinite(alpha) for alpha in alphas):
            raise ValueError("an alpha that is no number")
    except (ValueError, AttributeError) as error:
        raise ModelError(
            f"got a header whose {ADAPTER_METADATA_KEY} cannot be read ({error}); export the file again"
        ) from error
    return dict(found)

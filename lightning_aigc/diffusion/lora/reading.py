"""Read the layers of a LoRA file, under the names of whichever program wrote it, as diffusers' modules."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_aigc.diffusion.families import TRANSFORMERS, TransformerFamily
from lightning_aigc.diffusion.lora import base_model as lora_base_model
from lightning_aigc.diffusion.lora import names as lora_names
from lightning_aigc.diffusion.lora import original_names as lora_original_names
from lightning_aigc.diffusion.lora.entries import OTHER_TEXT_ENCODER, TEXT_ENCODERS, Entries, group
from lightning_aigc.diffusion.lora.layers import LoRALayer, canonical_module
from lightning_aigc.diffusion.lora.names import TRANSFORMER, UNET
from lightning_aigc.errors import ModelError

Modules = dict[str, tuple[str, ...]]
"""By a denoiser's layer as the file names it: diffusers' modules that it holds."""


def read_layers(
    state: Mapping[str, Tensor],
    header: Mapping[str, str],
    adapter_metadata: Mapping[str, Any],
    *,
    base_model: str | None = None,
    layers_per_block: int = lora_names.SDXL_LAYERS_PER_BLOCK,
) -> list[LoRALayer]:
    """The layers of a file's state; one without alpha has scale 1, as in diffusers, ComfyUI and sd-scripts.

    base_model: whose LoRA it is; None takes it from the header, else from names and sizes.
    Raises: ModelError for entries that are not LoRA or DoRA, or layers of no known model.
    """
    entries = group(state)
    if not any(each.component or "alpha" in each.parts for each in entries) and not adapter_metadata:
        raise ModelError(
            "got a file in peft's layout, which does not hold its alpha; load it into the model with peft "
            "and write it with save_lora"
        )
    of_denoiser = [each for each in entries if each.component not in TEXT_ENCODERS]
    family, modules = denoiser_modules(of_denoiser, header, base_model, layers_per_block) if of_denoiser else (None, {})
    layers: list[LoRALayer] = []
    for each in entries:
        names: tuple[str, ...]
        if each.component in TEXT_ENCODERS:
            component, names = each.component, (_text_module(each),)
        else:
            component, names = TRANSFORMER if family else UNET, modules[each.name]
        alpha = _alpha_of(each, component, names[0], adapter_metadata)
        down, up = each.parts["down"], each.parts["up"]
        if len(names) > 1:
            assert family is not None
            layers += lora_original_names.apart(down, up, alpha / down.shape[0], names, family)
        else:
            found = next((each.parts[k] for k in ("dora_scale", "lora_magnitude_vector") if k in each.parts), None)
            magnitude = None if found is None else found.flatten()
            layers.append(LoRALayer(component, names[0], down, up, alpha, magnitude))
    return layers


def denoiser_modules(
    entries: Sequence[Entries], header: Mapping[str, str], base_model: str | None, layers_per_block: int
) -> tuple[TransformerFamily | None, Modules]:
    """The family, None for a U-Net, and the modules of each layer."""
    named = base_model or lora_base_model.named_base_model(header)
    of_unet = {each.name: _unet_module(each, layers_per_block) for each in entries}
    fits: dict[str, Modules] = {}
    for name, family in TRANSFORMERS.items():
        found = {each.name: _transformer_modules(each, family) for each in entries}
        known = {each: modules for each, modules in found.items() if modules is not None}
        if len(known) == len(found):
            fits[name] = known
        elif name == named:
            raise _unknown(next(each for each in entries if found[each.name] is None), f"its header names {named}")
    if named in fits:
        return TRANSFORMERS[named], fits[named]
    if None not in of_unet.values():
        return None, {name: (str(module),) for name, module in of_unet.items()}
    if named is not None:
        raise _unknown(next(each for each in entries if of_unet[each.name] is None), f"its header names {named}")
    told = next((header[key] for key in lora_base_model.HEADER_KEYS if header.get(key)), None)
    if not fits:
        strange = [each for each in entries if of_unet[each.name] is None]
        strange = [
            e for e in strange if all(_transformer_modules(e, f) is None for f in TRANSFORMERS.values())
        ] or strange
        raise _unknown(strange[0], f"its header names {told}" if told else "its header names no base model")
    if told is not None:
        raise ModelError(
            f"got a LoRA whose header names {told}, which is not known here; {', '.join(fits)} have its layers: "
            f"add --base_model {next(iter(fits))}, or the one that it was trained on"
        )
    if len({tuple(found.items()) for found in fits.values()}) > 1:  # equal names in all need no choice
        shapes = [(fits[name][each.name][0], each.parts["down"].shape[1]) for each in entries for name in fits]
        likely = lora_base_model.likely([TRANSFORMERS[name] for name in fits], shapes)
        fits = {family.name: fits[family.name] for family in likely}
        if len({tuple(found.items()) for found in fits.values()}) > 1:
            raise lora_base_model.ambiguous((each.name for each in entries), likely)
    name, modules = next(iter(fits.items()))
    return TRANSFORMERS[name], modules


def _unknown(entries: Entries, why: str) -> ModelError:
    return ModelError(
        f"got a LoRA on {entries}, and {why}; wanted layers of a Stable Diffusion U-Net, or of one of "
        f"{', '.join(TRANSFORMERS)}: write it in diffusers' layout by the program that trained it"
    )


def _unet_module(entries: Entries, layers_per_block: int) -> str | None:
    if entries.component == TRANSFORMER:
        return None
    module = lora_names.with_dots(entries.name)
    module = lora_names.from_original_unet(module, layers_per_block)
    return module if lora_names.is_unet_module(module) else None


def _transformer_modules(entries: Entries, family: TransformerFamily) -> tuple[str, ...] | None:
    if entries.component == UNET or entries.parts["down"].ndim != 2:
        return None
    modules = lora_base_model.modules_of(entries.underscored, family)
    if modules is None and entries.component == TRANSFORMER and lora_base_model.is_other_layer(entries.name, family):
        return (entries.name,)
    if modules is None or not lora_original_names.holds(entries.parts["down"], entries.parts["up"], modules, family):
        return None
    return modules


def _text_module(entries: Entries) -> str:
    module = canonical_module(entries.component, lora_names.with_dots(entries.name))
    if entries.component == OTHER_TEXT_ENCODER or not lora_names.is_text_module(module):
        raise ModelError(f"got a LoRA on {entries}; wanted layers of CLIP, the only text encoder that is trained here")
    return module


def _alpha_of(entries: Entries, component: str, module: str, metadata: Mapping[str, Any]) -> float:
    rank = entries.parts["down"].shape[0]
    if "alpha" in entries.parts:
        return float(entries.parts["alpha"].item())
    if f"{component}.lora_alpha" not in metadata:
        return float(rank)
    patterns: Mapping[str, float] = metadata.get(f"{component}.alpha_pattern") or {}
    # peft's rule (get_pattern_key): a pattern matches a whole name or a dotted suffix.
    alpha = next(
        (value for pattern, value in patterns.items() if re.fullmatch(rf"(.*\.)?({pattern})", module)),
        metadata[f"{component}.lora_alpha"],
    )
    return float(alpha) * math.sqrt(rank) if metadata.get(f"{component}.use_rslora") else float(alpha)

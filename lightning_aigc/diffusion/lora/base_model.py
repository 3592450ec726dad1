"""Tell the base model of a LoRA file: by its header, else by the names and sizes of its layers.

SD 3, FLUX.1, FLUX.2 and Qwen-Image share names such as `transformer_blocks.0.attn.to_q`, so that a file of a few layers
without a header may fit several of them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence

from lightning_aigc.diffusion.families import TRANSFORMERS, TransformerFamily
from lightning_aigc.diffusion.lora.metadata import BASE_MODELS
from lightning_aigc.errors import ModelError

HEADER_KEYS = ("ss_base_model_version", "modelspec.architecture")
_OUTSIDE = re.compile(
    r"(x_embedder|context_embedder|proj_out|norm_out|time_text_embed|time_guidance_embed|pos_embed|img_in|txt_in"
    r"|cap_embedder|t_embedder|all_x_embedder|all_final_layer|(single|double)_stream_modulation\w*"
    r"|distilled_guidance_layer|time_embed|time_mod_proj|text_fusion|final_layer)(\.[\w.-]+)?"
)
"""diffusers' layers outside a transformer's blocks, which some programs adapt and no LoRA target here covers."""


def named_base_model(header: Mapping[str, str]) -> str | None:
    """The base model that a header names; None where it names none that is known."""
    for key in HEADER_KEYS:
        letters = re.sub(r"[^a-z0-9]", "", header.get(key, "").lower())
        for base_model, words in BASE_MODELS.items():
            if re.search(words, letters):
                return base_model
    return None


def modules_of(name: str, family: TransformerFamily) -> tuple[str, ...] | None:
    """diffusers' modules of a layer's name with underscores, the model's own or diffusers'; None if it is no layer."""
    for pattern, modules in _patterns(family.name):
        if match := pattern.fullmatch(name):
            return tuple(module.format(match[1]) for module in modules)
    return None


def is_other_layer(name: str, family: TransformerFamily) -> bool:
    """Whether a dotted name may be a layer of diffusers' transformer that no LoRA target here covers."""
    blocks = {modules[0].partition(".")[0] for _, modules in _patterns(family.name)}
    return _OUTSIDE.fullmatch(name) is not None or re.fullmatch(rf"({'|'.join(blocks)})\.\d+\.[\w.]+", name) is not None


def likely(families: Sequence[TransformerFamily], shapes: Iterable[tuple[str, int]]) -> list[TransformerFamily]:
    """The families whose published models have this width and depth; all where the sizes tell nothing.

    shapes: module and inputs of each layer, under diffusers' names.
    """
    found = [
        (int(match[1]), inputs)
        for name, inputs in shapes
        if (match := re.fullmatch(r"transformer_blocks\.(\d+)\.attn\.(?:to|add)_[qkv](?:_proj)?", name))
    ]
    if not found:
        return list(families)
    depth, width = max(found)[0] + 1, found[0][1]
    whole = [family for family in families if (width, depth) in family.published_sizes]
    part = [family for family in families if any(width == w and depth <= d for w, d in family.published_sizes)]
    return whole or part or list(families)


def ambiguous(names: Iterable[str], families: Iterable[TransformerFamily]) -> ModelError:
    """The error for layers that several families have."""
    known = sorted(family.name for family in families)
    return ModelError(
        f"got a LoRA on {min(names)}, which {', '.join(known)} have, and no header that names the base model; add "
        f"--base_model {known[0]}, or the one that it was trained on"
    )


def check_base_model(name: str | None) -> None:
    """Raise ModelError for a base model that is none of those known."""
    if name is not None and name not in BASE_MODELS:
        raise ModelError(f"got the base model {name!r}; wanted one of {', '.join(BASE_MODELS)}")


@functools.cache
def _patterns(family_name: str) -> list[tuple[re.Pattern[str], tuple[str, ...]]]:
    family = TRANSFORMERS[family_name]
    plain = {module: (module,) for modules in family.original_layers.values() for module in modules} or {
        f"transformer_blocks.{{}}.{layer}": (f"transformer_blocks.{{}}.{layer}",)
        for layers in family.lora_layers.values()
        for layer in layers
    }
    return [
        (re.compile(re.escape(name.replace(".", "_")).replace(r"\{\}", r"(\d+)")), modules)
        for name, modules in (dict(family.original_layers) | plain).items()
    ]

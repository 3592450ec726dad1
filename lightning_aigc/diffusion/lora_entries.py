"""Group the entries of a LoRA file by layer, whichever program wrote it.

A name is a component's prefix, the module and a suffix. Prefixes, beside diffusers' and sd-scripts' own: `transformer.
base_model.model.` (SimpleTuner, peft), `_orig_mod.` (torch.compile), `diffusion_model.` and `text_encoders.` (ComfyUI,
ai-toolkit), `lora_transformer_` (OneTrainer), `lycoris_` (SimpleTuner's LyCORIS), `clip_l.` and `clip_g.` (OMI).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from lightning_aigc.diffusion.lora_names import TEXT_ENCODER, TEXT_ENCODER_2, TRANSFORMER, UNET
from lightning_aigc.errors import ModelError

DENOISER = "denoiser"
"""The component of a prefix that U-Nets and transformers share."""
OTHER_TEXT_ENCODER = "text_encoder_3"
"""T5 and others, which no LoRA here adapts."""
TEXT_ENCODERS = (TEXT_ENCODER, TEXT_ENCODER_2, OTHER_TEXT_ENCODER)
PREFIXES = {
    "text_encoders.clip_l.transformer.": TEXT_ENCODER,
    "text_encoders.clip_h.transformer.": TEXT_ENCODER,
    "text_encoders.clip_g.transformer.": TEXT_ENCODER_2,
    "model.diffusion_model.": DENOISER,
    "diffusion_model.": DENOISER,
    "text_encoders.": OTHER_TEXT_ENCODER,
    "text_encoder_3.": OTHER_TEXT_ENCODER,
    "text_encoder_2.": TEXT_ENCODER_2,
    "text_encoder.": TEXT_ENCODER,
    "transformer.": TRANSFORMER,
    "clip_l.": TEXT_ENCODER,
    "clip_g.": TEXT_ENCODER_2,
    "t5.": OTHER_TEXT_ENCODER,
    "t5xxl.": OTHER_TEXT_ENCODER,
    "unet.": UNET,
    "lora_unet_": DENOISER,
    "lora_transformer_": TRANSFORMER,
    "lora_te1_": TEXT_ENCODER,
    "lora_te2_": TEXT_ENCODER_2,
    "lora_te3_": OTHER_TEXT_ENCODER,
    "lora_te_": TEXT_ENCODER,
    "lycoris_": DENOISER,
}
_WRAPPERS = re.compile(r"^(base_model\.model\.|_orig_mod[._]|module\.)+")
_SUFFIX = re.compile(
    r"(?:(?:\.processor)?\.to_(?P<old>q|k|v|out)_lora\.(?P<old_side>down|up)\.weight"
    r"|\.lora_(?P<letter>[AB])(?:\.(?!weight$)\w+)?(?:\.weight)?"
    r"|\.lora(?:_linear_layer)?[._](?P<side>down|up)(?:\.(?!weight$)\w+)?\.weight"
    r"|\.(?P<alpha>alpha)"
    r"|\.(?P<scale>dora_scale)"
    r"|\.(?P<magnitude>lora_magnitude_vector)(?:\.\w+)*)$"
)
_SIDES = {"A": "down", "B": "up"}


@dataclass(frozen=True)
class Entries:
    """The tensors of one layer."""

    component: str
    """A component, `denoiser`, or nothing where the name has no prefix."""
    name: str
    """The module as the file has it, with dots or with underscores, without prefix and wrappers."""
    parts: dict[str, Tensor]
    """`down`, `up`, and where the file has them `alpha`, `dora_scale` and `lora_magnitude_vector`."""

    @property
    def underscored(self) -> str:
        return self.name.replace(".", "_")

    def __str__(self) -> str:
        return f"{self.component}.{self.name}" if self.component else self.name


def group(state: Mapping[str, Tensor]) -> list[Entries]:
    """The layers of a file's state. Raises: ModelError for entries that are not LoRA or DoRA, or a half of a pair."""
    groups: dict[tuple[str, str], dict[str, Tensor]] = {}
    for key, tensor in state.items():
        match = _SUFFIX.search(key)
        if match is None:
            raise ModelError(f"got {key}; wanted plain LoRA or DoRA (LoHa, LoKr and others cannot be converted)")
        component, name = _without_prefix(key[: match.start()])
        if old := match["old"]:
            in_text = component in TEXT_ENCODERS
            name += f".{old}_proj" if in_text else {"out": ".to_out.0"}.get(old, f".to_{old}")
        kinds = (_SIDES.get(match["letter"] or ""), match["side"], match["old_side"])
        kind = next(filter(None, (*kinds, match["alpha"], match["scale"], match["magnitude"])))
        parts = groups.setdefault((component, name), {})
        if kind in parts:
            raise ModelError(f"got {key}, a second {kind} of {name}; the file holds more than one LoRA")
        parts[kind] = tensor
    found = [Entries(component, name, parts) for (component, name), parts in groups.items()]
    for entries in found:
        _check(entries)
    return found


def _without_prefix(name: str) -> tuple[str, str]:
    name = _WRAPPERS.sub("", name)
    for prefix, component in PREFIXES.items():
        if name.startswith(prefix):
            return component, _WRAPPERS.sub("", name.removeprefix(prefix))
    return "", name


def _check(entries: Entries) -> None:
    down, up = entries.parts.get("down"), entries.parts.get("up")
    if down is None or up is None:
        missing = "down" if down is None else "up"
        raise ModelError(f"got {entries} without its {missing} weight; the file is incomplete")
    if down.ndim not in (2, 4) or up.ndim != down.ndim or up.shape[1] != down.shape[0]:
        raise ModelError(
            f"got {entries} with down {list(down.shape)} and up {list(up.shape)}; wanted [rank, in] and [out, rank], "
            "or their convolution forms"
        )
    magnitude = entries.parts.get("dora_scale")
    if magnitude is not None and magnitude.numel() != up.shape[0]:
        raise ModelError(
            f"got {entries}.dora_scale of shape {list(magnitude.shape)}; wanted one value for each of {up.shape[0]} "
            "outputs: diffusers has no DoRA over inputs"
        )

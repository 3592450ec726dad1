"""Group the entries of a LoRA file by layer, whichever program wrote it.

A name is a component's prefix, the module and a suffix. Prefixes, except diffusers' and sd-scripts' own: `transformer.
base_model.model.` (SimpleTuner, peft), `_orig_mod.` (torch.compile), `diffusion_model.` and `text_encoders.` (ComfyUI,
ai-toolkit), `lora_transformer_` (OneTrainer), `lycoris_` (SimpleTuner's LyCORIS), `clip_l.` and `clip_g.` (OMI).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from lightning_aigc.diffusion.lora.names import TEXT_ENCODER, TEXT_ENCODER_2, TRANSFORMER, UNET
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
    r"|\.lora_(?P<letter>[AB])(?:\.(?!weight$|bias$)\w+)?(?:\.weight)?"
    r"|\.lora(?:_linear_layer)?[._](?P<side>down|up)(?:\.(?!weight$)\w+)?\.weight"
    r"|\.(?P<alpha>alpha)"
    r"|\.(?P<scale>dora_scale)"
    r"|\.(?P<magnitude>lora_magnitude_vector)(?:\.\w+)*)$"
)
OTHER_KINDS = {
    "LoHa": r"\.hada_\w+$",
    "LoKr": r"\.lokr_\w+$",
    "OFT": r"\.(oft_\w+|oft_R(\.\w+)*)$",
    "GLoRA": r"\.[ab][12]\.weight$",
    "IA3": r"\.(on_input|ia3_l(\.\w+)*)$",
    "VeRA": r"\.vera_\w+(\.\w+)*$",
    "a LoRA in Tucker's form": r"\.lora_mid\.weight$",
    "a LoRA with biases": r"\.(lora_[AB](\.\w+)?|lora_(down|up))\.bias$",
    "a LoRA with trained norms": r"\.[wb]_norm$",
    "whole differences of weights": r"\.diff(_b)?$",
    "an embedding of new words": r"^(bundle_emb\.|emb_params$|string_to_param)",
    "a LoRA with layers that were trained whole": r"^(unet|transformer|text_encoder\w*)\.[\w.]+\.(weight|bias)$",
    "a whole model": r"\.(weight|bias)$",
}
"""Patterns of a key by the kind of file that has it; the first that is found counts."""
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
            raise not_lora(state)
        component, name = without_prefix(key[: match.start()])
        if old := match["old"]:
            in_text = component in TEXT_ENCODERS
            name += f".{old}_proj" if in_text else {"out": ".to_out.0"}.get(old, f".to_{old}")
        kinds = (_SIDES.get(match["letter"] or ""), match["side"], match["old_side"])
        kind = next(filter(None, (*kinds, match["alpha"], match["scale"], match["magnitude"])))
        parts = groups.setdefault((component, name), {})
        if kind in parts:
            raise ModelError(f"got {key}, a second {kind} of {name}; the file holds more than one LoRA")
        # Sums and products of a file's layers are computed in its dtype; float16 holds every float8 value.
        parts[kind] = tensor.half() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor
    found = [Entries(component, name, parts) for (component, name), parts in groups.items()]
    for entries in found:
        _check(entries)
    return found


def not_lora(keys: Iterable[str]) -> ModelError:
    """The error for a file with these entries, some of which are of another kind than LoRA; it names the kind."""
    keys = sorted(keys)
    others = [key for key in keys if _SUFFIX.search(key) is None]
    kind, key = next(
        ((kind, key) for kind, pattern in OTHER_KINDS.items() for key in others if re.search(pattern, key)),
        ("nothing that is known here", ", ".join(others[:2]) or "no entry"),
    )
    if kind == "a whole model":
        remedy = "load it with model.init_args.pretrained_model_name_or_path"
    elif kind == "OFT":
        remedy = (
            "peft, by which adapters are loaded here, turns a layer's inputs and other programs its outputs, so that"
            " nothing converts it exactly; merge it into its base model by the program that trained it"
        )
    else:
        remedy = "merge it into its base model by the program that trained it"
    return ModelError(f"got {kind} ({key}), not LoRA weights; wanted plain LoRA or DoRA: {remedy}")


def without_prefix(name: str) -> tuple[str, str]:
    """The component of a name's prefix, or nothing, and the rest without wrappers."""
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
    if down.ndim not in (2, 4) or not down.shape[0] or up.ndim != down.ndim or up.shape[1] != down.shape[0]:
        raise ModelError(
            f"got {entries} with down {list(down.shape)} and up {list(up.shape)}; wanted [rank, in] and [out, rank], "
            "or their convolution forms"
        )
    for kind, tensor in entries.parts.items():
        if kind == "alpha" and tensor.numel() != 1:
            raise ModelError(
                f"got {entries}.alpha of shape {list(tensor.shape)}; wanted one value: export the file again"
            )
        if not tensor.is_floating_point() and kind != "alpha":
            raise ModelError(
                f"got {entries} in {str(tensor.dtype).removeprefix('torch.')}, a quantized LoRA; wanted float32, "
                "bfloat16, float16 or float8: write it unquantized by the program that trained it"
            )
        if not tensor.isfinite().all():
            raise ModelError(
                f"got {entries} with values that are not finite: the training diverged; use a file of an earlier step"
            )
    magnitude = entries.parts.get("dora_scale")
    if magnitude is not None and magnitude.numel() != up.shape[0]:
        raise ModelError(
            f"got {entries}.dora_scale of shape {list(magnitude.shape)}; wanted one value for each of {up.shape[0]} "
            "outputs: diffusers has no DoRA over inputs"
        )

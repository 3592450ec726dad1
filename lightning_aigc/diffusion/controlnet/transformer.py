"""Load a ControlNet of a diffusion transformer, or make one from the transformer, and write it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn

from lightning_aigc.diffusion.controlnet.unet import KEY, check_same_settings, load_controlnet
from lightning_aigc.diffusion.families import Components, TransformerControl, TransformerFamily
from lightning_aigc.diffusion.pipeline.saving import deferred, replaced_folder, save_part
from lightning_aigc.diffusion.pipeline.tensor_stream import write_tensors
from lightning_aigc.errors import ModelError

CHANNELS = 3
"""Channels of a condition, as the autoencoder reads it."""
LAYERS = ("num_layers", "num_single_layers")
"""Arguments that say how many blocks of a kind a new ControlNet has."""
SAME = (
    "in_channels", "patch_size", "num_attention_heads", "attention_head_dim", "joint_attention_dim",
    "pooled_projection_dim", "all_patch_size", "dim", "n_heads", "n_kv_heads", "n_refiner_layers", "qk_norm",
)  # fmt: skip
"""Keys in which the configs of a ControlNet and its transformer agree."""
ONE_PICTURE: Mapping[str, Any] = {
    "num_mode": None, "conditioning_embedding_channels": None, "extra_conditioning_channels": 0,
    "extra_condition_channels": 0, "use_pos_embed": True,
}  # fmt: skip
"""Config entries, or their defaults, of a ControlNet that reads the latents of one image only."""


def make_controlnet(
    components: Components, name_or_path: str | None, revision: str | None = None, **layers: int | None
) -> Any:
    """A ControlNet of this pipeline in float32, frozen: a copy of the transformer's first blocks, or a given one.

    layers: how many blocks a new one has, by `LAYERS`; None is the family's own number.
    Raises: ModelError for one that cannot be loaded or is of another base, or a number of blocks that cannot be.
    """
    control = control_of(components)
    kind: Any = getattr(diffusers, control.network)
    if name_or_path is None:
        made = _copy(kind, control, components, layers)
    else:
        if given := [name for name in LAYERS if layers.get(name) is not None]:
            raise ModelError(
                f"model.init_args.{given[0]} is of a new ControlNet, and {KEY} gives one; leave one of them"
            )
        made = load_controlnet(kind, name_or_path, revision)
        check_fits(made, components, name_or_path)
    control.lend(made, components.denoiser)
    components.family.prepare(made, components)
    return made.requires_grad_(False).eval()


def train_all(controlnet: Any, family: TransformerFamily) -> None:
    """Let all layers of a ControlNet take gradients, except those whose output nothing reads."""
    unread = family.unread_layers(controlnet)
    for name, parameter in controlnet.named_parameters():
        parameter.requires_grad_(not name.startswith(unread))


def check_fits(controlnet: Any, components: Components, name: str) -> None:
    """Raise ModelError if a ControlNet belongs to another base, or reads something else than one image's latents."""
    for key, wanted in ONE_PICTURE.items():
        found = controlnet.config.get(key, wanted)
        if found != wanted:
            raise ModelError(
                f"{KEY}: {name} reads more than one image's latents (its {key} is {found}), which is not trained"
                " here; use a ControlNet without that, or null to begin from the transformer"
            )
    shared = [key for key in SAME if key in controlnet.config and key in components.denoiser.config]
    check_same_settings(controlnet, components, name, shared)
    if misfit := control_of(components).misfit(controlnet, components.denoiser):
        raise ModelError(f"{KEY}: {name} {misfit}; use one that was trained for this base")


def save_controlnet(folder: Path, single_file: Path, controlnet: nn.Module, dtype: torch.dtype | None) -> None:
    """Write a diffusers folder, and next to it the same weights as a single file under diffusers' names."""
    with replaced_folder(folder) as unfinished:
        save_part(unfinished, controlnet, dtype)
    write_tensors(single_file, deferred(controlnet, dtype))


def control_of(components: Components) -> TransformerControl:
    """The ControlNet of the pipeline's family."""
    control = components.family.control
    assert isinstance(control, TransformerControl)
    return control


def _copy(kind: Any, control: TransformerControl, components: Components, layers: Mapping[str, int | None]) -> Any:
    """A ControlNet that starts with the transformer's weights and zero residuals.

    diffusers' `from_transformer` writes SD 3's number of blocks into the transformer's own config, and leaves
    Qwen-Image's norm of the text out.
    """
    transformer = components.denoiser
    known = inspect.signature(kind.__init__).parameters
    config = {key: value for key, value in transformer.config.items() if key in known}
    made = kind(**{**config, **control.control_config(transformer, _counts(control, components, layers))})
    made.load_state_dict(control.copied_weights(made, transformer), strict=False)
    return made.to(transformer.device)


def _counts(control: TransformerControl, components: Components, layers: Mapping[str, int | None]) -> dict[str, int]:
    """The numbers of blocks of a new ControlNet, by kind. Raises: ModelError for an invalid number."""
    counts, has = {}, control.block_counts(components.denoiser)
    for name in LAYERS:
        asked = layers.get(name)
        if name not in has:
            if asked is not None:
                raise ModelError(
                    f"model.init_args.{name}: {components.family.pipeline} has no such blocks; leave it null"
                )
            continue
        blocks = has[name]
        possible = control.control_counts(blocks) + ([0] if name != LAYERS[0] else [])
        if asked is not None and asked not in possible:
            raise ModelError(
                f"model.init_args.{name}: the transformer's {blocks} blocks do not read {asked} of a ControlNet's, each"
                f" at least once; use one of {', '.join(map(str, sorted(possible)))}"
            )
        usual = max((n for n in possible if n <= control.layers[name]), default=0)
        counts[name] = usual if asked is None else asked
    return counts

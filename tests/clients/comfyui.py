"""ComfyUI's own loading code, imported from the checkout that the environment variable COMFYUI names.

Its detection finds a model by the sizes of the published ones. `small_sizes` tells it the sizes of small models; all
else that runs is ComfyUI's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

MODULES = (
    "controlnet", "diffusers_convert", "lora", "model_detection", "model_management", "sd", "sd1_clip", "sdxl_clip",
    "supported_models", "utils",
)  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "flux": {"num_heads": 4, "axes_dim": [4, 6, 6]},
    "chroma": {
        "num_heads": 4, "axes_dim": [4, 6, 6], "in_dim": 16, "out_dim": 64, "hidden_dim": 32, "n_layers": 2,
    },
    "flux2": {"num_heads": 4, "axes_dim": [4, 4, 4, 4], "out_channels": 16},
    "lumina2": {
        "in_channels": 4, "n_heads": 4, "n_kv_heads": 4, "axes_dims": [96, 96, 96], "axes_lens": [600, 64, 64],
        "rope_theta": 256.0, "ffn_dim_multiplier": 8 / 3, "z_image_modulation": True, "time_scale": 1000.0,
        "pad_tokens_multiple": 32,
    },
    "qwen_image": {
        "num_attention_heads": 4, "attention_head_dim": 16, "joint_attention_dim": 32, "axes_dims_rope": (4, 6, 6),
        "out_channels": 4,
    },
}  # fmt: skip
"""Sizes of the small models in `shapes`, under ComfyUI's names."""


def import_comfyui(folder: Path) -> SimpleNamespace:
    """ComfyUI's modules, for a machine without a GPU."""
    sys.path.insert(0, str(folder))
    with mock.patch.object(sys, "argv", [sys.argv[0], "--cpu"]):
        import comfy.options

        comfy.options.enable_args_parsing()
        import comfy.controlnet
        import comfy.diffusers_convert
        import comfy.lora
        import comfy.sd
        import comfy.sdxl_clip
    return SimpleNamespace(**{name: getattr(comfy, name) for name in MODULES})


@contextmanager
def small_sizes(comfy: Any) -> Iterator[None]:
    """Have the detection answer for a small model as for the published one that it is in all but sizes."""
    detect = comfy.model_detection.detect_unet_config
    models = comfy.supported_models.models

    def detected(tensors: Mapping[str, Tensor], prefix: str, *arguments: Any, **options: Any) -> Any:
        config = detect(tensors, prefix, *arguments, **options)
        if config is None:
            return None
        config |= SIZES.get(config.get("image_model"), {})
        names = {"lumina2": "ZImage"}
        if "model_channels" in config:
            names[None] = "SDXL" if config["adm_in_channels"] else "SD15"  # type: ignore[index]
        if (name := names.get(config.get("image_model"))) is not None:  # told apart by its width
            published = getattr(comfy.supported_models, name)
            keys = {key: config[key] for key in published.unet_config if key in config}
            models.insert(0, type(f"Small{name}", (published,), {"unet_config": keys}))
        return config

    known = list(models)
    with mock.patch.object(comfy.model_detection, "detect_unet_config", detected):
        try:
            yield
        finally:
            models[:] = known


def load_denoiser(comfy: Any, tensors: Mapping[str, Tensor]) -> Any:
    """A ModelPatcher of a diffusion model in any layout that ComfyUI knows; fails if a tensor has no place."""
    with small_sizes(comfy), no_warnings():
        patcher = comfy.sd.load_diffusion_model_state_dict(dict(tensors), model_options={"dtype": torch.float32})
    assert patcher is not None, "ComfyUI does not recognise the model"
    return patcher


@contextmanager
def no_warnings() -> Iterator[None]:
    """Fail on ComfyUI's warnings, which name tensors and keys that it leaves out."""
    said: list[str] = []
    with mock.patch(
        "logging.warning", lambda message, *values: said.append(str(message) % values if values else str(message))
    ):
        yield
    assert said == [], said


def weights(comfy: Any, patcher: Any) -> dict[str, Tensor]:
    """The weights with the patches added, as ComfyUI does before it samples."""
    comfy.model_management.load_models_gpu([patcher], force_patch_weights=True, force_full_load=True)
    found = {name: tensor.detach().clone() for name, tensor in patcher.model.state_dict().items()}
    comfy.model_management.unload_all_models()
    return found

"""Save a pipeline as a diffusers folder and as a single-file checkpoint, each weight written as it arrives."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
import yaml
from torch import Tensor, nn

from lightning_aigc.atomic_file import atomic_file
from lightning_aigc.diffusion.families import Components, TransformerFamily
from lightning_aigc.diffusion.pipeline.generate import make_pipeline
from lightning_aigc.diffusion.pipeline.saved_schedule import V_PREDICTION, header_of, markers_of
from lightning_aigc.diffusion.pipeline.single_file_names import (
    UNET,
    VAE,
    clip_name,
    open_clip_tensors,
    original_tensors,
    unet_names,
    vae_name,
    vae_tensor,
)
from lightning_aigc.diffusion.pipeline.tensor_stream import DeferredTensor, write_tensors
from lightning_aigc.embedded import resolve
from lightning_aigc.errors import ModelError
from lightning_aigc.sharding.local_parts import original_class

DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
"""The floating-point names of safetensors."""
WEIGHTS = {"diffusers": "diffusion_pytorch_model.safetensors", "transformers": "model.safetensors"}


def save_folder(
    folder: Path,
    components: Components,
    trained: Mapping[str, nn.Module],
    dtype: torch.dtype | None,
    schedule: Mapping[str, Any] | None = None,
) -> None:
    """Write a pipeline folder, replacing one of that name; components that were not trained keep their files.

    dtype: of the trained components' weights; None keeps theirs.
    schedule: config of the scheduler that the run draws with; None is the pipeline's own.
    Raises: ModelError if it cannot be written.
    """
    pipeline = make_pipeline(components, schedule or components.scheduler_config)
    source = resolve(components.source)
    with replaced_folder(folder) as unfinished:
        for name, component in pipeline.components.items():
            if isinstance(component, nn.Module):
                if name not in trained and (source / name).is_dir():
                    shutil.copytree(source / name, unfinished / name)
                else:
                    save_part(unfinished / name, component, dtype if name in trained else None)
            elif component is not None:
                component.save_pretrained(unfinished / name)
            elif (source / name).is_dir():  # text encoders that have left memory
                shutil.copytree(source / name, unfinished / name)
        described = source / "model_index.json"
        if described.is_file():
            index = json.loads(described.read_text(encoding="utf-8"))
            index["scheduler"] = ["diffusers", type(pipeline.scheduler).__name__]
        else:
            pipeline.save_config(unfinished)
            index = json.loads((unfinished / "model_index.json").read_text(encoding="utf-8"))
            for name, component in pipeline.components.items():
                if isinstance(component, nn.Module):  # FSDP puts a class of its own in the place of a sharded one's
                    own = original_class(component)
                    index[name] = [own.__module__.split(".")[0], own.__name__]
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (unfinished / "model_index.json").write_text(text, encoding="utf-8")
        load_in_float32(unfinished)


def load_in_float32(folder: Path) -> None:
    """Set the configs so that transformers loads float32 by default, as diffusers does.

    transformers 5 follows the dtype in `config.json`: a half-precision text encoder would meet a float32 U-Net. Drop
    this once diffusers passes one dtype to all components.
    """
    for path in folder.glob("*/config.json"):
        config = json.loads(path.read_text(encoding="utf-8"))
        if "architectures" in config:  # written by transformers, not by diffusers
            config.pop("torch_dtype", None)
            path.write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n", encoding="utf-8")


def save_part(folder: Path, component: Any, dtype: torch.dtype | None) -> None:
    """Write one network's config and weights, as its library's `from_pretrained` reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(component, "save_config"):
        component.save_config(folder)
        _name_own_class(folder / "config.json", component)
        file = WEIGHTS["diffusers"]
    else:
        component.config.architectures = [original_class(component).__name__]
        component.config.save_pretrained(folder)
        file = WEIGHTS["transformers"]
    write_tensors(folder / file, deferred(component, dtype))


def _name_own_class(config: Path, component: nn.Module) -> None:
    """Put the class's own name in a config that diffusers wrote of a sharded module, whose class FSDP renames."""
    described = json.loads(config.read_text(encoding="utf-8"))
    if described["_class_name"] != original_class(component).__name__:
        described["_class_name"] = original_class(component).__name__
        config.write_text(json.dumps(described, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def save_transformer(
    path: Path, components: Components, dtype: torch.dtype | None, schedule: Mapping[str, Any]
) -> None:
    """Write the transformer alone, under names that ComfyUI reads as a diffusion model (see `original_tensors`)."""
    tensors: Mapping[str, DeferredTensor] = deferred(components.denoiser, dtype)
    if isinstance(components.family, TransformerFamily):
        markers = components.family.marker_tensors(components.denoiser)
        tensors = original_tensors(tensors, components.family)
        tensors = {**tensors, **{name: DeferredTensor.of(tensor) for name, tensor in markers.items()}}
    write_tensors(path, tensors, header_of(schedule))


def save_single_file(
    path: Path,
    components: Components,
    trained: Mapping[str, nn.Module],
    dtype: torch.dtype | None,
    schedule: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint under the names of the original code, as ComfyUI, A1111 and `from_single_file` read them.

    dtype: of all weights; None keeps theirs, of components that were not trained those of their files.
    schedule: config of the scheduler that the run draws with, for the markers of v-prediction and zero terminal SNR.
    """
    schedule = components.scheduler_config if schedule is None else schedule
    markers = markers_of(schedule)
    write_tensors(path, dict(single_file_tensors(components, trained, dtype)) | markers, header_of(schedule))
    if V_PREDICTION in markers and components.family.name == "sd":
        write_a1111_config(path.with_suffix(".yaml"), components, schedule)


def single_file_tensors(
    components: Components, trained: Mapping[str, nn.Module], dtype: torch.dtype | None
) -> Iterator[tuple[str, DeferredTensor]]:
    """The checkpoint's names and tensors, in memory only when they are written."""
    source = resolve(components.source)

    def tensors_of(name: str, module: nn.Module) -> dict[str, DeferredTensor]:
        return deferred(module, dtype, None if name in trained else source / name)

    unet = tensors_of("unet", components.denoiser)
    layers = components.denoiser.config.layers_per_block
    if not isinstance(layers, int):
        raise ModelError(f"a single file holds U-Nets of as many layers in each block, got layers_per_block={layers}")
    for name, new in unet_names(unet, layers).items():
        yield f"{UNET}{new}", unet[name]
    blocks = len(components.vae.config.up_block_types)
    for name, tensor in tensors_of("vae", components.vae).items():
        yield f"{VAE}{vae_name(name, blocks)}", vae_tensor(name, tensor)
    for number, encoder in enumerate(components.text_encoders):
        tensors = tensors_of("text_encoder_2" if number else "text_encoder", encoder)
        is_open_clip = encoder.config.hidden_act == "gelu" or number == 1  # type: ignore[union-attr]
        prefix = f"conditioner.embedders.{number}." if components.family.name == "sdxl" else "cond_stage_model."
        if is_open_clip:
            for name, tensor in open_clip_tensors(tensors):
                yield f"{prefix}model.{name}", tensor
        else:
            for name, tensor in tensors.items():
                yield f"{prefix}transformer.{clip_name(name)}", tensor


def deferred(module: nn.Module, dtype: torch.dtype | None, folder: Path | None = None) -> dict[str, DeferredTensor]:
    """A module's state; out of the one weights file of `folder`, if that has the same names and so all their bits."""
    state = module.state_dict()
    for file in WEIGHTS.values():
        if folder is not None and (folder / file).is_file():
            with safetensors.safe_open(folder / file, framework="pt") as opened:
                if set(opened.keys()) == state.keys():
                    return {name: _stored(folder / file, name, dtype) for name in state}
    return {name: DeferredTensor.of(tensor, dtype) for name, tensor in state.items()}


def _stored(path: Path, name: str, dtype: torch.dtype | None) -> DeferredTensor:
    def make() -> Tensor:
        with safetensors.safe_open(path, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor

    with safetensors.safe_open(path, framework="pt") as opened:
        described = opened.get_slice(name)
        return DeferredTensor(tuple(described.get_shape()), dtype or DTYPES[described.get_dtype()], make)


@contextlib.contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """A new folder that takes the place of `folder` when the block ends, and disappears when the block raises.

    Raises: ModelError if the disk is full or the folder cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
            unfinished = Path(temporary) / "new"
            unfinished.mkdir()
            yield unfinished
            if folder.exists():
                folder.rename(Path(temporary) / "old")
            unfinished.rename(folder)
    except OSError as error:
        raise ModelError(
            f"cannot write {folder}: {error.strerror or error}; free some space, or choose another default_root_dir"
        ) from error


LDM = "ldm.modules"


def write_a1111_config(path: Path, components: Components, schedule: Mapping[str, Any]) -> None:
    """Write the YAML at `path`; nothing for widths that are no multiples of the first, as the original code wants."""
    unet, vae, encoder = components.denoiser.config, components.vae.config, components.text_encoders[0].config
    if any(width % net.block_out_channels[0] for net in (unet, vae) for width in net.block_out_channels):
        return
    is_open_clip = encoder.hidden_act == "gelu"  # type: ignore[union-attr]
    channels, vae_channels = unet.block_out_channels, vae.block_out_channels
    heads = unet.attention_head_dim  # diffusers' name of the number of heads
    shape: dict[str, Any] = {
        "image_size": 32, "in_channels": unet.in_channels, "out_channels": unet.out_channels,
        "model_channels": channels[0], "num_res_blocks": unet.layers_per_block,
        "attention_resolutions": [2**n for n, kind in enumerate(unet.down_block_types) if "CrossAttn" in kind][::-1],
        "channel_mult": [width // channels[0] for width in channels], "use_spatial_transformer": True,
        "transformer_depth": 1, "context_dim": unet.cross_attention_dim, "use_checkpoint": True, "legacy": False,
    }  # fmt: skip
    if isinstance(heads, int):
        shape["num_heads"] = heads
    else:
        shape |= {"num_head_channels": channels[0] // heads[0], "use_linear_in_transformer": True}
    first_stage = {
        "double_z": True, "z_channels": vae.latent_channels, "resolution": 256, "in_channels": 3, "out_ch": 3,
        "ch": vae_channels[0], "ch_mult": [width // vae_channels[0] for width in vae_channels],
        "num_res_blocks": vae.layers_per_block, "attn_resolutions": [], "dropout": 0.0,
    }  # fmt: skip
    text = {"freeze": True, "layer": "penultimate"} if is_open_clip else {}
    params = {
        "parameterization": "v", "linear_start": schedule["beta_start"], "linear_end": schedule["beta_end"],
        "timesteps": schedule["num_train_timesteps"], "num_timesteps_cond": 1, "log_every_t": 200,
        "first_stage_key": "jpg", "cond_stage_key": "txt", "image_size": unet.sample_size,
        "channels": unet.in_channels, "cond_stage_trainable": False, "conditioning_key": "crossattn",
        "monitor": "val/loss_simple_ema", "scale_factor": vae.scaling_factor, "use_ema": False,
        "unet_config": {"target": f"{LDM}.diffusionmodules.openaimodel.UNetModel", "params": shape},
        "first_stage_config": {
            "target": "ldm.models.autoencoder.AutoencoderKL",
            "params": {"embed_dim": vae.latent_channels, "monitor": "val/rec_loss", "ddconfig": first_stage,
                       "lossconfig": {"target": "torch.nn.Identity"}},
        },
        "cond_stage_config": {
            "target": f"{LDM}.encoders.modules.Frozen{'OpenCLIP' if is_open_clip else 'CLIP'}Embedder", "params": text,
        },
    }  # fmt: skip
    model = {"base_learning_rate": 1.0e-4, "target": "ldm.models.diffusion.ddpm.LatentDiffusion", "params": params}
    with atomic_file(path) as file:
        file.write(yaml.safe_dump({"model": model}, sort_keys=False).encode())

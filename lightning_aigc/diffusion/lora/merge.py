"""Merge a LoRA into the weights of a diffusers pipeline folder or a single-file checkpoint."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor, nn

from lightning_aigc.atomic_file import require_writable
from lightning_aigc.diffusion.families import TRANSFORMERS, Components
from lightning_aigc.diffusion.lora import base_model as lora_base_model
from lightning_aigc.diffusion.lora import file as lora_file
from lightning_aigc.diffusion.lora import layouts as lora_layouts
from lightning_aigc.diffusion.lora.layers import LoRALayer
from lightning_aigc.diffusion.lora.lycoris import FactorLayer
from lightning_aigc.diffusion.lora.metadata import serialize, write_atomically
from lightning_aigc.diffusion.pipeline.loading import PIPELINES, no_missing_weights, quiet_local_loading
from lightning_aigc.diffusion.pipeline.saved_schedule import merged_scheduler
from lightning_aigc.diffusion.pipeline.saving import DTYPES, load_in_float32, save_single_file
from lightning_aigc.diffusion.pipeline.single_file import load_single_file
from lightning_aigc.diffusion.pipeline.single_file_names import UNET, VAE
from lightning_aigc.embedded import resolve
from lightning_aigc.errors import ModelError

SINGLE_FILE = ".safetensors"
"""Ending of an output that is a single-file checkpoint."""


def merge_into_pipeline(
    lora_path: str | Path,
    pipeline: str | Path,
    output: str | Path,
    strength: float = 1.0,
    base_model: str | None = None,
) -> Path:
    """Write the pipeline with the LoRA added to its weights; returns `output`.

    The output is written atomically. Each component keeps the precision of its file in `pipeline`, and
    `from_pretrained` without a dtype loads all of them in float32, so that they fit together.

    Args:
        pipeline: A diffusers pipeline folder, or a single-file checkpoint of Stable Diffusion or SDXL.
        output: A new or empty folder; for a U-Net's pipeline also the name of a new `.safetensors` file, the
            single-file checkpoint that ComfyUI and A1111 read.
        strength: 0 is the base model, 1 the LoRA as trained; for DoRA too, values between interpolate the weights.
        base_model: Whose LoRA it is, where the file does not tell.

    Raises: ModelError if a folder is wrong or not empty, or the LoRA has layers that the pipeline lacks.
    """
    source, output = resolve(str(pipeline)), Path(output)
    lora_base_model.check_base_model(base_model)
    lora = lora_file.read_lora(lora_path)
    if not (source.is_file() or (source / "model_index.json").is_file()):
        raise ModelError(
            f"got {source}; wanted a diffusers pipeline folder with model_index.json, or a single-file checkpoint"
        )
    if base_model is None and lora_base_model.named_base_model(lora.metadata) is None and source.is_dir():
        base_model = _family_of(source)
    layers = lora.factor_layers(base_model) if lora.has_factors else lora.layers(base_model)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ModelError(f"got output {output}, which already exists; name a new or empty folder, or a new file")
    try:
        require_writable(output)
    except OSError as error:
        raise ModelError(f"cannot write {output}: {error.strerror or error}; choose another folder") from error
    merged = _load(source)
    family = PIPELINES.get(type(merged).__name__)
    if output.suffix == SINGLE_FILE and (family is None or family.is_flow):
        raise ModelError(f"got output {output}; a single file holds Stable Diffusion or SDXL, so name a folder")
    _check_fit(lora_path, layers, merged)
    _fuse(merged, layers, strength)
    merged.register_modules(scheduler=merged_scheduler(lora.metadata, merged))
    for name, component in merged.components.items():
        if isinstance(component, nn.Module):
            nn.Module.to(component, _stored_dtype(source, name))  # not diffusers' own, which advises against it
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.suffix == SINGLE_FILE:
            if output.is_dir():
                output.rmdir()
            save_single_file(output, _components(merged, source), merged.components, None)
        else:
            _write_folder(merged, output)
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelError(f"cannot write {output}: {error}; free some space or choose another folder") from error
    return output


def _load(source: Path) -> Any:
    """The pipeline in float32. Raises: ModelError"""
    from diffusers import DiffusionPipeline

    try:
        with no_missing_weights(str(source), "--merge_into"), quiet_local_loading(True):
            if source.is_file():
                return load_single_file(source, dict.fromkeys(("unet", "vae"), torch.float32))
            absent = _absent_parts(source)
            return DiffusionPipeline.from_pretrained(source, local_files_only=True, dtype=torch.float32, **absent)
    except ModelError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError, safetensors.SafetensorError) as error:
        raise ModelError(f"cannot load the pipeline in {source}: {error}") from error


def _write_folder(pipeline: Any, output: Path) -> None:
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as temporary:
        unfinished = Path(temporary) / "pipeline"
        with quiet_local_loading(True):
            pipeline.save_pretrained(unfinished)
        load_in_float32(unfinished)
        if output.exists():
            output.rmdir()
        shutil.move(unfinished, output)


def _components(pipeline: Any, source: Path) -> Components:
    encoders = (getattr(pipeline, name, None) for name in ("text_encoder", "text_encoder_2"))
    return Components(
        family=PIPELINES[type(pipeline).__name__],
        denoiser=pipeline.unet,
        vae=pipeline.vae,
        text_encoders=tuple(encoder for encoder in encoders if encoder is not None),
        tokenizers=(),
        scheduler_config=pipeline.scheduler.config,
        source=str(source),
    )


def _absent_parts(pipeline_dir: Path) -> dict[str, None]:
    """Parts that a folder's index has as null; diffusers 0.42 wants these named where its pipeline has no default."""
    index = json.loads((pipeline_dir / "model_index.json").read_text(encoding="utf-8"))
    return {name: None for name, value in index.items() if value == [None, None]}


def _family_of(pipeline_dir: Path) -> str | None:
    """The family of a folder's transformer, which tells layers apart that several families name alike."""
    pipeline = json.loads((pipeline_dir / "model_index.json").read_text(encoding="utf-8")).get("_class_name")
    return next((name for name, family in TRANSFORMERS.items() if family.pipeline == pipeline), None)


def _fuse(pipeline: Any, found: Sequence[LoRALayer | FactorLayer], strength: float) -> None:
    """Load and fuse the LoRA at full strength with diffusers, then interpolate with the base weights.

    The change of a LoKr or LoHa is added as it is.
    """
    for layer in found:
        if isinstance(layer, FactorLayer):
            weight = pipeline.components[layer.component].get_submodule(layer.module).weight
            weight.data += strength * layer.delta(weight.shape)
    layers = [layer for layer in found if isinstance(layer, LoRALayer)]
    if not layers:
        return
    modules = [pipeline.components[layer.component].get_submodule(_module_name(pipeline, layer)) for layer in layers]
    base: list[Tensor] = [module.weight.detach().clone() for module in modules] if strength != 1.0 else []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "lora.safetensors"
        state, adapter_metadata = lora_layouts.to_diffusers(layers)
        write_atomically(file, serialize(state, {lora_layouts.ADAPTER_METADATA_KEY: adapter_metadata}))
        pipeline.load_lora_weights(folder, weight_name=file.name)
    components = sorted({layer.component for layer in layers})
    pipeline.fuse_lora(components=components, safe_fusing=False)
    pipeline.unload_lora_weights()
    with torch.no_grad():
        for module, weight in zip(modules, base, strict=False):
            module.weight.copy_(torch.lerp(weight, module.weight, strength))


def _module_name(pipeline: Any, layer: LoRALayer | FactorLayer) -> str:
    """The layer's module name in this pipeline; CLIP has no inner `text_model` in transformers 5."""
    if hasattr(pipeline.components[layer.component], "text_model"):
        return layer.module
    return layer.module.removeprefix("text_model.")


def _check_fit(lora_path: str | Path, layers: Sequence[LoRALayer | FactorLayer], pipeline: Any) -> None:
    for layer in layers:
        model = pipeline.components.get(layer.component)
        modules = dict(model.named_modules()) if model is not None else {}
        weight = getattr(modules.get(_module_name(pipeline, layer)) if model is not None else None, "weight", None)
        wanted = (*layer.shape, *(layer.down.shape[2:] if isinstance(layer, LoRALayer) else ()))
        if weight is None or not _fits(layer, wanted, weight.shape):
            found = "which the pipeline lacks" if weight is None else f"which is {list(weight.shape)} in the pipeline"
            raise ModelError(
                f"got {lora_path} with a layer of {list(wanted)} on {layer.component}.{layer.module}, {found}; "
                "the LoRA was trained on another kind of model"
            )


def _fits(layer: LoRALayer | FactorLayer, wanted: tuple[int, ...], shape: torch.Size) -> bool:
    return layer.fits(shape) if isinstance(layer, FactorLayer) else tuple(shape) == wanted


PREFIXES = {"unet": (UNET,), "vae": (VAE,)}
"""Names of a component's tensors in a single file; others belong to text encoders."""
TEXT_ENCODERS = ("cond_stage_model.", "conditioner.embedders.")


def _stored_dtype(source: Path, component: str) -> torch.dtype:
    """The narrowest dtype that holds all floating-point tensors of a component's files; float32 without any."""
    found: torch.dtype | None = None
    prefixes = PREFIXES.get(component, TEXT_ENCODERS) if source.is_file() else ("",)
    for path in _weights_of(source, component):
        with safetensors.safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                dtype = DTYPES.get(file.get_slice(key).get_dtype()) if key.startswith(prefixes) else None
                if dtype is not None:
                    found = dtype if found is None else torch.promote_types(found, dtype)
    return found or torch.float32


def _weights_of(source: Path, component: str) -> Iterable[Path]:
    if source.is_file():
        return [source] if source.suffix == SINGLE_FILE else []
    files = (source / component).glob(f"*{SINGLE_FILE}")
    return (path for path in files if "." not in path.stem)  # else a variant that was not loaded: model.fp16

"""`denoiser_file`: a transformer's weights from one safetensors file, as ComfyUI keeps them, in float8 too.

diffusers renames the layers and builds the module from the pipeline's config; here each weight gets the scale that
ComfyUI's and NVIDIA's files keep next to it, which diffusers does not read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import safetensors
import torch
from diffusers.utils import logging as diffusers_logging
from torch import Tensor, nn

from lightning_aigc.diffusion.families import Family
from lightning_aigc.errors import ModelError

KEY = "model.init_args.denoiser_file"
PREFIXES = ("model.diffusion_model.", "diffusion_model.", "transformer.")
"""Prefixes of the denoiser's layers in files, the first in files of a whole pipeline."""
SCALES = (".weight_scale", ".scale_weight")
"""Ends of the names of a weight's scale."""
NOT_WEIGHTS = (".input_scale", ".scale_input", ".comfy_quant", "scaled_fp8")
"""Ends of the names of what only computing in 8 bits needs."""
FORMATS = ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise")
"""ComfyUI's names of the formats whose weight is its numbers times a scale."""
SCALED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


def find_file(name: str, key: str) -> Path:
    """The file of a local path, or of `owner/name/file.safetensors`, which is downloaded from the hub.

    Args: key: The setting that names it, for the error.

    Raises: ModelError for one that is nowhere.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if not _is_of_hub(name):
        raise ModelError(f"{key}: there is no file {name}; give a file, or owner/name/file.safetensors of the hub")
    from huggingface_hub import hf_hub_download

    owner, repository, file = name.split("/", 2)
    try:
        return Path(hf_hub_download(f"{owner}/{repository}", file))
    except Exception as error:  # the hub raises anything from OSError to its own errors here
        raise ModelError(
            f"{key}: {name} is no file here, and the hub did not give it ({type(error).__name__}); where there is a"
            f" network, run: hf download {owner}/{repository} {file}"
        ) from error


def _is_of_hub(name: str) -> bool:
    return name.count("/") >= 2 and not name.startswith((".", "/", "~"))


def check_denoiser_file(name: str | None, family: Family) -> None:
    """Raise ModelError for a family that takes no such file, a file of another kind, or a path without a file."""
    if name is None:
        return
    if not family.is_flow:
        raise ModelError(
            f"{KEY} is for transformers; for {family.title}, whose single files hold the whole pipeline, set"
            f" model.init_args.pretrained_model_name_or_path: {name}"
        )
    if not name.endswith((".safetensors", ".sft")):
        raise ModelError(f"{KEY}: {name} is no safetensors file; give the model's file in bf16 or float8")
    if not _is_of_hub(name):
        find_file(name, KEY)


def load_denoiser_file(name: str, family: Family, pipeline: str, revision: str | None, dtype: torch.dtype) -> nn.Module:
    """The transformer with the weights of a file, in `dtype`.

    Args:
        name: As `find_file` takes it.
        pipeline: Folder or hub id of the pipeline, which has the transformer's config.

    Raises: ModelError for a file that cannot be read, or is of another model than the pipeline.
    """
    path = find_file(name, KEY)
    is_local = Path(pipeline).is_dir()
    where: dict[str, Any] = {"local_files_only": is_local, "revision": revision}
    index = getattr(diffusers, family.pipeline).load_config(pipeline, **where)
    config = {"config": pipeline, "subfolder": "transformer", "config_revision": revision, "local_files_only": is_local}
    state = read_state(path, dtype)
    verbosity = diffusers_logging.get_verbosity()
    diffusers_logging.set_verbosity_error()  # it lists every tensor of another model
    try:
        network: nn.Module = getattr(diffusers, index["transformer"][1]).from_single_file(state, **config)
    except Exception as error:  # the converters raise anything for names and shapes that they do not expect
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        reason = "it lacks some of the layers" if "meta tensor" in first_line else first_line
        raise ModelError(
            f"{KEY}: {name} does not load as the transformer of {pipeline}, a {family.title}: {reason}; give a file"
            " and a pipeline of the same model"
        ) from error
    finally:
        diffusers_logging.set_verbosity(verbosity)
    _cast_(network, dtype)
    return network


def _cast_(network: nn.Module, dtype: torch.dtype) -> None:
    """Cast the weights as diffusers' `from_pretrained` does, which keeps some modules of some families in float32."""
    kept = set(getattr(network, "_keep_in_fp32_modules", None) or ()) if dtype != torch.float32 else set()
    in_file = network.state_dict().keys()  # not the buffers that a config gives
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        if name in in_file and tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if kept.intersection(name.split(".")) else dtype)


def read_state(path: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """The denoiser's tensors of a file by name, without prefix; a scaled weight is its numbers times the scale.

    Args: dtype: Of scaled weights, rounded once from float32; other tensors keep the file's.

    Raises: ModelError for a file that cannot be read, and for weights of 4 bits or of a scale for each block.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            names = list(file.keys())
            prefix = next((each for each in PREFIXES if any(name.startswith(each) for name in names)), "")
            found = {name.removeprefix(prefix): file.get_tensor(name) for name in names if name.startswith(prefix)}
            header = json.loads((file.metadata() or {}).get("_quantization_metadata", "{}")).get("layers", {})
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ModelError(f"{KEY}: {path} cannot be read as safetensors ({error}); download it again") from error
    _check_formats(path, found, {name: each for name, each in header.items() if name.startswith(prefix)})
    scales = {name.removesuffix(end): found.pop(name) for end in SCALES for name in list(found) if name.endswith(end)}
    state = {}
    for name, tensor in found.items():
        scale = scales.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        if scale is not None:
            state[name] = _scaled(path, name, tensor, scale, dtype)
        elif not name.endswith(NOT_WEIGHTS):
            if not tensor.is_floating_point():
                raise _unread(path, name, f"{tensor.dtype} without a scale".replace("torch.", ""))
            state[name] = tensor
    return state


def _check_formats(path: Path, found: dict[str, Tensor], layers: dict[str, Any]) -> None:
    """Raise ModelError for a layer that header or tensors describe in a format other than `FORMATS`."""
    layers |= {name: json.loads(bytes(each.tolist())) for name, each in found.items() if name.endswith(".comfy_quant")}
    for name, described in layers.items():
        if described.get("format") not in FORMATS:
            raise _unread(path, name, f"in the format {described.get('format')}")


def _scaled(path: Path, name: str, numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    rows = scale.reshape(-1, *[1] * (numbers.ndim - 1))
    if numbers.dtype not in SCALED or len(rows) not in (1, len(numbers)):
        shape = "x".join(map(str, scale.shape))
        raise _unread(path, name, f"{numbers.dtype} with {shape} scales".replace("torch.", ""))
    return (numbers.float() * rows.float()).to(dtype)


def _unread(path: Path, name: str, kind: str) -> ModelError:
    return ModelError(
        f"{KEY}: {path} holds {name} {kind}; read are bf16, float16, float32, float8 and int8 with one scale for a"
        " weight or for each of its rows, so take such a file of the model, and set base_quantization for fewer bits"
    )

"""Write the objective of a run, prediction type, terminal SNR and flow shift, into its files, and read it back.

A folder has the scheduler that the run draws with. A single file of a U-Net has ComfyUI's and A1111's empty tensors
`v_pred` and `ztsnr` and the header `modelspec.prediction_type`; a LoRA has these headers and the scheduler's config.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import safetensors
import torch

from lightning_aigc.diffusion.families import FAMILIES, Family
from lightning_aigc.diffusion.pipeline.tensor_stream import DeferredTensor

SCHEDULER_KEY = "lightning_aigc.scheduler"
"""Header entry: the config of the scheduler that the run draws with, as JSON."""
PREDICTION_KEY, TERMINAL_KEY, SHIFT_KEY = "modelspec.prediction_type", "ss_zero_terminal_snr", "ss_discrete_flow_shift"
"""Header entries of ModelSpec and sd-scripts."""
V_PREDICTION, ZERO_TERMINAL_SNR = "v_pred", "ztsnr"
"""Names of the tensors that mark a single file."""


def scheduler_json(family: Family, config: Mapping[str, Any]) -> str:
    """The JSON of the scheduler that a run of this family draws with."""
    return json.dumps(json.loads(family.make_scheduler(config).to_json_string()), sort_keys=True)


def header_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The header entries of a scheduler's config that other programs read."""
    header = {}
    if "prediction_type" in config:
        kind = str(config["prediction_type"])
        header[PREDICTION_KEY] = "v" if kind == "v_prediction" else kind
        if config.get("rescale_betas_zero_snr"):
            header[TERMINAL_KEY] = "True"
    elif not config.get("use_dynamic_shifting"):
        header[SHIFT_KEY] = f"{config.get('shift', 1.0):.9g}"
    return header


def markers_of(config: Mapping[str, Any]) -> dict[str, DeferredTensor]:
    """The tensors that mark a single file."""
    header = header_of(config)
    names = [V_PREDICTION] if header.get(PREDICTION_KEY) == "v" else []
    names += [ZERO_TERMINAL_SNR] if TERMINAL_KEY in header else []
    return {name: DeferredTensor.of(torch.empty(0)) for name in names}


def of_single_file(path: Path) -> dict[str, Any]:
    """Settings of a U-Net's scheduler config that a single file's markers and header change."""
    if path.suffix != ".safetensors":
        return {}
    with safetensors.safe_open(path, framework="pt") as file:
        names, header = set(file.keys()), dict(file.metadata() or {})
    if V_PREDICTION in names:
        header[PREDICTION_KEY] = "v"
    if ZERO_TERMINAL_SNR in names:
        header[TERMINAL_KEY] = "True"
    return _overrides(header)


def merged_scheduler(header: Mapping[str, str], pipeline: Any) -> Any:
    """The scheduler of a pipeline with this LoRA merged in: that of the run, or for another program's LoRA its own.

    Another program's header changes the pipeline's to v-prediction and zero terminal SNR, if it names them.
    """
    family = next((f for f in FAMILIES.values() if isinstance(pipeline, getattr(diffusers, f.pipeline))), None)
    if family is not None and SCHEDULER_KEY in header:
        return family.make_scheduler(json.loads(header[SCHEDULER_KEY]))
    changed = _overrides(header) if "prediction_type" in pipeline.scheduler.config else {}
    return pipeline.scheduler.from_config(pipeline.scheduler.config, **changed) if changed else pipeline.scheduler


def _overrides(header: Mapping[str, str]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    if header.get(PREDICTION_KEY) in ("v", "v_prediction"):
        changed["prediction_type"] = "v_prediction"
    if header.get(TERMINAL_KEY) == "True":
        changed |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    return changed

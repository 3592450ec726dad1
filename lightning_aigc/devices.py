"""Device-specific functions for npu, cuda and cpu: dtypes, autocast, memory, loss scaling."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from lightning_aigc.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype for a name in YAML.

    Raises: KeyError for a name outside `DTYPES`.
    """
    return DTYPES[name]


def device_named(name: str) -> torch.device:
    """The device for a name on the command line; auto is the accelerator that is here, else the CPU.

    Raises: ConfigError for a name of no device, or of one that is not here.
    """
    found = [kind for kind in ("npu", "cuda") if _is_available(kind)]
    if name == "auto":
        return torch.device(found[0] if found else "cpu")
    here = ", ".join([*found, "cpu"])
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name} is no device; this machine has {here}") from error
    if device.type not in (*found, "cpu"):
        raise ConfigError(f"--device {name} is not on this machine, which has {here}; leave --device out")
    return device


def _is_available(kind: str) -> bool:
    backend = getattr(torch, kind, None)
    return backend is not None and bool(backend.is_available())


def autocast_dtype(precision: str) -> torch.dtype:
    """The dtype of frozen weights under a Trainer's precision, such as bfloat16 under bf16-mixed."""
    if precision.startswith("bf16"):
        return torch.bfloat16
    return torch.float16 if precision.startswith("16") else torch.float32


def weights_dtype(network: nn.Module) -> torch.dtype:
    """The dtype of a network's first weight, as diffusers' `dtype` gives it, without its walk through all modules."""
    return next(network.parameters()).dtype


def float32_region(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Disable autocast in a block."""
    return torch.autocast(device.type, enabled=False)


def accelerator_module(device: torch.device) -> object | None:
    """`torch.cuda` or `torch.npu` for a device, None for the CPU."""
    return getattr(torch, device.type, None) if device.type in ("cuda", "npu") else None


def reset_peak_memory(device: torch.device) -> None:
    module = accelerator_module(device)
    if module is not None:
        module.reset_peak_memory_stats(device)  # type: ignore[attr-defined]


def peak_memory_mib(device: torch.device) -> float:
    """Peak memory in MiB, of the device's allocator, or on a CPU of this process's resident set."""
    module = accelerator_module(device)
    if module is not None:
        return float(module.max_memory_allocated(device)) / 2**20  # type: ignore[attr-defined]
    if sys.platform == "win32":
        return float(psutil.Process().memory_info().peak_wset) / 2**20
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def loss_scale(precision_plugin: object) -> Tensor | None:
    """The loss scale of a Trainer's precision plugin, on its device; None without loss scaling."""
    scale: Tensor | None = getattr(getattr(precision_plugin, "scaler", None), "_scale", None)
    return scale


def grad_scaler(device_type: str) -> torch.amp.GradScaler:
    """A dynamic loss scaler for float16 gradients on "cpu", "cuda" or "npu", with torch's defaults.

    torch_npu has a separate class: float16 saturates on some Ascend chips, and only that class reads the overflow flag.
    """
    amp: Any = getattr(getattr(torch, "npu", None), "amp", None) if device_type == "npu" else None
    scaler: torch.amp.GradScaler = amp.GradScaler() if hasattr(amp, "GradScaler") else torch.amp.GradScaler(device_type)
    return scaler

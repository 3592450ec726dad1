"""The only file that knows npu, cuda and cpu apart: dtypes, memory, loss scaling, random state."""

from __future__ import annotations

import contextlib
import random
import resource
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype of a name in YAML.

    Raises: KeyError for a name outside `DTYPES`.
    """
    return DTYPES[name]


def autocast_dtype(precision: str) -> torch.dtype:
    """The dtype that frozen weights may have under a Trainer's precision: bf16-mixed -> bfloat16."""
    if precision.startswith("bf16"):
        return torch.bfloat16
    return torch.float16 if precision.startswith("16") else torch.float32


def float32_region(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Within: no autocast, whatever the Trainer's precision."""
    return torch.autocast(device.type, enabled=False)


def accelerator_module(device: torch.device) -> object | None:
    """`torch.cuda` or `torch.npu` for a tensor's device, None for the CPU."""
    return getattr(torch, device.type, None) if device.type in ("cuda", "npu") else None


def reset_peak_memory(device: torch.device) -> None:
    module = accelerator_module(device)
    if module is not None:
        module.reset_peak_memory_stats(device)  # type: ignore[attr-defined]


def peak_memory_mib(device: torch.device) -> float:
    """The most memory used so far, MiB: the device allocator's peak, or this process's resident set on a CPU."""
    module = accelerator_module(device)
    if module is not None:
        return float(module.max_memory_allocated(device)) / 2**20  # type: ignore[attr-defined]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def grad_scaler(device_type: str) -> torch.amp.GradScaler:
    """A dynamic loss scaler for float16 gradients on "cpu", "cuda" or "npu", with torch's defaults.

    torch_npu brings its own: float16 saturates on some Ascend chips, and only theirs reads the overflow flag.
    """
    amp: Any = getattr(getattr(torch, "npu", None), "amp", None) if device_type == "npu" else None
    scaler: torch.amp.GradScaler = amp.GradScaler() if hasattr(amp, "GradScaler") else torch.amp.GradScaler(device_type)
    return scaler


@dataclass(frozen=True)
class RandomStates:
    """Every random state that a training step on `device` draws from."""

    device: torch.device
    python: Any
    """None where it was not taken, and then neither restored."""
    numpy: Any
    cpu: Tensor
    accelerator: Tensor | None


def random_states(device: torch.device) -> RandomStates:
    """Take the random states of python, numpy, torch's CPU and `device`; waits for nothing."""
    return replace(tensor_states(device), python=random.getstate(), numpy=np.random.get_state())


def tensor_states(device: torch.device) -> RandomStates:
    """Take those of torch's CPU and `device` alone."""
    backend = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    on_device = None if backend is None else backend.get_rng_state(device)
    return RandomStates(device, None, None, torch.get_rng_state(), on_device)


def have_host_states_changed(states: RandomStates) -> bool:
    """Whether somebody drew from Python's or numpy's random state since these were taken."""
    now = np.random.get_state()
    has_same_numpy = all(np.array_equal(a, b) for a, b in zip(states.numpy, now, strict=True))
    return random.getstate() != states.python or not has_same_numpy


def restore_random_states(states: RandomStates) -> None:
    """Put them back."""
    if states.python is not None:
        random.setstate(states.python)
    if states.numpy is not None:
        np.random.set_state(states.numpy)
    torch.set_rng_state(states.cpu)
    if states.accelerator is not None:
        torch.get_device_module(states.device).set_rng_state(states.accelerator, states.device)

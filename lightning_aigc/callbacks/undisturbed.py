"""Generate pictures in the middle of a training that must not notice."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn


@contextlib.contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Within: evaluation mode and no gradients. After: every random state and every module's mode as before.

    Random states are python's, numpy's, torch's on the CPU and torch's on `device`. Gradients are left alone.
    """
    modes = [(module, module.training) for module in model.modules()]
    python_state, numpy_state, cpu_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    backend = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    device_state = None if backend is None else backend.get_rng_state(device)
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(cpu_state)
        if backend is not None:
            backend.set_rng_state(device_state, device)

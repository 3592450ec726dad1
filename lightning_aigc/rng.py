"""Read, restore, isolate and serialize the random states of python, numpy, torch's CPU and one accelerator."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_aigc.errors import SnapshotError

CPU = torch.device("cpu")
_PYTHON_WORDS, _NUMPY_WORDS = 625, 624
_HEAD = np.dtype(
    [
        ("python", "<u4", _PYTHON_WORDS),
        ("python_has_gauss", "u1"),
        ("python_gauss", "<f8"),
        ("numpy", "<u4", _NUMPY_WORDS),
        ("numpy_position", "<i4"),
        ("numpy_has_gauss", "<i4"),
        ("numpy_gauss", "<f8"),
    ]
)


@dataclass(frozen=True)
class RandomStates:
    """All random states that a training step on `device` uses."""

    device: torch.device
    python: Any
    """None if not read; then it is not restored."""
    numpy: Any
    cpu: Tensor
    accelerator: Tensor | None


def random_states(device: torch.device) -> RandomStates:
    """Read the random states of python, numpy, torch's CPU and `device`, without synchronising."""
    return replace(tensor_states(device), python=random.getstate(), numpy=np.random.get_state())


def tensor_states(device: torch.device) -> RandomStates:
    """Read only the random states of torch's CPU and `device`."""
    backend = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    on_device = None if backend is None else backend.get_rng_state(device)
    return RandomStates(device, None, None, torch.get_rng_state(), on_device)


def have_host_states_changed(states: RandomStates) -> bool:
    """Whether Python's or numpy's random state has changed since `states` was read."""
    now = np.random.get_state()
    has_same_numpy = all(np.array_equal(a, b) for a, b in zip(states.numpy, now, strict=True))
    return random.getstate() != states.python or not has_same_numpy


def restore_random_states(states: RandomStates) -> None:
    """Restore the random states."""
    if states.python is not None:
        random.setstate(states.python)
    if states.numpy is not None:
        np.random.set_state(states.numpy)
    torch.set_rng_state(states.cpu)
    if states.accelerator is not None:
        torch.get_device_module(states.device).set_rng_state(states.accelerator, states.device)


@contextlib.contextmanager
def isolate_rng(device: torch.device) -> Iterator[None]:
    """Restore the random states of python, numpy, torch's CPU and `device` when the block ends.

    Lightning's `isolate_rng` saves the states of all CUDA devices, and of no NPU.
    """
    states = random_states(device)
    try:
        yield
    finally:
        restore_random_states(states)


def to_plain(states: RandomStates) -> dict[str, Any]:
    """Convert to lists, numbers and tensors, which `from_plain` reads back.

    Raises: SnapshotError if numpy's global generator is not the default MT19937.
    """
    version, words, gauss = states.python
    name, key, position, has_gauss, cached = _mt19937(states.numpy)
    return {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [name, torch.from_numpy(key.astype(np.int64)), int(position), int(has_gauss), float(cached)],
        "torch": states.cpu,
        "accelerator": states.accelerator,
    }


def from_plain(plain: dict[str, Any], device: torch.device) -> RandomStates:
    """Read the result of `to_plain`; the accelerator's state is dropped if `device` is the CPU."""
    version, words, gauss = plain["python"]
    name, key, position, has_gauss, cached = plain["numpy"]
    return RandomStates(
        device,
        (version, tuple(words.tolist()), gauss),
        (name, key.numpy().astype(np.uint32), position, has_gauss, cached),
        plain["torch"],
        None if device.type == "cpu" else plain["accelerator"],
    )


def to_bytes() -> bytes:
    """Serialize this process's random states of python, numpy and torch's CPU, to about 10 kB."""
    states = random_states(CPU)
    _, words, gauss = states.python
    _, key, position, has_gauss, cached = _mt19937(states.numpy)
    head = np.zeros((), _HEAD)
    head["python"], head["python_has_gauss"], head["python_gauss"] = words, gauss is not None, gauss or 0.0
    head["numpy"], head["numpy_position"] = key, position
    head["numpy_has_gauss"], head["numpy_gauss"] = has_gauss, cached
    return head.tobytes() + states.cpu.numpy().tobytes()


def set_from_bytes(data: bytes) -> None:
    """Restore this process's random states from the result of `to_bytes`."""
    head = np.frombuffer(data, _HEAD, count=1)[0]
    gauss = float(head["python_gauss"]) if head["python_has_gauss"] else None
    numpy_state = ("MT19937", head["numpy"], int(head["numpy_position"]), int(head["numpy_has_gauss"]))
    cpu = torch.frombuffer(bytearray(data[_HEAD.itemsize :]), dtype=torch.uint8)
    python = (3, tuple(head["python"].tolist()), gauss)
    restore_random_states(RandomStates(CPU, python, (*numpy_state, float(head["numpy_gauss"])), cpu, None))


def _mt19937(state: Any) -> tuple[Any, ...]:
    if not isinstance(state, tuple):
        raise SnapshotError(
            f"numpy's global random state is a {state.get('bit_generator')}, which a snapshot cannot hold; use its"
            " default MT19937"
        )
    return state

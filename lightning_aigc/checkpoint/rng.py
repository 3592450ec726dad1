"""Random states as plain values, for files, and as bytes, for what a loader's worker sends with each batch."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_aigc.devices import RandomStates, random_states, restore_random_states
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
class Draws:
    """The random states that drawing samples starts from: the global ones, and those of a loader's own generators."""

    states: RandomStates
    generators: tuple[Tensor, ...] = ()

    @classmethod
    def take(cls, generators: Iterable[torch.Generator] = ()) -> Draws:
        return cls(random_states(CPU), tuple(generator.get_state() for generator in generators))

    def restore(self, generators: Sequence[torch.Generator] = ()) -> None:
        restore_random_states(self.states)
        for generator, state in zip(generators, self.generators, strict=True):
            generator.set_state(state)

    def to_plain(self) -> dict[str, Any]:
        return {"states": to_plain(self.states), "generators": list(self.generators)}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Draws:
        return cls(from_plain(plain["states"], CPU), tuple(plain["generators"]))


def to_plain(states: RandomStates) -> dict[str, Any]:
    """Lists, numbers and tensors that `from_plain` turns back."""
    version, words, gauss = states.python
    name, key, position, has_gauss, cached = _legacy(states.numpy)
    return {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [name, torch.from_numpy(key.astype(np.int64)), int(position), int(has_gauss), float(cached)],
        "torch": states.cpu,
        "accelerator": states.accelerator,
    }


def from_plain(plain: dict[str, Any], device: torch.device) -> RandomStates:
    """What `to_plain` was given; the state of another kind of accelerator is left out."""
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
    """The random states of python, numpy and torch's CPU in this process, in 10 kB."""
    states = random_states(CPU)
    _, words, gauss = states.python
    _, key, position, has_gauss, cached = _legacy(states.numpy)
    head = np.zeros((), _HEAD)
    head["python"], head["python_has_gauss"], head["python_gauss"] = words, gauss is not None, gauss or 0.0
    head["numpy"], head["numpy_position"] = key, position
    head["numpy_has_gauss"], head["numpy_gauss"] = has_gauss, cached
    return head.tobytes() + states.cpu.numpy().tobytes()


def set_from_bytes(data: bytes) -> None:
    """Put the states of `to_bytes` into this process."""
    head = np.frombuffer(data, _HEAD, count=1)[0]
    gauss = float(head["python_gauss"]) if head["python_has_gauss"] else None
    random.setstate((3, tuple(head["python"].tolist()), gauss))
    np.random.set_state(
        (
            "MT19937",
            head["numpy"],
            int(head["numpy_position"]),
            int(head["numpy_has_gauss"]),
            float(head["numpy_gauss"]),
        )
    )
    torch.set_rng_state(torch.frombuffer(bytearray(data[_HEAD.itemsize :]), dtype=torch.uint8))


def _legacy(state: Any) -> tuple[Any, ...]:
    if not isinstance(state, tuple):
        raise SnapshotError(
            f"numpy's global random state is a {state.get('bit_generator')}, which a snapshot cannot hold; use its"
            " default MT19937"
        )
    return state

"""Training states to save, and an exact comparison with the state that was read."""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor


def small_state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "seed": seed,
        "weights": {"down.lora_A": noise(4, 32), "down.lora_B": noise(32, 4).bfloat16(), "conv": noise(8, 4, 3, 3)},
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": noise(4, 32)}},
            "param_groups": [{"lr": 1e-4}],
        },
        "loops": {"epoch": 3, "micro_batch": 2, "open": True, "best": float("inf")},
        "random": (3, (2**31, 5), None),
    }


def same(left: Any, right: Any) -> bool:
    """Equal to the bit, of the same types, and laid out alike."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return (
            left.dtype is right.dtype
            and left.shape == right.shape
            and left.stride() == right.stride()
            and left.reshape(-1).view(torch.uint8).tolist() == right.reshape(-1).view(torch.uint8).tolist()
        )
    if isinstance(left, dict):
        return list(left) == list(right) and all(
            type(a) is type(b) and same(left[a], right[b]) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return struct.pack(">d", left) == struct.pack(">d", right) if isinstance(left, float) else left == right

"""Parameter names: as users know them, by block, and paired to LoRAs."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TypeVar

from torch import nn

WRAPPERS = ("_orig_mod.", "_forward_module.")
T = TypeVar("T")


def clean_name(name: str) -> str:
    """A parameter's name without the prefixes of torch.compile and of wrapping strategies."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def trained(named: Iterable[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
    """The trainable parameters, by their clean names."""
    return [(clean_name(name), p) for name, p in named if p.requires_grad]


def frozen(named: Iterable[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
    """The frozen parameters, by their clean names."""
    return [(clean_name(name), p) for name, p in named if not p.requires_grad]


def block_of(name: str) -> str:
    """The block that a parameter belongs to: up to its first number, else its outermost two names.

    >>> block_of("unet.down_blocks.1.attentions.0.proj_in.weight"), block_of("unet.mid_block.resnets.0.conv1.weight")
    ('unet.down_blocks.1', 'unet.mid_block.resnets.0')
    >>> block_of("unet.conv_in.weight"), block_of("weight")
    ('unet.conv_in', 'weight')
    """
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ".".join(parts[:-1][:2]) or name


def lora_part(name: str) -> tuple[str, str] | None:
    """The layer and the letter, A or B, of a LoRA matrix as peft, diffusers and kohya name it; None for any other.

    >>> lora_part("unet.attn1.to_q.lora_A.default.weight")
    ('unet.attn1.to_q', 'A')
    >>> lora_part("to_q.lora.up.weight")
    ('to_q', 'B')
    """
    for spelled, letter in (("lora_A", "A"), ("lora_B", "B"), ("lora_down", "A"), ("lora_up", "B"),
                            ("lora.down", "A"), ("lora.up", "B")):  # fmt: skip
        before, found, _ = f".{name}.".partition(f".{spelled}.")
        if found:
            return before.lstrip("."), letter
    return None


@functools.lru_cache(maxsize=16)
def lora_pairs(names: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    """Each LoRA layer's A and B by name."""
    halves: dict[str, dict[str, str]] = {}
    for name in names:
        part = lora_part(name)
        if part is not None:
            halves.setdefault(part[0], {})[part[1]] = name
    return {layer: (half["A"], half["B"]) for layer, half in halves.items() if len(half) == 2}

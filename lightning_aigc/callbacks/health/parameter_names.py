"""Parameter names: as users know them, by block, and paired to LoRAs."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TypeVar

from torch import nn

WRAPPERS = ("_orig_mod.", "_forward_module.")
T = TypeVar("T")
RESIDUALS = (
    ".controlnet_mid_block.", ".controlnet_down_blocks.", ".controlnet_blocks.", ".controlnet_single_blocks."
)  # fmt: skip
"""Names in diffusers' ControlNets, the last two for transformers: the zero layers that residuals leave through."""
IN_BLOCKS, CONTROL_BLOCKS = ".after_proj.", ".control_layers."
"""Zero projections inside the blocks, as in Z-Image's ControlNet."""
HINT = "controlnet_cond_embedding"
"""Module that reads the condition in a U-Net's ControlNet; in a transformer's it is a single layer."""
HINTS = (f".{HINT}.", ".control_all_x_embedder.", ".control_noise_refiner.")
"""The same, and for Z-Image, where a zero layer follows it too."""
ENTRANCES = (f"{HINT}.conv_out.weight", ".before_proj.weight")
"""The zero layers that what was read of the condition goes through."""


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
def zero_convolution_gates(names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Parameters of a ControlNet behind layers that start at zero: the weights of those, of which one must move.

    The residuals leave through zero convolutions, and the condition enters through another one, so the gradients of
    what lies before them begin at zero, and those of the hint embedding a step later.

    >>> names = ("net.conv_in.weight", "net.controlnet_mid_block.weight", "unet.conv_in.weight",
    ...          "net.controlnet_cond_embedding.conv_in.weight", "net.controlnet_cond_embedding.conv_out.weight")
    >>> gates = zero_convolution_gates(names)
    >>> gates["net.conv_in.weight"], gates["net.controlnet_cond_embedding.conv_in.weight"]
    (('net.controlnet_mid_block.weight',), ('net.controlnet_cond_embedding.conv_out.weight',))
    >>> "unet.conv_in.weight" in gates or "net.controlnet_mid_block.weight" in gates
    False
    """
    gates: dict[str, tuple[str, ...]] = {}
    parts = (*RESIDUALS, CONTROL_BLOCKS)
    for root in {f".{name}".partition(part)[0] for name in names for part in parts if part in f".{name}"}:
        own = [name for name in names if f".{name}".startswith(f"{root}.")]
        leaving = [n for n in own if any(part in f".{n}" for part in (*RESIDUALS, IN_BLOCKS))]
        opened = tuple(name for name in leaving if name.endswith("weight"))
        entering = tuple(name for name in own if name.endswith(ENTRANCES))
        for name in own:
            if name not in leaving:
                is_hint = any(part in f".{name}" for part in HINTS) and name not in entering
                gates[name] = entering if is_hint and entering else opened
    return gates


@functools.lru_cache(maxsize=16)
def lora_pairs(names: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    """Each LoRA layer's A and B by name."""
    halves: dict[str, dict[str, str]] = {}
    for name in names:
        part = lora_part(name)
        if part is not None:
            halves.setdefault(part[0], {})[part[1]] = name
    return {layer: (half["A"], half["B"]) for layer, half in halves.items() if len(half) == 2}

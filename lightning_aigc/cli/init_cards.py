"""The card that a config is written for, and what it means for each family: shipped config, memory level, base's bits.

A figure without "on an H100" is the peak of a LoRA's step at 1024 px and batch 1, counted on shapes
(benchmarks/results/precision/step_shapes.jsonl); no card has run these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lightning_aigc.diffusion.components import FamilyName
from lightning_aigc.diffusion.families import U_NETS
from lightning_aigc.errors import ConfigError

KINDS_BY_GIB = ((22, "24gb"), (11, "12gb"), (7, "8gb"), (5, "6gb"))
"""The card from so many GiB on; a card shows a little less than its name says."""
CARD_GIB = {"4gb": 4, "6gb": 6, "8gb": 8, "12gb": 12, "24gb": 24, "910b": 32}
"""Memory by `--card`; a 910B has this or twice as much."""
CARDS = tuple(CARD_GIB)
FREE_SHARE = 0.85
"""Of a card's memory, what a counted step may take; the rest is its context, and what an operator makes inside."""
CONFIGS = {
    ("sd", "4gb"): "sd_qlora_4gb.yaml", ("sd", "6gb"): "sd_lora_8gb.yaml",
    ("sdxl", "4gb"): "sdxl_qlora_6gb.yaml", ("sdxl", "6gb"): "sdxl_qlora_6gb.yaml",
    ("sd", "8gb"): "sd_lora_8gb.yaml", ("sd", "12gb"): "sd_lora.yaml", ("sd", "24gb"): "sd_lora.yaml",
    ("sd", "910b"): "sd_lora_ascend.yaml", ("sdxl", "8gb"): "sdxl_qlora_6gb.yaml", ("sdxl", "12gb"): "sdxl_lora.yaml",
    ("sdxl", "24gb"): "sdxl_lora.yaml", ("sdxl", "910b"): "sdxl_lora.yaml",
}  # fmt: skip
TRANSFORMER_CONFIGS = {
    "sd3": "sd3_lora.yaml",
    "flux": "flux_qlora_12gb.yaml",
    "flux2": "flux2_klein_lora.yaml",
    "z_image": "z_image_qlora_8gb.yaml",
    "qwen_image": "qwen_image_qlora.yaml",
}
"""Of families whose config is the same for every card."""
MEMORY = {
    ("sd", "4gb"): ("max", "blocks are recomputed in backward"),
    ("sd", "6gb"): ("max", "a step took 2.4 GiB on an H100 (docs/first_hour.md)"),
    ("sdxl", "4gb"): ("max", "2.5 GiB and the card's context, by counting (docs/quantized_base.md)"),
    ("sdxl", "6gb"): ("max", "3.5 GiB and the card's context, by counting (docs/quantized_base.md)"),
    ("sd", "8gb"): ("max", "blocks are recomputed in backward"),
    ("sd", "12gb"): ("lean", "a step of 4 pictures took 2.8 GiB on an H100 (docs/first_hour.md)"),
    ("sd", "24gb"): ("off", "fastest: nothing is recomputed; a step of 4 pictures took 6.3 GiB on an H100"),
    ("sd", "910b"): ("lean", "not run on this chip yet"),
    ("sdxl", "8gb"): ("max", "3.5 GiB and the card's context, by counting (docs/quantized_base.md)"),
    ("sdxl", "12gb"): ("max", "the U-Net's step took 5.8 GiB on an H100; lean took 6.6"),
    ("sdxl", "24gb"): ("lean", "the U-Net's step took 6.6 GiB on an H100"),
    ("sdxl", "910b"): ("lean", "not run on this chip yet"),
}
QUANTIZED = {
    ("sd", "4gb"): ("int8", "the frozen U-Net in 8 bits; no loss was seen (docs/quantized_base.md)"),
    ("sdxl", "4gb"): ("nf4", "int8 needs 1 GiB more; the LoRA loses a little on the full-precision base"),
    ("sdxl", "6gb"): ("int8", "the frozen U-Net in 8 bits; no loss was seen (docs/quantized_base.md)"),
    ("sdxl", "8gb"): ("int8", "a whole base takes 5.8 GiB for the step alone; no loss was seen in 8 bits"),
}
"""`base_quantization`, where the whole base would not fit."""
WHOLE, INT8, NF4 = None, "int8", "nf4"
COUNTED_GIB: dict[str, dict[str | None, float]] = {
    "sd3": {WHOLE: 6.0, INT8: 4.1, NF4: 3.0},
    "flux": {WHOLE: 25.7, INT8: 15.3, NF4: 9.8},
    "flux2": {WHOLE: 9.5, INT8: 6.1, NF4: 4.3},
    "z_image": {WHOLE: 13.9, INT8: 8.5, NF4: 5.7},
    "qwen_image": {WHOLE: 40.8, NF4: 13.4},
}
"""Peak of a step at `memory: max` by what the frozen transformer is kept in."""
COUNTED_OFF_GIB = {"sd3": 13.8}
"""The same at `memory: off` with the transformer whole, where that was counted."""
COUNTED_MODEL = {
    "sd3": "SD 3.5 medium", "flux": "FLUX.1 dev", "flux2": "FLUX.2 klein 4B", "z_image": "Z-Image",
    "qwen_image": "Qwen-Image",
}  # fmt: skip


@dataclass(frozen=True)
class Card:
    """One of CARDS, and why."""

    kind: str
    reason: str
    precision: str | None = None
    """The precision that it needs where that is not the config's."""


@dataclass(frozen=True)
class CardValues:
    """What a config for a family and a card begins from; values with their reasons."""

    template: str
    """The shipped config."""
    memory: tuple[str, str]
    base_quantization: tuple[str | None, str] | None
    """None where the shipped config says it."""


def find_card(given: str | None, family: FamilyName = "sd") -> Card:
    """The given card, else this machine's, else 12gb or the next on which the family trains."""
    if given is not None:
        return Card(given, f"--card {given}")
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        return Card("910b", f"found {npu.get_device_name(0)}")
    if torch.cuda.is_available():
        gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        kind = next((name for least, name in KINDS_BY_GIB if gib > least), "4gb")
        precision = None if torch.cuda.is_bf16_supported(including_emulation=False) else "16-mixed"
        return Card(kind, f"found {torch.cuda.get_device_name(0)} with {gib:.0f} GiB", precision)
    kind = next(each for each in CARDS[CARDS.index("12gb") :] if family in U_NETS or _fitting(family, each))
    others = ", ".join(each for each in CARDS if each != kind and (family in U_NETS or _fitting(family, each)))
    return Card(kind, f"no card here, so values for {CARD_GIB[kind]} GB; --card {others} writes others")


def values_for(family: FamilyName, card: Card) -> CardValues:
    """The values for a family and a card. Raises: ConfigError where no step of the family was counted to fit."""
    key = (str(family), card.kind)
    if family in U_NETS:
        return CardValues(CONFIGS[key], MEMORY[key], QUANTIZED.get(key))
    counted, fitting = COUNTED_GIB[family], _fitting(family, card.kind)
    if not fitting:
        enough = ", ".join(each for each in CARDS if _fitting(family, each))
        smallest = min(COUNTED_GIB, key=_least)
        raise ConfigError(
            f"{card.reason}: a step of {COUNTED_MODEL[family]} at 1024 px takes {_least(family)} GiB, counted on shapes"
            f" with the base in nf4, too much for {CARD_GIB[card.kind]} GB; use --card {enough}, or --base {smallest},"
            f" which takes {_least(smallest)} GiB"
        )
    kind = fitting[0]
    run = "not run on this chip yet" if card.kind == "910b" else "no card has run it"
    level, gib = "max", counted[kind]
    off = COUNTED_OFF_GIB.get(family, math.inf)
    if kind is WHOLE and off <= FREE_SHARE * CARD_GIB[card.kind]:
        level, gib = "off", off
    memory = (level, f"a step of {COUNTED_MODEL[family]} at 1024 px takes {gib} GiB, counted on shapes; {run}")
    more = ", ".join(f"{gib} GiB {_said(other)}" for other, gib in counted.items() if other != kind)
    return CardValues(TRANSFORMER_CONFIGS[family], memory, (kind, f"{_said(kind)}; a step would take {more}"))


def _said(kind: str | None) -> str:
    return "with the transformer whole" if kind is WHOLE else f"in {kind}"


def _fitting(family: FamilyName, card: str) -> list[str | None]:
    """What the frozen transformer may be kept in on this card, most bits first."""
    return [kind for kind, gib in COUNTED_GIB[family].items() if gib <= FREE_SHARE * CARD_GIB[card]]


def _least(family: str) -> float:
    """GiB of the smallest step that was counted."""
    return min(COUNTED_GIB[family].values())

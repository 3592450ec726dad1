"""The card that a config is written for, and its values for a family: shipped config, memory level, base's bits.

A figure without "on an H100" is the peak of a LoRA's step at 1024 px and batch 1, counted on shapes
(benchmarks/results/precision/step_shapes.jsonl); no card has run these.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_aigc.cli.init.card_sizes import CARD_GIB, CARD_SPEEDS, CARDS
from lightning_aigc.diffusion.families import FAMILIES, Family, StepMemory
from lightning_aigc.diffusion.families.family import BYTES_A_WEIGHT
from lightning_aigc.errors import ConfigError

KINDS_BY_GIB = ((22, "24gb"), (11, "12gb"), (7, "8gb"), (5, "6gb"))
"""Card by its least memory in GiB; a card shows a little less than its name says."""
FREE_SHARE = 0.85
"""Share of a card's memory for a counted step; the rest is its context and the operators' workspace."""


@dataclass(frozen=True)
class Card:
    """One of CARDS, and why."""

    kind: str
    reason: str
    precision: str | None = None
    """The precision that it needs where that is not the config's."""


@dataclass(frozen=True)
class CardValues:
    """First values of a config for a family and a card, with their reasons."""

    template: str
    """The shipped config."""
    memory: tuple[str, str]
    base_quantization: tuple[str | None, str] | None
    """None where the shipped config says it."""
    base_location: tuple[str, str] | None = None
    """None where the whole base stays on the card."""


def find_card(given: str | None, family: Family = FAMILIES["sd"]) -> Card:
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
    fitting = [each for each in CARDS if family.cards or _fitting(_memory_of(family), each)]
    kind = next(each for each in fitting if CARDS.index(each) >= CARDS.index("12gb"))
    others = ", ".join(each for each in fitting if each != kind)
    return Card(kind, f"no card here, so values for {CARD_GIB[kind]} GB; --card {others} writes others")


def values_for(family: Family, card: Card) -> CardValues:
    """The values for a family and a card. Raises: ConfigError where no step of the family was counted to fit."""
    if family.cards:
        row = family.cards[card.kind]
        quantization = None if row.quantization is None else (row.quantization, row.quantization_reason)
        return CardValues(row.config, (row.memory, row.reason), quantization)
    counted = _memory_of(family)
    fitting = _fitting(counted, card.kind)
    streamed = _streamed(counted, card.kind)
    if not fitting and streamed is not None:
        return _values_of_streaming(family, card, counted, streamed)
    if not fitting:
        enough = ", ".join(each for each in CARDS if _fitting(counted, each) or _streamed(counted, each))
        smallest = min((f for f in FAMILIES.values() if f.step_memory is not None), key=lambda f: _least(_memory_of(f)))
        raise ConfigError(
            f"{card.reason}: a step of {counted.model} at 1024 px takes {_least(counted)} GiB, counted on shapes"
            f" with the base in nf4, too much for {CARD_GIB[card.kind]} GB; use --card {enough}, or --base"
            f" {smallest.name}, which takes {_least(_memory_of(smallest))} GiB"
        )
    kind = fitting[0]
    run = "not run on this chip yet" if card.kind == "910b" else "no card has run it"
    level, gib = "max", counted.gib[kind]
    if kind is None and counted.off_gib is not None and counted.off_gib <= FREE_SHARE * CARD_GIB[card.kind]:
        level, gib = "off", counted.off_gib
    memory = (level, f"a step of {counted.model} at 1024 px takes {gib} GiB, counted on shapes; {run}")
    more = ", ".join(f"{gib} GiB {_said(other)}" for other, gib in counted.gib.items() if other != kind)
    if kind == "nf4" and streamed == "int8":
        waiting = counted.gib_of("int8") - FREE_SHARE * CARD_GIB[card.kind]
        more += f"; or int8 and base_location: fit, with {waiting:.0f} GiB in host memory"
    return CardValues(family.shipped_config, memory, (kind, f"{_said(kind)}; a step would take {more}"))


def _streamed(counted: StepMemory, card: str) -> str | None:
    """The most bits with which the base's blocks fit by waiting in host memory, and hide their copies; else None.

    A weight's bytes travel in forward and again in backward, and its three products (forward, forward again, backward)
    take 2 operations a token: two copies hide where `tokens >= bytes * TFLOP/s / (3 * GB/s)`.
    """
    if not counted.tokens or card not in CARD_SPEEDS:
        return None
    tflops, gb_s = CARD_SPEEDS[card]
    for kind in ("int8", "nf4"):
        hides = counted.tokens >= BYTES_A_WEIGHT[kind] * 1000 * tflops / (3 * gb_s)
        if hides and counted.gib_of(kind) - counted.billions * BYTES_A_WEIGHT[kind] < FREE_SHARE * CARD_GIB[card]:
            return kind
    return None


def _values_of_streaming(family: Family, card: Card, counted: StepMemory, kind: str) -> CardValues:
    """Values with blocks of the base in host memory."""
    base_gib = counted.billions * BYTES_A_WEIGHT[kind]
    waiting_gib = counted.gib_of(kind) - FREE_SHARE * CARD_GIB[card.kind]
    tflops, gb_s = CARD_SPEEDS[card.kind]
    memory = f"a step of {counted.model} at 1024 px takes {counted.gib_of(kind):.1f} GiB, counted on shapes"
    where = (
        f"{waiting_gib:.0f} of the base's {base_gib:.0f} GiB wait in host memory; their copies hide behind computing at"
        f" {tflops} TFLOP/s and {gb_s} GB/s, which are assumed; no card has run it"
    )
    quality = f"{_said(kind)}; no kind fits on the card whole"
    return CardValues(family.shipped_config, ("max", memory), (kind, quality), ("fit", where))


def _memory_of(family: Family) -> StepMemory:
    if family.step_memory is None:
        raise ConfigError(
            f"the memory of a step of {family.title} was not counted yet, so that no card can be chosen for it; copy"
            f" {family.shipped_config}, and set in it the base, data.init_args.source_data_dir and base_quantization"
        )
    return family.step_memory


def _said(kind: str | None) -> str:
    return "with the full transformer" if kind is None else f"in {kind}"


def _fitting(counted: StepMemory, card: str) -> list[str | None]:
    """Quantizations of the base that fit on this card, most bits first."""
    return [kind for kind, gib in counted.gib.items() if gib <= FREE_SHARE * CARD_GIB[card]]


def _least(counted: StepMemory) -> float:
    """GiB of the smallest step that was counted."""
    return min(counted.gib.values())

"""A run's summary as summary.json holds it, and the table of it that the terminal shows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

LAST_LOSSES = 50
"""Losses whose mean is the final one."""


def finite_or_none(value: float) -> float | None:
    """Rounded to four digits; None where JSON could not hold it."""
    return round(value, 4) if math.isfinite(value) else None


def final_loss(losses_T: Tensor) -> float | None:
    """The mean of the last losses."""
    return finite_or_none(float(losses_T[-LAST_LOSSES:].mean())) if len(losses_T) else None


def before_and_after(scores: Mapping[str, float | None], has_prior_prompts: bool) -> dict[str, float | None]:
    """The scores under summary.json's keys; None for one that was not measured."""
    return {
        f"{name}_{when}": scores.get(f"{name}_{when}")
        for name in ("clip_t", "clip_i", "prior_clip_t")
        for when in ("before", "after")
        if name != "prior_clip_t" or has_prior_prompts
    }


def summary_table(summary: Mapping[str, Any], has_prior_prompts: bool) -> str:
    """The summary for the terminal, one number or file a line."""

    def pair(name: str) -> str:
        before, after = summary.get(f"{name}_before"), summary.get(f"{name}_after")
        return "-" if before is None or after is None else f"{before:.3f} -> {after:.3f}"

    rows = {
        "steps": str(summary["steps"]),
        "seconds": f"{summary['seconds']:.1f}",
        "peak memory": f"{summary['peak_memory_mib']:.0f} MiB",
        "CLIP-T before -> after": pair("clip_t"),
        "CLIP-I before -> after": pair("clip_i"),
        "CLIP-T of other prompts": pair("prior_clip_t") if has_prior_prompts else None,
        "LoRA": summary["lora_file"] or "-",
        "report": summary["report"],
    }
    return "\n".join(f"{name:24} {value}" for name, value in rows.items() if value is not None)

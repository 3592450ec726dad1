"""A run's summary as summary.json holds it, and the table of it that the terminal shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_aigc.report.record import Curve, Paired, RunRecord
from lightning_aigc.report.units import UNKNOWN, memory_text, score_text, speed_text, time_text
from lightning_aigc.report.verdict import change, judge

LAST_LOSSES = 50
"""Losses whose mean is the final one."""
SCORES, EDIT_SCORES = ("clip_t", "clip_i", "prior_clip_t"), ("direction", "kept", "clip_t")


def finite_or_none(value: float) -> float | None:
    """Rounded to four digits; None where JSON could not hold it."""
    return round(value, 4) if math.isfinite(value) else None


def summary_of(record: RunRecord, has_prior_prompts: bool) -> dict[str, Any]:
    """summary.json: scores with the standard error of their paired difference, cost, verdict."""
    verdict = judge(record)
    guard, losses = record.guard, record.curves.get("loss", Curve()).values[-LAST_LOSSES:]
    scores: dict[str, Any] = {}
    for name in EDIT_SCORES if "direction" in record.scores else SCORES:
        if name == "prior_clip_t" and not has_prior_prompts:
            continue
        paired = record.scores.get(name, Paired())
        found = change(paired)
        scores |= {
            f"{name}_before": _mean_or_none(paired.before),
            f"{name}_after": _mean_or_none(paired.after),
            f"{name}_stderr": None if found is None else finite_or_none(found.stderr),
        }
    for metric in ("clip_i", *EDIT_SCORES):
        if f"full_base_{metric}" in record.scores:
            scores[f"{metric}_on_full_precision_base"] = _mean_or_none(record.scores[f"full_base_{metric}"].after)
    return {
        "steps": record.steps,
        "seconds": round(record.seconds, 2),
        "steps_a_second": finite_or_none(record.steps / record.seconds) if record.seconds else None,
        "peak_memory_mib": round(record.peak_memory_mib, 1),
        **scores,
        "final_loss": _mean_or_none(losses),
        "best_step": guard.best_step if guard is not None else None,
        "best_file": Path(guard.best_file).name if guard is not None and guard.best_file else None,
        "verdict": verdict.sentence,
        "verdict_kind": verdict.kind,
        "lora_file": record.lora.file if record.lora is not None else None,
        **{name: finite_or_none(value) for name, value in record.figures.items()},
        **record.result_files,
        "notes": record.notes,
    }


def summary_table(record: RunRecord, report_file: str) -> str:
    """The summary for the terminal, one number or file a line, without what was not measured."""
    rows = {
        "verdict": judge(record).sentence,
        "steps": f"{record.steps}, {speed_text(record.steps, record.seconds)}",
        "time": time_text(record.seconds),
        "peak memory": memory_text(record.peak_memory_mib),
        "CLIP-T before -> after": score_text(record, "clip_t"),
        "CLIP-I before -> after": score_text(record, "clip_i"),
        "edit direction": score_text(record, "direction"),
        "edit keeps": score_text(record, "kept"),
        "CLIP-T of other prompts": score_text(record, "prior_clip_t"),
        "CLIP-T packed -> whole base": score_text(record, "full_base_clip_t"),
        "LoRA": record.lora.file if record.lora is not None else UNKNOWN,
        **{name.replace("_", " "): path for name, path in record.result_files.items()},
        "report": report_file,
    }
    return "\n".join(f"{name:27} {value}" for name, value in rows.items() if value != UNKNOWN)


def _mean_or_none(values: Sequence[float]) -> float | None:
    return finite_or_none(sum(values) / len(values)) if values else None

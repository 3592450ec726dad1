"""Records of runs, made by hand."""

from __future__ import annotations

import math
from pathlib import Path

from lightning_aigc.report.paired_scores import Check
from lightning_aigc.report.record import (
    Curve,
    GuardResult,
    Health,
    HealthAlert,
    LoRAFile,
    Paired,
    Picture,
    RateChange,
    RunRecord,
    Snapshots,
    SyncResult,
)


def full_record(folder: Path) -> RunRecord:
    """A run that has every part."""
    return RunRecord(
        "run", str(folder), True, 7, 1.5, 900.0,
        scores={"clip_t": Paired([0.1, 0.2], [0.3, 0.4])},
        pictures=[Picture("a <b>mug</b>", 3, True, "data:x", "")],
        grids=[Check(0, {"clip_t": [0.1], "clip_i": [0.2]})],
        curves={"loss": Curve([1, 2], [math.inf, 0.5])},
        guard=GuardResult("clip_t", [Check(0, {"clip_t": [0.1], "clip_i": [0.2]})], 0, None, True, "memorises"),
        rate_changes=[RateChange(3, 0.5, "a peak")],
        health=Health([HealthAlert(1, "vanishing", "a", "error", "m", "c", "r")], [1], {"a": [1.0], "b": [math.inf]}),
        sync=SyncResult("int3", 2, 1),
        snapshots=Snapshots(2, [1.0], "step-1", 1, 100),
        lora=LoRAFile("zorp.safetensors", "zorp", "embedded:sd"),
        config="a: 1\n",
        notes=["a note"],
    )  # fmt: skip

"""Imported: a DeepSpeed or accelerate file as blocks of a config of this project."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Imported:
    """Config blocks of a file, and a line for each of its keys."""

    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    """Arguments of ZeROStrategy."""
    precision: dict[str, Any] = field(default_factory=dict)
    """Arguments of FusedBackwardPrecision."""
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    """One line for each key."""
    notes: list[str] = field(default_factory=list)
    """One note for each DeepSpeed default that applies because a key is missing."""

    def as_config(self) -> dict[str, Any]:
        """Return the nested mapping of the YAML."""
        trainer = dict(self.trainer)
        stage = self.strategy.get("stage", 2)
        zero = {"class_path": "ZeROStrategy", "init_args": {"stage": stage, **self.strategy}}
        trainer["strategy"] = zero if stage else "ddp"
        if self.precision:
            trainer["plugins"] = {"class_path": "FusedBackwardPrecision", "init_args": dict(self.precision)}
        config: dict[str, Any] = {"trainer": trainer}
        if self.model:
            config["model"] = {"init_args": dict(self.model)}
        if self.data:
            config["data"] = {"init_args": dict(self.data)}
        return config

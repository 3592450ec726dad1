"""Compare the final states of two trainings by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from lightning_aigc.checkpoint import find_snapshots


def result(root: Path) -> dict[str, torch.Tensor]:
    """Read a run's final state by name: its files, and the weights, optimizer and EMA of its snapshot.

    For a sharded run, each rank's rows come from that rank's part of the snapshot.
    """
    snapshot = find_snapshots(root / "snapshots")[0]
    assert snapshot.facts["is_finished"]
    found: dict[str, torch.Tensor] = {}
    for path in sorted(set(root.rglob("*.safetensors")) - set((root / "snapshots").rglob("*"))):
        # The files themselves differ: their headers contain times.
        found |= {f"{path.relative_to(root)}.{name}": value for name, value in load_file(path).items()}
    shared = snapshot.shared()
    for key in ("state_dict", "optimizer_states", "ema", "lr_schedulers"):
        found |= dict(_tensors(shared.get(key), key))
    for rank in range(snapshot.world_size):
        found |= dict(_tensors(snapshot.rank(rank), f"rank{rank}"))
    assert any("state_dict" in name for name in found) and any("optimizer_states" in name for name in found)
    summary = json.loads((root / "summary.json").read_text())
    for key in ("seconds", "steps_a_second", "peak_memory_mib", "report", "notes"):
        del summary[key]
    summary = {key: value for key, value in summary.items() if not key.endswith(("_file", "_folder"))}  # under root
    assert (root / "report.html").stat().st_size > 1000
    written = {f"summary.{key}": json.dumps(value).encode() for key, value in summary.items()}
    written |= {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.png")}
    return found | {name: torch.frombuffer(bytearray(data), dtype=torch.uint8) for name, data in written.items()}


def _tensors(value: Any, path: str) -> Any:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (dict, list, tuple)):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(one, f"{path}.{key}")


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names whose bytes differ, and names that only one state has."""

    def raw(value: torch.Tensor) -> bytes:
        return (
            value.contiguous().view(torch.uint8).numpy().tobytes()
            if value.dim()
            else value.view(1).view(torch.uint8).numpy().tobytes()
        )

    shared = one.keys() & other.keys()
    return sorted(one.keys() ^ other.keys()) + [name for name in shared if raw(one[name]) != raw(other[name])]

"""Resources of this machine for data loading: CPU cores, memory, accelerator."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import psutil
import torch


def cpu_cores() -> int:
    """The number of cores that this process may use, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return max(1, os.cpu_count() or 1)


def memory_bytes() -> int:
    """Memory that this process may use: the machine's, or the container's lower limit."""
    total = int(psutil.virtual_memory().total)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8").strip()
        return min(total, int(limit)) if limit.isdigit() else total
    except OSError:
        return total


def has_accelerator() -> bool:
    """Whether a CUDA device or an NPU is present, so that pinned memory may help."""
    npu = getattr(torch, "npu", None)
    return torch.cuda.is_available() or bool(npu is not None and npu.is_available())


def choose_workers(in_memory: bool, batches: int, processes: int) -> int:
    """Loader workers per training process: 0 for data in memory or a single batch, else the spare cores."""
    if in_memory or batches < 2:
        return 0
    return min(8, max(0, cpu_cores() // max(1, processes) - 1))


def loader_settings(
    workers: int | None,
    pin_memory: bool | None,
    prefetch_factor: int | None,
    *,
    in_memory: bool,
    batches: int,
    processes: int,
) -> dict[str, Any]:
    """A DataLoader's arguments; None means chosen for this machine."""
    if workers is None:
        workers = choose_workers(in_memory, batches, processes)
    pin = has_accelerator() if pin_memory is None else pin_memory
    if workers == 0:
        warnings.filterwarnings("ignore", ".*_dataloader' does not have many workers.*")
        return {"pin_memory": pin}
    prefetch = prefetch_factor or 4
    return {"num_workers": workers, "pin_memory": pin, "prefetch_factor": prefetch, "persistent_workers": True}

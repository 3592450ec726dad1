"""A process that writes snapshots until it is killed, or locks their folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fakes.processes.ranks import forking_context
from lightning_aigc.checkpoint import SnapshotCheckpointIO, SnapshotWriter, newest_complete


def start(work: Callable[..., None], *arguments: Any) -> Any:
    """The process, forked from a server that has imported torch once."""
    process = forking_context("fakes.runs.snapshot_writer").Process(target=work, args=arguments, daemon=True)
    process.start()
    return process


def state_of(step: int, version: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1000 * version + step)
    return {"step": step, "version": version, "weights": torch.randn(100_000, generator=generator)}


def write_forever(directory: str, told: str, version: int) -> None:
    """Go on at the newest snapshot, whose step is written once more; tell (step, version) of each that is durable."""
    torch.set_num_threads(1)
    store = SnapshotWriter(directory, keep_last=2)
    store.open()
    newest = newest_complete(directory, lambda line: None)
    file = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    step = newest.step if newest else 0
    while True:
        store.save(step, state_of(step, version), {"shared": step})
        store.wait()
        os.write(file, f"{step} {version}\n".encode())
        step += 1


def checkpoint_forever(path: str, told: str, version: int) -> None:
    """Replace one checkpoint again and again; tell each number that is durable."""
    torch.set_num_threads(1)
    io = SnapshotCheckpointIO()
    file = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    step = 1000 * version
    while True:
        io.save_checkpoint(state_of(step, version), path)
        io.wait()
        os.write(file, f"{step}\n".encode())
        step += 1


def hold(directory: str, ready: str, *, with_child: bool) -> None:
    store = SnapshotWriter(directory)
    store.open()
    if with_child and os.fork() == 0:  # as a data worker, which may outlive its parent
        time.sleep(60)
        os._exit(0)
    Path(ready).touch()
    time.sleep(60)

"""Measure one published row on this machine's devices."""

from __future__ import annotations

import math
import os
import platform
import statistics
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader

from lightning_aigc._lightning import Strategy, Trainer, package, version
from lightning_aigc.accelerators.torch_npu_import import npu_count
from lightning_aigc.cli.bench.architectures import SMALL_PIXELS
from lightning_aigc.cli.bench.published import GIB, PublishedRow
from lightning_aigc.cli.bench.training import Clock, TimedTraining, make_batch
from lightning_aigc.cli.doctor.versions import cann_version, installed
from lightning_aigc.devices import accelerator_module, device_named
from lightning_aigc.errors import ConfigError
from lightning_aigc.precision import FusedBackwardPrecision
from lightning_aigc.strategies import NPUSparseStrategy

SMALL_BATCH = 2
MOST_CARDS = 8
"""Cards that are taken by default, as many as the published runs have."""
PACKAGES = ("lightning_aigc", "torch", "torch_npu", "triton", "triton-ascend", "diffusers", "peft")


@dataclass(frozen=True)
class Machine:
    """The devices to run on, and the size of the models."""

    kind: str
    """npu, cuda or cpu."""
    cards: int
    small: bool

    @classmethod
    def of(cls, device: str, cards: int | None, *, small: bool) -> Machine:
        """The machine for arguments of the command line; a CPU runs small models.

        Raises: ConfigError for more cards than there are.
        """
        kind = device_named(device).type
        here = {"npu": npu_count, "cuda": torch.cuda.device_count}.get(kind, lambda: os.cpu_count() or 1)()
        if cards is not None and cards > here:
            raise ConfigError(f"--devices {cards} is more than the {here} {kind} of this machine; pass at most {here}")
        return cls(kind, cards or (1 if kind == "cpu" else min(here, MOST_CARDS)), small or kind == "cpu")

    @property
    def name(self) -> str:
        """The device's name, as its driver gives it."""
        device_module: Any = accelerator_module(torch.device(self.kind))
        return f"cpu ({platform.machine()})" if device_module is None else str(device_module.get_device_name())

    @property
    def gib(self) -> float:
        """Memory of a card, or of the host for a CPU."""
        device_module: Any = accelerator_module(torch.device(self.kind))
        total = psutil.virtual_memory().total if device_module is None else device_module.mem_get_info()[1]
        return float(total) / GIB


def check_memory(row: PublishedRow, machine: Machine) -> None:
    """Raise ConfigError for a row that needs more than a card has."""
    needed = row.needed_gib(machine.cards)
    if machine.small or needed <= machine.gib:
        return
    shared = row.needed_gib(MOST_CARDS)
    helps = row.strategy != "npu_sparse" and machine.cards < MOST_CARDS and shared <= machine.gib
    remedy = f"on {MOST_CARDS} cards it takes {shared:.0f} GiB each: pass --devices {MOST_CARDS} there" if helps else (
        "leave it out by naming others with --rows"
    )  # fmt: skip
    raise ConfigError(
        f"{row.name} needs about {needed:.0f} GiB on each of {machine.cards} {machine.kind}, and {machine.name} has"
        f" {machine.gib:.0f}; {remedy}"
    )


def measure(row: PublishedRow, machine: Machine, *, steps: int, warm_up: int, memory: str | None) -> dict[str, Any]:
    """Train `warm_up` and then `steps` steps; returns the row to keep.

    Raises: ConfigError for a card that is too small, or a loss that is not finite.
    """
    check_memory(row, machine)
    architecture = row.architecture.small if machine.small else row.architecture
    assert architecture is not None
    pixels, batch = (SMALL_PIXELS, min(row.batch, SMALL_BATCH)) if machine.small else (row.pixels, row.batch)
    level: Any = memory or row.memory
    clock = Clock(warm_up)
    trainer = Trainer(
        accelerator=machine.kind,
        devices=machine.cards,
        strategy=_strategy(row, machine),
        plugins=FusedBackwardPrecision(row.precision, memory=level),
        max_steps=warm_up + steps,
        gradient_clip_val=1.0,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = TimedTraining(row, architecture)
    batches = [make_batch(row, architecture, pixels, batch)] * (warm_up + steps)
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]  # a list is a dataset
    if not math.isfinite(clock.loss):
        raise ConfigError(
            f"{row.name}: the loss is {clock.loss} after {warm_up + steps} steps, so its time is not reported; try"
            " --memory off, and report it as a bug"
        )
    if clock.skipped_steps:
        raise ConfigError(
            f"{row.name}: the loss scale fell from {clock.scales[0]:g} to {clock.scales[-1]:g} in the timed steps, so"
            f" steps of the optimizer were skipped; warm up longer with --warm_up {4 * warm_up}"
        )
    step_s = statistics.median(clock.steps_s())
    a_card = batch / step_s
    published = row.samples_s / row.cards
    return {
        "benchmark": "published_rows", "row": row.name, "in_small": machine.small,
        "device": machine.name, "devices": machine.cards, "samples_s": round(a_card * machine.cards, 4),
        "samples_s_a_card": round(a_card, 4), "step_s": round(step_s, 5),
        "step_spread_s": [round(min(clock.steps_s()), 5), round(max(clock.steps_s()), 5)],
        "steps": steps, "warm_up": warm_up, "peak_mib": round(clock.peak_mib, 1),
        "needed_gib": None if machine.small else round(row.needed_gib(machine.cards), 1),
        "model": row.model, "method": row.method, "rank": row.rank, "pixels": pixels, "batch": batch,
        "sources": row.sources, "precision": row.precision, "memory": level,
        "strategy": row.strategy if machine.cards > 1 else None, "encodes_images": row.encodes_images,
        "parameters": sum(p.numel() for p in module.loaded().denoiser.parameters()),
        "trained": sum(p.numel() for p in module.trainable_parameters()), "loss": round(clock.loss, 5),
        "published": {
            "publisher": row.source.publisher, "task": row.task, "samples_s": row.samples_s, "cards": row.cards,
            "samples_s_a_card": round(published, 4), "chip": row.source.chip, "software": row.source.software,
            "address": row.source.address, "commit": row.source.commit, "differs": row.differs,
        },
        "ratio_a_card": None if machine.small else round(a_card / published, 3),
        "versions": versions(),
    }  # fmt: skip


def _strategy(row: PublishedRow, machine: Machine) -> Strategy | str:
    if machine.cards == 1:
        return "auto"
    if row.strategy == "npu_sparse":
        return NPUSparseStrategy(mode="dense")
    return row.strategy


def versions() -> dict[str, str]:
    """Versions of the packages that make a step, of Python and of CANN, where they are installed."""
    found = {name: installed(name) for name in PACKAGES} | {package(): version(), "python": platform.python_version()}
    found["cann"] = cann_version(os.environ)
    return {name: text for name, text in found.items() if text is not None}

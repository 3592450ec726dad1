"""Measurements of both sides of article_table.py: a clock that pauses for scoring, bytes, memory and CLIP-T."""

from __future__ import annotations

import ctypes
import math
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common.kept_memory import kept_mib
from lightning_aigc.diffusion.families import Components
from lightning_aigc.diffusion.pipeline.generate import TimeLimit, generate
from lightning_aigc.evaluation_mode import evaluating
from lightning_aigc.metrics import CLIPSimilarity
from lightning_aigc.rng import isolate_rng

PROMPTS = ["a zorp umbrella", "a zorp teapot", "a zorp guitar"]  # objects that no brand image shows
INFERENCE_STEPS, GUIDANCE = 8, 3.0
MIB = 2**20


class Meter:
    """Measure seconds, bytes sent through a network interface, and peak resident memory while not paused."""

    def __init__(self, interface: str) -> None:
        self.interface = interface
        self.seconds = 0.0
        self.sent_bytes = 0
        self.start_s = 0.0
        """Seconds before the first step: models, caches, the guard's first check."""
        self.peak_rss_mib = self.first_rss_mib = 0.0
        self._start_s, self._start_bytes = math.nan, 0

    def resume(self) -> None:
        """Synchronize the ranks and continue to measure."""
        ctypes.CDLL(None).malloc_trim(0)  # return the memory that scoring freed, or it counts as resident
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # reset the peak of resident memory
        dist.barrier()
        if not self.first_rss_mib:
            self.first_rss_mib = resident_mib("VmRSS")
        self._start_s, self._start_bytes = time.perf_counter(), sent_bytes(self.interface)

    def note_start(self) -> None:
        """Mark the start of the first step."""
        self.start_s = self.start_s or time.perf_counter() - self._start_s

    def pause(self) -> None:
        self.seconds += time.perf_counter() - self._start_s
        self.sent_bytes += sent_bytes(self.interface) - self._start_bytes
        self.peak_rss_mib = max(self.peak_rss_mib, resident_mib("VmHWM"))


def sent_bytes(interface: str) -> int:
    """Bytes sent through an interface of this network namespace, counted by the kernel."""
    for line in Path("/proc/self/net/dev").read_text(encoding="utf-8").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    raise SystemExit(f"there is no interface {interface} in this network namespace")


def resident_mib(field: str) -> float:
    """Resident memory of this process in MiB: VmRSS now, or VmHWM at its peak."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        if line.startswith(f"{field}:")
    )
    return int(line.split()[1]) * 1024 / MIB


class Scorer:
    """Score images of the same seeds on both sides, half of them on each rank, while the meter is paused.

    Args: each: images per prompt. every: optimizer steps between two scores; they fall between two snapshots.
    """

    def __init__(self, meter: Meter, each: int, every: int, steps: int) -> None:
        self.meter, self.every, self.steps = meter, every, steps
        self.pairs = [(prompt, 5000 + seed) for prompt in PROMPTS for seed in range(each)]
        self.checks: list[dict[str, float]] = []
        self.scoring_s = 0.0
        self.judge = CLIPSimilarity("embedded:clip")
        self.judge.check()

    def is_due(self, step: int) -> bool:
        return step == self.steps or step % self.every == self.every // 2

    def score(self, step: int, parts: Components, schedule_config: Any, averaged: Any) -> None:
        """Sample with the averaged weights and record the mean CLIP-T with its standard error. Collective."""
        self.meter.pause()
        start = time.perf_counter()
        rank, world = dist.get_rank(), dist.get_world_size()
        share = self.pairs[rank::world]
        prompts = [prompt for prompt, _ in share]
        settings: dict[str, Any] = {"num_inference_steps": INFERENCE_STEPS, "guidance_scale": GUIDANCE}
        settings |= {"device": torch.device("cpu"), "time_limit": TimeLimit(math.inf), "batch_size": 24}
        with isolate_rng(torch.device("cpu")), evaluating(parts.denoiser), averaged(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a diverged run samples black images
            pictures = generate(parts, schedule_config, prompts, [seed for _, seed in share], **settings)
            scores = self.judge.scores(pictures.nan_to_num(0.0), prompts)["clip_t"]
        every_score = torch.zeros(len(self.pairs))
        every_score[rank::world] = scores
        dist.all_reduce(every_score)
        noise = float(every_score.std()) / math.sqrt(len(self.pairs))
        seconds = float(largest(self.meter.seconds))
        self.checks.append(
            {"step": step, "s": round(seconds, 2), "clip_t": round(float(every_score.mean()), 4), "se": round(noise, 4)}
        )
        self.scoring_s += time.perf_counter() - start
        self.meter.resume()


def largest(number: float) -> float:
    """Maximum over the ranks. Collective."""
    value = torch.tensor([number], dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def kept_by_a_step_mib(unet: nn.Module, batch: int, tokens: int) -> float:
    """Memory that the U-Net's forward pass of one batch keeps for backward, MiB."""
    config: Any = unet.config
    side = int(config.sample_size)
    given = {
        "sample": torch.randn(batch, config.in_channels, side, side),
        "timestep": torch.randint(1000, (batch,)),
        "encoder_hidden_states": torch.randn(batch, tokens, config.cross_attention_dim),
    }
    unet.train()
    return float(kept_mib(unet, given))


def measured(meter: Meter, scorer: Scorer, steps: int) -> dict[str, Any]:
    """A run's figures, each the maximum over the ranks. Collective; the meter is paused."""
    return {
        "steps": steps,
        "start_s": round(largest(meter.start_s), 2),
        "total_s": round(largest(meter.seconds), 2),
        "scoring_s": round(largest(scorer.scoring_s), 2),
        "sent_bytes_per_step": round(largest(meter.sent_bytes / max(1, steps))),
        "rss_before_mib": round(largest(meter.first_rss_mib), 1),
        "peak_rss_mib": round(largest(meter.peak_rss_mib), 1),
        "checks": scorer.checks,
    }

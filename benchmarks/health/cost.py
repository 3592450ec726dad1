"""Cost of GradientHealthMonitor on a U-Net of Stable Diffusion 1.5's shape, compared with a naive hand-written loop.

    OMP_NUM_THREADS=1 python -m benchmarks.health.cost                    # LoRA of rank 64, float32
    OMP_NUM_THREADS=1 python -m benchmarks.health.cost --kind full        # every weight, bfloat16
    python -m benchmarks.health.cost --device cuda --size 512 --precision bf16-mixed

A real `Trainer.fit` with the monitor's defaults, which times the monitor's hooks. The naive loop, timed in the same
steps, computes and prints three norms per trained parameter: weight norm, gradient norm, largest gradient. Weights are
random and images are noise, which does not affect the time. Prints one JSON row and appends it to its file:
milliseconds of a step, of the monitor in steps with and without a look, and of the naive loop; and the share of the
step time over a period of `every_n_steps`, of the monitor and of the naive loop. All are medians; cpu_ figures are CPU
time, which other processes hardly affect.

cpu_..._python_ms is the CPU time without the norms and their sum, which an accelerator would compute asynchronously;
they are timed again in the same step, with cold caches as in the step. ops counts operators that reach torch's
dispatcher, without views: on an accelerator most are one kernel each, `_foreach_norm` a few. syncs counts how often the
host waits for a value.
"""
# mypy: no-warn-return-any

from __future__ import annotations

import argparse
import contextlib
import io
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import lightning.pytorch
import peft
import torch
from diffusers import UNet2DConditionModel
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks import RESULTS
from benchmarks.common.rows import keep_row
from fakes.processes.launches import Operators, Waits
from lightning_aigc.callbacks import GradientHealthMonitor
from lightning_aigc.callbacks.health.parameter_stats import norms
from lightning_aigc.precision import FusedBackwardPrecision

HOOKS = ("on_train_batch_start", "on_before_backward", "on_before_optimizer_step", "on_train_batch_end")


class UNet(LightningModule):
    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        with torch.device("meta"):
            self.unet = UNet2DConditionModel(sample_size=64, cross_attention_dim=768)
        self.unet.to_empty(device="cpu")
        self.unet.to(dtype)
        with torch.no_grad():
            for name, p in self.unet.named_parameters():
                p.normal_(std=0.02) if p.dim() > 1 else p.fill_(float("norm" in name and name.endswith("weight")))
        if kind == "lora":
            self.unet.requires_grad_(False)
            targets = ["to_k", "to_q", "to_v", "to_out.0"]
            self.unet.add_adapter(peft.LoraConfig(r=64, lora_alpha=64, target_modules=targets))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        t_B = torch.randint(0, 1000, (len(batch),), device=self.device)
        text = torch.randn(len(batch), 77, 768, dtype=self.unet.dtype, device=self.device)
        loss_B = self.unet(batch.to(self.unet.dtype), t_B, text).sample.float().square().mean(dim=(1, 2, 3))
        self.last_example_losses, self.last_timesteps = loss_B.detach(), t_B
        return loss_B.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        # Without a LoRA, the cheapest optimizer: the shorter the step, the higher the monitor's share of it.
        return torch.optim.AdamW(trained, 1e-4) if len(trained) < 400 else torch.optim.SGD(trained, 1e-5)


class Timed(GradientHealthMonitor):
    """The monitor with its wall and CPU seconds in each step, and the operators of two counted steps."""

    def __init__(self) -> None:
        super().__init__()
        self.spent: list[list[float]] = [[0.0, 0.0]]
        self.counts = {COUNTED_LOOK: [0, 0], COUNTED_STEP: [0, 0]}
        self.norms: list[list[float]] = []
        """CPU seconds per step of the norms of all gradients and of all weights."""
        self.extra: list[list[float]] = []
        """Wall and CPU seconds per step that measuring them took."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        start = time.perf_counter()
        super().on_train_start(trainer, pl_module)
        self.start_s = time.perf_counter() - start

    @property
    def step(self) -> int:
        """Number of the current step, from 1."""
        return len(self.spent)


COUNTED_LOOK, COUNTED_STEP = 10, 4
"""Steps whose operators are counted instead of timed: one with a look, and one without."""
EVICTING = torch.zeros(2**25)
"""128 MiB to evict the gradients from the CPU's caches."""


def _timed(name: str) -> Any:
    def hook(self: Timed, *args: Any) -> None:
        own = getattr(GradientHealthMonitor, name)
        if self.step in self.counts:
            with Waits() as waits, Operators() as operators:
                own(self, *args)
            self.counts[self.step][0] += operators.count
            self.counts[self.step][1] += waits.count
        else:
            start, cpu = time.perf_counter(), time.process_time()
            own(self, *args)
            self.spent[-1][0] += time.perf_counter() - start
            self.spent[-1][1] += time.process_time() - cpu
        if name == "on_before_optimizer_step":
            start, cpu = time.perf_counter(), time.process_time()
            weights = [p.detach() for p in args[1].parameters() if p.grad is not None]
            gradients = [p.grad for p in args[1].parameters() if p.grad is not None]
            self.norms.append([_norms_s(gradients), _norms_s(weights)])
            self.extra.append([time.perf_counter() - start, time.process_time() - cpu])
        if name == "on_train_batch_end":
            self.spent.append([0.0, 0.0])

    return hook


def _norms_s(tensors: Sequence[Tensor]) -> float:
    """CPU seconds for the norms of these tensors."""
    EVICTING.add_(1)
    start = time.process_time()
    torch.linalg.vector_norm(norms(tensors))
    return time.process_time() - start


for _name in HOOKS:
    setattr(Timed, _name, _timed(_name))


class Naive(Callback):
    """Compute and print three norms of every parameter, and time the steps."""

    def __init__(self) -> None:
        self.spent: list[list[float]] = []
        self.steps: list[list[float]] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._wait(pl_module)
        self.start, self.start_cpu = time.perf_counter(), time.process_time()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._wait(pl_module)
        start, cpu = time.perf_counter(), time.process_time()
        with contextlib.redirect_stdout(io.StringIO()):
            for name, p in pl_module.named_parameters():
                if p.grad is not None:
                    print(name, p.norm().item(), p.grad.norm().item(), p.grad.abs().max().item())
        self.spent.append([time.perf_counter() - start, time.process_time() - cpu])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._wait(pl_module)
        self.steps.append([time.perf_counter() - self.start, time.process_time() - self.start_cpu])

    @staticmethod
    def _wait(module: LightningModule) -> None:
        if module.device.type != "cpu":
            torch.get_device_module(module.device).synchronize()


def shares(monitor: Timed, naive: Naive, steps: int) -> dict[str, Any]:
    """The monitor's share of a step, in wall and in CPU time."""
    row: dict[str, Any] = {}
    every = monitor.every_n_steps
    for i, clock in enumerate(("", "cpu_")):
        own = [spent[i] for spent in monitor.spent[:steps]]
        looks = [n for n in range(COUNTED_LOOK, steps) if (n + 1) % every == 0]
        plain = [n for n in range(COUNTED_STEP, steps) if (n + 1) % every]
        # Time of a step without the monitor and the naive loop.
        alone = [naive.steps[n][i] - naive.spent[n][i] - own[n] - monitor.extra[n][i] for n in (*plain, *looks)]
        step, loop = statistics.median(alone), statistics.median(n[i] for n in naive.spent[2:])
        between, look = (statistics.median(own[n] for n in which) for which in (plain, looks))
        monitor_share = ((every - 1) * between + look) / every / step
        row |= {
            f"{clock}step_ms": round(1000 * step, 1),
            f"{clock}between_looks_ms": round(1000 * between, 2),
            f"{clock}look_ms": round(1000 * look, 1),
            f"{clock}naive_ms": round(1000 * loop, 1),
            f"{clock}monitor_share": round(monitor_share, 5),
            f"{clock}naive_share": round(loop / step, 5),
        }
        if clock:
            # Between looks the monitor takes one norm of all gradients, or of a sample; a look takes the norms of
            # gradients and weights as well.
            often = int(monitor._diagnostics.is_exact)
            of_step = [own[n] - often * monitor.norms[n][0] for n in plain]
            of_look = [own[n] - (often + 1) * monitor.norms[n][0] - monitor.norms[n][1] for n in looks]
            row["cpu_between_looks_python_ms"] = round(1000 * statistics.median(of_step), 2)
            row["cpu_look_python_ms"] = round(1000 * statistics.median(of_look), 1)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("lora", "full"), default="lora")
    parser.add_argument("--size", type=int, default=256, help="side of the images, pixels")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=21)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", help="unset: 32-true for a LoRA, bf16-true for full fine-tuning")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / "health" / "cost.jsonl")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    warnings.filterwarnings("ignore")
    precision: Any = given.precision or ("32-true" if given.kind == "lora" else "bf16-true")
    monitor, naive = Timed(), Naive()
    side = given.size // 8
    with tempfile.TemporaryDirectory() as root:
        trainer = Trainer(
            accelerator=given.device,
            devices=1,
            max_steps=given.steps,
            plugins=[FusedBackwardPrecision(precision, memory="off")],
            default_root_dir=root,
            callbacks=[naive, monitor],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = UNet(given.kind, torch.bfloat16 if precision == "bf16-true" else torch.float32)
        pictures = [torch.randn(given.batch, 4, side, side) for _ in range(given.steps)]
        trainer.fit(module, DataLoader(pictures, batch_size=None))  # type: ignore[arg-type]
    row: dict[str, Any] = {
        "kind": given.kind,
        "trained_values": sum(p.numel() for p in module.parameters() if p.requires_grad),
        "trained_tensors": sum(p.requires_grad for p in module.parameters()),
        "size": given.size,
        "batch": given.batch,
        "steps": given.steps,
        "precision": precision,
        "start_ms": round(1000 * monitor.start_s, 1),
    }
    row |= shares(monitor, naive, given.steps)
    for name, number in (("between_looks", COUNTED_STEP), ("look", COUNTED_LOOK)):
        row[f"{name}_ops"], row[f"{name}_syncs"] = monitor.counts[number]
    row |= {
        "alerts": sorted({f"{a.level} {a.check}" for a in monitor.alerts}),
        "device": f"{given.device} {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "versions": {m.__name__: m.__version__ for m in (torch, lightning.pytorch, diffusers, peft)},
    }
    keep_row(row, given.output)


if __name__ == "__main__":
    main()

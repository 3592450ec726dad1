"""Cost of the lossy gradient options: the tiny Stable Diffusion learns its brand with and without them.

    OMP_NUM_THREADS=1 python -m benchmarks.precision.lossy [--steps 150]
        [--output benchmarks/results/precision/lossy.jsonl]

Same seeds, batches and noise in every run. `loss` is the mean over the last third of the steps, `relative` is that loss
over the dense run's, `cosine` the cosine of the first step's LoRA gradient with the dense gradient.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from benchmarks.common.rows import keep_row
from lightning_aigc.data import ImageCaptionData
from lightning_aigc.diffusion import DiffusionLoRA
from lightning_aigc.precision import FusedBackwardPrecision

VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "attention_grad_density 0.9": {"attention_grad_density": 0.9},
    "attention_grad_density 0.5": {"attention_grad_density": 0.5},
    "attention_grad_density 0.2": {"attention_grad_density": 0.2},
    "input_grad_density 0.8": {"input_grad_density": 0.8},
    "input_grad_density 0.5": {"input_grad_density": 0.5},
    "input_grad_density 0.2": {"input_grad_density": 0.2},
}


class Watch(Callback):
    """Record every loss, and the first gradient of all trained parameters."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradient = torch.empty(0)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        if not self.gradient.numel():
            found = [p.grad.flatten() for p in pl_module.parameters() if p.grad is not None]
            self.gradient = torch.cat(found).clone()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


def train(steps: int, lossy: dict[str, Any], folder: str) -> Watch:
    seed_everything(0, verbose=False)
    watch = Watch()
    model = DiffusionLoRA("embedded:sd", rank=16, learning_rate=1e-3, max_train_steps=steps)
    data = ImageCaptionData("embedded:brand", resolution=64, train_batch_size=8, cache_dir=f"{folder}/cache", seed=0)
    trainer = Trainer(
        default_root_dir=folder, accelerator="cpu", max_steps=steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[watch],
        plugins=[FusedBackwardPrecision("32-true", memory="lean", **lossy)],
    )  # fmt: skip
    model.configure_callbacks = lambda: []  # type: ignore[method-assign]  # images and files are not the subject
    trainer.fit(model, data)
    return watch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--output", type=Path, help="a .jsonl file to append the rows to")
    options = parser.parse_args()
    dense: tuple[float, torch.Tensor] | None = None
    with tempfile.TemporaryDirectory() as folder:
        for name, lossy in VARIANTS.items():
            watch = train(options.steps, lossy, folder)
            last = watch.losses[-options.steps // 3 :]
            loss = sum(last) / len(last)
            dense = dense or (loss, watch.gradient)
            row = {
                "benchmark": "lossy",
                "device": f"cpu ({platform.machine()})",
                "torch": torch.__version__,
                "steps": options.steps,
                "variant": name,
                "loss": round(loss, 5),
                "relative": round(loss / dense[0], 4),
                "cosine": round(torch.cosine_similarity(watch.gradient, dense[1], dim=0).item(), 4),
            }
            keep_row(row, options.output)


if __name__ == "__main__":
    main()

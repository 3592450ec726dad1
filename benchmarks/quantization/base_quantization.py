"""Loss of a LoRA that was trained on a quantized base: the tiny Stable Diffusion on its brand, several seeds.

    OMP_NUM_THREADS=1 python -m benchmarks.quantization.base_quantization [--steps 120] [--seeds 1 2 3]
        [--kinds int8 fp8 nf4 nf4-all]        # a number among the kinds is a budget in MiB
        [--output benchmarks/results/quantization/base_quantization.jsonl]

Equal batches and noise in every run of a seed. `own_base` is the LoRA's loss on the base of its training, `full_base`
its loss on the float32 base, as in use; `relative` is `full_base` over the loss of a LoRA trained on the float32 base.
The loss is the mean squared error at 8 timesteps of each image, with noise from the image's seed, on the training
images and on the held-out tenth. `output_error` is the relative L2 change of the untrained U-Net's output on held-out
images by quantization alone. One row per seed and kind.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor

from benchmarks.common.rows import keep_row
from lightning_aigc.data import ImageCaptionData
from lightning_aigc.diffusion import DiffusionLoRA
from lightning_aigc.diffusion.objectives.noise import SeededNoise, example_seeds
from lightning_aigc.precision import FusedBackwardPrecision

BATCHES = 10
"""Scored batches of training images."""


def make(kind: Any, steps: int, seed: int) -> DiffusionLoRA:
    seed_everything(seed, verbose=False)
    return DiffusionLoRA(
        "embedded:sd", rank=16, learning_rate=2e-3, max_train_steps=steps, lr_scheduler="cosine", lr_warmup_steps=20,
        lora_targets=["attention", "feed_forward", "convolutions"], snr_gamma=5.0, base_quantization=kind,
    )  # fmt: skip


def train(kind: Any, steps: int, seed: int, folder: str) -> tuple[DiffusionLoRA, ImageCaptionData, float]:
    """Train on a quantized or float32 base. Returns: the module, the data and the seconds."""
    module = make(kind, steps, seed)
    data = ImageCaptionData(
        "embedded:brand", resolution=64, train_batch_size=16, cache_latents=True, cache_text_embeddings=True,
        cache_dir=f"{folder}/cache", validation_split=0.1, seed=0,
    )  # fmt: skip
    trainer = Trainer(
        default_root_dir=folder, accelerator="cpu", max_steps=steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
        plugins=[FusedBackwardPrecision("32-true", memory="lean")],
    )  # fmt: skip
    module.configure_callbacks = lambda: []  # type: ignore[method-assign]  # images and files are not the subject
    started = time.perf_counter()
    trainer.fit(module, data)
    return module, data, time.perf_counter() - started


@torch.no_grad()
def loss_of(module: DiffusionLoRA, batches: list[dict[str, Any]]) -> float:
    module.eval()
    losses = [module.validation_losses(batch, SeededNoise(example_seeds(batch))) for batch in batches]
    return float(torch.cat(losses).mean())


@torch.no_grad()
def base_outputs(module: DiffusionLoRA, batches: list[dict[str, Any]]) -> Tensor:
    """Flat outputs of the base without its LoRA."""
    found = []
    adapters = {name: p.clone() for name, p in module.named_parameters() if "lora_B" in name}
    for name, parameter in module.named_parameters():
        if name in adapters:
            parameter.zero_()
    for batch in batches:
        noise = SeededNoise(example_seeds(batch))
        latents = module.encoders.latents(batch, noise.normal_like)
        condition = module.encoders.condition(batch, with_gradients=False)
        for part in range(8):
            timesteps = noise.timesteps(part, 8, module.num_train_timesteps)
            noisy = module.objective.schedule.add_noise(latents, noise.normal_like(latents), timesteps)  # type: ignore[union-attr]
            found.append(module.predict(noisy, timesteps, condition, batch).flatten())
    for name, parameter in module.named_parameters():
        if name in adapters:
            parameter.copy_(adapters[name])
    return torch.cat(found)


def trained(module: DiffusionLoRA) -> dict[str, Tensor]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def batches_of(data: ImageCaptionData) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Some batches of training images in a fixed order, and all held-out batches."""
    torch.manual_seed(123)
    training = [batch for _, batch in zip(range(BATCHES), data.train_dataloader(), strict=False)]
    return training, list(data.val_dataloader())


def rows_of_seed(seed: int, kinds: list[Any], steps: int, folder: str) -> Iterator[dict[str, Any]]:
    """Score the untrained base, and LoRAs trained on the float32 base and on each quantized one."""
    whole: DiffusionLoRA | None = None
    baseline: dict[str, float] = {}
    for kind in (None, *kinds):
        module, data, seconds = train(kind, steps, seed, folder)
        if whole is None:
            whole = module
            training, held_out = batches_of(data)
            untrained = make(None, 1, seed)
            untrained.loaded()
            reference = base_outputs(untrained, held_out)
            losses = {"full_base": loss_of(untrained, training), "full_base_held_out": loss_of(untrained, held_out)}
            yield {"kind": "untrained", **losses}
        own = loss_of(module, training)
        with torch.no_grad():
            for name, parameter in trained(whole).items():
                parameter.copy_(trained(module)[name])
        found = {"own_base": own, "full_base": loss_of(whole, training),
                 "full_base_held_out": loss_of(whole, held_out), "seconds": seconds}  # fmt: skip
        if module.packed_base is not None:
            found["output_error"] = float((base_outputs(module, held_out) - reference).norm() / reference.norm())
            found["bytes_ratio"] = module.packed_base.bytes_after / module.packed_base.bytes_before
        baseline = baseline or found
        for name in ("full_base", "full_base_held_out"):
            found[name.replace("full_base", "relative")] = found[name] / baseline[name]
        yield {
            "kind": "float32" if kind is None else str(kind),
            **{name: round(value, 5) for name, value in found.items()},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--kinds", nargs="+", default=["int8", "fp8", "nf4", "nf4-all"])
    parser.add_argument("--output", type=Path, help="a .jsonl file to append the rows to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            kinds = [{"target_mib": float(kind)} if kind[0].isdigit() else kind for kind in options.kinds]
            for found in rows_of_seed(seed, kinds, options.steps, folder):
                row = {
                    "benchmark": "base_quantization",
                    "device": f"cpu ({platform.machine()})", "torch": torch.__version__, "steps": options.steps,
                    "seed": seed, **found,
                }  # fmt: skip
                keep_row(row, options.output)


if __name__ == "__main__":
    main()

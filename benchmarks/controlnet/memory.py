"""Memory that a ControlNet's training step keeps for backward, at each level of FusedBackwardPrecision.

    python -m benchmarks.controlnet.memory [--output benchmarks/results/controlnet/memory.jsonl]

The trained ControlNet and the frozen U-Net, on the embedded model and on SD 1.5's architecture at half its
width with random weights; bytes are counted, so they are the same on every device.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from diffusers import ControlNetModel, UNet2DConditionModel
from torch import nn

from benchmarks.common.kept_memory import LiveStorages
from benchmarks.common.rows import keep_row
from benchmarks.common.unet_variants import SD15
from lightning_aigc.diffusion.pipeline.loading import load_components
from lightning_aigc.precision import FusedBackwardPrecision

LEVELS = ("off", "balanced", "lean", "max")


class Pair(nn.Module):
    """A trained ControlNet and a frozen U-Net."""

    def __init__(self, unet: Any, hint: tuple[int, ...]) -> None:
        super().__init__()
        self.unet = unet.requires_grad_(False)
        self.controlnet: Any = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=hint)

    def forward(self, noisy: Any, timesteps: Any, text: Any, condition: Any) -> Any:
        down, middle = self.controlnet(noisy, timesteps, text, controlnet_cond=condition, return_dict=False)
        return self.unet(
            noisy, timesteps, text, down_block_additional_residuals=list(down), mid_block_additional_residual=middle
        ).sample


def models() -> dict[str, tuple[Pair, tuple[int, int, int]]]:
    """By name: ControlNet and U-Net, batch, latent side and tokens."""
    torch.manual_seed(0)
    half: dict[str, Any] = dict(SD15) | {"block_out_channels": (160, 320, 640, 640)}
    return {
        "embedded": (Pair(load_components("embedded:sd").denoiser, (16, 32, 96)), (8, 16, 16)),
        "SD 1.5 at half its width": (Pair(UNet2DConditionModel(**half), (16, 32, 96, 256)), (1, 64, 77)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a .jsonl file to add the rows to")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name, (pair, (batch, side, tokens)) in models().items():
        factor = 2 ** (len(pair.controlnet.config.conditioning_embedding_out_channels) - 1)
        noisy = torch.randn(batch, 4, side, side)
        text = torch.randn(batch, tokens, pair.unet.config.cross_attention_dim)
        condition = torch.rand(batch, 3, factor * side, factor * side)
        native = 0.0
        for level in LEVELS:
            plugin = FusedBackwardPrecision("32-true", memory=level)  # type: ignore[arg-type]
            plugin.convert_module(pair)
            with LiveStorages(pair) as storages:
                output = pair(noisy, torch.full((batch,), 500), text, condition)
                kept = storages.live_mib()
            del output
            plugin.teardown()
            native = native or kept
            row = {
                "benchmark": "controlnet_memory", "model": name, "batch": batch, "latent_side": side, "memory": level,
                "kept_mib": round(kept, 2), "of_native": round(kept / native, 3),
                "versions": {"torch": torch.__version__},
            }  # fmt: skip
            keep_row(row, given.output)


if __name__ == "__main__":
    main()

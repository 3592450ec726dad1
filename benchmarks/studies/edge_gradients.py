"""Size of the first gradients of a ControlNet's edge path, and the share that a global sparsifier keeps of them.

    python -m benchmarks.studies.edge_gradients [--output benchmarks/results/studies/edge_gradients.jsonl]

The tiny model with batches of 16 and half the captions dropped. For each group of parameters: the root mean square of
its gradient, and the share of its values among the largest quarter of all values.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path

import torch

from benchmarks.common.rows import keep_row
from lightning_aigc.data import ImageCaptionData
from lightning_aigc.diffusion import DiffusionControlNet

LOOKS = (0, 1, 2, 5, 10, 20, 40)
KEPT = 0.25


def group_of(name: str) -> str:
    """Group of a ControlNet's parameters that a parameter belongs to."""
    part = name.removeprefix("controlnet.")
    if part.startswith("controlnet_cond_embedding"):
        return "hint embedding"
    if part.startswith(("controlnet_down_blocks", "controlnet_mid_block")):
        return "zero convolutions"
    if part.startswith("conv_in"):
        return "conv_in"
    return "down_blocks.0" if part.startswith("down_blocks.0") else "rest of the copy"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a .jsonl file to add the rows to")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(3)
    module = DiffusionControlNet("embedded:sd")
    module.configure_model()
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    with tempfile.TemporaryDirectory() as root:
        data = ImageCaptionData(
            "embedded:prior",
            resolution=64,
            train_batch_size=16,
            num_workers=0,
            caption_dropout_rate=0.5,
            cache_dir=root,
        )  # fmt: skip
        data.prepare()
        batches = [batch for _ in range(2) for batch in data.loader()]
        optimizer = torch.optim.AdamW([p for _, p in named], lr=5e-4)
        for step in range(max(LOOKS) + 1):
            optimizer.zero_grad()
            module.example_losses(batches[step]).mean().backward()
            if step in LOOKS:
                groups: dict[str, list[torch.Tensor]] = {}
                for name, parameter in named:
                    assert parameter.grad is not None
                    groups.setdefault(group_of(name), []).append(parameter.grad.flatten())
                whole = {name: torch.cat(parts) for name, parts in groups.items()}
                sizes = torch.cat(list(whole.values())).abs()
                limit = sizes.kthvalue(int(sizes.numel() * (1 - KEPT))).values
                rms = {name: float(values.square().mean().sqrt()) for name, values in whole.items()}
                row = {
                    "benchmark": "edge_gradients", "step": step,
                    "rms": {name: float(f"{value:.2e}") for name, value in rms.items()},
                    "kept": {name: round(float((v.abs() > limit).float().mean()), 3) for name, v in whole.items()},
                    "zero_convolutions_of_hint": None
                    if not rms["hint embedding"]
                    else round(rms["zero convolutions"] / rms["hint embedding"], 1),
                }  # fmt: skip
                keep_row(row, given.output)
            optimizer.step()


if __name__ == "__main__":
    main()

"""Losses and step time of DiffusionControlNet, compared with diffusers' train_controlnet.py on the same work.

    OMP_NUM_THREADS=1 python -m benchmarks.controlnet.step [--output benchmarks/results/controlnet/step.jsonl]

Both begin with the same pipeline, ControlNet weights, batches, conditions and noise; blocks of steps alternate in one
process, as in lora_step.py. `folder` reads the conditions from files, as the script does; `canny` computes them in
each step; `caches on` computes them once. Needs no network.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torchvision.transforms.functional import to_pil_image

from benchmarks.common.controlnet_loop import controlnet_steps
from benchmarks.common.diffusers_loop import LEARNING_RATE, MAX_GRAD_NORM
from benchmarks.common.embedded_images import embedded_images
from benchmarks.common.rows import keep_row
from benchmarks.end_to_end.lora_step import Alternate, make_data, summarize
from lightning_aigc.callbacks import RunProgress
from lightning_aigc.diffusion import DiffusionControlNet
from lightning_aigc.embedded import resolve
from lightning_aigc.metrics import canny
from lightning_aigc.precision import FusedBackwardPrecision

MODEL, PICTURES = "embedded:sd", "embedded:prior"
CASES = {"caches off, folder": ("folder", False), "caches off, canny": ("canny", False), "caches on": ("canny", True)}
FIRST = 3


def run(case: str, given: argparse.Namespace) -> dict[str, Any]:
    conditions, cached = CASES[case]
    with tempfile.TemporaryDirectory() as root:
        edges = Path(root) / "conditions"
        edges.mkdir()
        files = sorted(resolve(PICTURES).glob("*.png"))
        for file, edge in zip(files, canny(embedded_images(PICTURES)), strict=True):
            to_pil_image(edge).save(edges / file.name)

        plain = make_data(PICTURES, root, given, cached=False)
        alternate = Alternate(controlnet_steps(plain, edges, Path(root), resolve(MODEL)), given.block)
        module = DiffusionControlNet(
            MODEL,
            conditions=conditions,
            learning_rate=LEARNING_RATE,
            checkpointing_steps=10**9,
            max_train_steps=given.steps,
        )
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            plugins=[FusedBackwardPrecision("32-true", memory=given.memory)],
            default_root_dir=root,
            gradient_clip_val=MAX_GRAD_NORM,
            log_every_n_steps=10,
            callbacks=[alternate, RunProgress()],
        )
        torch.manual_seed(0)
        shown = edges if conditions == "folder" else None
        trainer.fit(module, make_data(PICTURES, root, given, cached=cached, conditions=shown))
    given.precision = "32-true"
    row = summarize(case, alternate, given)
    ours, theirs = torch.stack(alternate.our_losses[:FIRST]), torch.tensor(alternate.their_losses[:FIRST])
    row["first_losses_max_difference"] = float((ours.cpu() - theirs).abs().max())
    return {"benchmark": "controlnet_step", "memory": given.memory} | row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--block", type=int, default=5)
    parser.add_argument("--warmup_blocks", type=int, default=2)
    parser.add_argument("--memory", default="off", help="FusedBackwardPrecision's level")
    parser.add_argument("--case", choices=CASES, help="one case only")
    parser.add_argument("--output", type=Path, help="a .jsonl file to add the rows to")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for case in CASES if given.case is None else [given.case]:
        keep_row(run(case, given), given.output)


if __name__ == "__main__":
    main()

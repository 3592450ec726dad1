"""Check a run of `make demo-edit` against its bars: `python -m tools.check_edit_demo runs/demo_edit/edit.safetensors`.

Edits things that training never shows, whose true targets the tiny world draws. An `edit_error` is the squared distance
to the target over the pixels that change, 1 where nothing was changed; `untouched_rmse` is the distance to the source
over the others, in 0..1; `rolled_error` is the distance over all pixels where another pair's source was given: it tells
that sources are read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from lightning_aigc.diffusion.samplers.lora import LoRASampler
from lightning_aigc.metrics.clip_similarity import CLIPSimilarity
from tools.embedded import edits, world

MOST_SASH_ERROR, MOST_COLOUR_ERROR, MOST_UNTOUCHED_RMSE = 0.50, 0.20, 0.07
LEAST_CLIP_T, LEAST_ROLLED_ERROR = 0.70, 1.0
COUNT = 24
BASE = {"pretrained_model_name_or_path": "embedded:sd3", "num_inference_steps": 12, "guidance_scale": 1.0}


def square(first: Tensor, second: Tensor, mask_N1HW: Tensor) -> float:
    """Mean squared distance over the pixels of a mask."""
    return float((((first - second) ** 2) * mask_N1HW).sum() / (3 * mask_N1HW.sum()))


def measure(lora: Path, seed: int = 5) -> dict[str, float]:
    """The figures of a LoRA file."""
    sampler = LoRASampler(BASE | {"flow_shift": 1.0}, "32-true", "cpu", lora)
    judge = CLIPSimilarity(model="embedded:clip")
    found: dict[str, float] = {}
    for name, instruction in (("sash", edits.SASH), ("colour", edits.ORANGE)):
        pairs = edits.held_out(instruction, COUNT)
        source, target = (world.to_pixels([getattr(pair, key) for pair in pairs]) for key in ("source", "target"))
        drawn = draw(sampler, instruction, [pair.source for pair in pairs], seed)
        changed = (source - target).abs().amax(1, keepdim=True) > 0.02
        everywhere = torch.ones_like(changed)
        found[f"{name}_error"] = square(drawn, target, changed) / square(source, target, changed)
        found[f"{name}_untouched_rmse"] = square(drawn, source, ~changed) ** 0.5
        captions = [pair.description for pair in pairs]
        found[f"{name}_clip_t"] = float(judge.scores(drawn, captions)["clip_t"].mean())
        found[f"{name}_clip_t_of_source"] = float(judge.scores(source, captions)["clip_t"].mean())
        found[f"{name}_clip_t_of_target"] = float(judge.scores(target, captions)["clip_t"].mean())
        rolled = draw(sampler, instruction, [pairs[at - 1].source for at in range(COUNT)], seed)
        found[f"{name}_rolled_error"] = square(rolled, target, everywhere) / square(source, target, everywhere)
    return {key: round(value, 3) for key, value in found.items()}


def draw(sampler: LoRASampler, instruction: str, sources: Sequence[object], seed: int) -> Tensor:
    images = [[Image.fromarray(source)] for source in sources]  # type: ignore[arg-type]
    with torch.no_grad():
        return sampler.sample([(instruction, seed + at) for at in range(len(images))], sources=images)


def failures(found: dict[str, float]) -> list[str]:
    """One sentence per missed bar; empty if the run passed."""
    bars = [
        (found["sash_error"] <= MOST_SASH_ERROR, f"sash: error {found['sash_error']}, wanted {MOST_SASH_ERROR}"),
        (found["colour_error"] <= MOST_COLOUR_ERROR, f"colour: error {found['colour_error']}, {MOST_COLOUR_ERROR}"),
        (found["sash_clip_t"] >= LEAST_CLIP_T, f"sash: CLIP-T {found['sash_clip_t']}, wanted {LEAST_CLIP_T}"),
    ]
    for name in ("sash", "colour"):
        untouched, rolled = found[f"{name}_untouched_rmse"], found[f"{name}_rolled_error"]
        bars.append((untouched <= MOST_UNTOUCHED_RMSE, f"{name}: {untouched} on what should stay"))
        bars.append((rolled >= LEAST_ROLLED_ERROR, f"{name}: another source gives an error of {rolled} only"))
    return [said for holds, said in bars if not holds]


def main() -> None:
    found = measure(Path(sys.argv[1]))
    print(json.dumps(found))
    missed = failures(found)
    print("\n".join(missed) if missed else "demo-edit: all bars held")
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()

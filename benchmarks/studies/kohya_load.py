"""Compare one of our LoRA files loaded by kohya sd-scripts' network class with the same file in diffusers.

    python -m benchmarks.studies.kohya_load SD_SCRIPTS/networks/lora.py runs/demo/zorp.safetensors [--commit HASH]
        [--output F]

sd-scripts' `create_network_from_weights` applies the file to the embedded Stable Diffusion's U-Net, diffusers loads it
with `load_lora_weights`; both get the same noise, timestep and text. The two sd-scripts modules that its file imports
(a logger's set-up, SDXL's U-Net class) are stubbed. Prints one row.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import StableDiffusionPipeline

from benchmarks.common.rows import keep_row
from lightning_aigc.embedded import resolve


def kohya_networks(path: Path) -> Any:
    """sd-scripts' networks/lora.py as a module."""
    utils, sdxl = types.ModuleType("library.utils"), types.ModuleType("library.sdxl_original_unet")
    utils.setup_logging = lambda *_, **__: None  # type: ignore[attr-defined]
    sdxl.SdxlUNet2DConditionModel = type("SdxlUNet2DConditionModel", (), {})  # type: ignore[attr-defined]
    sys.modules |= {"library": types.ModuleType("library"), "library.utils": utils, "library.sdxl_original_unet": sdxl}
    spec = importlib.util.spec_from_file_location("kohya_lora", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def output_of(pipeline: StableDiffusionPipeline) -> torch.Tensor:
    torch.manual_seed(0)
    unet = pipeline.unet.eval()
    side = unet.config.sample_size
    noise, text = torch.randn(2, 4, side, side), torch.randn(2, 16, unet.config.cross_attention_dim)
    result: torch.Tensor = unet(noise, torch.tensor([10, 500]), text).sample
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks_lora", type=Path, help="networks/lora.py of an sd-scripts checkout")
    parser.add_argument("lora", type=Path)
    parser.add_argument("--commit", help="of the sd-scripts checkout, for the row")
    parser.add_argument("--output", type=Path, help="a .jsonl file to append the row to")
    given = parser.parse_args()
    folder = resolve("embedded:sd")
    base, theirs, ours = (StableDiffusionPipeline.from_pretrained(folder, safety_checker=None) for _ in range(3))
    ours.load_lora_weights(given.lora.parent, weight_name=given.lora.name)
    network, weights = kohya_networks(given.networks_lora).create_network_from_weights(
        1.0, str(given.lora), theirs.vae, theirs.text_encoder, theirs.unet, for_inference=True
    )
    network.apply_to(theirs.text_encoder, theirs.unet, apply_text_encoder=False)
    loaded = network.load_state_dict(weights, strict=False)
    plain, kohya, in_diffusers = output_of(base), output_of(theirs), output_of(ours)
    row = {
        "benchmark": "kohya_load",
        "sd_scripts": given.commit,
        "diffusers": diffusers.__version__,
        "torch": torch.__version__,
        "modules": len(network.unet_loras),
        "keys": len(weights),
        "missing": len(loaded.missing_keys),
        "unexpected": len(loaded.unexpected_keys),
        "largest_difference_to_diffusers": float((kohya - in_diffusers).abs().max()),
        "largest_change_by_the_lora": round(float((kohya - plain).abs().max()), 4),
    }
    keep_row(row, given.output)


if __name__ == "__main__":
    main()

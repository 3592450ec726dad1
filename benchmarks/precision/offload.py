"""Bytes that a U-Net's forward keeps for backward, on the device and in host memory, at memory="max" with offload.

Counted on the simulated npu of the tests, which tracks for every tensor whether it is on the device or on the host.
The row also says whether the gradients are bit-identical to those of memory="max".

    OMP_NUM_THREADS=1 python -m benchmarks.precision.offload [--pixels 512] [--width 1.0] [--lora 64] [--output FILE]
"""
# mypy: no-warn-return-any

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common.rows import keep_row
from benchmarks.common.unet_variants import build, inputs_of
from fakes.kept_bytes import host_storages, npu_storages
from fakes.npu import fake_npu
from lightning_aigc.precision.swaps import swap_forwards

VARIANTS: dict[str, dict[str, Any]] = {
    "max": {"memory": "max"},
    "max, offload": {"memory": "max", "offload": True},
}


def measure(unet: nn.Module, given: dict[str, Any], variant: dict[str, Any]) -> tuple[int, int, dict[str, Tensor]]:
    """Run one step. Returns: bytes kept on the device and in host memory after forward, and the gradients."""
    npu, host = npu_storages(), host_storages()
    swapped = swap_forwards(unet, **variant)
    output = unet(**given).sample
    kept = sum(nbytes for address, nbytes in npu_storages().items() if address not in npu) - output.nbytes
    on_host = sum(nbytes for address, nbytes in host_storages().items() if address not in host)
    output.square().mean().backward()
    gradients = {name: p.grad.cpu() for name, p in unet.named_parameters() if p.grad is not None}
    unet.zero_grad(set_to_none=True)
    swapped.restore()
    return kept, on_host, gradients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pixels", type=int, default=512)
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--lora", type=int, default=64, help="rank; 0 trains every weight")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    fake_npu.install()
    fake_npu.pin_everything()
    unet = build("sd15", options.lora, torch.bfloat16, width=options.width).to("npu")
    given = {
        name: value.to("npu") for name, value in inputs_of("sd15", 1, options.pixels, torch.bfloat16, "cpu").items()
    }
    found: dict[str, tuple[int, int, dict[str, Tensor]]] = {}
    for name, variant in VARIANTS.items():
        found[name] = kept, on_host, gradients = measure(unet, given, variant)
        alike = [torch.equal(gradient, found["max"][2][key]) for key, gradient in gradients.items()]
        row = {
            "benchmark": "offload", "device": "simulated npu, bytes counted",
            "torch": torch.__version__, "pixels": options.pixels, "width": options.width, "lora_rank": options.lora,
            "variant": name, "kept_on_device_mib": round(kept / 2**20, 2),
            "kept_on_host_mib": round(on_host / 2**20, 2),
            "share_of_max": round(kept / found["max"][0], 4), "gradients_of_max": all(alike),
        }  # fmt: skip
        keep_row(row, options.output)


if __name__ == "__main__":
    main()

"""Peak memory of a LoRA step of real U-Nets and diffusion transformers, counted on shapes alone, without weights.

    python -m benchmarks.precision.step_shapes [--model sdxl] [--pixels 1024] [--batch 1] [--rank 16] [--text 128]
        [--variants max-int8 max-nf4] [--blocks 4] [--weights] [--output FILE]

Forward and backward run on fake tensors, and every storage that is alive when an operator returns is counted, as in
`step_memory.py`; for its real steps of SD 1.5 (--model sd15 --pixels 512 --batch 4 --rank 64) the count is within 0.2
%. Resident are the U-Net, LoRA and AdamW's two states in float32, and until backward the last step's gradients, as
under Lightning; latents and text embeddings come from caches. Memory that one operator allocates and frees is not
counted: at most one layer's dequantized weight (`largest_unpacked_mib`) and its products. Prints one JSON object per
line.

With --blocks N a transformer is counted with N blocks of each kind and with one more of each, and the line through
these is followed to its published depth: bytes grow by the block, and the count's time by its square. For Qwen-Image
at 1024 px this is within 0.02 % of the whole count; with two kinds of blocks it was not compared.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import inspect
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.common.denoisers import DENOISERS, DEPTHS, KLEIN, SD35, denoiser_on, inputs_of
from benchmarks.common.rows import keep_row
from benchmarks.precision.step_memory import MIB, VARIANTS, PeakOfStorages
from lightning_aigc.cli.bench.architectures import SD35_LARGE
from lightning_aigc.precision import FusedBackwardPrecision
from lightning_aigc.quantization.frozen import stored_bytes
from lightning_aigc.quantization.layers import FORMATS, frozen_layers
from lightning_aigc_kernels.packed_weight import Format, PackedWeight, set_packed_
from lightning_aigc_kernels.packed_weight.reference import BLOCK, BYTES_OF_A_BLOCK


def unwritten(weight: Tensor, kind: Format) -> PackedWeight:
    """A quantized weight of this shape without values."""
    blocks = -(-weight.numel() // BLOCK)
    packed = torch.empty(blocks, BYTES_OF_A_BLOCK[kind], dtype=torch.int8 if kind == "int8" else torch.uint8)
    return PackedWeight(packed, torch.empty(blocks), kind, weight.shape, (weight.dtype,))


def fill_in(unet: Any, kind: str) -> None:
    """Replace every parameter and tensor by a fake one: trained in float32, quantized in its format."""
    for module in unet.modules():
        for held in (module._buffers, vars(module)):  # Qwen-Image's positions are not buffers
            tensors = {name: tensor for name, tensor in held.items() if isinstance(tensor, Tensor)}
            held.update({name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()})
        for name, parameter in module._parameters.items():
            if parameter is not None:
                dtype = torch.float32 if parameter.requires_grad else parameter.dtype
                fake = torch.empty(parameter.shape, dtype=dtype)
                module._parameters[name] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    for layer in frozen_layers(unet) if kind else ():
        if not layer.skip_reason:
            chosen = FORMATS[kind][0 if layer.is_linear else 1]
            set_packed_(layer.module, chosen, unwritten(layer.weight, chosen))


def count_by_blocks(variant: str, options: argparse.Namespace) -> dict[str, float]:
    """The count of the published depth, on the line through those of `options.blocks` blocks and of one more."""
    with torch.device("meta"):
        published = DENOISERS[options.model](num_layers=1)
    defaults = {name: p.default for name, p in inspect.signature(type(published).__init__).parameters.items()}
    whole = defaults | {"sd35": SD35, "sd35_large": SD35_LARGE, "klein": KLEIN}.get(options.model, {})
    kinds = [name for name in DEPTHS if name in published.config]
    few = dict.fromkeys(kinds, options.blocks)
    depths = [few, *(few | {name: few[name] + 1} for name in kinds)]
    # Each in a process of its own: what one count leaves in memory would look like a block's in the next.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        first, *more = (pool.submit(count, variant, options, **depth) for depth in depths)
        found = dict(first.result())
        for name, other in zip(kinds, more, strict=True):
            for key in ("weights_mib", "resident_mib", "peak_mib"):
                found[key] += (int(whole[name]) - few[name]) * (other.result()[key] - first.result()[key])
    return {key: round(value, 1) for key, value in found.items()}


def count_weights(variant: str, options: argparse.Namespace) -> dict[str, float]:
    """The frozen weights of the published depth alone; a step adds equally many bytes to them in every format."""
    denoiser = denoiser_on("meta", options.model, options.rank)
    with FakeTensorMode(), torch.device("cpu"):
        fill_in(denoiser, variant.partition("-")[2])
        frozen = [p for p in denoiser.parameters() if not p.requires_grad]
        return {"weights_mib": round(sum(map(stored_bytes, frozen)) / MIB, 1)}


def count(variant: str, options: argparse.Namespace, **depth: int) -> dict[str, float]:
    memory: Any
    memory, _, kind = variant.partition("-")
    unet = denoiser_on("meta", options.model, options.rank, **depth)
    with FakeTensorMode(), torch.device("cpu"):
        fill_in(unet, kind)
        plugin = FusedBackwardPrecision("bf16-mixed", memory=memory)
        plugin.convert_module(unet)
        given = inputs_of(unet.config, options.model, options.batch, options.pixels, options.text)
        trained = [p for p in unet.parameters() if p.requires_grad]
        adam = [torch.empty_like(p) for p in trained for _ in range(2)]
        gradients = [torch.empty_like(p) for p in trained]  # of the last step; Lightning frees them before backward
        watch = PeakOfStorages()
        watch.start([])
        with plugin.forward_context():
            output = unet(**given, return_dict=False)[0]
            loss = (torch.stack(output) if isinstance(output, list) else output).float().square().mean()
        del output
        del gradients
        loss.backward()
        watch.stop()
        del adam
        plugin.teardown()
        frozen = [p for p in unet.parameters() if not p.requires_grad]
        return {
            "weights_mib": round(sum(map(stored_bytes, frozen)) / MIB, 1),
            "resident_mib": round(watch.resident_bytes / MIB, 1),
            "peak_mib": round(watch.peak_bytes / MIB, 1),
            "largest_unpacked_mib": round(max(p.numel() * 2 for p in frozen if isinstance(p, PackedWeight)) / MIB, 1)
            if kind
            else 0.0,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=DENOISERS, default="sdxl")
    parser.add_argument("--pixels", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rank", type=int, default=16, help="of the LoRA; 0 trains every weight")
    parser.add_argument("--text", type=int, default=128, help="text tokens of a transformer")
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=["max", "max-int8", "max-nf4", "max-nf4-all"]
    )
    parser.add_argument(
        "--blocks", type=int, help="count this number of blocks of each kind, and follow the line to all"
    )
    parser.add_argument("--weights", action="store_true", help="count the weights alone, without a step")
    parser.add_argument("--output", type=Path, help="a .jsonl file to append the rows to")
    options = parser.parse_args()
    for variant in options.variants:
        row = {
            "benchmark": "step_shapes", "model": options.model,
            "variant": variant, "batch": options.batch, "rank": options.rank, "pixels": options.pixels,
            "torch": torch.__version__,
        }  # fmt: skip
        row |= {name: value for name, value in (("text", options.text), ("blocks", options.blocks)) if options.blocks}
        by_blocks = count_by_blocks if options.blocks else count
        row |= (count_weights if options.weights else by_blocks)(variant, options)
        keep_row(row, options.output)


if __name__ == "__main__":
    main()

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
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    ChromaTransformer2DModel,
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    Krea2Transformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    ZImageTransformer2DModel,
)
from peft import LoraConfig
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.common.rows import keep_row
from benchmarks.end_to_end.real_size import sdxl_unet
from benchmarks.precision.step_memory import MIB, VARIANTS, PeakOfStorages
from lightning_aigc.cli.bench.architectures import SD35_LARGE
from lightning_aigc.diffusion.families import TRANSFORMERS
from lightning_aigc.diffusion.families.unet_lora import unet_lora_config
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


SD35: dict[str, Any] = {
    "sample_size": 128, "num_layers": 24, "num_attention_heads": 24, "attention_head_dim": 64,
    "caption_projection_dim": 1536, "pos_embed_max_size": 384, "qk_norm": "rms_norm", "in_channels": 16,
    "out_channels": 16, "dual_attention_layers": tuple(range(13)),
}  # fmt: skip
KLEIN: dict[str, Any] = {
    "num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680,
    "guidance_embeds": False,
}  # fmt: skip
DENOISERS: dict[str, Callable[..., Any]] = {
    "sd15": lambda: UNet2DConditionModel(sample_size=64, cross_attention_dim=768),
    "sdxl": lambda: sdxl_unet(UNet2DConditionModel),
    "sd35": lambda **depth: SD3Transformer2DModel(**(SD35 | depth)),
    "sd35_large": lambda **depth: SD3Transformer2DModel(**(SD35_LARGE | depth)),
    "z_image": ZImageTransformer2DModel,
    "flux": lambda **depth: FluxTransformer2DModel(guidance_embeds=True, **depth),
    "klein": lambda **depth: Flux2Transformer2DModel(**(KLEIN | depth)),
    "flux2_dev": Flux2Transformer2DModel,
    "flux2_dev_edit": Flux2Transformer2DModel,
    "qwen_image": QwenImageTransformer2DModel,
    "qwen_image_edit": QwenImageTransformer2DModel,
    "qwen_image_edit_plus": lambda **depth: QwenImageTransformer2DModel(zero_cond_t=True, **depth),
    "chroma": ChromaTransformer2DModel,
    "krea2": Krea2Transformer2DModel,
}
"""U-Nets of Stable Diffusion 1.5 and SDXL; transformers of SD 3.5 medium and large, Z-Image, FLUX.1 dev, FLUX.2
klein 4B and dev, Qwen-Image, Chroma and Krea 2, with the values of their published configs; edits of FLUX.2 and
Qwen-Image (2511 is Plus) have one source of the image's size."""
FAMILY = {"sd35": "sd3", "sd35_large": "sd3", "klein": "flux2", "flux2_dev_edit": "flux2_dev"}
DEPTHS = ("num_layers", "num_single_layers")
"""Config entries with the numbers of a transformer's blocks, by kind."""


def on_meta(model: str, rank: int, **depth: int) -> Any:
    """The bf16 denoiser with a LoRA on its attention, or with rank 0 all weights trained; `depth` as in `DEPTHS`."""
    with torch.device("meta"):
        torch.set_default_dtype(torch.bfloat16)
        denoiser = DENOISERS[model](**depth)
        torch.set_default_dtype(torch.float32)
        denoiser.requires_grad_(rank == 0)
        if rank == 0:
            return denoiser.train()
        family = TRANSFORMERS.get(FAMILY.get(model, model))
        if family is None:
            denoiser.add_adapter(unet_lora_config(["attention"], rank, rank))
        else:
            denoiser.add_adapter(LoraConfig(r=rank, target_modules=family.adapted_layers(denoiser, ["attention"])))
    return denoiser.train()


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


def inputs_of(unet: Any, model: str, options: argparse.Namespace) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    batch, pixels = options.batch, options.pixels
    side = pixels // 8
    if model not in ("sd15", "sdxl"):
        return (), _inputs_of_a_transformer(unet.config, model, batch, side, options.text)
    given = (
        torch.empty(batch, 4, side, side, dtype=torch.bfloat16),
        torch.zeros(batch, dtype=torch.int64),
        torch.empty(batch, 77, unet.config.cross_attention_dim, dtype=torch.bfloat16),
    )
    if model == "sd15":
        return given, {}
    added = {"text_embeds": torch.empty(batch, 1280, dtype=torch.bfloat16),
             "time_ids": torch.empty(batch, 6, dtype=torch.bfloat16)}  # fmt: skip
    return given, {"added_cond_kwargs": added}


def _inputs_of_a_transformer(config: Any, model: str, batch: int, side: int, text: int) -> dict[str, Any]:
    """Arguments of a transformer, with bf16 latents of `side` by `side` and `text` text tokens."""

    def half(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16)

    if model == "z_image":
        captions = [half(text, config.cap_feat_dim) for _ in range(batch)]
        return {"x": [half(16, 1, side, side) for _ in range(batch)], "t": torch.rand(batch), "cap_feats": captions}
    given: dict[str, Any] = {"timestep": torch.rand(batch)}
    if model == "krea2":
        given["encoder_hidden_states"] = half(batch, text, config.num_text_layers, config.text_hidden_dim)
        given["hidden_states"] = half(batch, (side // 2) ** 2, config.in_channels)
        return given | {"position_ids": torch.zeros(text + (side // 2) ** 2, 3)}
    given["encoder_hidden_states"] = half(batch, text, config.joint_attention_dim)
    if model in ("sd35", "sd35_large", "flux"):
        given["pooled_projections"] = half(batch, config.pooled_projection_dim)
    if model.startswith("sd35"):
        return given | {"hidden_states": half(batch, 16, side, side)}
    images = 2 if "edit" in model else 1  # with one source
    given["hidden_states"] = half(batch, images * (side // 2) ** 2, config.in_channels)
    if model.startswith("qwen_image"):
        return given | {"img_shapes": [[(1, side // 2, side // 2)] * images] * batch}
    if model == "chroma":
        ids = {"img_ids": torch.zeros((side // 2) ** 2, 3), "txt_ids": torch.zeros(text, 3)}
        return given | ids | {"attention_mask": half(batch, text + (side // 2) ** 2)}
    if model == "flux":
        ids = {"img_ids": torch.zeros((side // 2) ** 2, 3), "txt_ids": torch.zeros(text, 3)}
        return given | ids | {"guidance": torch.ones(batch)}
    ids = {"img_ids": torch.zeros(batch, images * (side // 2) ** 2, 4), "txt_ids": torch.zeros(batch, text, 4)}
    return given | ids | {"guidance": torch.ones(batch) if config.guidance_embeds else None}


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
    denoiser = on_meta(options.model, options.rank)
    with FakeTensorMode(), torch.device("cpu"):
        fill_in(denoiser, variant.partition("-")[2])
        frozen = [p for p in denoiser.parameters() if not p.requires_grad]
        return {"weights_mib": round(sum(map(stored_bytes, frozen)) / MIB, 1)}


def count(variant: str, options: argparse.Namespace, **depth: int) -> dict[str, float]:
    memory: Any
    memory, _, kind = variant.partition("-")
    unet = on_meta(options.model, options.rank, **depth)
    with FakeTensorMode(), torch.device("cpu"):
        fill_in(unet, kind)
        plugin = FusedBackwardPrecision("bf16-mixed", memory=memory)
        plugin.convert_module(unet)
        given, extra = inputs_of(unet, options.model, options)
        trained = [p for p in unet.parameters() if p.requires_grad]
        adam = [torch.empty_like(p) for p in trained for _ in range(2)]
        gradients = [torch.empty_like(p) for p in trained]  # of the last step; Lightning frees them before backward
        watch = PeakOfStorages()
        watch.start([])
        with plugin.forward_context():
            output = unet(*given, **extra, return_dict=False)[0]
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

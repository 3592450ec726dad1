"""Kept bytes, repeated FLOPs and time of a step of transformer blocks, at each level of FusedBackwardPrecision.

    python -m benchmarks.precision.transformer_memory [--models sd3 z_image flux2 flux2_single] [--output FILE]

Real block classes with random weights and a LoRA of rank 16 on the attention, float32, one thread, and the ratio of
tokens to features that the family has at 1024 px. Kept bytes are per block: half the difference between a model of
three blocks and one of one. A step is forward and backward of three blocks; times are CPU time, medians after warm-up
with alternating levels. The row says whether the gradients of a level are bit-identical to native's.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count

from benchmarks.common.rows import keep_row
from lightning_aigc.precision.context import count_saved
from lightning_aigc.precision.memory.budget import MemoryBudget
from lightning_aigc.precision.memory.profile import COUNTED
from lightning_aigc.precision.memory.saved_tensors import owned_by
from lightning_aigc.precision.swaps import swap_forwards

LEVELS: dict[str, Any] = {
    "off": "off", "balanced": "balanced", "lean": "lean", "max": "max", "kept 0.25": MemoryBudget(kept=0.25),
}  # fmt: skip
LAYERS = 3
LORA = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "to_qkv_mlp_proj"]
BACKWARD = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, *_, **__: (
        sdpa_backward_flop_count(grad, q, k, v)
    )
}
Make = Callable[[int, int, int, int], tuple[nn.Module, dict[str, Any]]]


def sd3(layers: int, width: int, side: int, text: int) -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.SD3Transformer2DModel(
        sample_size=2 * side, patch_size=2, in_channels=16, out_channels=16, num_layers=layers, attention_head_dim=64,
        num_attention_heads=width // 64, joint_attention_dim=64, caption_projection_dim=width,
        pooled_projection_dim=64, pos_embed_max_size=2 * side, qk_norm="rms_norm",
    )  # fmt: skip
    given = {"hidden_states": torch.randn(1, 16, 2 * side, 2 * side), "timestep": torch.tensor([300.0])}
    return model, given | {
        "encoder_hidden_states": torch.randn(1, text, 64), "pooled_projections": torch.randn(1, 64)
    }  # fmt: skip


def z_image(layers: int, width: int, side: int, text: int) -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.ZImageTransformer2DModel(
        all_patch_size=(2,), all_f_patch_size=(1,), in_channels=16, dim=width, n_layers=layers, n_refiner_layers=1,
        n_heads=width // 128, n_kv_heads=width // 128, cap_feat_dim=64, axes_dims=[32, 48, 48],
        axes_lens=[1024, 512, 512],
    )  # fmt: skip
    return model, {
        "x": [torch.randn(16, 1, 2 * side, 2 * side)], "t": torch.tensor([0.7]), "cap_feats": [torch.randn(text, 64)]
    }  # fmt: skip


def flux2(layers: int, width: int, side: int, text: int, single: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.Flux2Transformer2DModel(
        in_channels=64, num_layers=0 if single else layers, num_single_layers=layers if single else 0,
        attention_head_dim=128, num_attention_heads=width // 128, joint_attention_dim=64, guidance_embeds=False,
    )  # fmt: skip
    rows = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"), dim=-1).flatten(0, 1)
    ids = torch.zeros(1, side * side, 4)
    ids[0, :, 1:3] = rows
    return model, {
        "hidden_states": torch.randn(1, side * side, 64), "encoder_hidden_states": torch.randn(1, text, 64),
        "timestep": torch.tensor([0.3]), "img_ids": ids, "txt_ids": torch.zeros(1, text, 4), "guidance": None,
    }  # fmt: skip


def flux2_single(layers: int, width: int, side: int, text: int) -> tuple[nn.Module, dict[str, Any]]:
    return flux2(layers, width, side, text, single=True)


MODELS: dict[str, tuple[Make, float]] = {
    "sd3": (sd3, (4096 + 333) / 1536), "z_image": (z_image, (4096 + 128) / 3840),
    "flux2": (flux2, (4096 + 512) / 3072), "flux2_single": (flux2_single, (4096 + 512) / 3072),
}  # fmt: skip
"""Models, with their tokens at 1024 px scaled by width: SD 3.5 medium, Z-Image, FLUX.2 klein 4B."""


def build(make: Make, layers: int, given: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(given.seed)
    model, arguments = make(layers, given.width, given.side, given.text)
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=16, target_modules=LORA))  # type: ignore[operator]
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return model, arguments


def step(model: nn.Module, arguments: dict[str, Any]) -> tuple[int, float, dict[str, Tensor]]:
    """Run one step. Returns: kept bytes, CPU seconds of forward and backward, and the gradients."""
    model.zero_grad()
    started = time.process_time()
    with count_saved(owned_by(model)) as saved:
        output = model(**arguments, return_dict=False)[0]
    (output[0] if isinstance(output, list) else output).square().mean().backward()
    seconds = time.process_time() - started
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return saved.total(), seconds, gradients


def operations(model: nn.Module, arguments: dict[str, Any]) -> int:
    """FLOPs of the matrix products and attention of a step."""
    with FlopCounterMode(display=False, custom_mapping=COUNTED | BACKWARD) as counter:
        step(model, arguments)
    return int(counter.get_total_flops())


def kept_by_a_block(make: Make, level: Any, given: argparse.Namespace) -> float:
    """Bytes that one block keeps in a step at this level, after planning."""
    found = []
    for layers in (1, LAYERS):
        model, arguments = build(make, layers, given)
        swapped = swap_forwards(model, memory=level)
        found.append([step(model, arguments)[0] for _ in range(2)][-1])
        swapped.restore()
    return (found[1] - found[0]) / (LAYERS - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="a .jsonl file to add the rows to")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.models:
        make, tokens_for_each_feature = MODELS[name]
        tokens = tokens_for_each_feature * given.width
        given.text = round(tokens / 12)
        given.side = round((tokens - given.text) ** 0.5)
        kept = {level: kept_by_a_block(make, asked, given) for level, asked in LEVELS.items()}
        model, arguments = build(make, LAYERS, given)
        seconds: dict[str, list[float]] = {level: [] for level in LEVELS}
        gradients: dict[str, dict[str, Tensor]] = {}
        counted = {}
        for repeat in range(given.repeats + 1):
            for level, asked in LEVELS.items():
                swapped = swap_forwards(model, memory=asked)
                step(model, arguments)  # first step: plans, and records the tensors that backward reads
                _, taken, gradients[level] = step(model, arguments)
                if repeat:
                    seconds[level].append(taken)
                else:
                    counted[level] = operations(model, arguments)
                swapped.restore()
        medians = {level: statistics.median(taken) for level, taken in seconds.items()}
        for level in LEVELS:
            equal = all(torch.equal(g, gradients[level][n]) for n, g in gradients["off"].items())
            keep_row(
                {
                    "benchmark": "transformer_memory", "model": name, "width": given.width,
                    "tokens": given.side**2 + given.text, "seed": given.seed, "memory": level,
                    "kept_mib_a_block": round(kept[level] / 2**20, 2),
                    "of_native": round(kept[level] / kept["off"], 3),
                    "repeated": round(counted[level] / counted["off"] - 1, 3),
                    "step": round(medians[level] / medians["off"], 3), "native_s": round(medians["off"], 3),
                    "gradients_equal_bits": equal,
                    "versions": {"torch": torch.__version__, "diffusers": diffusers.__version__},
                },
                given.output,
            )  # fmt: skip


if __name__ == "__main__":
    main()

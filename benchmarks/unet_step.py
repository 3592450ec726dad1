"""What one training step of a diffusion U-Net keeps and takes at each memory level, beside native and checkpointing.

    python benchmarks/unet_step.py [--model sd15|sdxl] [--batch 1] [--lora 64|0] [--pixels 512] [--rounds 7]
        [--width 0.5] [--device cuda]

One U-Net with random weights from its config, in bf16 (`--dtype`), takes every variant in turn within each round, so
that a change of the machine's pace meets all of them; the figures are medians of the rounds after one warm-up round.
`kept` counts every storage that the forward pass leaves alive for backward, exactly; for `compile` (torch.compile, by
name only: it compiles for minutes) what the compiled code saves. `--width` scales every channel count. On a card a step
is `--steps` of them in a row with one wait at the end, and the allocator's peak stands beside. There the step is also
captured as a CUDA graph and replayed: `device_time_s` is what the card itself takes, `step_time_s` what the host lets
it take. Before anything is reported, the loss of each variant must equal the native one within bf16's rounding. One
JSON object a line goes to `--output`.
"""

from __future__ import annotations

import lightning_aigc  # noqa: F401 - first: it mends torchvision's import

# isort: split

import argparse
import datetime
import functools
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bandwidth import replay_seconds
from diffusers import UNet2DConditionModel
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_aigc.precision.swaps import swap_forwards

LORA_TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
SD15 = {"sample_size": 64, "cross_attention_dim": 768, "block_out_channels": (320, 640, 1280, 1280)}
SDXL = {
    "sample_size": 128,
    "cross_attention_dim": 2048,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
VARIANTS = ("native", "balanced", "lean", "max", "checkpointing", "compile")


def build(
    model: str, lora_rank: int, dtype: torch.dtype, seed: int = 0, device: str = "cpu", width: float = 1.0
) -> nn.Module:
    """The U-Net with random weights, LoRA on its attention or everything trainable."""
    config = dict(SDXL if model == "sdxl" else SD15)
    config["block_out_channels"] = tuple(round(width * channels) for channels in config["block_out_channels"])
    torch.manual_seed(seed)
    torch.set_default_dtype(dtype)
    with torch.device(device):
        unet = UNet2DConditionModel(**config)
    torch.set_default_dtype(torch.float32)
    if lora_rank:
        unet.requires_grad_(False)
        lora = LoraConfig(r=lora_rank, target_modules=LORA_TARGETS, init_lora_weights=False)
        unet = inject_adapter_in_model(lora, unet)
    return unet.train()


def inputs_of(model: str, batch: int, pixels: int, dtype: torch.dtype, device: str) -> dict[str, object]:
    """What the U-Net is called with."""
    latent, width = pixels // 8, 2048 if model == "sdxl" else 768
    given: dict[str, object] = {
        "sample": torch.randn(batch, 4, latent, latent, dtype=dtype, device=device),
        "timestep": torch.full((batch,), 500, device=device),
        "encoder_hidden_states": torch.randn(batch, 77, width, dtype=dtype, device=device),
    }
    if model == "sdxl":
        size = torch.tensor([[pixels, pixels, 0, 0, pixels, pixels]] * batch, dtype=dtype, device=device)
        pooled = torch.randn(batch, 1280, dtype=dtype, device=device)
        given["added_cond_kwargs"] = {"text_embeds": pooled, "time_ids": size}
    return given


class LiveStorages(TorchDispatchMode):
    """Remembers, without keeping it alive, every storage that an operator made."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.owned = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())}
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self.owned:
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def live_mib(self) -> float:
        gc.collect()
        return sum(nbytes for reference, nbytes in self.made.values() if not reference.expired()) / 2**20


class Variant:
    """The U-Net as one variant runs it: entered, and left as it was."""

    def __init__(self, unet: nn.Module, name: str) -> None:
        self.unet, self.name = unet, name
        self.compiled: Callable[..., object] | None = None

    def __enter__(self) -> None:
        if self.name == "checkpointing":
            # As diffusers does it, but for random states, which a CUDA graph cannot take and nothing here draws from.
            again = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
            self.unet.enable_gradient_checkpointing(again)
        elif self.name == "compile":
            if self.compiled is None:
                self.unet.compile()
                self.compiled = self.unet._compiled_call_impl
            self.unet._compiled_call_impl = self.compiled
        elif self.name != "native":
            self.swapped = swap_forwards(self.unet, memory=self.name)

    def __exit__(self, *_: object) -> None:
        if self.name == "checkpointing":
            self.unet.disable_gradient_checkpointing()
        elif self.name == "compile":
            self.unet._compiled_call_impl = None
        elif self.name != "native":
            self.swapped.restore()


def synchronize(device: str) -> None:
    if device != "cpu":
        getattr(torch, device).synchronize()


def one_step(unet: nn.Module, given: dict[str, object], device: str, steps: int = 1) -> tuple[float, float, float]:
    """Loss, seconds of wall clock and of this process's CPU for a forward and a backward pass, the mean of `steps`."""
    synchronize(device)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        loss = unet(**given).sample.float().square().mean()
        loss.backward()
        unet.zero_grad(set_to_none=True)
    synchronize(device)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return loss.item(), wall / steps, cpu / steps


def kept_mib(unet: nn.Module, given: dict[str, object]) -> float:
    gc.collect()
    with LiveStorages(unet) as storages:
        output = unet(**given).sample
        kept = storages.live_mib()
    del output
    return kept


def kept_by_compiled_mib(unet: nn.Module, given: dict[str, object]) -> float:
    """The same for compiled code, which no dispatch mode sees into: what it saves for backward, weights left out."""
    owned = {t.untyped_storage()._cdata for t in (*unet.parameters(), *unet.buffers())}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in owned:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = unet(**given).sample
    del output
    return sum(saved.values()) / 2**20


def peak_mib(device: str, step: Callable[[], object]) -> float | None:
    """The device allocator's peak over a step, MiB; None on a CPU."""
    if device == "cpu":
        return None
    module = getattr(torch, device)
    module.reset_peak_memory_stats()
    step()
    return float(module.max_memory_allocated()) / 2**20


def device_time_s(unet: nn.Module, given: dict[str, object], replays: int) -> float | None:
    """Median seconds of a replayed CUDA graph of the step; None where it cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        one_step(unet, given, "cuda")
    torch.cuda.current_stream().wait_stream(stream)
    graph, seconds = torch.cuda.CUDAGraph(), None
    try:
        with torch.cuda.graph(graph):
            unet(**given).sample.float().square().mean().backward()
        seconds = replay_seconds(graph, replays)
    except RuntimeError as error:
        print(f"no CUDA graph of the step: {str(error).splitlines()[0]}", file=sys.stderr)
    unet.zero_grad(set_to_none=True)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["sd15", "sdxl"], default="sd15")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--lora", type=int, default=64, help="LoRA rank; 0 trains every weight")
    parser.add_argument("--pixels", type=int, default=512)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--width", type=float, default=1.0, help="scales every channel count")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, help="steps a round of one variant; unset: 1 on a CPU, 5 on a card")
    parser.add_argument("--rounds", type=int, default=7, help="0 leaves out the clock of the host")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS[:-1]))
    parser.add_argument("--output", type=Path, help="a .jsonl file to append the rows to")
    options = parser.parse_args()

    dtype = getattr(torch, options.dtype)
    steps = options.steps or (1 if options.device == "cpu" else 5)
    unet = build(options.model, options.lora, dtype, device=options.device, width=options.width).to(options.device)
    given = inputs_of(options.model, options.batch, options.pixels, dtype, options.device)
    kept, losses, walls, cpus, peaks = {}, {}, {}, {}, {}
    variants = {name: Variant(unet, name) for name in options.variants}
    for name in options.variants:
        with variants[name]:
            kept[name] = (kept_by_compiled_mib if name == "compile" else kept_mib)(unet, given)
        walls[name], cpus[name] = [], []
    for round_ in range(options.rounds + 1 if options.rounds else 0):
        for name in options.variants:
            with variants[name]:
                losses[name], wall, cpu = one_step(unet, given, options.device, steps)
                if round_ == 0:
                    peaks[name] = peak_mib(options.device, lambda: one_step(unet, given, options.device))
                else:
                    walls[name].append(wall)
                    cpus[name].append(cpu)
    device_s = {}
    if options.device == "cuda":
        for name in options.variants:
            with variants[name]:
                device_s[name] = device_time_s(unet, given, replays=15)
    if losses and max(losses.values()) - min(losses.values()) > 0.02 * losses["native"]:
        sys.exit(f"the variants' losses differ, nothing is reported: {losses}")
    header = {
        "benchmark": "unet_step",
        "date": datetime.date.today().isoformat(),
        "model": options.model,
        "batch": options.batch,
        "lora_rank": options.lora,
        "width": options.width,
        "pixels": options.pixels,
        "dtype": options.dtype,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else f"cpu ({platform.machine()})",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "rounds": options.rounds,
        "steps_a_round": steps,
    }
    for name in options.variants:
        row = header | {"variant": name, "kept_mib": round(kept[name], 1)}
        row["kept_ratio"] = round(kept[name] / kept["native"], 3)
        if options.rounds:
            row["step_time_s"] = round(statistics.median(walls[name]), 5)
            row["step_time_ratio"] = median_ratio(walls, name)
            row["cpu_time_ratio"] = median_ratio(cpus, name)
            row["step_time_spread_s"] = [round(min(walls[name]), 5), round(max(walls[name]), 5)]
        took, native = device_s.get(name), device_s.get("native")
        if took and native:
            row |= {"device_time_s": round(took, 5), "device_time_ratio": round(took / native, 3)}
        if peaks.get(name):
            row["peak_mib"] = round(peaks[name] or 0, 1)
            row["peak_ratio"] = round((peaks[name] or 0) / (peaks["native"] or 1), 3)
        print(json.dumps(row))
        if options.output:
            with options.output.open("a") as file:
                file.write(json.dumps(row) + "\n")


def median_ratio(seconds: dict[str, list[float]], name: str) -> float:
    """Median over the rounds of a variant's time over native's in the same round."""
    return round(
        statistics.median(own / native for own, native in zip(seconds[name], seconds["native"], strict=True)), 3
    )


if __name__ == "__main__":
    main()

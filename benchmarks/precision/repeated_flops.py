"""FLOPs of a training step at each memory level over native autograd's: the cost of recomputation on any device.

    python -m benchmarks.precision.repeated_flops [--model sd15|sdxl] [--pixels 512] [--width 0.5] [--lora 64|0]
        [--output FILE]

FLOPs of matrix products, convolutions and attention, forward and backward, counted from operator shapes by torch's
FlopCounterMode on fake tensors: nothing is computed and no device is needed. Step times depend on the device and its
kernels; this ratio does not. Prints one JSON object per line.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from benchmarks.common.rows import keep_row
from benchmarks.common.unet_variants import Variant, build, inputs_of
from lightning_aigc_kernels import custom_op

aten = torch.ops.aten
VARIANTS = ("native", "balanced", "lean", "max", "checkpointing")


def flash_for_cpu(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def flash_for_cpu_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))


OF_THE_CPU = {  # torch's own table lacks these two
    aten._scaled_dot_product_flash_attention_for_cpu: flash_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flash_for_cpu_backward,
}


def flops_of_a_step(variant: str, given: argparse.Namespace) -> dict[str, int]:
    """FLOPs by operator of a forward and a backward pass in bfloat16."""
    unet = build(given.model, given.lora, torch.bfloat16, device="meta", width=given.width)
    with FakeTensorMode(), open_ops():
        for module in unet.modules():  # peft cannot build its layers from fake tensors
            for name, p in module._parameters.items():
                if p is not None:
                    module._parameters[name] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype), p.requires_grad)
        inputs = inputs_of(given.model, given.batch, given.pixels, torch.bfloat16, "cpu")
        with Variant(unet, variant), FlopCounterMode(display=False, custom_mapping=OF_THE_CPU) as counter:
            unet(**inputs).sample.float().square().mean().backward()
    return {str(op): int(count) for op, count in counter.get_flop_counts()["Global"].items()}


@contextlib.contextmanager
def open_ops() -> Iterator[None]:
    """Context in which fused ops dispatch the operators that they consist of."""
    is_traced = custom_op.is_traced
    custom_op.is_traced = lambda: False
    try:
        yield
    finally:
        custom_op.is_traced = is_traced


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["sd15", "sdxl"], default="sd15")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--lora", type=int, default=64, help="LoRA rank; 0 trains every weight")
    parser.add_argument("--pixels", type=int, default=512)
    parser.add_argument("--width", type=float, default=1.0, help="scales every channel count")
    parser.add_argument("--output", type=Path, help="a .jsonl file to append the rows to")
    given = parser.parse_args()
    counts = {variant: flops_of_a_step(variant, given) for variant in VARIANTS}
    for variant, by_operator in counts.items():
        row = {
            "benchmark": "repeated_flops",
            "torch": torch.__version__,
            **{name: getattr(given, name) for name in ("model", "batch", "lora", "pixels", "width")},
            "variant": variant,
            "tflops": round(sum(by_operator.values()) / 1e12, 4),
            "ratio": round(sum(by_operator.values()) / sum(counts["native"].values()), 3),
            "by_operator": {name: round(count / 1e12, 4) for name, count in sorted(by_operator.items())},
        }
        keep_row(row, given.output)


if __name__ == "__main__":
    main()

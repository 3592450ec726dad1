"""Error of a LoRA's gradients in transformer blocks against float64: with fused ops, and natively.

    OMP_NUM_THREADS=1 python -m benchmarks.precision.transformer_accuracy [--models sd3 z_image ...] [--output FILE]

The models of transformer_memory.py, several seeds each, with weights rounded to the dtype first, and at a timestep that
bfloat16 represents exactly: a rounded timestep changes its embedding, and hides the error of the blocks. An error is
the L2 norm of the difference of all gradients to float64's, over the norm of float64's; a ratio is fused over native.
The fused forwards run the ops' references; tests/kernels compare the kernels with them.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import copy
import statistics
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import torch
from torch import Tensor, nn

from benchmarks.common.rows import keep_row
from benchmarks.precision.transformer_memory import LAYERS, MODELS, build
from lightning_aigc.precision.blocks import mmdit
from lightning_aigc.precision.swaps import swap_forwards

LEVELS = ("lean", "max")
TIMES = {"t": 0.5, "timestep": 0.5}
"""Timesteps that replace those of transformer_memory.py; Stable Diffusion 3's range to 1000, and 300 is exact."""


def in_dtype(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype)
    return [in_dtype(part, dtype) for part in value] if isinstance(value, list) else value


def gradients(model: nn.Module, arguments: dict[str, Any], dtype: torch.dtype) -> Tensor:
    model = copy.deepcopy(model).to(dtype)
    output = model(**{name: in_dtype(value, dtype) for name, value in arguments.items()}, return_dict=False)[0]
    (output[0] if isinstance(output, list) else output).square().mean().backward()
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--output", type=Path, help="a .jsonl file to add the rows to")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    given.side, given.text = 12, 24
    with mock.patch.object(mmdit, "KERNEL_DEVICES", ("cpu",)):
        compare(given)


def compare(given: argparse.Namespace) -> None:
    for name in given.models:
        for dtype in (torch.bfloat16, torch.float32):
            native: list[float] = []
            fused: dict[str, list[float]] = {level: [] for level in LEVELS}
            for seed in given.seeds:
                given.seed = seed
                model, arguments = build(MODELS[name][0], LAYERS, given)
                model.to(dtype)  # rounded, so that all variants compute with the same weights
                if name != "sd3":
                    arguments |= {key: torch.tensor([time]) for key, time in TIMES.items() if key in arguments}
                arguments = {key: in_dtype(value, dtype) for key, value in arguments.items()}
                exact = gradients(model, arguments, torch.float64)
                native.append(error(gradients(model, arguments, dtype), exact))
                for level in LEVELS:
                    copied = copy.deepcopy(model)
                    swap_forwards(copied, memory=level)  # type: ignore[arg-type]
                    fused[level].append(error(gradients(copied, arguments, dtype), exact))
            for level, found in fused.items():
                ratios = [mine / other for mine, other in zip(found, native, strict=True)]
                keep_row({
                    "benchmark": "transformer_accuracy", "model": name,
                    "width": given.width, "layers": LAYERS, "dtype": str(dtype).removeprefix("torch."),
                    "memory": level, "seeds": given.seeds, "native_error": statistics.median(native),
                    "fused_error": statistics.median(found), "ratio": round(statistics.median(ratios), 3),
                    "ratio_spread": [round(min(ratios), 3), round(max(ratios), 3)],
                    "versions": {"torch": torch.__version__, "diffusers": diffusers.__version__},
                }, given.output)  # fmt: skip


if __name__ == "__main__":
    main()

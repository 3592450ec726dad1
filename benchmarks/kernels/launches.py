"""Count the kernels that a backward pass of GroupNorm and SiLU launches: native autograd, and the fused Triton kernel.

    python -m benchmarks.kernels.launches [--batch 4] [--output launches.jsonl]

Counted on a CPU, from the operators that reach the dispatcher; nothing is launched on a device. An operator that only
allocates or makes a view counts nothing, any other one launch, and native_group_norm_backward as many as torch's CUDA
source launches for more than one pixel: the sums over pixels, rstd * weight, the group's coefficients, dx, and, where
asked for, dweight and dbias together. The fused side is the host code around the kernel run as it is, with a stand-in
for the kernel that counts its one launch. Copies and zeros that a device's reductions add inside are counted on neither
side. Launches are no time: those on the host's side of the fused kernel handle [C] or [N, C] numbers, none of x's size.
One JSON object a line goes to `--output`.
"""
# mypy: allow-untyped-calls, no-warn-return-any

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common.rows import keep_row
from lightning_aigc_kernels.group_norm_silu import op as module
from lightning_aigc_kernels.group_norm_silu.affine import Affine

op: Any = module
GROUPS, EPS = 32, 1e-5


class Launches(TorchDispatchMode):
    """Counts the launches of every operator, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func._schema.name.removeprefix("aten::")
        is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)
        if name == "native_group_norm_backward":
            weight, (_, need_weight, need_bias) = args[4], args[9]
            self.counted[name] += 3 + (weight is not None) + (need_weight or need_bias)
        elif not is_view and not name.startswith(("empty", "new_empty")):
            self.counted[name] += 1
        return func(*args, **(kwargs or {}))


class StandIn:
    """In the kernels' place: their launches, and results of the right shapes."""

    launches = 0

    def backward(self, dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, affine: Affine, *rest: Any) -> list[Any]:
        need_affine = rest[-2]
        self.launches += 2 if need_affine else 1
        given = (affine.weight, affine.bias, *(affine.modulation or (None, None)))
        grads = [None if of is None or not need_affine else torch.empty_like(of) for of in given]
        return [torch.empty_like(x), *grads]


def native(x: Tensor, parameters: dict[str, Tensor], trained: bool) -> Counter[str]:
    leaves = {name: p.clone().requires_grad_(trained) for name, p in parameters.items()}
    x = x.clone().requires_grad_()
    y = F.group_norm(x, GROUPS, leaves["weight"], leaves["bias"], EPS)
    if "scale" in leaves:
        y = y * (1 + leaves["scale"][..., None, None]) + leaves["shift"][..., None, None]
    y = F.silu(y)
    dy = torch.randn_like(y)
    with Launches() as launches:
        torch.autograd.grad(y, [x, *(leaves.values() if trained else ())], dy)
    return launches.counted


def fused(x: Tensor, parameters: dict[str, Tensor], trained: bool) -> Counter[str]:
    stand_in, kernel_for = StandIn(), op.kernel_for
    statistics = torch.zeros(x.shape[0], GROUPS)
    given = [parameters.get(name) for name in ("weight", "bias", "scale", "shift")]
    op.kernel_for = lambda name, tensor: stand_in
    try:
        with Launches() as launches:
            op._backward_op._init_fn(x, x, statistics, statistics, *given, GROUPS, EPS, True, trained, 1.0)
    finally:
        op.kernel_for = kernel_for
    return launches.counted + Counter(group_norm_silu_backward_kernel=stand_in.launches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--output", type=Path, help="a .jsonl file to append the rows to")
    options = parser.parse_args()

    channels = 320
    sizes = {"weight": (channels,), "bias": (channels,)}
    modulation = {"scale": (options.batch, channels), "shift": (options.batch, channels)}
    for dtype in (torch.float32, torch.bfloat16):
        for with_modulation in (False, True):
            for trained in (False, True):
                names = sizes | (modulation if with_modulation else {})
                parameters = {name: torch.randn(size, dtype=dtype) for name, size in names.items()}
                x = torch.randn(options.batch, channels, 16, 16, dtype=dtype)
                before, after = native(x, parameters, trained), fused(x, parameters, trained)
                row = {
                    "benchmark": "launches",
                    "torch": torch.__version__,
                    "batch": options.batch,
                    "dtype": str(dtype).removeprefix("torch."),
                    "scale_and_shift": with_modulation,
                    "parameters": "trained" if trained else "frozen",
                    "native_launches": before.total(),
                    "fused_launches": after.total(),
                    "fewer": round(1 - after.total() / before.total(), 2),
                    "native": dict(before),
                    "fused": dict(after),
                }
                keep_row(row, options.output)


if __name__ == "__main__":
    main()

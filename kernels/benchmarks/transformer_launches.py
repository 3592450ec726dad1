"""How many kernels the ops of transformer blocks launch, forward and backward: plain torch, and the Triton kernels.

    .venv-triton/bin/python kernels/benchmarks/transformer_launches.py [--batch 2] [--output launches.jsonl]

As launches.py: counted on a CPU from the operators that reach the dispatcher. Plain torch is the order of diffusers'
blocks, where layer norm's backward is one launch, and two with a trained weight. The fused side is the host code of
kernel.py, with a stand-in for each Triton kernel that counts its launch; so it needs Triton, but no device. A trained
modulation means that its scale, shift or gate need gradients; norm weights are frozen, as for LoRA.
"""
# mypy: allow-untyped-calls, no-warn-return-any

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from launches import Launches
from lightning_aigc_kernels.modulated_norm import kernel as norm_kernel
from lightning_aigc_kernels.modulated_norm import reference as norm_reference
from lightning_aigc_kernels.modulated_norm import token_sums
from lightning_aigc_kernels.modulated_norm.modulation import Modulation, Needs
from lightning_aigc_kernels.silu_mul import kernel as silu_kernel
from lightning_aigc_kernels.silu_mul import reference as silu_reference

TOKENS, CHANNELS, EPS = 256, 64, 1e-6
Pass = Callable[[], Any]
CASES = {
    "layer norm, scale, shift": ("layer", "scale", "shift"),
    "RMS norm, weight, scale": ("rms", "weight", "scale"),
    "gate": ("none", "gate"),
    "RMS norm, weight, gate": ("rms", "weight", "gate"),
    "silu_mul": (),
}


@contextmanager
def counted_kernels(counter: Counter[str]) -> Iterator[None]:
    """Every Triton kernel counts its launches in place of running."""
    places = [(norm_kernel, "modulated_norm_forward"), (norm_kernel, "modulated_norm_backward")]
    places += [
        (token_sums, "sums_of_tokens"),
        (token_sums, "gradients_of_sums"),
        (silu_kernel, "silu_mul_forward"),
        (silu_kernel, "silu_mul_backward"),
    ]

    class StandIn:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *args, **constants: counter.update([self.name])

    kept = [getattr(module, name) for module, name in places]
    for module, name in places:
        setattr(module, name, StandIn(name))
    try:
        yield
    finally:
        for (module, name), function in zip(places, kept, strict=True):
            setattr(module, name, function)


def passes(case: str, batch: int, dtype: torch.dtype, trained: bool) -> tuple[Pass, Callable[[Any], Pass], Pass, Pass]:
    """Plain torch's forward, its backward for that output, and ours."""
    shape = batch, TOKENS, CHANNELS
    x, y, dy = (torch.randn(shape, dtype=dtype) for _ in range(3))
    if case == "silu_mul":
        leaves = [x.requires_grad_(), y.requires_grad_()]
        return (
            lambda: silu_reference.silu_mul(*leaves),
            lambda out: lambda: torch.autograd.grad(out, leaves, dy),
            lambda: silu_kernel.forward(x, y),
            lambda: silu_kernel.backward(dy, x, y, True, True),
        )
    norm, *names = CASES[case]
    given = {name: torch.randn(CHANNELS if name == "weight" else (batch, CHANNELS), dtype=dtype) for name in names}
    of_samples = [tensor.requires_grad_(trained) for name, tensor in given.items() if name != "weight"]
    wanted = [x.requires_grad_(), *of_samples] if trained else [x.requires_grad_()]
    gate, weight = given.get("gate"), given.get("weight")
    modulation = Modulation(given.get("scale", gate), given.get("shift"), weight, None, norm, EPS, gate is None)
    needs = Needs(True, scale=trained, shift=trained and "shift" in given)
    residual = None if gate is None else y

    def plain() -> Tensor:
        if residual is not None:
            return norm_reference.gated_residual(residual, gate, x, norm_weight=weight, eps=EPS)
        scale, shift = given.get("scale"), given.get("shift")
        return norm_reference.modulated_norm(x, scale, shift, norm=norm, weight=weight, eps=EPS)

    return (
        plain,
        lambda out: lambda: torch.autograd.grad(out, wanted, dy),
        lambda: norm_kernel.forward(x, modulation, dtype, residual),
        lambda: norm_kernel.backward(dy, x, modulation, dtype, needs),
    )


def count(run: Pass) -> tuple[Counter[str], Any]:
    """The launches of one pass, and what it gives."""
    kernels: Counter[str] = Counter()
    with counted_kernels(kernels), Launches() as launches:
        result = run()
    del launches.counted["promote_types"]  # of dtypes, not of tensors
    return launches.counted + kernels, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--output", type=Path, help="a .jsonl file to append the rows to")
    options = parser.parse_args()
    for dtype in (torch.float32, torch.bfloat16):
        for case in CASES:
            for trained in (False,) if case == "silu_mul" else (False, True):
                plain, plain_backward, ours, ours_backward = passes(case, options.batch, dtype, trained)
                native, out = count(plain)
                native_backward, _ = count(plain_backward(out))
                with torch.no_grad():
                    fused, fused_backward = count(ours)[0], count(ours_backward)[0]
                row = {
                    "benchmark": "launches of transformer ops",
                    "date": datetime.date.today().isoformat(),
                    "torch": torch.__version__,
                    "batch": options.batch,
                    "dtype": str(dtype).removeprefix("torch."),
                    "op": case,
                    "modulation": "trained" if trained else "frozen",
                    "native_launches": [native.total(), native_backward.total()],
                    "fused_launches": [fused.total(), fused_backward.total()],
                    "native": [dict(native), dict(native_backward)],
                    "fused": [dict(fused), dict(fused_backward)],
                }
                print(json.dumps(row))
                if options.output:
                    with options.output.open("a") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

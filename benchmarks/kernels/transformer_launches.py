"""Count the kernels that the ops of transformer blocks launch, forward and backward: plain torch and Triton kernels.

    .venv-triton/bin/python -m benchmarks.kernels.transformer_launches [--batch 2] [--output launches.jsonl]

As launches.py: counted on a CPU from the operators that reach the dispatcher. Plain torch is the order of diffusers'
blocks, where layer norm's backward is one launch, and two with a trained weight. The fused side is the host code of
kernel.py, with a stand-in for each Triton kernel that counts its launch; so it needs Triton, but no device. A trained
modulation means that its scale, shift or gate need gradients; norm weights are frozen, as for LoRA. For a query or key
it means that the norm's weight does. In the attention of two streams, the attention itself is one launch either way.
RMSNorm is counted as its operators, which is how diffusers' own class runs in SD 3, Qwen-Image and Z-Image; for torch's
class, which FLUX has, a recent torch for CUDA has a fused kernel.
"""
# mypy: allow-untyped-calls, no-warn-return-any

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.rows import keep_row
from benchmarks.kernels.launches import Launches
from lightning_aigc_kernels.joint_attention import AttentionStream
from lightning_aigc_kernels.joint_attention import passes as joint_passes
from lightning_aigc_kernels.joint_attention.op import joint_attention_reference
from lightning_aigc_kernels.modulated_norm import kernel as norm_kernel
from lightning_aigc_kernels.modulated_norm import reference as norm_reference
from lightning_aigc_kernels.modulated_norm import token_sums
from lightning_aigc_kernels.modulated_norm.modulation import Modulation, Needs
from lightning_aigc_kernels.qk_norm_rope import kernel as qk_kernel
from lightning_aigc_kernels.qk_norm_rope import op as qk_op
from lightning_aigc_kernels.qk_norm_rope import reference as qk_reference
from lightning_aigc_kernels.qk_norm_rope.norm_rope import NormRope
from lightning_aigc_kernels.silu_mul import kernel as silu_kernel
from lightning_aigc_kernels.silu_mul import reference as silu_reference

TOKENS, CHANNELS, EPS = 256, 64, 1e-6
Pass = Callable[[], Any]
Passes = tuple[Pass, Callable[[Any], Pass], Pass, Pass]
"""Plain torch's forward, its backward for that output, and ours."""
CASES = {
    "layer norm, scale, shift": ("layer", "scale", "shift"),
    "RMS norm, weight, scale": ("rms", "weight", "scale"),
    "gate": ("none", "gate"),
    "RMS norm, weight, gate": ("rms", "weight", "gate"),
    "silu_mul": (),
    "query, norm and rotation": ("query", "rotate"),
    "query, norm": ("query",),
    "attention of two streams, norm and rotation": ("streams", "rotate"),
    "attention of two streams, norm": ("streams",),
}
HEADS, FEATURES, TEXT = 4, 16, 64


@contextmanager
def counted_kernels(counter: Counter[str]) -> Iterator[None]:
    """Make every Triton kernel count its launches instead of running."""
    places = [(norm_kernel, "modulated_norm_forward"), (norm_kernel, "modulated_norm_backward")]
    places += [
        (token_sums, "sums_of_tokens"),
        (token_sums, "gradients_of_sums"),
        (silu_kernel, "silu_mul_forward"),
        (silu_kernel, "silu_mul_backward"),
        (qk_kernel, "qk_norm_rope_forward"),
        (qk_kernel, "qk_norm_rope_backward"),
    ]

    class StandIn:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *args, **constants: counter.update([self.name])

    kept = [getattr(module, name) for module, name in places]
    for module, name in places:
        setattr(module, name, StandIn(name))
    op: Any = qk_op
    implementation, op._implementation = op._implementation, lambda x, how: qk_kernel
    try:
        yield
    finally:
        for (module, name), function in zip(places, kept, strict=True):
            setattr(module, name, function)
        op._implementation = implementation


def passes(case: str, batch: int, dtype: torch.dtype, trained: bool) -> Passes:
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
    if CASES[case][0] == "query":
        return query_passes("rotate" in CASES[case], batch, dtype, trained)
    if CASES[case][0] == "streams":
        return stream_passes("rotate" in CASES[case], batch, dtype, trained)
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


def query_passes(rotate: bool, batch: int, dtype: torch.dtype, trained: bool) -> Passes:
    x, dy = (torch.randn(batch, TOKENS, HEADS, FEATURES, dtype=dtype) for _ in range(2))
    weight = torch.randn(FEATURES, dtype=dtype).requires_grad_(trained)
    cos, sin = torch.randn(2, TOKENS, FEATURES // 2) if rotate else (None, None)
    how = NormRope(weight.detach(), cos, sin, EPS)
    wanted = [x.requires_grad_(), weight] if trained else [x.requires_grad_()]
    return (
        lambda: qk_reference.qk_norm_rope(x, weight, cos, sin, eps=EPS),
        lambda out: lambda: torch.autograd.grad(out, wanted, dy),
        lambda: qk_op.forward(x, how, torch.empty_like(x)),
        lambda: qk_op.backward(dy, x, how, trained),
    )


def stream_passes(rotate: bool, batch: int, dtype: torch.dtype, trained: bool) -> Passes:
    streams, wanted, needs = [], [], []
    for tokens in (TEXT, TOKENS):
        qkv = [torch.randn(batch, tokens, HEADS * FEATURES, dtype=dtype).requires_grad_() for _ in range(3)]
        weights = [torch.randn(FEATURES, dtype=dtype).requires_grad_(trained) for _ in range(2)]
        rotary = torch.randn(2, tokens, FEATURES // 2) if rotate else (None, None)
        streams.append(AttentionStream(*qkv, *weights, *rotary))
        wanted += [*qkv, *weights] if trained else qkv
        needs += [True] * 3 + [trained] * 2 + [False] * 2
    do = [torch.randn_like(stream.query) for stream in streams]
    detached = [AttentionStream._make(None if t is None else t.detach() for t in stream) for stream in streams]
    joint = joint_passes.Joint(detached, HEADS, EPS, True, dtype)
    *outputs, softmax1, softmax2 = joint_passes.forward(joint)
    return (
        lambda: joint_attention_reference(streams, HEADS, eps=EPS),
        lambda out: lambda: torch.autograd.grad(out, wanted, do),
        lambda: joint_passes.forward(joint),
        lambda: joint_passes.backward(do, joint, outputs, (softmax1, softmax2), needs),
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
    parser.add_argument("--ops", default="", help="only cases whose name contains this")
    parser.add_argument("--output", type=Path, help="a .jsonl file to append the rows to")
    options = parser.parse_args()
    for dtype in (torch.float32, torch.bfloat16):
        for case in (name for name in CASES if options.ops in name):
            for trained in (False,) if case == "silu_mul" else (False, True):
                plain, plain_backward, ours, ours_backward = passes(case, options.batch, dtype, trained)
                native, out = count(plain)
                native_backward, _ = count(plain_backward(out))
                if "rotation" in case:
                    del native["clone"]  # of cos and sin for both of a pair, which diffusers makes once for all blocks
                with torch.no_grad():
                    fused, fused_backward = count(ours)[0], count(ours_backward)[0]
                row = {
                    "benchmark": "launches of transformer ops",
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
                keep_row(row, options.output)


if __name__ == "__main__":
    main()

"""Error of the transformer ops' outputs and gradients against float64, compared with plain torch in the same dtype.

    python -m benchmarks.kernels.op_accuracy [--channels 1536] [--tokens 1024] [--seeds 5] [--output op_accuracy.jsonl]

Each op as the blocks call it, with every tensor trained; plain torch is the order of diffusers' blocks. `error` is the
relative L2 error, `ratio` that over plain torch's: the median over seeds and the largest. A ratio below 1 is a gain, as
where plain torch rounds between its operators. Computed by the reference on a CPU. The gradients of a full U-Net:
benchmarks/precision/accuracy.py.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.rows import keep_row
from lightning_aigc_kernels import (
    AttentionStream,
    gated_residual,
    joint_attention,
    modulated_norm,
    qk_norm_rope,
    silu_mul,
)
from lightning_aigc_kernels.joint_attention.op import joint_attention_reference
from lightning_aigc_kernels.modulated_norm import reference as norm_reference
from lightning_aigc_kernels.qk_norm_rope import reference as qk_reference
from lightning_aigc_kernels.silu_mul import reference as silu_reference

Outcome = dict[str, Tensor]
FEATURES, TEXT = 128, 128
"""Features of a head, and how many of the tokens are text, in the attentions."""


def angles(tokens: int) -> tuple[Tensor, Tensor]:
    """cos and sin [T, D/2] as of one axis of FLUX.1."""
    frequencies = 10_000 ** -(torch.arange(0, FEATURES, 2, dtype=torch.float64) / FEATURES)
    turns = torch.outer(torch.arange(tokens, dtype=torch.float64), frequencies)
    return turns.cos().float(), turns.sin().float()


def padding(samples: int) -> Tensor:
    """The bias of the texts' keys where each text has a fourth fewer tokens than the one before it."""
    lengths = TEXT - TEXT // 4 * torch.arange(samples)
    return torch.where(torch.arange(TEXT) < lengths[:, None], 0.0, -torch.inf)


def on_heads(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A `qk_norm_rope` of x [N, T, C]."""

    def call(x: Tensor, rotate: bool, **options: Any) -> Tensor:
        cos, sin = angles(x.shape[1]) if rotate else (None, None)
        heads = x.view(*x.shape[:2], x.shape[2] // FEATURES, FEATURES)
        return op(heads, cos=cos, sin=sin, **options).flatten(2)

    return call


def on_streams(op: Callable[..., Any]) -> Callable[..., Tensor]:
    """A `joint_attention` of q, k and v [N, T, C], whose first tokens are text; all streams' outputs side by side."""

    def call(
        q: Tensor, k: Tensor, v: Tensor, query_weight: Tensor, key_weight: Tensor, rotate: bool, padded: bool = False
    ) -> Tensor:
        cos, sin = angles(q.shape[1])
        streams = []
        for part in (slice(TEXT), slice(TEXT, None)):
            rotary = (cos[part], sin[part]) if rotate else (None, None)
            streams.append(AttentionStream(q[:, part], k[:, part], v[:, part], query_weight, key_weight, *rotary))
        if padded:
            streams[0] = streams[0]._replace(key_bias=padding(q.shape[0]))
        made = op(streams, q.shape[2] // FEATURES)
        return torch.cat(made[0] if op is joint_attention else made, 1)

    return call


QKV = {"q": "tokens", "k": "tokens", "v": "tokens", "query_weight": "head", "key_weight": "head"}
# The op, plain torch, the options, and which tensors have a row of tokens, a sample's, a channel's or a head's numbers.
CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], dict[str, Any], dict[str, str]]] = {
    "modulated_norm, layer norm": (
        modulated_norm,
        norm_reference.modulated_norm,
        {"norm": "layer"},
        {"x": "tokens", "scale": "sample", "shift": "sample"},
    ),
    "modulated_norm, RMS norm": (
        modulated_norm,
        norm_reference.modulated_norm,
        {"norm": "rms"},
        {"x": "tokens", "scale": "sample", "weight": "channels"},
    ),
    "gated_residual": (
        gated_residual,
        norm_reference.gated_residual,
        {},
        {"x": "tokens", "gate": "sample", "y": "tokens"},
    ),
    "gated_residual, RMS norm": (
        gated_residual,
        norm_reference.gated_residual,
        {},
        {"x": "tokens", "gate": "sample", "y": "tokens", "norm_weight": "channels"},
    ),
    "qk_norm_rope": (
        on_heads(qk_norm_rope),
        on_heads(qk_reference.qk_norm_rope),
        {"rotate": True},
        {"x": "tokens", "weight": "head"},
    ),
    "qk_norm_rope, no rotation": (
        on_heads(qk_norm_rope),
        on_heads(qk_reference.qk_norm_rope),
        {"rotate": False},
        {"x": "tokens", "weight": "head"},
    ),
    "qk_norm_rope, no norm": (
        on_heads(qk_norm_rope),
        on_heads(qk_reference.qk_norm_rope),
        {"rotate": True, "norm": False},
        {"x": "tokens"},
    ),
    "joint_attention": (
        on_streams(joint_attention),
        on_streams(joint_attention_reference),
        {"rotate": True},
        QKV,
    ),
    "joint_attention, no rotation": (
        on_streams(joint_attention),
        on_streams(joint_attention_reference),
        {"rotate": False},
        QKV,
    ),
    "joint_attention, padded text": (
        on_streams(joint_attention),
        on_streams(joint_attention_reference),
        {"rotate": True, "padded": True},
        QKV,
    ),
    "silu_mul": (silu_mul, silu_reference.silu_mul, {}, {"gate": "tokens", "up": "tokens"}),
}


def outcome(op: Callable[..., Tensor], given: dict[str, Tensor], options: dict[str, Any], dy: Tensor) -> Outcome:
    """The output, and each tensor's gradient under "d" and its name."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in given.items()}
    y = op(**leaves, **options)
    gradients = torch.autograd.grad(y, list(leaves.values()), dy)
    return {"output": y.detach()} | {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}


def errors(ours: Outcome, truth: Outcome) -> dict[str, float]:
    """Relative L2 errors."""
    return {name: ((ours[name].double() - exact).norm() / exact.norm()).item() for name, exact in truth.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--channels", type=int, default=1536)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--ops", default="", help="only cases whose name contains this")
    parser.add_argument("--output", type=Path, help="a .jsonl file to append the rows to")
    options = parser.parse_args()
    sizes = {
        "tokens": (options.batch, options.tokens, options.channels),
        "sample": (options.batch, options.channels),
        "channels": (options.channels,),
        "head": (FEATURES,),
    }
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for case in (name for name in CASES if options.ops in name):
            op, plain, switches, kinds = CASES[case]
            found: dict[str, list[tuple[float, float]]] = {}
            for seed in range(options.seeds):
                torch.manual_seed(seed)
                given = {name: torch.randn(sizes[kind]).to(dtype) for name, kind in kinds.items()}
                dy = torch.randn(sizes["tokens"]).to(dtype)
                exact = {name: tensor.double() for name, tensor in given.items()}
                truth = outcome(plain, exact, switches, dy.double())
                ours, theirs = (errors(outcome(each, given, switches, dy), truth) for each in (op, plain))
                for name in truth:
                    found.setdefault(name, []).append((ours[name], theirs[name]))
            for name, pairs in found.items():
                # Where both are exact, as the gradient that passes a residual, the ratio is 1.
                ratios = [1.0 if our == their else our / max(their, 1e-30) for our, their in pairs]
                row = {
                    "benchmark": "op_accuracy",
                    "torch": torch.__version__,
                    "device": f"cpu ({platform.machine()})",
                    "op": case,
                    "shape": list(sizes["tokens"]),
                    "dtype": str(dtype).removeprefix("torch."),
                    "seeds": options.seeds,
                    "of": name,
                    "error": float(f"{statistics.median(our for our, _ in pairs):.3g}"),
                    "plain_error": float(f"{statistics.median(their for _, their in pairs):.3g}"),
                    "ratio": round(statistics.median(ratios), 3),
                    "largest_ratio": round(max(ratios), 3),
                }
                keep_row(row, options.output)


if __name__ == "__main__":
    main()

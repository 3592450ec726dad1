"""torch_npu's fused operators that we call, on CPU tensors, for the fake npu: their formulas and documented limits.

Schemas are those of op-plugin; `tests/kernels/npu_contract` compares them with the real ones. Statistics have the
documented dtypes, so what a half-precision `npu_group_norm_swish` loses is lost here too. A call outside the documented
limits raises RuntimeError.
Source: op-plugin 517f2e7 (2026-08-21), `op_plugin_functions.yaml` and `docs/zh/custom_APIs`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *HALF)

ATTENTION_OPTIONS = (
    "int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, {seeds}int[]? prefix=None, "
    "int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, "
    'bool sync=False, str softmax_layout="", Tensor? sink=None'
)
"""Arguments of attention that we leave at their defaults."""


def group_norm_swish(
    x: Tensor, num_groups: int, weight: Tensor, bias: Tensor, eps: float = 1e-5, swish_scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    require(2 <= x.dim() <= 8, "GroupNormSwish", f"input has {x.dim()} dims, wanted 2 to 8")
    require(
        x.dtype in FLOATS and x.dtype == weight.dtype == bias.dtype,
        "GroupNormSwish",
        f"dtypes {x.dtype}, {weight.dtype}, {bias.dtype} differ",
    )
    activated, mean_NG, rstd_NG = _group_norm(x.float(), num_groups, weight.float(), bias.float(), eps)
    y = activated * torch.sigmoid(swish_scale * activated)
    return y.to(x.dtype), mean_NG.to(weight.dtype), rstd_NG.to(weight.dtype)


def group_norm_swish_grad(
    grad: Tensor,
    x: Tensor,
    num_groups: int,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    grad_input_mask: Sequence[bool],
    swish_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    dtypes = {tensor.dtype for tensor in (grad, x, weight, bias, mean, rstd)}
    require(len(dtypes) == 1, "GroupNormSwishGrad", f"dtypes {dtypes} differ")
    samples, channels = x.shape[:2]
    require(channels // num_groups <= 4000, "GroupNormSwishGrad", f"{channels // num_groups} channels a group")
    per_channel = (1, channels, *(1,) * (x.dim() - 2))
    but_channels = (0, *range(2, x.dim()))
    scale_C, shift_C = (tensor.float().view(per_channel) for tensor in (weight, bias))
    rstd_NG1 = rstd.float()[..., None]
    h = (x.float().reshape(samples, num_groups, -1) - mean.float()[..., None]) * rstd_NG1
    xhat = h.view_as(x)
    z = xhat * scale_C + shift_C
    gate = torch.sigmoid(swish_scale * z)
    dz = grad.float() * gate * (1 + swish_scale * z * (1 - gate))
    dweight, dbias = (dz * xhat).sum(but_channels), dz.sum(but_channels)
    g = (dz * scale_C).reshape(samples, num_groups, -1)
    dx = (g - g.mean(-1, keepdim=True) - h * (g * h).mean(-1, keepdim=True)) * rstd_NG1
    made = dx.view_as(x).to(x.dtype), dweight.to(weight.dtype), dbias.to(bias.dtype)
    empty = x.new_empty(0)
    return tuple(one if wanted else empty.clone() for one, wanted in zip(made, grad_input_mask, strict=True))  # type: ignore[return-value]


def _group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    samples, channels = x.shape[:2]
    return aten.native_group_norm(  # type: ignore[no-any-return]
        x.contiguous(), weight, bias, samples, channels, x[0, 0].numel(), groups, eps
    )


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    require(
        x.dtype in FLOATS and (gamma.dtype == x.dtype or gamma.dtype == torch.float32),
        "RmsNorm",
        f"a gamma of {gamma.dtype} for {x.dtype}",
    )
    dims = tuple(range(-gamma.dim(), 0))
    wide = x.float()
    rstd = (wide.square().mean(dims, keepdim=True) + epsilon).rsqrt()
    return (wide * rstd * gamma.float()).to(x.dtype), rstd


def rms_norm_backward(dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    require(rstd.dtype == torch.float32, "RmsNormGrad", f"an rstd of {rstd.dtype}")
    dims = tuple(range(-gamma.dim(), 0))
    g, xhat = dy.float(), x.float() * rstd
    dgamma = (g * xhat).sum(tuple(range(x.dim() - gamma.dim())))
    g = g * gamma.float()
    return ((g - xhat * (g * xhat).mean(dims, keepdim=True)) * rstd).to(x.dtype), dgamma


def rotary_mul(x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None) -> Tensor:
    require(rotary_mode == "interleave" and rotate is None, "RotaryPositionEmbedding", "not a mode that we use")
    samples, tokens, heads, features = x.shape
    require(samples * heads < 1000, "RotaryPositionEmbedding", f"B * N is {samples * heads}, wanted below 1000")
    require(features < 896 and features % 2 == 0, "RotaryPositionEmbedding", f"D is {features}")
    for table in (r1, r2):
        require(
            table.shape == (1, tokens, 1, features),
            "RotaryPositionEmbedding",
            f"a table of {tuple(table.shape)}, not 1S1D",
        )
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * r1.to(x.dtype) + turned * r2.to(x.dtype)


def swiglu(x: Tensor, dim: int = -1) -> Tensor:
    _check_swiglu(x, dim)
    first, second = x.float().chunk(2, dim)
    return (F.silu(first) * second).to(x.dtype)


def swiglu_backward(grad_output: Tensor, x: Tensor, dim: int = -1) -> Tensor:
    _check_swiglu(x, dim)
    first, second = x.float().chunk(2, dim)
    g = grad_output.float()
    return torch.cat((aten.silu_backward(g * second, first), F.silu(first) * g), dim).to(x.dtype)


def _check_swiglu(x: Tensor, dim: int) -> None:
    require(x.is_contiguous() and x.numel() > 0, "SwiGlu", "a tensor that is empty or not contiguous")
    require(x.shape[dim] % 2 == 0, "SwiGlu", f"{x.shape[dim]} numbers to halve")


def fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    logits = _logits(query, key, head_num, input_layout, pse, padding_mask, atten_mask, scale, keep_prob)
    maximum = logits.amax(-1, keepdim=True)
    weights = (logits - maximum).exp()
    total = weights.sum(-1, keepdim=True)
    out = (weights / total) @ value.float()
    maximum, total = (statistic.expand(-1, -1, -1, 8).clone() for statistic in (maximum, total))
    return out.to(query.dtype), maximum, total, query.new_empty(0), 0, 0, 0


def fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    assert softmax_max is not None and softmax_sum is not None and attention_in is not None
    logits = _logits(query, key, head_num, input_layout, pse, padding_mask, atten_mask, scale_value, keep_prob)
    weights = (logits - softmax_max[..., :1]).exp() / softmax_sum[..., :1]
    g = dy.float()
    dweights = g @ value.float().transpose(-1, -2)
    dlogits = weights * (dweights - (g * attention_in.float()).sum(-1, keepdim=True)) * scale_value
    dq, dk = dlogits @ key.float(), dlogits.transpose(-1, -2) @ query.float()
    dv = weights.transpose(-1, -2) @ g
    return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), query.new_empty(0), query.new_empty(0)


def _logits(
    query: Tensor,
    key: Tensor,
    heads: int,
    layout: str,
    pse: Tensor | None,
    padding_mask: Tensor | None,
    atten_mask: Tensor | None,
    scale: float,
    keep_prob: float,
) -> Tensor:
    """scale * (pse + query key^T), masked."""
    op = "FlashAttentionScore"
    require(layout == "BNSD" and heads == query.shape[1], op, f"layout {layout} with {heads} heads")
    require(padding_mask is None and keep_prob == 1, op, "a padding mask or dropout")
    require(query.dtype in FLOATS and key.dtype == query.dtype, op, f"dtypes {query.dtype}, {key.dtype}")
    batch, _, queries, _ = query.shape
    keys = key.shape[2]
    if pse is not None:
        forms = ((batch, heads, queries, keys), (batch, heads, 1, keys), (1, heads, queries, keys))
        require(pse.shape in forms and pse.dtype == query.dtype, op, f"a pse of {tuple(pse.shape)} in {pse.dtype}")
    logits = query.float() @ key.float().transpose(-1, -2)
    logits = scale * (logits if pse is None else logits + pse.float())
    if atten_mask is None:
        return logits
    require(atten_mask.dtype in (torch.bool, torch.uint8), op, f"a mask of {atten_mask.dtype}")
    require_no_broadcast(atten_mask, query, key)
    return logits.masked_fill(atten_mask.bool(), -torch.inf)


def require_no_broadcast(mask: Tensor, query: Tensor, key: Tensor) -> None:
    """Raise RuntimeError for a mask in none of the documented forms BNSS, B1SS, 11SS and SS, with both lengths."""
    batch, heads, queries = query.shape[0], query.shape[-3], query.shape[-2]
    one = (queries, key.shape[-2])
    forms = ((batch, heads, *one), (batch, 1, *one), (1, 1, *one), one)
    require(
        tuple(mask.shape) in forms, "FlashAttentionScore", f"a mask of shape {tuple(mask.shape)}, wanted one of {forms}"
    )


def check_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
) -> None:
    """Raise RuntimeError for a mask that torch's own attention would pass on in a broadcast shape."""
    if attn_mask is not None:
        require_no_broadcast(attn_mask, query, key)


def require(holds: bool, op: str, got: str) -> None:
    if not holds:
        raise RuntimeError(f"call aclnn{op} failed, detail:EZ1001: got {got}")


OPS: dict[str, tuple[str, Callable[..., Any]]] = {
    "npu_group_norm_swish": (
        "(Tensor input, int num_groups, Tensor weight, Tensor bias, float? eps=1e-5, float? swish_scale=1.0) "
        "-> (Tensor, Tensor, Tensor)",
        group_norm_swish,
    ),
    "npu_group_norm_swish_grad": (
        "(Tensor grad, Tensor input, int num_groups, Tensor weight, Tensor bias, Tensor mean, Tensor rstd, "
        "bool[3] grad_input_mask, float? swish_scale=1.0) -> (Tensor, Tensor, Tensor)",
        group_norm_swish_grad,
    ),
    "npu_rms_norm": ("(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)", rms_norm),
    "npu_rms_norm_backward": (
        "(Tensor dy, Tensor input, Tensor gamma, Tensor rstd) -> (Tensor, Tensor)",
        rms_norm_backward,
    ),
    "npu_rotary_mul": (
        "(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', Tensor? rotate=None) -> Tensor",
        rotary_mul,
    ),
    "npu_swiglu": ("(Tensor input, int dim=-1) -> Tensor", swiglu),
    "npu_swiglu_backward": ("(Tensor grad_output, Tensor input, int dim=-1) -> Tensor", swiglu_backward),
    "npu_fusion_attention": (
        "(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, Tensor? pse=None, "
        "Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1., "
        + ATTENTION_OPTIONS.format(seeds="")
        + ", Tensor? dropout_mask=None, int seed=0, int offset=0) -> (Tensor, Tensor, Tensor, Tensor, int, int, int)",
        fusion_attention,
    ),
    "npu_fusion_attention_grad": (
        "(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num, str input_layout, *, Tensor? pse=None, "
        "Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? softmax_max=None, Tensor? softmax_sum=None, "
        "Tensor? softmax_in=None, Tensor? attention_in=None, float scale_value=1., float keep_prob=1., "
        + ATTENTION_OPTIONS.format(seeds="int seed=0, int offset=0, int numels=0, ")
        + ") -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        fusion_attention_grad,
    ),
}


def register() -> list[torch.library.Library]:
    """Define the operators in `torch.ops.npu`; returns what must be kept alive."""
    defined = torch.library.Library("npu", "DEF")
    for name, (schema, formula) in OPS.items():
        defined.define(name + schema)
        defined.impl(name, formula, "CPU")
    return [defined]

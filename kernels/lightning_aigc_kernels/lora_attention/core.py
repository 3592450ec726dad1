"""Softmax attention, forward and backward, with each device's fused kernel, and a bias of each key for all queries.

A bias [N or 1, S] in float32 is added to every query's logits: -inf leaves a key out, log(n) counts it n times. Some
key must be left. On cuda torch's memory-efficient attention takes it; there and on npu the bias is rounded to the
queries' dtype. Without one, Hopper and Blackwell cards run cuDNN's attention, 1.6 to 2 times as fast on an H100 as
torch's flash attention, which serves on other cards.

Dimensions: N samples, H heads, T queries, S keys, D features of a head.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_aigc_kernels.dispatch import HALF_DTYPES, KERNEL_DEVICES, warn_once

aten = torch.ops.aten
BIAS_ALIGNMENT = 16
"""Multiple of numbers at which rows of a bias start, as in torch's own padding."""
LOWEST = -65504.0
"""Replacement of -inf on npu: far enough below any logit, and finite in half precision."""


def attend(
    q_NHTD: Tensor, k_NHSD: Tensor, v_NHSD: Tensor, bias_NS: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The output [N, H, T, D] and two small softmax tensors for `attend_backward`."""
    nothing = q_NHTD.new_empty(0)
    which = _kernel(q_NHTD, k_NHSD, v_NHSD, bias_NS is not None)
    q_NHTD, k_NHSD, v_NHSD = _dense(q_NHTD), _dense(k_NHSD), _dense(v_NHSD)
    bias = _bias_for(which, bias_NS, q_NHTD)
    if which == "cpu_flash":
        o_NHTD, lse_NHT = aten._scaled_dot_product_flash_attention_for_cpu(q_NHTD, k_NHSD, v_NHSD, attn_mask=bias)
        # torch 2.11's fake kernel reports float32 where the result is float64.
        return o_NHTD, lse_NHT.to(torch.promote_types(q_NHTD.dtype, torch.float32)).contiguous(), nothing
    if which == "cudnn":
        q_NHTD, k_NHSD, v_NHSD = map(_tokens_first, (q_NHTD, k_NHSD, v_NHSD))
        o_NHTD, lse_NHT1, *_ = aten._scaled_dot_product_cudnn_attention(q_NHTD, k_NHSD, v_NHSD, None, True)
        return o_NHTD, lse_NHT1, nothing
    if which == "cuda_flash":
        o_NHTD, lse_NHT, *_, random_state, _, _ = aten._scaled_dot_product_flash_attention(q_NHTD, k_NHSD, v_NHSD)
        return o_NHTD, lse_NHT, random_state
    if which == "cuda_efficient":
        o_NHTD, lse_NHT, *_ = aten._scaled_dot_product_efficient_attention(q_NHTD, k_NHSD, v_NHSD, bias, True)
        return o_NHTD, lse_NHT, nothing
    if which == "npu":
        o_NHTD, maximum, total, *_ = torch.ops.npu.npu_fusion_attention(
            q_NHTD, k_NHSD, v_NHSD, q_NHTD.shape[1], "BNSD", pse=bias, scale=q_NHTD.shape[-1] ** -0.5
        )
        return o_NHTD, maximum, total
    scores_NHTS = _scores(q_NHTD, k_NHSD, bias)
    lse_NHT = scores_NHTS.logsumexp(-1)
    o_NHTD = (scores_NHTS - lse_NHT[..., None]).exp().to(v_NHSD.dtype) @ v_NHSD
    return o_NHTD, lse_NHT, nothing


def attend_backward(
    do_NHTD: Tensor,
    q_NHTD: Tensor,
    k_NHSD: Tensor,
    v_NHSD: Tensor,
    o_NHTD: Tensor,
    softmax1: Tensor,
    softmax2: Tensor,
    bias_NS: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv."""
    which = _kernel(q_NHTD, k_NHSD, v_NHSD, bias_NS is not None)
    do_NHTD, q_NHTD, k_NHSD, v_NHSD = _dense(do_NHTD), _dense(q_NHTD), _dense(k_NHSD), _dense(v_NHSD)
    bias = _bias_for(which, bias_NS, q_NHTD)
    if which == "cpu_flash":
        softmax1 = softmax1.to(torch.promote_types(q_NHTD.dtype, torch.float32))  # forward's q may differ in dtype
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            do_NHTD, q_NHTD, k_NHSD, v_NHSD, o_NHTD, softmax1, 0.0, False, attn_mask=bias
        )
        return dq, dk, dv
    queries, keys = q_NHTD.shape[2], k_NHSD.shape[2]
    if which == "cudnn":
        # torch builds one backward for equal strides of q, k and v, whatever the strides of o and do are.
        do_NHTD, q_NHTD, k_NHSD, v_NHSD, o_NHTD = map(_tokens_first, (do_NHTD, q_NHTD, k_NHSD, v_NHSD, o_NHTD))
        seed = torch.empty((), dtype=torch.int64, device=q_NHTD.device)  # for dropout, which is off
        dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
            do_NHTD, q_NHTD, k_NHSD, v_NHSD, o_NHTD, softmax1, seed, seed, None, None, None, queries, keys, 0.0, False
        )
        return dq, dk, dv
    if which == "cuda_flash":
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            do_NHTD, q_NHTD, k_NHSD, v_NHSD, o_NHTD, softmax1, None, None, queries, keys, 0.0, False,
            softmax2, softmax2.new_empty(()),
        )  # fmt: skip
        return dq, dk, dv
    if which == "cuda_efficient":
        seed = torch.zeros((), dtype=torch.int64, device=q_NHTD.device)  # for dropout, which is off
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            do_NHTD, q_NHTD, k_NHSD, v_NHSD, bias, o_NHTD, softmax1, seed, seed, 0.0, [True, True, True, False], False
        )
        return dq, dk, dv
    if which == "npu":
        dq, dk, dv, *_ = torch.ops.npu.npu_fusion_attention_grad(
            q_NHTD, k_NHSD, v_NHSD, do_NHTD, q_NHTD.shape[1], "BNSD", pse=bias,
            softmax_max=softmax1, softmax_sum=softmax2, attention_in=o_NHTD, scale_value=q_NHTD.shape[-1] ** -0.5,
        )  # fmt: skip
        return dq, dk, dv
    weights_NHTS = (_scores(q_NHTD, k_NHSD, bias) - softmax1[..., None]).exp()
    dweights_NHTS = (do_NHTD @ v_NHSD.transpose(-1, -2)).to(weights_NHTS.dtype)
    delta_NHT1 = (do_NHTD.to(weights_NHTS.dtype) * o_NHTD.to(weights_NHTS.dtype)).sum(-1, keepdim=True)
    dscores_NHTS = weights_NHTS * (dweights_NHTS - delta_NHT1) * q_NHTD.shape[-1] ** -0.5
    dscores_NHTS, weights_NHTS = dscores_NHTS.to(q_NHTD.dtype), weights_NHTS.to(q_NHTD.dtype)
    dv_NHSD = weights_NHTS.transpose(-1, -2) @ do_NHTD
    return dscores_NHTS @ k_NHSD, dscores_NHTS.transpose(-1, -2) @ q_NHTD, dv_NHSD


def _scores(q_NHTD: Tensor, k_NHSD: Tensor, bias: Tensor | None) -> Tensor:
    """q k^T / sqrt(D) + bias, at least in float32."""
    wide = torch.promote_types(q_NHTD.dtype, torch.float32)
    scale: float = q_NHTD.shape[-1] ** -0.5
    scores_NHTS = q_NHTD.to(wide) @ k_NHSD.to(wide).transpose(-1, -2) * scale
    return scores_NHTS if bias is None else scores_NHTS + bias


def _bias_for(which: str, bias_NS: Tensor | None, q_NHTD: Tensor) -> Tensor | None:
    """The bias of the keys in the form that a kernel takes."""
    if bias_NS is None:
        return None
    samples, heads, queries, features = q_NHTD.shape
    keys = bias_NS.shape[1]
    bias_N11S = bias_NS.unsqueeze(1).unsqueeze(1)
    if which == "cuda_efficient":
        padded = F.pad(bias_N11S, (0, -keys % BIAS_ALIGNMENT)).to(q_NHTD.dtype)
        return padded.narrow(-1, 0, keys).expand(samples, heads, queries, keys)
    if which == "npu":  # pse, which is added before the scale; a row for all queries must have all heads
        root: float = features**0.5
        scaled = (bias_N11S * root).clamp(min=LOWEST).to(q_NHTD.dtype)
        return scaled.expand(samples, heads, 1, keys).contiguous()
    # torch 2.13 misreads a float32 bias of float64 queries.
    return bias_N11S.to(torch.promote_types(q_NHTD.dtype, torch.float32))


def _dense(heads_first: Tensor) -> Tensor:
    """Make a head's features contiguous, which the fused kernels require without checking."""
    return heads_first if heads_first.stride(-1) == 1 else heads_first.contiguous()


def _tokens_first(heads_first: Tensor) -> Tensor:
    """The tensor in memory as [N, T, H, D]; without a copy if it is so already."""
    _, heads, tokens, features = heads_first.shape
    if heads_first.stride() == (tokens * heads * features, features, heads * features, 1):
        return heads_first
    return heads_first.transpose(1, 2).contiguous().transpose(1, 2)


def _kernel(q_NHTD: Tensor, k_NHSD: Tensor, v_NHSD: Tensor, biased: bool = False) -> str:
    """The attention kernel for these tensors; fused kernels divide by zero without keys."""
    device, features = q_NHTD.device.type, q_NHTD.shape[-1]
    if q_NHTD.numel() == 0 or k_NHSD.numel() == 0 or v_NHSD.shape[-1] != features:
        return "math"
    if device == "cpu":
        # With fewer keys than a vector register holds, torch 2.13 treats a NaN query as a masked row and hides it.
        return "cpu_flash" if k_NHSD.shape[2] >= 16 else "math"
    half = q_NHTD.dtype in HALF_DTYPES
    if device == "cuda" and features % 8 == 0 and (half or q_NHTD.dtype == torch.float32):
        if not half or biased or features > 256:
            return "cuda_efficient"
        if k_NHSD.shape[2] > 1 and features <= cudnn_features(q_NHTD.device.index) and _may_use_cudnn():
            return "cudnn"
        return "cuda_flash" if has_flash_attention(q_NHTD.device.index) else "cuda_efficient"
    if device == "npu" and half and hasattr(torch.ops.npu, "npu_fusion_attention"):
        return "npu"
    if device in KERNEL_DEVICES:
        warn_once("lora_attention", device, f"no fused attention takes {q_NHTD.dtype} with {features} features a head")
    return "math"


@functools.cache
def has_flash_attention(cuda_index: int | None) -> bool:
    """Whether this card runs torch's flash attention (Ampere or later); True without a card, for tracing."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(cuda_index) >= (8, 0)


@functools.cache
def cudnn_features(cuda_index: int | None) -> int:
    """The most features of a head for which this card runs cuDNN's attention; 0 without it, and without a card.

    As torch prefers it: on Hopper and Blackwell, by a cuDNN after 9.15.0, which misread some numbers of tokens.
    """
    if not torch.cuda.is_available() or (torch.backends.cudnn.version() or 0) <= 91500:  # type: ignore[no-untyped-call]
        return 0
    return {(9, 0): 256, (10, 0): 128, (10, 3): 128}.get(torch.cuda.get_device_capability(cuda_index), 0)


def _may_use_cudnn() -> bool:
    """Whether torch's switches allow it; it does not repeat its bits."""
    is_enabled: bool = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    return is_enabled and not torch.are_deterministic_algorithms_enabled()

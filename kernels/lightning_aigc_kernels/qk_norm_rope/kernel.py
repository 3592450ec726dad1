"""Triton kernels of RMSNorm per head and rotary position embedding, for NVIDIA and Ascend.

Dimensions: N samples, T tokens, H heads, D features of a head. A program takes one token at a time, a tile of its heads
at once: they share cos, sin and the weight. Tensors have any strides but that of D, which is 1, so that a part of a
wider projection is read, and a part of the joined tokens written, where it lies.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_aigc_kernels.launch import KernelCase, LaunchConfig, config_for, next_power_of_two, on_device_of
from lightning_aigc_kernels.qk_norm_rope.norm_rope import NormRope

FORWARD = {"cuda": LaunchConfig(4096, 65_535, 8), "npu": LaunchConfig(4096, 960), "cpu": LaunchConfig(64, 3)}
# Each program adds up the weight's gradient of its tokens: 1056 are eight on each multiprocessor of an H100.
BACKWARD = {"cuda": LaunchConfig(4096, 1056, 8), "npu": LaunchConfig(2048, 960), "cpu": LaunchConfig(64, 3)}
# On Ascend a rotation's split and joined tiles need additional room.
ROTATED = {"npu": LaunchConfig(1024, 960)}
WIDEST_ROTATED = {"npu": 128}
"""Features of a head, where 8 heads of more do not fit on the chip."""


@triton.jit
def rotated(x, cos, sin, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    """(x0 cos - x1 sin, x1 cos + x0 sin) of the pairs of neighbours in [BLOCK_H, BLOCK_D].

    Split and joined on chip: loads of every second element run one at a time on Ascend.
    """
    x0, x1 = tl.split(tl.reshape(x, (BLOCK_H, BLOCK_D // 2, 2)))
    return tl.reshape(tl.join(x0 * cos - x1 * sin, x1 * cos + x0 * sin), (BLOCK_H, BLOCK_D))


@triton.jit
def row_of(ptr, row, length, BLOCK: tl.constexpr):
    """Row `row` of a matrix with rows of `length`, in float32, [1, BLOCK]."""
    column = tl.arange(0, BLOCK)
    return tl.load(ptr + tl.cast(row, tl.int64) * length + column, mask=column < length, other=0.0).to(tl.float32)[
        None, :
    ]


@triton.jit
def token_start(sample, position, stride_n, stride_t):
    """Offset of a token in a tensor; 64-bit, so that the offsets inside it can be 32-bit."""
    return tl.cast(sample, tl.int64) * stride_n + tl.cast(position, tl.int64) * stride_t


@triton.jit
def qk_norm_rope_forward(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    tokens,
    length,
    heads,
    features,
    x_stride_n,
    x_stride_t,
    x_stride_h,
    y_stride_n,
    y_stride_t,
    y_stride_h,
    angle_stride_n,
    eps,
    NORM: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """y of every token; `tokens` is N * T, `length` T, and a sample's angles start `angle_stride_n` tokens further."""
    feature = tl.arange(0, BLOCK_D)
    if WEIGHTED:
        weight = row_of(weight_ptr, 0, features, BLOCK_D)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        sample = token // length
        position = token % length
        x_start = token_start(sample, position, x_stride_n, x_stride_t)
        y_start = token_start(sample, position, y_stride_n, y_stride_t)
        if ROTATED:
            row = sample * angle_stride_n + position
            cos = row_of(cos_ptr, row, features // 2, BLOCK_D // 2)
            sin = row_of(sin_ptr, row, features // 2, BLOCK_D // 2)
        for h in range(0, heads, BLOCK_H):
            head = h + tl.arange(0, BLOCK_H)
            inside = (head < heads)[:, None] & (feature < features)[None, :]
            offsets = head[:, None] * x_stride_h + feature[None, :]
            x = tl.load(x_ptr + x_start + offsets, mask=inside, other=0.0).to(tl.float32)
            if NORM:
                x = x * (1.0 / tl.sqrt(tl.sum(x * x, 1) / features + eps))[:, None]
            if WEIGHTED:
                x = x * weight
            if ROTATED:
                x = rotated(x, cos, sin, BLOCK_H, BLOCK_D)
            offsets = head[:, None] * y_stride_h + feature[None, :]
            tl.store(y_ptr + y_start + offsets, x.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def qk_norm_rope_backward(
    dy_ptr,
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    dx_ptr,
    weight_grad_ptr,
    tokens,
    length,
    heads,
    features,
    dy_stride_n,
    dy_stride_t,
    dy_stride_h,
    x_stride_n,
    x_stride_t,
    x_stride_h,
    angle_stride_n,
    eps,
    NORM: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROTATED: tl.constexpr,
    NEED_WEIGHT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A contiguous dx, and with NEED_WEIGHT each program's part of the weight's gradient, [programs, D]."""
    feature = tl.arange(0, BLOCK_D)
    if WEIGHTED:
        weight = row_of(weight_ptr, 0, features, BLOCK_D)
    dweight = tl.zeros([BLOCK_D], tl.float32)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        sample = token // length
        position = token % length
        dy_start = token_start(sample, position, dy_stride_n, dy_stride_t)
        x_start = token_start(sample, position, x_stride_n, x_stride_t)
        dx_start = tl.cast(token, tl.int64) * heads * features
        if ROTATED:
            row = sample * angle_stride_n + position
            cos = row_of(cos_ptr, row, features // 2, BLOCK_D // 2)
            sin = row_of(sin_ptr, row, features // 2, BLOCK_D // 2)
        for h in range(0, heads, BLOCK_H):
            head = h + tl.arange(0, BLOCK_H)
            inside = (head < heads)[:, None] & (feature < features)[None, :]
            offsets = head[:, None] * dy_stride_h + feature[None, :]
            g = tl.load(dy_ptr + dy_start + offsets, mask=inside, other=0.0).to(tl.float32)
            if ROTATED:
                g = rotated(g, cos, -sin, BLOCK_H, BLOCK_D)
            if NORM:
                offsets = head[:, None] * x_stride_h + feature[None, :]
                x = tl.load(x_ptr + x_start + offsets, mask=inside, other=0.0).to(tl.float32)
                rstd = (1.0 / tl.sqrt(tl.sum(x * x, 1) / features + eps))[:, None]
                xhat = x * rstd
                if NEED_WEIGHT:
                    dweight += tl.sum(g * xhat, 0)
                if WEIGHTED:
                    g = g * weight
                mean = (tl.sum(g * xhat, 1) / features)[:, None]
                g = (g - xhat * mean) * rstd
            offsets = head[:, None] * features + feature[None, :]
            tl.store(dx_ptr + dx_start + offsets, g.to(dx_ptr.dtype.element_ty), mask=inside)
    if NEED_WEIGHT:
        tl.store(weight_grad_ptr + tl.program_id(0) * features + feature, dweight, mask=feature < features)


def launch(
    device_type: str, is_backward: bool, heads: int, features: int, rotated: bool
) -> tuple[LaunchConfig, int, int]:
    """The launch sizes, and the heads and features of a tile; a head is never divided.

    Ascend pads a row to 32 bytes, hence at least 16 features, so 8 pairs. To split and join fewer than 8 heads takes it
    more memory than to do so with 8. The compiler for its 950 (ascendnpu-ir 1.2) crashes where a loaded tile with 64
    features is split, so that one takes 128.
    """
    config = config_for(device_type, (BACKWARD if is_backward else FORWARD) | (ROTATED if rotated else {}))
    block_d = max(next_power_of_two(features), 16)
    if rotated and device_type == "npu" and block_d == 64:
        block_d = 128
    return config, max(min(config.tile // block_d, max(next_power_of_two(heads), 8)), 1), block_d


def why_not(x_NTHD: Tensor, how: NormRope) -> str | None:
    """The reason why these kernels cannot take a head of x, None if they can."""
    features, device = x_NTHD.shape[-1], x_NTHD.device.type
    widest = WIDEST_ROTATED.get(device, features)
    return f"it rotates up to {widest} features a head" if how.cos is not None and features > widest else None


def forward(x_NTHD: Tensor, how: NormRope, out_NTHD: Tensor) -> Tensor:
    """rotate(rms_norm(x) * weight), computed in float32, written to `out` in its dtype.

    Raises: ValueError if the features of `out` are not adjacent.
    """
    samples, length, heads, features = x_NTHD.shape
    if not _is_dense(out_NTHD):
        raise ValueError(f"out must have stride 1 in its last dimension, got strides {out_NTHD.stride()}")
    if x_NTHD.numel() == 0:
        return out_NTHD
    x_NTHD = _dense(x_NTHD)
    weight, cos, sin, angle_stride = _small(how, x_NTHD)
    config, block_h, block_d = launch(x_NTHD.device.type, False, heads, features, how.cos is not None)
    with on_device_of(x_NTHD):
        qk_norm_rope_forward[(min(samples * length, config.programs),)](
            x_NTHD,
            weight,
            cos,
            sin,
            out_NTHD,
            samples * length,
            length,
            heads,
            features,
            *x_NTHD.stride()[:3],
            *out_NTHD.stride()[:3],
            angle_stride,
            how.eps,
            NORM=how.norm,
            WEIGHTED=how.weight is not None,
            ROTATED=how.cos is not None,
            BLOCK_H=block_h,
            BLOCK_D=block_d,
            **config.options,
        )
    return out_NTHD


def backward(
    dy_NTHD: Tensor, x_NTHD: Tensor, how: NormRope, dx_NTHD: Tensor, need_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradient of x, written to the contiguous `dx`, and if needed that of the weight in float32.

    The weight's is each program's sum, then the sum over programs: the same bits each time.
    Args: x is not read without norm.
    """
    samples, length, heads, features = dy_NTHD.shape
    tokens = samples * length
    if dx_NTHD.numel() == 0:
        return dx_NTHD, dy_NTHD.new_zeros(features, dtype=torch.float32) if need_weight else None
    dy_NTHD, x_NTHD = _dense(dy_NTHD), _dense(x_NTHD)
    weight, cos, sin, angle_stride = _small(how, x_NTHD)
    config, block_h, block_d = launch(dy_NTHD.device.type, True, heads, features, how.cos is not None)
    programs = min(tokens, config.programs)
    sums = dy_NTHD.new_empty(programs if need_weight else 1, features, dtype=torch.float32)
    with on_device_of(dy_NTHD):
        qk_norm_rope_backward[(programs,)](
            dy_NTHD,
            x_NTHD,
            weight,
            cos,
            sin,
            dx_NTHD,
            sums,
            tokens,
            length,
            heads,
            features,
            *dy_NTHD.stride()[:3],
            *x_NTHD.stride()[:3],
            angle_stride,
            how.eps,
            NORM=how.norm,
            WEIGHTED=how.weight is not None,
            ROTATED=how.cos is not None,
            NEED_WEIGHT=need_weight,
            BLOCK_H=block_h,
            BLOCK_D=block_d,
            **config.options,
        )
    return dx_NTHD, sums.sum(0) if need_weight else None


def _is_dense(x_NTHD: Tensor) -> bool:
    return x_NTHD.stride(-1) == 1 or x_NTHD.shape[-1] == 1


def _dense(x_NTHD: Tensor) -> Tensor:
    return x_NTHD if _is_dense(x_NTHD) else x_NTHD.contiguous()


def _small(how: NormRope, stand_in: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Weight, cos and sin for the kernels, another tensor for an absent one, and how many rows of cos a sample has."""
    weight = stand_in if how.weight is None else how.weight.contiguous()
    if how.cos is None or how.sin is None:
        return weight, stand_in, stand_in, 0
    return weight, how.cos.contiguous(), how.sin.contiguous(), how.cos.shape[1] if how.cos.dim() == 3 else 0


def _case(chip: str, direction: str, dtype: str, heads: int, features: int, **switches: bool) -> KernelCase:
    backward = direction == "backward"
    function = qk_norm_rope_backward if backward else qk_norm_rope_forward
    switches = {"NORM": True, "WEIGHTED": True, "ROTATED": True} | switches
    _, block_h, block_d = launch(chip, backward, heads, features, switches["ROTATED"])
    constants = {**switches, "BLOCK_H": block_h, "BLOCK_D": block_d}
    signature = {}
    for name in function.arg_names:
        if name in ("cos_ptr", "sin_ptr", "weight_grad_ptr"):
            signature[name] = "*fp32"
        elif name not in constants:
            signature[name] = f"*{dtype}" if name.endswith("_ptr") else "fp32" if name == "eps" else "i32"
    switched = "".join(f" {name.lower()}={int(value)}" for name, value in switches.items())
    return KernelCase(f"{direction} {dtype} {block_h}x{block_d}{switched}", function, signature, constants)


def cases(chip: str) -> list[KernelCase]:
    """The compiled variants of the kernels for a chip: each use of norm and rotation, a wide, a narrow, an odd head."""
    rotation_alone = {"NORM": False, "WEIGHTED": False}
    made = []
    for dtype in ("fp16", "bf16", "fp32"):
        for use in ({}, {"ROTATED": False}, {"WEIGHTED": False}, rotation_alone):
            made.append(_case(chip, "forward", dtype, 24, 128, **use))
            made.append(_case(chip, "backward", dtype, 24, 128, NEED_WEIGHT=False, **use))
        for heads, features, use in ((24, 128, {}), (38, 64, {"ROTATED": False}), (3, 32, {}), (3, 10, {})):
            if features != 128:
                made.append(_case(chip, "forward", dtype, heads, features, **use))
            made.append(_case(chip, "backward", dtype, heads, features, NEED_WEIGHT=True, **use))
    return made


KERNELS: list[KernelCase] = cases("npu")

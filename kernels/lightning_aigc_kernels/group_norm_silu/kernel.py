"""GroupNorm with SiLU, forward and backward in one launch each: one Triton source for NVIDIA and Ascend.

Dimensions: N samples, C channels, G groups, K = C / G channels of a group, P pixels of a channel.
A slab is one group of one sample: K * P numbers that lie together. One program takes one slab at a time, so backward
needs no second launch and no atomics: the per-channel sums of a slab are complete in the program that needs them for
dx. A batch of few slabs leaves a big GPU idle (SDXL at batch 1: 32 slabs on 132 multiprocessors); splitting a slab
would cost a second launch and a pass over partial sums, and is left out until a measurement asks for it.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_aigc_kernels.bit_bisection import copy_at_least, kth_largest_magnitude
from lightning_aigc_kernels.launch import KernelCase, LaunchConfig, config_for, tile_shape

# 960 programs divide evenly among 40 and 48 vector cores; the interpreter's row makes small tensors loop in every loop.
FORWARD = {"cuda": LaunchConfig(4096, 65_535, 8), "npu": LaunchConfig(2048, 960), "cpu": LaunchConfig(64, 3)}
BACKWARD = {"cuda": LaunchConfig(2048, 65_535, 8), "npu": LaunchConfig(2048, 960), "cpu": LaunchConfig(64, 3)}


@triton.jit
def slab_mean_and_m2(x_ptr, length, BLOCK: tl.constexpr):
    """Mean and sum of squared deviations of a slab in one reading: each tile in two passes, then merged.

    Source: Chan, Golub, LeVeque, Updating formulae and a pairwise algorithm for computing sample variances, 1979.
    """
    mean = 0.0
    m2 = 0.0
    for start in range(0, length, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < length
        values = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        count = tl.minimum(length - start, BLOCK).to(tl.float32)
        tile_mean = tl.sum(values, 0) / count
        centred = tl.where(inside, values - tile_mean, 0.0)
        delta = tile_mean - mean
        share = count / (start + count)
        mean += delta * share
        m2 += tl.sum(centred * centred, 0) + delta * delta * share * start
    return mean, m2


@triton.jit
def group_norm_silu_forward(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    slabs,
    groups,
    channels,
    pixels,
    weight_stride,
    bias_stride,
    eps,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """y, mean and rstd of every slab; `channels` are those of one group, BLOCK = BLOCK_K * BLOCK_P."""
    length = channels * pixels
    for slab in range(tl.program_id(0), slabs, tl.num_programs(0)):
        start = tl.cast(slab, tl.int64) * length
        mean, m2 = slab_mean_and_m2(x_ptr + start, length, BLOCK)
        rstd = 1.0 / tl.sqrt(m2 / length + eps)
        tl.store(mean_ptr + slab, mean)
        tl.store(rstd_ptr + slab, rstd)
        sample = slab // groups
        first_channel = (slab % groups) * channels
        for k in range(0, channels, BLOCK_K):
            channel = k + tl.arange(0, BLOCK_K)
            in_group = channel < channels
            affine = first_channel + channel
            weight = (
                tl.load(weight_ptr + sample * weight_stride + affine, mask=in_group, other=0.0).to(tl.float32) * rstd
            )
            bias = tl.load(bias_ptr + sample * bias_stride + affine, mask=in_group, other=0.0).to(tl.float32)
            for p in range(0, pixels, BLOCK_P):
                pixel = p + tl.arange(0, BLOCK_P)
                offsets = channel[:, None] * pixels + pixel[None, :]
                inside = in_group[:, None] & (pixel < pixels)[None, :]
                x = tl.load(x_ptr + start + offsets, mask=inside, other=0.0).to(tl.float32)
                z = (x - mean) * weight[:, None] + bias[:, None]
                if SILU:
                    z = z * tl.sigmoid(z)
                tl.store(y_ptr + start + offsets, z.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def normalised_and_dz(x_ptr, dy_ptr, offsets, inside, mean, rstd, weight, bias, SILU: tl.constexpr):
    """Of one tile: the normalised x, and the gradient of the number that enters the activation."""
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    dz = tl.load(dy_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    xhat = (x - mean) * rstd
    if SILU:
        z = xhat * weight[:, None] + bias[:, None]
        gate = tl.sigmoid(z)
        dz = dz * gate * (1.0 + z * (1.0 - gate))
    return xhat, dz


@triton.jit
def group_norm_silu_backward(
    dy_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    bias_ptr,
    dx_ptr,
    weight_grad_ptr,
    bias_grad_ptr,
    slabs,
    groups,
    channels,
    pixels,
    weight_stride,
    bias_stride,
    keep,
    SILU: tl.constexpr,
    NEED_AFFINE: tl.constexpr,
    SPARSE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """dx; the sums over pixels of dz * xhat and dz when NEED_AFFINE; the `keep` largest |dx| of a slab when SPARSE."""
    length = channels * pixels
    for slab in range(tl.program_id(0), slabs, tl.num_programs(0)):
        start = tl.cast(slab, tl.int64) * length
        mean = tl.load(mean_ptr + slab)
        rstd = tl.load(rstd_ptr + slab)
        sample = slab // groups
        first_channel = (slab % groups) * channels
        mean_dz = 0.0
        mean_dz_xhat = 0.0
        for k in range(0, channels, BLOCK_K):
            channel = k + tl.arange(0, BLOCK_K)
            in_group = channel < channels
            affine = first_channel + channel
            weight = tl.load(weight_ptr + sample * weight_stride + affine, mask=in_group, other=0.0).to(tl.float32)
            bias = tl.load(bias_ptr + sample * bias_stride + affine, mask=in_group, other=0.0).to(tl.float32)
            weight_grad = tl.zeros([BLOCK_K], tl.float32)
            bias_grad = tl.zeros([BLOCK_K], tl.float32)
            for p in range(0, pixels, BLOCK_P):
                pixel = p + tl.arange(0, BLOCK_P)
                offsets = channel[:, None] * pixels + pixel[None, :]
                inside = in_group[:, None] & (pixel < pixels)[None, :]
                xhat, dz = normalised_and_dz(
                    x_ptr + start, dy_ptr + start, offsets, inside, mean, rstd, weight, bias, SILU
                )
                weight_grad += tl.sum(dz * xhat, 1)
                bias_grad += tl.sum(dz, 1)
            mean_dz += tl.sum(bias_grad * weight, 0) / length
            mean_dz_xhat += tl.sum(weight_grad * weight, 0) / length
            if NEED_AFFINE:
                row = sample * groups * channels
                tl.store(weight_grad_ptr + row + affine, weight_grad, mask=in_group)
                tl.store(bias_grad_ptr + row + affine, bias_grad, mask=in_group)
        for k in range(0, channels, BLOCK_K):
            channel = k + tl.arange(0, BLOCK_K)
            in_group = channel < channels
            affine = first_channel + channel
            weight = tl.load(weight_ptr + sample * weight_stride + affine, mask=in_group, other=0.0).to(tl.float32)
            bias = tl.load(bias_ptr + sample * bias_stride + affine, mask=in_group, other=0.0).to(tl.float32)
            for p in range(0, pixels, BLOCK_P):
                pixel = p + tl.arange(0, BLOCK_P)
                offsets = channel[:, None] * pixels + pixel[None, :]
                inside = in_group[:, None] & (pixel < pixels)[None, :]
                xhat, dz = normalised_and_dz(
                    x_ptr + start, dy_ptr + start, offsets, inside, mean, rstd, weight, bias, SILU
                )
                dx = rstd * (weight[:, None] * dz - mean_dz - xhat * mean_dz_xhat)
                tl.store(dx_ptr + start + offsets, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if SPARSE:
            tl.debug_barrier()  # other threads of this program wrote the dx that is read from here on
            threshold = kth_largest_magnitude(dx_ptr + start, length, keep, BLOCK)
            copy_at_least(dx_ptr + start, dx_ptr + start, length, threshold, BLOCK)


def _sizes(x: Tensor, groups: int) -> tuple[int, int, int, int]:
    """N, K, P and the slab's length of x viewed as [N, C, P].

    Raises: ValueError when x is not a contiguous [N, C, ...] or C does not divide into the groups.
    """
    if x.dim() < 2 or not x.is_contiguous():
        raise ValueError(f"x must be contiguous [N, C, ...], got shape {tuple(x.shape)}, strides {x.stride()}")
    samples, channels = x.shape[:2]
    if groups < 1 or channels % groups:
        raise ValueError(f"{channels} channels do not divide into {groups} groups; use a divisor of {channels}")
    pixels = math.prod(x.shape[2:])
    return samples, channels // groups, pixels, channels // groups * pixels


def _affine(affine_NC: Tensor, x: Tensor, name: str) -> Tensor:
    """The per-sample weight or bias with its channels next to each other; the samples may share one row (stride 0).

    Raises: ValueError for another shape or dtype.
    """
    if affine_NC.shape != x.shape[:2] or affine_NC.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        wanted = f"float32, float16 or bfloat16 of shape {tuple(x.shape[:2])}"
        raise ValueError(f"{name} must be {wanted}, got {affine_NC.dtype} of shape {tuple(affine_NC.shape)}")
    return affine_NC if affine_NC.stride(1) == 1 else affine_NC.contiguous()


def forward(
    x: Tensor, weight_NC: Tensor, bias_NC: Tensor, groups: int, eps: float, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """act(GroupNorm(x) * weight + bias), and each slab's mean and reciprocal standard deviation.

    Args: x is contiguous [N, C, ...] in float32, float16 or bfloat16; weight_NC and bias_NC any of those, and a sample
        stride of 0 shares them. The activation is SiLU, or the identity when `silu` is false.
    Returns: y like x, mean_NG and rstd_NG in float32.
    Raises: ValueError for a strided x, channels that do not divide into the groups, or an affine of another shape.
    """
    samples, channels, pixels, length = _sizes(x, groups)
    weight_NC, bias_NC = _affine(weight_NC, x, "weight"), _affine(bias_NC, x, "bias")
    y = torch.empty_like(x)
    mean_NG = torch.empty(samples, groups, dtype=torch.float32, device=x.device)
    rstd_NG = torch.empty_like(mean_NG)
    if length == 0 or samples == 0:
        return y, mean_NG.fill_(math.nan), rstd_NG.fill_(math.nan)
    config = config_for(x.device.type, FORWARD)
    block_k, block_p = tile_shape(pixels, config.tile)
    group_norm_silu_forward[(min(samples * groups, config.programs),)](
        x,
        weight_NC,
        bias_NC,
        y,
        mean_NG,
        rstd_NG,
        samples * groups,
        groups,
        channels,
        pixels,
        weight_NC.stride(0),
        bias_NC.stride(0),
        eps,
        SILU=silu,
        BLOCK=config.tile,
        BLOCK_K=block_k,
        BLOCK_P=block_p,
        **config.options,
    )
    return y, mean_NG, rstd_NG


def backward(
    dy: Tensor,
    x: Tensor,
    mean_NG: Tensor,
    rstd_NG: Tensor,
    weight_NC: Tensor,
    bias_NC: Tensor,
    groups: int,
    silu: bool,
    need_affine: bool,
    density: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of `forward` from x alone: what it normalised is computed again, nothing of its size was saved.

    Args: dy is contiguous and has the shape of x. Below density 1 each slab keeps its ceil(density * length) largest
        |dx|, ties included, and the rest is zero.
    Returns: dx like x; with `need_affine` the per-sample weight_grad_NC and bias_grad_NC in float32, else None.
    Raises: ValueError as `forward`, or for a density outside (0, 1].
    """
    samples, channels, pixels, length = _sizes(x, groups)
    if dy.shape != x.shape or not dy.is_contiguous():
        raise ValueError(f"dy must be contiguous {tuple(x.shape)}, got {tuple(dy.shape)}, strides {dy.stride()}")
    if not 0 < density <= 1:
        raise ValueError(f"density must be in (0, 1], got {density}; use 1 to keep every gradient")
    weight_NC, bias_NC = _affine(weight_NC, x, "weight"), _affine(bias_NC, x, "bias")
    dx = torch.empty_like(x)
    grads_NC = [torch.empty(x.shape[:2], dtype=torch.float32, device=x.device) for _ in range(2 if need_affine else 0)]
    if length == 0 or samples == 0:
        grads_NC = [grad.zero_() for grad in grads_NC]
    else:
        config = config_for(x.device.type, BACKWARD)
        block_k, block_p = tile_shape(pixels, config.tile)
        group_norm_silu_backward[(min(samples * groups, config.programs),)](
            dy,
            x,
            mean_NG,
            rstd_NG,
            weight_NC,
            bias_NC,
            dx,
            *(grads_NC or (mean_NG, rstd_NG)),  # without need_affine nothing is written to the last two
            samples * groups,
            groups,
            channels,
            pixels,
            weight_NC.stride(0),
            bias_NC.stride(0),
            math.ceil(density * length),
            SILU=silu,
            NEED_AFFINE=need_affine,
            SPARSE=density < 1,
            BLOCK=config.tile,
            BLOCK_K=block_k,
            BLOCK_P=block_p,
            **config.options,
        )
    weight_grad_NC, bias_grad_NC = grads_NC or (None, None)
    return dx, weight_grad_NC, bias_grad_NC


def _case(chip: str, direction: str, dtype: str, pixels: int, affine: str = "fp32", **switches: bool) -> KernelCase:
    backward = direction == "backward"
    function = group_norm_silu_backward if backward else group_norm_silu_forward
    tile = (BACKWARD if backward else FORWARD)[chip].tile
    block_k, block_p = tile_shape(pixels, tile)
    ours, theirs = f"*{dtype}", "*fp32"
    pointers = {"dy_ptr": ours, "x_ptr": ours, "mean_ptr": theirs, "rstd_ptr": theirs, "weight_ptr": f"*{affine}"}
    pointers |= {
        "bias_ptr": f"*{affine}",
        "dx_ptr": ours,
        "y_ptr": ours,
        "weight_grad_ptr": theirs,
        "bias_grad_ptr": theirs,
    }
    constants = {"SILU": True, "BLOCK": tile, "BLOCK_K": block_k, "BLOCK_P": block_p, **switches}
    numbers = {"eps": "fp32"}
    signature = {a: pointers.get(a) or numbers.get(a, "i32") for a in function.arg_names if a not in constants}
    switched = "".join(f" {name.lower()}={int(value)}" for name, value in switches.items())
    switched += "" if affine == "fp32" else f" affine={affine}"
    return KernelCase(f"{direction} {dtype} {block_k}x{block_p}{switched}", function, signature, constants)


def cases(chip: str) -> list[KernelCase]:
    """Every way the kernels are compiled for a row of the tables; of the tiles, the widest, a middle, the narrowest.

    Dtypes, SiLU, NEED_AFFINE and SPARSE are switches of one source, so not every combination is listed.
    """
    dtypes, pixels = ("fp16", "bf16", "fp32"), (4096, 256, 1)
    forwards = [_case(chip, "forward", dtype, p) for dtype in dtypes for p in pixels]
    backwards = [
        _case(chip, "backward", dtype, p, NEED_AFFINE=True, SPARSE=sparse)
        for dtype in dtypes
        for p in pixels
        for sparse in (False, True)
    ]
    return [
        *forwards,
        _case(chip, "forward", "fp16", 4096, SILU=False),
        *backwards,
        _case(chip, "backward", "fp16", 4096, NEED_AFFINE=False, SPARSE=False),
        *(_case(chip, "forward", half, 256, affine=half) for half in ("fp16", "bf16")),
        *(_case(chip, "backward", half, 256, affine=half, NEED_AFFINE=True, SPARSE=False) for half in ("fp16", "bf16")),
        _case(chip, "backward", "fp16", 4096, SILU=False, NEED_AFFINE=True, SPARSE=False),
    ]


KERNELS: list[KernelCase] = cases("npu")

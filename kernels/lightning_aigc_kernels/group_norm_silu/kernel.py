"""Triton kernels of GroupNorm with the timestep's scale and shift and SiLU, for NVIDIA and Ascend.

Forward is one launch, and so is backward; a trained weight and bias need a second launch, which sums over samples.

Dimensions: N samples, C channels, G groups, K = C / G channels of a group, P pixels of a channel.
A slab is one group of one sample: K * P contiguous elements. Each program handles one slab at a time, so backward needs
no second launch and no atomics: the program that needs a slab's per-channel sums for dx has computed all of them. A few
slabs would leave a large GPU idle (batch 1: 32 slabs on 132 multiprocessors); `split.py` handles that case.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_aigc_kernels.group_norm_silu import split
from lightning_aigc_kernels.group_norm_silu.affine import Affine
from lightning_aigc_kernels.group_norm_silu.reference import is_channels_last
from lightning_aigc_kernels.group_norm_silu.split import normalised_and_dz, slope_and_offset
from lightning_aigc_kernels.kth_magnitude import copy_at_least, kth_largest_magnitude
from lightning_aigc_kernels.launch import KernelCase, LaunchConfig, config_for, on_device_of, tile_shape

# 960 programs divide evenly among 40 and 48 vector cores. The interpreter's row is small, so that tests run all loops.
FORWARD = {"cuda": LaunchConfig(8192, 65_535, 16), "npu": LaunchConfig(2048, 960), "cpu": LaunchConfig(64, 3)}
BACKWARD = {"cuda": LaunchConfig(8192, 65_535, 16), "npu": LaunchConfig(2048, 960), "cpu": LaunchConfig(64, 3)}
# Ascend's planner also needs room for the search of the largest entries.
BACKWARD_SPARSE = BACKWARD | {"npu": LaunchConfig(1024, 960)}
SUMS = {"cuda": LaunchConfig(128, 65_535, 4), "npu": LaunchConfig(256, 960), "cpu": LaunchConfig(4, 3)}


@triton.jit
def slab_mean_and_m2(x_ptr, length, BLOCK: tl.constexpr):
    """Mean and sum of squared deviations of a slab, reading it once: two passes per tile, then merged.

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
    scale_ptr,
    shift_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    slabs,
    groups,
    channels,
    pixels,
    scale_stride,
    shift_stride,
    eps,
    MODULATED: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Compute y, mean and rstd of every slab; `channels` is per group, BLOCK = BLOCK_K * BLOCK_P."""
    length = channels * pixels
    for slab in range(tl.program_id(0), slabs, tl.num_programs(0)):
        start = tl.cast(slab, tl.int64) * length
        mean, m2 = slab_mean_and_m2(x_ptr + start, length, BLOCK)
        rstd = 1.0 / tl.sqrt(m2 / length + eps)
        tl.store(mean_ptr + slab, mean)
        tl.store(rstd_ptr + slab, rstd)
        sample = slab // groups
        first_channel = (slab % groups) * channels
        scale_row = scale_ptr + sample * scale_stride
        shift_row = shift_ptr + sample * shift_stride
        for k in range(0, channels, BLOCK_K):
            channel = k + tl.arange(0, BLOCK_K)
            in_group = channel < channels
            affine = first_channel + channel
            slope, offset = slope_and_offset(weight_ptr, bias_ptr, scale_row, shift_row, affine, in_group, MODULATED)
            slope = slope * rstd
            for p in range(0, pixels, BLOCK_P):
                pixel = p + tl.arange(0, BLOCK_P)
                offsets = channel[:, None] * pixels + pixel[None, :]
                inside = in_group[:, None] & (pixel < pixels)[None, :]
                x = tl.load(x_ptr + start + offsets, mask=inside, other=0.0).to(tl.float32)
                z = (x - mean) * slope[:, None] + offset[:, None]
                if SILU:
                    z = z * tl.sigmoid(z)
                tl.store(y_ptr + start + offsets, z.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def group_norm_silu_backward(
    dy_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    shift_ptr,
    dx_ptr,
    weight_grad_ptr,
    bias_grad_ptr,
    scale_grad_ptr,
    shift_grad_ptr,
    slabs,
    groups,
    channels,
    pixels,
    scale_stride,
    shift_stride,
    keep,
    MODULATED: tl.constexpr,
    SILU: tl.constexpr,
    NEED_AFFINE: tl.constexpr,
    SPARSE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Compute dx; with SPARSE keep only the `keep` largest |dx| of each slab.

    With NEED_AFFINE also the per-sample gradients of weight and bias, for `sum_of_samples`, and of scale and shift.
    """
    length = channels * pixels
    for slab in range(tl.program_id(0), slabs, tl.num_programs(0)):
        start = tl.cast(slab, tl.int64) * length
        mean = tl.load(mean_ptr + slab)
        rstd = tl.load(rstd_ptr + slab)
        sample = slab // groups
        first_channel = (slab % groups) * channels
        scale_row = scale_ptr + sample * scale_stride
        shift_row = shift_ptr + sample * shift_stride
        mean_dz = 0.0
        mean_dz_xhat = 0.0
        for k in range(0, channels, BLOCK_K):
            channel = k + tl.arange(0, BLOCK_K)
            in_group = channel < channels
            affine = first_channel + channel
            slope, offset = slope_and_offset(weight_ptr, bias_ptr, scale_row, shift_row, affine, in_group, MODULATED)
            slope_grad = tl.zeros([BLOCK_K], tl.float32)
            offset_grad = tl.zeros([BLOCK_K], tl.float32)
            for p in range(0, pixels, BLOCK_P):
                pixel = p + tl.arange(0, BLOCK_P)
                offsets = channel[:, None] * pixels + pixel[None, :]
                inside = in_group[:, None] & (pixel < pixels)[None, :]
                xhat, dz = normalised_and_dz(
                    x_ptr + start, dy_ptr + start, offsets, inside, mean, rstd, slope, offset, SILU
                )
                slope_grad += tl.sum(dz * xhat, 1)
                offset_grad += tl.sum(dz, 1)
            mean_dz += tl.sum(offset_grad * slope, 0) / length
            mean_dz_xhat += tl.sum(slope_grad * slope, 0) / length
            if NEED_AFFINE:
                row = sample * groups * channels + affine
                if MODULATED:
                    weight = tl.load(weight_ptr + affine, mask=in_group, other=0.0).to(tl.float32)
                    bias = tl.load(bias_ptr + affine, mask=in_group, other=0.0).to(tl.float32)
                    dscale = slope_grad * weight + offset_grad * bias
                    tl.store(scale_grad_ptr + row, dscale.to(scale_grad_ptr.dtype.element_ty), mask=in_group)
                    tl.store(shift_grad_ptr + row, offset_grad.to(shift_grad_ptr.dtype.element_ty), mask=in_group)
                    amplify = 1.0 + tl.load(scale_row + affine, mask=in_group, other=0.0).to(tl.float32)
                    slope_grad = slope_grad * amplify
                    offset_grad = offset_grad * amplify
                tl.store(weight_grad_ptr + row, slope_grad, mask=in_group)
                tl.store(bias_grad_ptr + row, offset_grad, mask=in_group)
        for k in range(0, channels, BLOCK_K):
            channel = k + tl.arange(0, BLOCK_K)
            in_group = channel < channels
            affine = first_channel + channel
            slope, offset = slope_and_offset(weight_ptr, bias_ptr, scale_row, shift_row, affine, in_group, MODULATED)
            for p in range(0, pixels, BLOCK_P):
                pixel = p + tl.arange(0, BLOCK_P)
                offsets = channel[:, None] * pixels + pixel[None, :]
                inside = in_group[:, None] & (pixel < pixels)[None, :]
                xhat, dz = normalised_and_dz(
                    x_ptr + start, dy_ptr + start, offsets, inside, mean, rstd, slope, offset, SILU
                )
                dx = rstd * (slope[:, None] * dz - mean_dz - xhat * mean_dz_xhat)
                tl.store(dx_ptr + start + offsets, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if SPARSE:
            tl.debug_barrier()  # other threads of this program wrote parts of dx that are read below
            threshold = kth_largest_magnitude(dx_ptr + start, length, keep, BLOCK)
            copy_at_least(dx_ptr + start, dx_ptr + start, length, threshold, BLOCK)


@triton.jit
def sum_of_samples(
    weight_grads_ptr, bias_grads_ptr, weight_grad_ptr, bias_grad_ptr, samples, channels, BLOCK: tl.constexpr
):
    """Sum the per-sample gradients of weight and bias [N, C] to [C]."""
    for start in range(tl.program_id(0) * BLOCK, channels, tl.num_programs(0) * BLOCK):
        channel = start + tl.arange(0, BLOCK)
        inside = channel < channels
        weight_grad = tl.zeros([BLOCK], tl.float32)
        bias_grad = tl.zeros([BLOCK], tl.float32)
        for sample in range(samples):
            row = sample * channels + channel
            weight_grad += tl.load(weight_grads_ptr + row, mask=inside, other=0.0)
            bias_grad += tl.load(bias_grads_ptr + row, mask=inside, other=0.0)
        tl.store(weight_grad_ptr + channel, weight_grad.to(weight_grad_ptr.dtype.element_ty), mask=inside)
        tl.store(bias_grad_ptr + channel, bias_grad.to(bias_grad_ptr.dtype.element_ty), mask=inside)


def _sizes(x: Tensor, groups: int) -> tuple[int, int, int, int]:
    """Return N, K, P and the slab length of x viewed as [N, C, P].

    Raises: ValueError if x is not a contiguous [N, C, ...] or the groups do not divide C.
    """
    if x.dim() < 2 or not (x.is_contiguous() or (x.device.type in split.FORWARD and is_channels_last(x))):
        raise ValueError(f"x must be contiguous [N, C, ...], got shape {tuple(x.shape)}, strides {x.stride()}")
    samples, channels = x.shape[:2]
    if groups < 1 or channels % groups:
        raise ValueError(f"{channels} channels do not divide into {groups} groups; use a divisor of {channels}")
    pixels = math.prod(x.shape[2:])
    return samples, channels // groups, pixels, channels // groups * pixels


def forward(x: Tensor, affine: Affine, groups: int, eps: float, silu: bool) -> tuple[Tensor, Tensor, Tensor]:
    """act((GroupNorm(x) * weight + bias) * (1 + scale) + shift), with each slab's mean and reciprocal deviation.

    Args: x is contiguous [N, C, ...], or channels_last where `split` serves, in float32, float16 or bfloat16. The
        activation is SiLU, or the identity if `silu` is false.
    Returns: y like x, mean_NG and rstd_NG in float32.
    Raises: ValueError for a strided x, or channels that do not divide into the groups.
    """
    samples, channels, pixels, length = _sizes(x, groups)
    cut = split.shared(x, groups, channels, pixels) if length and samples else None
    if cut is not None:
        return split.forward(x, cut, affine, groups, channels, pixels, eps, silu)
    y = torch.empty_like(x)
    mean_NG = torch.empty(samples, groups, dtype=torch.float32, device=x.device)
    rstd_NG = torch.empty_like(mean_NG)
    if length == 0 or samples == 0:
        return y, mean_NG.fill_(math.nan), rstd_NG.fill_(math.nan)
    config = config_for(x.device.type, FORWARD)
    block_k, block_p = tile_shape(pixels, config.tile)
    with on_device_of(x):
        group_norm_silu_forward[(min(samples * groups, config.programs),)](
            x,
            *affine.pointers,
            y,
            mean_NG,
            rstd_NG,
            samples * groups,
            groups,
            channels,
            pixels,
            *affine.strides,
            eps,
            MODULATED=bool(affine.modulation),
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
    affine: Affine,
    groups: int,
    silu: bool,
    need_affine: bool,
    density: float,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of `forward`, recomputing the normalised x, so that only x of its size is saved.

    Args: dy has x's shape and layout; channels_last is taken without `need_affine` at density 1. Below density 1 each
        slab keeps its ceil(density * length) largest |dx|, ties included; the rest is zero.
    Returns: dx like x; with `need_affine` the gradients of weight, bias, scale and shift in their shapes and dtypes,
        the last two None without modulation; else four times None.
    Raises: ValueError as `forward`, or for a density outside (0, 1].
    """
    samples, channels, pixels, length = _sizes(x, groups)
    if dy.shape != x.shape or not (dy.is_contiguous() if x.is_contiguous() else is_channels_last(dy)):
        wanted = f"{tuple(x.shape)} in x's layout, {x.stride()}"
        raise ValueError(f"dy must be {wanted}, got {tuple(dy.shape)}, strides {dy.stride()}")
    if not 0 < density <= 1:
        raise ValueError(f"density must be in (0, 1], got {density}; use 1 to keep every gradient")
    if length == 0 or samples == 0:
        given = (affine.weight, affine.bias, *(affine.modulation or (None, None)))
        dweight, dbias, dscale, dshift = (
            torch.zeros(of.shape, dtype=of.dtype, device=of.device) if need_affine and of is not None else None
            for of in given
        )
        return torch.empty_like(x), dweight, dbias, dscale, dshift
    may_share = not need_affine and density == 1
    if not may_share and not x.is_contiguous():
        raise ValueError("x must be contiguous for gradients of affine tensors and below density 1, got channels_last")
    cut = split.shared(x, groups, channels, pixels, is_backward=True) if may_share else None
    if cut is not None:
        dx = split.backward(dy, x, cut, mean_NG, rstd_NG, affine, groups, channels, pixels, silu)
        return dx, None, None, None, None
    dx = torch.empty_like(x)
    of_samples, modulation = [], []
    if need_affine:
        of_samples = [torch.empty(x.shape[:2], dtype=torch.float32, device=x.device) for _ in range(2)]
        modulation = [torch.empty(t.shape, dtype=t.dtype, device=x.device) for t in affine.modulation]
    config = config_for(x.device.type, BACKWARD_SPARSE if density < 1 else BACKWARD)
    block_k, block_p = tile_shape(pixels, config.tile)
    nowhere = (mean_NG, mean_NG)  # placeholders that are not written
    with on_device_of(x):
        group_norm_silu_backward[(min(samples * groups, config.programs),)](
            dy,
            x,
            mean_NG,
            rstd_NG,
            *affine.pointers,
            dx,
            *(of_samples or nowhere),
            *(modulation or nowhere),
            samples * groups,
            groups,
            channels,
            pixels,
            *affine.strides,
            math.ceil(density * length),
            MODULATED=bool(affine.modulation),
            SILU=silu,
            NEED_AFFINE=need_affine,
            SPARSE=density < 1,
            BLOCK=config.tile,
            BLOCK_K=block_k,
            BLOCK_P=block_p,
            **config.options,
        )
        if not need_affine:
            return dx, None, None, None, None
        dweight, dbias = torch.empty_like(affine.weight), torch.empty_like(affine.bias)
        config = config_for(x.device.type, SUMS)
        sum_of_samples[(min(triton.cdiv(x.shape[1], config.tile), config.programs),)](
            *of_samples, dweight, dbias, samples, x.shape[1], BLOCK=config.tile, **config.options
        )
    dscale, dshift = modulation or (None, None)
    return dx, dweight, dbias, dscale, dshift


def _case(
    chip: str, direction: str, dtype: str, pixels: int, affine: str = "fp32", modulated: bool = False, **switches: bool
) -> KernelCase:
    backward = direction == "backward"
    function = group_norm_silu_backward if backward else group_norm_silu_forward
    configs = (BACKWARD_SPARSE if switches.get("SPARSE") else BACKWARD) if backward else FORWARD
    tile = configs[chip].tile
    block_k, block_p = tile_shape(pixels, tile)
    pointers = dict.fromkeys(("dy_ptr", "x_ptr", "dx_ptr", "y_ptr"), f"*{dtype}")
    pointers |= dict.fromkeys(("mean_ptr", "rstd_ptr", "weight_grad_ptr", "bias_grad_ptr"), "*fp32")
    pointers |= dict.fromkeys(("weight_ptr", "bias_ptr"), f"*{affine}")
    # Without modulation these point to the weight, the bias and the mean, and are not read.
    pointers |= dict.fromkeys(("scale_ptr", "shift_ptr"), f"*{dtype if modulated else affine}")
    pointers |= dict.fromkeys(("scale_grad_ptr", "shift_grad_ptr"), f"*{dtype if modulated else 'fp32'}")
    tiles = {"BLOCK": tile, "BLOCK_K": block_k, "BLOCK_P": block_p}
    constants = {"SILU": True, "MODULATED": modulated, **tiles, **switches}
    numbers = {"eps": "fp32"}
    signature = {a: pointers.get(a) or numbers.get(a, "i32") for a in function.arg_names if a not in constants}
    switched = "".join(f" {name.lower()}={int(value)}" for name, value in switches.items())
    switched += ("" if affine == "fp32" else f" affine={affine}") + (" modulated" if modulated else "")
    return KernelCase(f"{direction} {dtype} {block_k}x{block_p}{switched}", function, signature, constants)


def _sums_case(chip: str, dtype: str) -> KernelCase:
    pointers = dict.fromkeys(("weight_grads_ptr", "bias_grads_ptr"), "*fp32")
    pointers |= dict.fromkeys(("weight_grad_ptr", "bias_grad_ptr"), f"*{dtype}")
    numbers = {"samples": "i32", "channels": "i32"}
    return KernelCase(f"sums {dtype}", sum_of_samples, pointers | numbers, {"BLOCK": SUMS[chip].tile})


def cases(chip: str) -> list[KernelCase]:
    """The compiled variants of the kernels for a chip, with the tiles for SD 1.5's numbers of pixels.

    Dtypes and switches share one source, so not every combination is listed.
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
        *(_case(chip, "forward", "bf16", p) for p in (1024, 64)),
        _case(chip, "forward", "fp16", 4096, SILU=False),
        *(_case(chip, "forward", half, 256, affine=half) for half in ("fp16", "bf16")),
        *(_case(chip, "forward", "bf16", p, modulated=True) for p in pixels),
        *backwards,
        *(_case(chip, "backward", "bf16", p, NEED_AFFINE=True, SPARSE=False) for p in (1024, 64)),
        _case(chip, "backward", "fp16", 4096, NEED_AFFINE=False, SPARSE=False),
        *(_case(chip, "backward", half, 256, affine=half, NEED_AFFINE=True, SPARSE=False) for half in ("fp16", "bf16")),
        *(
            _case(chip, "backward", dtype, p, modulated=True, NEED_AFFINE=True, SPARSE=False)
            for dtype in ("bf16", "fp32")
            for p in pixels
        ),
        _case(chip, "backward", "fp16", 4096, modulated=True, NEED_AFFINE=False, SPARSE=False),
        _case(chip, "backward", "fp16", 4096, SILU=False, NEED_AFFINE=True, SPARSE=False),
        *(_sums_case(chip, dtype) for dtype in dtypes),
        *(
            case
            for dtype in dtypes
            for modulated in (False, True)
            for channels_last in (False, True)
            for case in (split.cases(dtype, 4096, modulated, channels_last) if chip == "cuda" else ())
        ),
    ]


KERNELS: list[KernelCase] = cases("npu")

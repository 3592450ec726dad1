"""Variants of the kernels for few, long slabs: several programs share a slab, to occupy a large GPU.

A batch of one has 32 slabs, an H100 132 multiprocessors: with one program per slab most of them would be idle. Here a
first launch writes each program's partial sums, and a second adds up its slab's partial sums and writes the result. The
cost is a launch and a second read of x, by then in the cache. Ascend has few programs, each of which takes a full slab;
trained affine tensors and sparse gradients use `kernel.py` too.

These kernels also read channels_last tensors, in which a slab has K contiguous numbers of each pixel, so that nothing
is copied between a convolution and its norm.

Dimensions: as `kernel.py`. A slab is divided into tiles of BLOCK_K channels by BLOCK_P pixels, and each of SPLITS
programs handles `tiles_a_split` consecutive tiles.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_aigc_kernels.group_norm_silu.affine import Affine
from lightning_aigc_kernels.group_norm_silu.reference import is_channels_last
from lightning_aigc_kernels.launch import (
    KernelCase,
    LaunchConfig,
    config_for,
    next_power_of_two,
    on_device_of,
    tile_shape,
)

FORWARD = {"cuda": LaunchConfig(4096, 65_535, 8), "cpu": LaunchConfig(64, 65_535)}
BACKWARD = {"cuda": LaunchConfig(2048, 65_535, 8), "cpu": LaunchConfig(64, 65_535)}
PROGRAMS_A_MULTIPROCESSOR = 4
MOST_SPLITS = 64


@functools.cache
def wanted_programs(device_type: str, index: int | None) -> int:
    """The number of programs that fill the device; 0 if slabs are never split."""
    if device_type != "cuda" or not torch.cuda.is_available():
        return 0
    return PROGRAMS_A_MULTIPROCESSOR * torch.cuda.get_device_properties(index).multi_processor_count


@triton.jit
def slope_and_offset(weight_ptr, bias_ptr, scale_row, shift_row, channel, inside, MODULATED: tl.constexpr):
    """slope = weight * (1 + scale) and offset = bias * (1 + scale) + shift per channel: z = slope * xhat + offset."""
    weight = tl.load(weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    if MODULATED:
        amplify = 1.0 + tl.load(scale_row + channel, mask=inside, other=0.0).to(tl.float32)
        shift = tl.load(shift_row + channel, mask=inside, other=0.0).to(tl.float32)
        weight = weight * amplify
        bias = bias * amplify + shift
    return weight, bias


@triton.jit
def normalised_and_dz(x_ptr, dy_ptr, offsets, inside, mean, rstd, slope, offset, SILU: tl.constexpr):
    """xhat, the normalised x of a tile, and dz, the gradient of the activation's input."""
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    dz = tl.load(dy_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    xhat = (x - mean) * rstd
    if SILU:
        z = xhat * slope[:, None] + offset[:, None]
        gate = tl.sigmoid(z)
        dz = dz * gate * (1.0 + z * (1.0 - gate))
    return xhat, dz


@triton.jit
def slab_start(slab, groups, channels, pixels, CHANNELS_LAST: tl.constexpr):
    """Offset of a slab's first element, in 64 bits."""
    if CHANNELS_LAST:
        return tl.cast(slab // groups, tl.int64) * groups * channels * pixels + (slab % groups) * channels
    return tl.cast(slab, tl.int64) * channels * pixels


@triton.jit
def tile_of(
    tile, across, groups, channels, pixels, CHANNELS_LAST: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr
):
    """The channels of a slab's tile, the offsets of its elements, their mask, and their number."""
    channel = (tile // across) * BLOCK_K + tl.arange(0, BLOCK_K)
    pixel = (tile % across) * BLOCK_P + tl.arange(0, BLOCK_P)
    if CHANNELS_LAST:
        offsets = channel[:, None] + pixel[None, :] * (groups * channels)
    else:
        offsets = channel[:, None] * pixels + pixel[None, :]
    inside = (channel < channels)[:, None] & (pixel < pixels)[None, :]
    rows = tl.minimum(channels - (tile // across) * BLOCK_K, BLOCK_K)
    columns = tl.minimum(pixels - (tile % across) * BLOCK_P, BLOCK_P)
    return channel, offsets, inside, (rows * columns).to(tl.float32)


@triton.jit
def forward_shares(
    x_ptr,
    shares_ptr,
    groups,
    channels,
    pixels,
    tiles,
    across,
    tiles_a_split,
    CHANNELS_LAST: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Write count, mean and sum of squared deviations of each split, [slabs, 3, SPLITS].

    Source: Chan, Golub, LeVeque, Updating formulae and a pairwise algorithm for computing sample variances, 1979.
    """
    slab = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    x_ptr += slab_start(slab, groups, channels, pixels, CHANNELS_LAST)
    count = 0.0
    mean = 0.0
    m2 = 0.0
    first = split * tiles_a_split
    for tile in range(first, tl.minimum(first + tiles_a_split, tiles)):
        _, offsets, inside, numbers = tile_of(tile, across, groups, channels, pixels, CHANNELS_LAST, BLOCK_K, BLOCK_P)
        values = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        tile_mean = tl.sum(tl.sum(values, 1), 0) / numbers
        centred = tl.where(inside, values - tile_mean, 0.0)
        delta = tile_mean - mean
        share = numbers / (count + numbers)
        mean += delta * share
        m2 += tl.sum(tl.sum(centred * centred, 1), 0) + delta * delta * share * count
        count += numbers
    shares_ptr += slab * 3 * SPLITS + split
    tl.store(shares_ptr, count)
    tl.store(shares_ptr + SPLITS, mean)
    tl.store(shares_ptr + 2 * SPLITS, m2)


@triton.jit
def forward_result(
    x_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    shift_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    shares_ptr,
    groups,
    channels,
    pixels,
    tiles,
    across,
    tiles_a_split,
    scale_stride,
    shift_stride,
    eps,
    MODULATED: tl.constexpr,
    SILU: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Write y of each split's tiles, and mean and rstd of each slab, from the statistics of all its splits."""
    slab = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    of_splits = shares_ptr + slab * 3 * SPLITS + tl.arange(0, SPLITS)
    counts = tl.load(of_splits)
    means = tl.load(of_splits + SPLITS)
    length = channels * pixels
    mean = tl.sum(counts * means, 0) / length
    m2 = tl.sum(tl.load(of_splits + 2 * SPLITS) + counts * (means - mean) * (means - mean), 0)
    rstd = 1.0 / tl.sqrt(m2 / length + eps)
    if split == 0:
        tl.store(mean_ptr + slab, mean)
        tl.store(rstd_ptr + slab, rstd)
    start = slab_start(slab, groups, channels, pixels, CHANNELS_LAST)
    first_channel = (slab % groups) * channels
    scale_row = scale_ptr + (slab // groups) * scale_stride + first_channel
    shift_row = shift_ptr + (slab // groups) * shift_stride + first_channel
    first = split * tiles_a_split
    for tile in range(first, tl.minimum(first + tiles_a_split, tiles)):
        channel, offsets, inside, _ = tile_of(tile, across, groups, channels, pixels, CHANNELS_LAST, BLOCK_K, BLOCK_P)
        slope, offset = slope_and_offset(
            weight_ptr + first_channel,
            bias_ptr + first_channel,
            scale_row,
            shift_row,
            channel,
            channel < channels,
            MODULATED,
        )
        x = tl.load(x_ptr + start + offsets, mask=inside, other=0.0).to(tl.float32)
        z = (x - mean) * (slope * rstd)[:, None] + offset[:, None]
        if SILU:
            z = z * tl.sigmoid(z)
        tl.store(y_ptr + start + offsets, z.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def backward_shares(
    dy_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    shift_ptr,
    shares_ptr,
    groups,
    channels,
    pixels,
    tiles,
    across,
    tiles_a_split,
    scale_stride,
    shift_stride,
    MODULATED: tl.constexpr,
    SILU: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Write the sums over each split of dxhat and of dxhat * xhat, [slabs, 2, SPLITS]."""
    slab = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    mean = tl.load(mean_ptr + slab)
    rstd = tl.load(rstd_ptr + slab)
    start = slab_start(slab, groups, channels, pixels, CHANNELS_LAST)
    first_channel = (slab % groups) * channels
    scale_row = scale_ptr + (slab // groups) * scale_stride + first_channel
    shift_row = shift_ptr + (slab // groups) * shift_stride + first_channel
    total = 0.0
    total_xhat = 0.0
    first = split * tiles_a_split
    for tile in range(first, tl.minimum(first + tiles_a_split, tiles)):
        channel, offsets, inside, _ = tile_of(tile, across, groups, channels, pixels, CHANNELS_LAST, BLOCK_K, BLOCK_P)
        slope, offset = slope_and_offset(
            weight_ptr + first_channel,
            bias_ptr + first_channel,
            scale_row,
            shift_row,
            channel,
            channel < channels,
            MODULATED,
        )
        xhat, dz = normalised_and_dz(x_ptr + start, dy_ptr + start, offsets, inside, mean, rstd, slope, offset, SILU)
        dxhat = dz * slope[:, None]
        total += tl.sum(tl.sum(dxhat, 1), 0)
        total_xhat += tl.sum(tl.sum(dxhat * xhat, 1), 0)
    shares_ptr += slab * 2 * SPLITS + split
    tl.store(shares_ptr, total)
    tl.store(shares_ptr + SPLITS, total_xhat)


@triton.jit
def backward_result(
    dy_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    shift_ptr,
    dx_ptr,
    shares_ptr,
    groups,
    channels,
    pixels,
    tiles,
    across,
    tiles_a_split,
    scale_stride,
    shift_stride,
    MODULATED: tl.constexpr,
    SILU: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Write dx of each split's tiles, from the sums of all splits of its slab."""
    slab = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    mean = tl.load(mean_ptr + slab)
    rstd = tl.load(rstd_ptr + slab)
    length = channels * pixels
    of_splits = shares_ptr + slab * 2 * SPLITS + tl.arange(0, SPLITS)
    mean_dxhat = tl.sum(tl.load(of_splits), 0) / length
    mean_dxhat_xhat = tl.sum(tl.load(of_splits + SPLITS), 0) / length
    start = slab_start(slab, groups, channels, pixels, CHANNELS_LAST)
    first_channel = (slab % groups) * channels
    scale_row = scale_ptr + (slab // groups) * scale_stride + first_channel
    shift_row = shift_ptr + (slab // groups) * shift_stride + first_channel
    first = split * tiles_a_split
    for tile in range(first, tl.minimum(first + tiles_a_split, tiles)):
        channel, offsets, inside, _ = tile_of(tile, across, groups, channels, pixels, CHANNELS_LAST, BLOCK_K, BLOCK_P)
        slope, offset = slope_and_offset(
            weight_ptr + first_channel,
            bias_ptr + first_channel,
            scale_row,
            shift_row,
            channel,
            channel < channels,
            MODULATED,
        )
        xhat, dz = normalised_and_dz(x_ptr + start, dy_ptr + start, offsets, inside, mean, rstd, slope, offset, SILU)
        dxhat = dz * slope[:, None]
        dx = rstd * (dxhat - mean_dxhat - xhat * mean_dxhat_xhat)
        tl.store(dx_ptr + start + offsets, dx.to(dx_ptr.dtype.element_ty), mask=inside)


class Cut:
    """The division of the slabs of x [N, groups * channels, pixels] among programs."""

    def __init__(self, x: Tensor, groups: int, channels: int, pixels: int, table: dict[str, LaunchConfig]) -> None:
        self.config = config_for(x.device.type, table)
        self.channels_last = is_channels_last(x)
        if self.channels_last:
            self.block_p, self.block_k = tile_shape(channels, self.config.tile)
        else:
            self.block_k, self.block_p = tile_shape(pixels, self.config.tile)
        self.across = triton.cdiv(pixels, self.block_p)
        self.tiles = triton.cdiv(channels, self.block_k) * self.across
        self.slabs = x.shape[0] * groups
        programs = wanted_programs(x.device.type, x.device.index)
        wanted = min(triton.cdiv(programs, max(self.slabs, 1)), self.tiles, MOST_SPLITS)
        self.splits = next_power_of_two(wanted) if wanted > 1 else 1
        self.tiles_a_split = triton.cdiv(self.tiles, self.splits)

    @property
    def grid(self) -> tuple[int]:
        return (self.slabs * self.splits,)

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.tiles, self.across, self.tiles_a_split

    @property
    def constants(self) -> dict[str, int | bool]:
        tiles = {"SPLITS": self.splits, "BLOCK_K": self.block_k, "BLOCK_P": self.block_p}
        return {"CHANNELS_LAST": self.channels_last, **tiles, **self.config.options}


def shared(x: Tensor, groups: int, channels: int, pixels: int, *, is_backward: bool = False) -> Cut | None:
    """The Cut of x's slabs for `forward` or `backward`; None if each program takes a full slab of a contiguous x."""
    table = BACKWARD if is_backward else FORWARD
    if x.device.type not in table:
        return None
    cut = Cut(x, groups, channels, pixels, table)
    return cut if cut.splits > 1 or cut.channels_last else None


def forward(
    x: Tensor, cut: Cut, affine: Affine, groups: int, channels: int, pixels: int, eps: float, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `kernel.forward` in two launches; `kernel.forward` has checked x."""
    y = torch.empty_like(x)
    mean_NG = torch.empty(x.shape[0], groups, dtype=torch.float32, device=x.device)
    rstd_NG = torch.empty_like(mean_NG)
    shares = torch.empty(cut.slabs, 3, cut.splits, dtype=torch.float32, device=x.device)
    with on_device_of(x):
        forward_shares[cut.grid](x, shares, groups, channels, pixels, *cut.sizes, **cut.constants)
        forward_result[cut.grid](
            x, *affine.pointers, y, mean_NG, rstd_NG, shares, groups, channels, pixels, *cut.sizes, *affine.strides,
            eps, MODULATED=bool(affine.modulation), SILU=silu, **cut.constants,
        )  # fmt: skip
    return y, mean_NG, rstd_NG


def backward(
    dy: Tensor,
    x: Tensor,
    cut: Cut,
    mean_NG: Tensor,
    rstd_NG: Tensor,
    affine: Affine,
    groups: int,
    channels: int,
    pixels: int,
    silu: bool,
) -> Tensor:
    """dx as `kernel.backward`, which has checked the tensors."""
    dx = torch.empty_like(x)
    shares = torch.empty(cut.slabs, 2, cut.splits, dtype=torch.float32, device=x.device)
    sizes = groups, channels, pixels, *cut.sizes, *affine.strides
    switches = {"MODULATED": bool(affine.modulation), "SILU": silu, **cut.constants}
    with on_device_of(x):
        backward_shares[cut.grid](dy, x, mean_NG, rstd_NG, *affine.pointers, shares, *sizes, **switches)
        backward_result[cut.grid](dy, x, mean_NG, rstd_NG, *affine.pointers, dx, shares, *sizes, **switches)
    return dx


def cases(dtype: str, pixels: int, modulated: bool, channels_last: bool = False) -> list[KernelCase]:
    """The compiled variants of these kernels for CUDA."""
    found = []
    for function in (forward_shares, forward_result, backward_shares, backward_result):
        table = FORWARD if function in (forward_shares, forward_result) else BACKWARD
        block_k, block_p = (16, table["cuda"].tile // 16) if channels_last else tile_shape(pixels, table["cuda"].tile)
        switches = {"MODULATED": modulated, "SILU": True, "CHANNELS_LAST": channels_last}
        constants = switches | {"SPLITS": 8, "BLOCK_K": block_k, "BLOCK_P": block_p}
        pointers = dict.fromkeys(("x_ptr", "y_ptr", "dy_ptr", "dx_ptr", "scale_ptr", "shift_ptr"), f"*{dtype}")
        pointers |= dict.fromkeys(("weight_ptr", "bias_ptr", "mean_ptr", "rstd_ptr", "shares_ptr"), "*fp32")
        signature = {
            name: pointers.get(name) or ("fp32" if name == "eps" else "i32")
            for name in function.arg_names
            if name not in constants
        }
        own = {name: value for name, value in constants.items() if name in function.arg_names}
        switched = " modulated" * modulated + " channels_last" * channels_last
        found.append(KernelCase(f"{function.__name__} {dtype} {pixels}{switched}", function, signature, own))
    return found

"""Triton kernel of the sums over tokens that gradients of scale, shift, weight, bias and gate are made of.

Dimensions: N samples, T tokens, C channels, S splits. A sample's tokens are divided among S programs, each of which
writes its own row, so that no atomics are needed and the sums come out the same every time.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_aigc_kernels.launch import KernelCase, LaunchConfig, config_for, on_device_of, tile_shape

SUMS = {"cuda": LaunchConfig(4096, 65_535, 8), "npu": LaunchConfig(2048, 960), "cpu": LaunchConfig(64, 3)}
MOST_COLUMNS = {"cuda": 128, "npu": 256, "cpu": 16}
# Programs that fill a chip, fixed so that every card adds up in the same order.
WANTED_PROGRAMS = {"cuda": 512, "npu": 48, "cpu": 12}


@triton.jit
def sums_of_tokens(
    dy_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    sums_ptr,
    samples,
    splits,
    tokens_a_split,
    tokens,
    channels,
    dy_sample,
    dy_token,
    x_sample,
    x_token,
    NORMED: tl.constexpr,
    NEED_SLOPE: tl.constexpr,
    NEED_OFFSET: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Sums over each split's tokens of dy * norm(x) and of dy, [NEED_SLOPE + NEED_OFFSET, N, S, C] in this order.

    Without NORMED the first is that of dy * x.
    """
    across = tl.cdiv(channels, BLOCK_C)
    for work in range(tl.program_id(0), samples * splits * across, tl.num_programs(0)):
        part = work // across
        sample = part // splits
        first = (part % splits) * tokens_a_split
        last = tl.minimum(first + tokens_a_split, tokens)
        channel = (work % across) * BLOCK_C + tl.arange(0, BLOCK_C)
        in_row = channel < channels
        slope_sum = tl.zeros([BLOCK_C], tl.float32)
        offset_sum = tl.zeros([BLOCK_C], tl.float32)
        token = tl.arange(0, BLOCK_T)
        for start in range(first, last, BLOCK_T):
            in_split = start + token < last
            inside = in_split[:, None] & in_row[None, :]
            wide_start = tl.cast(start, tl.int64)
            dy_start = dy_ptr + tl.cast(sample, tl.int64) * dy_sample + wide_start * dy_token
            dy = tl.load(dy_start + (token * dy_token)[:, None] + channel[None, :], mask=inside, other=0.0)
            dy = dy.to(tl.float32)
            if NEED_SLOPE:
                x_start = x_ptr + tl.cast(sample, tl.int64) * x_sample + wide_start * x_token
                x = tl.load(x_start + (token * x_token)[:, None] + channel[None, :], mask=inside, other=0.0)
                x = x.to(tl.float32)
                if NORMED:
                    statistics = sample * tokens + start + token
                    mean = tl.load(mean_ptr + statistics, mask=in_split, other=0.0)
                    rstd = tl.load(rstd_ptr + statistics, mask=in_split, other=0.0)
                    x = (x - mean[:, None]) * rstd[:, None]
                slope_sum += tl.sum(dy * x, 0)
            if NEED_OFFSET:
                offset_sum += tl.sum(dy, 0)
        row = sums_ptr + tl.cast(part, tl.int64) * channels
        if NEED_SLOPE:
            tl.store(row + channel, slope_sum, mask=in_row)
            row += tl.cast(samples, tl.int64) * splits * channels
        if NEED_OFFSET:
            tl.store(row + channel, offset_sum, mask=in_row)


def sums(
    dy: Tensor, x: Tensor, statistics: tuple[Tensor, Tensor] | None, need_slope: bool, need_offset: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The needed sums over tokens of dy * norm(x) and of dy, [N, C] in float32.

    Args: dy and x [N, T, C] with contiguous channels; statistics are mean and reciprocal deviation [N, T], None without
        a norm.
    """
    samples, tokens, channels = dy.shape
    if dy.numel() == 0:
        nothing = torch.zeros(samples, channels, dtype=torch.float32, device=dy.device)
        return (nothing if need_slope else None), (nothing.clone() if need_offset else None)
    config = config_for(dy.device.type, SUMS)
    block_t, block_c = tile_shape(min(channels, MOST_COLUMNS[dy.device.type]), config.tile)
    across = triton.cdiv(channels, block_c)
    splits = min(triton.cdiv(WANTED_PROGRAMS[dy.device.type], samples * across), triton.cdiv(tokens, block_t))
    tokens_a_split = triton.cdiv(triton.cdiv(tokens, block_t), splits) * block_t
    splits = triton.cdiv(tokens, tokens_a_split)
    of_splits = torch.empty(need_slope + need_offset, samples, splits, channels, dtype=torch.float32, device=dy.device)
    mean, rstd = statistics or (of_splits, of_splits)  # not read without a norm
    with on_device_of(dy):
        sums_of_tokens[(min(samples * splits * across, config.programs),)](
            dy, x, mean, rstd, of_splits, samples, splits, tokens_a_split, tokens, channels, dy.stride(0), dy.stride(1),
            x.stride(0), x.stride(1), NORMED=statistics is not None, NEED_SLOPE=need_slope, NEED_OFFSET=need_offset,
            BLOCK_T=block_t, BLOCK_C=block_c, **config.options,
        )  # fmt: skip
    totals = iter(of_splits[:, :, 0] if splits == 1 else of_splits.sum(2))
    return (next(totals) if need_slope else None), (next(totals) if need_offset else None)


def cases(chip: str) -> list[KernelCase]:
    """The compiled variants of the kernel for a chip, with a wide and the narrowest tile."""
    found = []
    switches = ((True, True, True), (True, True, False), (False, True, False), (False, False, True))
    for dtype in ("fp16", "bf16", "fp32"):
        for channels, (normed, slope, offset) in ((3072, switch) for switch in switches):
            found.append(_case(chip, dtype, channels, NORMED=normed, NEED_SLOPE=slope, NEED_OFFSET=offset))
    return [*found, _case(chip, "bf16", 16, NORMED=True, NEED_SLOPE=True, NEED_OFFSET=True)]


def _case(chip: str, dtype: str, channels: int, **switches: bool) -> KernelCase:
    block_t, block_c = tile_shape(min(channels, MOST_COLUMNS[chip]), SUMS[chip].tile)
    constants = {**switches, "BLOCK_T": block_t, "BLOCK_C": block_c}
    pointers = {"dy_ptr": f"*{dtype}", "x_ptr": f"*{dtype}"}
    pointers |= dict.fromkeys(("mean_ptr", "rstd_ptr", "sums_ptr"), "*fp32")
    arguments: list[str] = sums_of_tokens.arg_names
    signature = {name: pointers.get(name, "i32") for name in arguments if name not in constants}
    switched = "".join(f" {name.lower()}={int(value)}" for name, value in switches.items())
    return KernelCase(f"sums {dtype} {block_t}x{block_c}{switched}", sums_of_tokens, signature, constants)

"""Triton kernels of the gradients of scale, shift, weight, bias and gate, which are sums over tokens.

Dimensions: N samples, T tokens, C channels, S splits. A sample's tokens are divided among S programs, each of which
writes its own row; a second launch adds these up in order, so that no atomics are needed and the same sums come out
every time.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_aigc_kernels.launch import KernelCase, LaunchConfig, config_for, on_device_of, tile_shape
from lightning_aigc_kernels.modulated_norm.modulation import Modulation, Needs

SUMS = {"cuda": LaunchConfig(4096, 65_535, 8), "npu": LaunchConfig(2048, 960), "cpu": LaunchConfig(64, 3)}
GRADIENTS = {"cuda": LaunchConfig(128, 65_535, 4), "npu": LaunchConfig(256, 960), "cpu": LaunchConfig(16, 3)}
MOST_COLUMNS = {"cuda": 128, "npu": 256, "cpu": 16}
# Programs that fill a chip, fixed so that every card adds up in the same order.
WANTED_PROGRAMS = {"cuda": 512, "npu": 48, "cpu": 12}
MOST_SPLITS = 64


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


@triton.jit
def gradients_of_sums(
    sums_ptr,
    scale_ptr,
    weight_ptr,
    bias_ptr,
    dscale_ptr,
    dshift_ptr,
    dweight_ptr,
    dbias_ptr,
    samples,
    splits,
    channels,
    scale_stride,
    ONE_PLUS: tl.constexpr,
    SCALED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
    NEED_SLOPE: tl.constexpr,
    NEED_OFFSET: tl.constexpr,
    NEED_SCALE: tl.constexpr,
    NEED_SHIFT: tl.constexpr,
    NEED_WEIGHT: tl.constexpr,
    NEED_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The needed gradients from `sums_of_tokens`: of scale and shift [N, C], of weight and bias [C]."""
    for start in range(tl.program_id(0) * BLOCK, channels, tl.num_programs(0) * BLOCK):
        channel = start + tl.arange(0, BLOCK)
        inside = channel < channels
        dweight = tl.zeros([BLOCK], tl.float32)
        dbias = tl.zeros([BLOCK], tl.float32)
        for sample in range(samples):
            slope_sum = tl.zeros([BLOCK], tl.float32)
            offset_sum = tl.zeros([BLOCK], tl.float32)
            for split in range(splits):
                row = sums_ptr + (tl.cast(sample, tl.int64) * splits + split) * channels
                if NEED_SLOPE:
                    slope_sum += tl.load(row + channel, mask=inside, other=0.0)
                    row += tl.cast(samples, tl.int64) * splits * channels
                if NEED_OFFSET:
                    offset_sum += tl.load(row + channel, mask=inside, other=0.0)
            made = tl.cast(sample, tl.int64) * channels + channel
            if NEED_SCALE:
                dscale = slope_sum
                if WEIGHTED:
                    dscale = dscale * tl.load(weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
                if BIASED:
                    dscale += offset_sum * tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
                tl.store(dscale_ptr + made, dscale.to(dscale_ptr.dtype.element_ty), mask=inside)
            if NEED_SHIFT:
                tl.store(dshift_ptr + made, offset_sum.to(dshift_ptr.dtype.element_ty), mask=inside)
            if SCALED and (NEED_WEIGHT or NEED_BIAS):
                scale_row = scale_ptr + tl.cast(sample, tl.int64) * scale_stride
                factor = tl.load(scale_row + channel, mask=inside, other=0.0).to(tl.float32)
                if ONE_PLUS:
                    factor = 1.0 + factor
                slope_sum = slope_sum * factor
                offset_sum = offset_sum * factor
            dweight += slope_sum
            dbias += offset_sum
        if NEED_WEIGHT:
            tl.store(dweight_ptr + channel, dweight.to(dweight_ptr.dtype.element_ty), mask=inside)
        if NEED_BIAS:
            tl.store(dbias_ptr + channel, dbias.to(dbias_ptr.dtype.element_ty), mask=inside)


def gradients(
    dy: Tensor, x: Tensor, statistics: tuple[Tensor, Tensor] | None, modulation: Modulation, needs: Needs
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The needed gradients of scale, shift, weight and bias, each in its tensor's dtype, in two launches.

    Args: dy and x [N, T, C] and the modulation's tensors have contiguous channels; statistics are mean and reciprocal
        deviation [N, T], None without a norm.
    """
    made = [
        torch.empty(of.shape, dtype=of.dtype, device=of.device) if need and of is not None else None
        for of, need in zip(modulation.tensors, needs[1:], strict=True)
    ]
    if not any(needs[1:]):
        return None, None, None, None
    need_slope, need_offset = modulation.sums(needs)
    if dy.numel() == 0:
        dscale, dshift, dweight, dbias = (None if gradient is None else gradient.zero_() for gradient in made)
        return dscale, dshift, dweight, dbias
    of_splits = _sums_of_splits(dy, x, statistics, need_slope, need_offset)
    scale, _, weight, bias, *_ = modulation
    samples, splits, channels = of_splits.shape[1:]
    config = config_for(dy.device.type, GRADIENTS)
    with on_device_of(dy):
        gradients_of_sums[(min(triton.cdiv(channels, config.tile), config.programs),)](
            of_splits,
            *(of_splits if tensor is None else tensor for tensor in (scale, weight, bias)),  # not read where None
            *(of_splits if gradient is None else gradient for gradient in made),  # not written where None
            samples,
            splits,
            channels,
            0 if scale is None else scale.stride(0),
            ONE_PLUS=modulation.one_plus,
            SCALED=scale is not None,
            WEIGHTED=weight is not None,
            BIASED=bias is not None,
            NEED_SLOPE=need_slope,
            NEED_OFFSET=need_offset,
            NEED_SCALE=needs.scale,
            NEED_SHIFT=needs.shift,
            NEED_WEIGHT=needs.weight,
            NEED_BIAS=needs.bias,
            BLOCK=config.tile,
            **config.options,
        )
    dscale, dshift, dweight, dbias = made
    return dscale, dshift, dweight, dbias


def _sums_of_splits(
    dy: Tensor, x: Tensor, statistics: tuple[Tensor, Tensor] | None, need_slope: bool, need_offset: bool
) -> Tensor:
    """Run `sums_of_tokens` and return the sums of each split in float32."""
    samples, tokens, channels = dy.shape
    config = config_for(dy.device.type, SUMS)
    block_t, block_c = tile_shape(min(channels, MOST_COLUMNS[dy.device.type]), config.tile)
    across, steps = triton.cdiv(channels, block_c), triton.cdiv(tokens, block_t)
    splits = min(triton.cdiv(WANTED_PROGRAMS[dy.device.type], samples * across), steps, MOST_SPLITS)
    steps_a_split = triton.cdiv(steps, splits)
    splits = triton.cdiv(steps, steps_a_split)
    of_splits = torch.empty(need_slope + need_offset, samples, splits, channels, dtype=torch.float32, device=dy.device)
    mean, rstd = statistics or (of_splits, of_splits)  # not read without a norm
    with on_device_of(dy):
        sums_of_tokens[(min(samples * splits * across, config.programs),)](
            dy, x, mean, rstd, of_splits, samples, splits, steps_a_split * block_t, tokens, channels,
            dy.stride(0), dy.stride(1), x.stride(0), x.stride(1), NORMED=statistics is not None, NEED_SLOPE=need_slope,
            NEED_OFFSET=need_offset, BLOCK_T=block_t, BLOCK_C=block_c, **config.options,
        )  # fmt: skip
    return of_splits


def cases(chip: str) -> list[KernelCase]:
    """The compiled variants of the kernels for a chip, with a wide and the narrowest tile."""
    found = []
    switches = ((True, True, True), (True, True, False), (False, True, False), (False, False, True))
    for dtype in ("fp16", "bf16", "fp32"):
        for normed, slope, offset in switches:
            found.append(_case(chip, dtype, 3072, NORMED=normed, NEED_SLOPE=slope, NEED_OFFSET=offset))
        for trained in ("scale shift", "weight bias", "scale shift weight bias"):
            found.append(_gradients_case(chip, dtype, trained, gate=False))
        found.append(_gradients_case(chip, dtype, "scale weight", gate=True))
    return [*found, _case(chip, "bf16", 16, NORMED=True, NEED_SLOPE=True, NEED_OFFSET=True)]


def _gradients_case(chip: str, dtype: str, trained: str, gate: bool) -> KernelCase:
    """Case with a scale or gate and a trained weight, all tensors of one dtype."""
    names = ("scale", "shift", "weight", "bias")
    needs = {f"NEED_{name.upper()}": name in trained.split() for name in names}
    constants = {"ONE_PLUS": not gate, "SCALED": True, "WEIGHTED": needs["NEED_WEIGHT"], "BIASED": needs["NEED_BIAS"]}
    constants |= {"NEED_SLOPE": True, "NEED_OFFSET": needs["NEED_SHIFT"] or needs["NEED_BIAS"], **needs}
    arguments: list[str] = gradients_of_sums.arg_names
    kinds = {name: f"*{dtype}" for name in arguments if name.endswith("_ptr")} | {"sums_ptr": "*fp32"}
    signature = {name: kinds.get(name, "i32") for name in arguments if name not in constants and name != "BLOCK"}
    name = f"gradients {dtype} {'gate' if gate else 'scale'}: {trained}"
    return KernelCase(name, gradients_of_sums, signature, {**constants, "BLOCK": GRADIENTS[chip].tile})


def _case(chip: str, dtype: str, channels: int, **switches: bool) -> KernelCase:
    block_t, block_c = tile_shape(min(channels, MOST_COLUMNS[chip]), SUMS[chip].tile)
    constants = {**switches, "BLOCK_T": block_t, "BLOCK_C": block_c}
    pointers = {"dy_ptr": f"*{dtype}", "x_ptr": f"*{dtype}"}
    pointers |= dict.fromkeys(("mean_ptr", "rstd_ptr", "sums_ptr"), "*fp32")
    arguments: list[str] = sums_of_tokens.arg_names
    signature = {name: pointers.get(name, "i32") for name in arguments if name not in constants}
    switched = "".join(f" {name.lower()}={int(value)}" for name, value in switches.items())
    return KernelCase(f"sums {dtype} {block_t}x{block_c}{switched}", sums_of_tokens, signature, constants)

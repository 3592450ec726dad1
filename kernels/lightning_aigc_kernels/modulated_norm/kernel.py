"""Triton kernels of a norm with a sample's slope and offset, and a residual, for NVIDIA and Ascend.

Forward is one launch. Backward is one for dx; trained small vectors need two more, see `token_sums.py`.

Dimensions: N samples, T tokens, C channels. A program handles BLOCK_T tokens of one sample at a time, in tiles of
BLOCK_C channels, and reads a token's channels again for each of its passes: two forward, three backward. They come from
the cache after the first.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_aigc_kernels.dispatch import KERNEL_DTYPES
from lightning_aigc_kernels.launch import KernelCase, LaunchConfig, config_for, on_device_of, tile_shape
from lightning_aigc_kernels.modulated_norm import token_sums
from lightning_aigc_kernels.modulated_norm.modulation import Gradients, Modulation, Needs
from lightning_aigc_kernels.modulated_norm.tile import mean_and_rstd, offset_of, slope_of

FORWARD = {"cuda": LaunchConfig(4096, 65_535, 8), "npu": LaunchConfig(2048, 960), "cpu": LaunchConfig(64, 3)}
BACKWARD = {"cuda": LaunchConfig(4096, 65_535, 8), "npu": LaunchConfig(1024, 960), "cpu": LaunchConfig(64, 3)}


@triton.jit
def modulated_norm_forward(
    x_ptr,
    residual_ptr,
    scale_ptr,
    shift_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    samples,
    tokens,
    channels,
    x_sample,
    x_token,
    residual_sample,
    residual_token,
    scale_stride,
    shift_stride,
    eps,
    NORMED: tl.constexpr,
    LAYER: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    SCALED: tl.constexpr,
    SHIFTED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """y = norm(x) * slope + offset + residual, of a contiguous y; strides are those of samples and tokens."""
    blocks = tl.cdiv(tokens, BLOCK_T)
    token = tl.arange(0, BLOCK_T)
    for block in range(tl.program_id(0), samples * blocks, tl.num_programs(0)):
        sample = tl.cast(block // blocks, tl.int64)
        first = (block % blocks) * BLOCK_T
        in_sample = first + token < tokens
        x_start = x_ptr + sample * x_sample + tl.cast(first, tl.int64) * x_token
        residual_start = residual_ptr + sample * residual_sample + tl.cast(first, tl.int64) * residual_token
        y_start = y_ptr + (sample * tokens + first) * channels
        scale_row = scale_ptr + sample * scale_stride
        shift_row = shift_ptr + sample * shift_stride
        x_row = token * x_token
        if NORMED:
            mean, rstd = mean_and_rstd(x_start, x_row, in_sample, channels, eps, LAYER, BLOCK_T, BLOCK_C)
        for start in range(0, channels, BLOCK_C):
            channel = start + tl.arange(0, BLOCK_C)
            in_row = channel < channels
            inside = in_sample[:, None] & in_row[None, :]
            slope = slope_of(scale_row, weight_ptr, channel, in_row, ONE_PLUS, SCALED, WEIGHTED, BLOCK_C)
            y = tl.load(x_start + x_row[:, None] + channel[None, :], mask=inside, other=0.0).to(tl.float32)
            if NORMED:
                y = (y - mean[:, None]) * rstd[:, None]
            y = y * slope[None, :]
            if SHIFTED or BIASED:
                offset = offset_of(scale_row, shift_row, bias_ptr, channel, in_row, SCALED, SHIFTED, BIASED, BLOCK_C)
                y = y + offset[None, :]
            if RESIDUAL:
                offsets = (token * residual_token)[:, None] + channel[None, :]
                y = y + tl.load(residual_start + offsets, mask=inside, other=0.0).to(tl.float32)
            offsets = (token * channels)[:, None] + channel[None, :]
            tl.store(y_start + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def modulated_norm_backward(
    dy_ptr,
    x_ptr,
    scale_ptr,
    weight_ptr,
    dx_ptr,
    mean_ptr,
    rstd_ptr,
    samples,
    tokens,
    channels,
    dy_sample,
    dy_token,
    x_sample,
    x_token,
    scale_stride,
    eps,
    NORMED: tl.constexpr,
    LAYER: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    SCALED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    NEED_X: tl.constexpr,
    NEED_STATISTICS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A contiguous dx with NEED_X, and each token's mean and reciprocal deviation with NEED_STATISTICS."""
    blocks = tl.cdiv(tokens, BLOCK_T)
    token = tl.arange(0, BLOCK_T)
    for block in range(tl.program_id(0), samples * blocks, tl.num_programs(0)):
        sample = tl.cast(block // blocks, tl.int64)
        first = (block % blocks) * BLOCK_T
        in_sample = first + token < tokens
        dy_start = dy_ptr + sample * dy_sample + tl.cast(first, tl.int64) * dy_token
        x_start = x_ptr + sample * x_sample + tl.cast(first, tl.int64) * x_token
        dx_start = dx_ptr + (sample * tokens + first) * channels
        scale_row = scale_ptr + sample * scale_stride
        dy_row = token * dy_token
        x_row = token * x_token
        if NORMED:
            mean, rstd = mean_and_rstd(x_start, x_row, in_sample, channels, eps, LAYER, BLOCK_T, BLOCK_C)
            if NEED_STATISTICS:
                tl.store(mean_ptr + sample * tokens + first + token, mean, mask=in_sample)
                tl.store(rstd_ptr + sample * tokens + first + token, rstd, mask=in_sample)
        if NEED_X:
            if NORMED:
                mean_dxhat = tl.zeros([BLOCK_T], tl.float32)
                mean_dxhat_xhat = tl.zeros([BLOCK_T], tl.float32)
                for start in range(0, channels, BLOCK_C):
                    channel = start + tl.arange(0, BLOCK_C)
                    in_row = channel < channels
                    inside = in_sample[:, None] & in_row[None, :]
                    slope = slope_of(scale_row, weight_ptr, channel, in_row, ONE_PLUS, SCALED, WEIGHTED, BLOCK_C)
                    dy = tl.load(dy_start + dy_row[:, None] + channel[None, :], mask=inside, other=0.0).to(tl.float32)
                    x = tl.load(x_start + x_row[:, None] + channel[None, :], mask=inside, other=0.0).to(tl.float32)
                    dxhat = dy * slope[None, :]
                    if LAYER:
                        mean_dxhat += tl.sum(dxhat, 1) / channels
                    mean_dxhat_xhat += tl.sum(dxhat * ((x - mean[:, None]) * rstd[:, None]), 1) / channels
            for start in range(0, channels, BLOCK_C):
                channel = start + tl.arange(0, BLOCK_C)
                in_row = channel < channels
                inside = in_sample[:, None] & in_row[None, :]
                slope = slope_of(scale_row, weight_ptr, channel, in_row, ONE_PLUS, SCALED, WEIGHTED, BLOCK_C)
                dx = tl.load(dy_start + dy_row[:, None] + channel[None, :], mask=inside, other=0.0).to(tl.float32)
                dx = dx * slope[None, :]
                if NORMED:
                    x = tl.load(x_start + x_row[:, None] + channel[None, :], mask=inside, other=0.0).to(tl.float32)
                    xhat = (x - mean[:, None]) * rstd[:, None]
                    if LAYER:
                        dx = dx - mean_dxhat[:, None]
                    dx = rstd[:, None] * (dx - xhat * mean_dxhat_xhat[:, None])
                offsets = (token * channels)[:, None] + channel[None, :]
                tl.store(dx_start + offsets, dx.to(dx_ptr.dtype.element_ty), mask=inside)


def forward(x: Tensor, modulation: Modulation, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
    """norm(x) * slope + offset of [N, T, C], and the residual where there is one, computed in float32, in `dtype`.

    Raises: ValueError for a dtype that the kernels do not support.
    """
    _check(x=x, residual=residual, **modulation._asdict())
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if y.numel() == 0:
        return y
    x, given = _rows(x), residual
    residual = x if given is None else _rows(given)
    scale, shift, weight, bias, norm, eps, one_plus = modulation
    scale, shift = None if scale is None else _rows(scale), None if shift is None else _rows(shift)
    config = config_for(x.device.type, FORWARD)
    grid, block_t, block_c = _grid(x, config)
    absent = x  # for pointers that are not read
    with on_device_of(x):
        modulated_norm_forward[grid](
            x,
            residual,
            absent if scale is None else scale,
            absent if shift is None else shift,
            absent if weight is None else weight.contiguous(),
            absent if bias is None else bias.contiguous(),
            y,
            *x.shape,
            *x.stride()[:2],
            *residual.stride()[:2],
            0 if scale is None else scale.stride(0),
            0 if shift is None else shift.stride(0),
            eps,
            NORMED=norm != "none",
            LAYER=norm == "layer",
            ONE_PLUS=one_plus,
            SCALED=scale is not None,
            SHIFTED=shift is not None,
            WEIGHTED=weight is not None,
            BIASED=bias is not None,
            RESIDUAL=given is not None,
            BLOCK_T=block_t,
            BLOCK_C=block_c,
            **config.options,
        )
    return y


def backward(dy: Tensor, x: Tensor | None, modulation: Modulation, dtype: torch.dtype, needs: Needs) -> Gradients:
    """The needed gradients: dx in `dtype`, each other one in its tensor's dtype.

    Args: x may be None where no gradient reads it.
    Raises: ValueError as `forward`.
    """
    _check(dy=dy, x=x, **modulation._asdict())
    dy = _rows(dy)
    x = dy if x is None else _rows(x)
    scale, _, weight, bias, *_ = modulation
    modulation = modulation._replace(
        scale=None if scale is None else _rows(scale),
        weight=None if weight is None else weight.contiguous(),
        bias=None if bias is None else bias.contiguous(),
    )
    dx = torch.empty(dy.shape, dtype=dtype, device=dy.device) if needs.x else None
    statistics = None
    if modulation.norm != "none" and modulation.sums(needs)[0]:
        mean_NT = torch.empty(dy.shape[:2], dtype=torch.float32, device=dy.device)
        statistics = mean_NT, torch.empty_like(mean_NT)
    if (dx is not None or statistics is not None) and dy.numel():
        _launch_backward(dy, x, modulation, dx, statistics)
    return dx, *token_sums.gradients(dy, x, statistics, modulation, needs)


def _launch_backward(
    dy: Tensor, x: Tensor, modulation: Modulation, dx: Tensor | None, statistics: tuple[Tensor, Tensor] | None
) -> None:
    scale, _, weight, _, norm, eps, one_plus = modulation
    config = config_for(dy.device.type, BACKWARD)
    grid, block_t, block_c = _grid(dy, config)
    with on_device_of(dy):
        modulated_norm_backward[grid](
            dy,
            x,
            x if scale is None else scale,  # not read, as the next ones
            x if weight is None else weight,
            dy if dx is None else dx,
            *(statistics or (dy, dy)),
            *dy.shape,
            *dy.stride()[:2],
            *x.stride()[:2],
            0 if scale is None else scale.stride(0),
            eps,
            NORMED=norm != "none",
            LAYER=norm == "layer",
            ONE_PLUS=one_plus,
            SCALED=scale is not None,
            WEIGHTED=weight is not None,
            NEED_X=dx is not None,
            NEED_STATISTICS=statistics is not None,
            BLOCK_T=block_t,
            BLOCK_C=block_c,
            **config.options,
        )


def _check(**given: object) -> None:
    """Raise ValueError for a tensor in a dtype that the kernels do not support."""
    for name, tensor in given.items():
        if isinstance(tensor, Tensor) and tensor.dtype not in KERNEL_DTYPES:
            raise ValueError(f"{name} must be float32, float16 or bfloat16, got {tensor.dtype}")


def _rows(tensor: Tensor) -> Tensor:
    """The tensor with contiguous channels; a slice of tokens or of a wider tensor's channels is taken as it is."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _grid(x_NTC: Tensor, config: LaunchConfig) -> tuple[tuple[int], int, int]:
    """The grid, and the tile's tokens and channels."""
    samples, tokens, channels = x_NTC.shape
    block_t, block_c = tile_shape(channels, config.tile)
    return (min(samples * triton.cdiv(tokens, block_t), config.programs),), block_t, block_c


VARIANTS = {
    "layer scale shift": ("layer", "scale", "shift"),  # AdaLayerNormZero
    "layer all": ("layer", "scale", "shift", "weight", "bias"),
    "rms scale weight": ("rms", "scale", "weight"),  # Z-Image's blocks
    "gate": ("none", "gate", "residual"),
    "rms gate weight": ("rms", "gate", "weight", "residual"),  # Z-Image's residual
}


def _case(chip: str, function: object, dtype: str, channels: int, variant: str, **needs: bool) -> KernelCase:
    norm, *tensors = VARIANTS[variant]
    is_forward = function is modulated_norm_forward
    block_t, block_c = tile_shape(channels, (FORWARD if is_forward else BACKWARD)[chip].tile)
    constants = {
        "NORMED": norm != "none",
        "LAYER": norm == "layer",
        "ONE_PLUS": "gate" not in tensors,
        "SCALED": "scale" in tensors or "gate" in tensors,
        "SHIFTED": "shift" in tensors,
        "WEIGHTED": "weight" in tensors,
        "BIASED": "bias" in tensors,
        "RESIDUAL": "residual" in tensors,
        "BLOCK_T": block_t,
        "BLOCK_C": block_c,
        **needs,
    }
    arguments: list[str] = function.arg_names  # type: ignore[attr-defined]
    constants = {name: value for name, value in constants.items() if name in arguments}
    pointers = {name: f"*{dtype}" for name in arguments if name.endswith("_ptr")}
    # Without NEED_STATISTICS these point to dy, and are not written.
    pointers |= dict.fromkeys(("mean_ptr", "rstd_ptr"), "*fp32" if needs.get("NEED_STATISTICS") else f"*{dtype}")
    kinds = pointers | {"eps": "fp32"}
    signature = {name: kinds.get(name, "i32") for name in arguments if name not in constants}
    direction = "forward" if is_forward else "backward"
    switched = "".join(f" {name.lower()}={int(value)}" for name, value in needs.items())
    return KernelCase(f"{direction} {dtype} {block_t}x{block_c} {variant}{switched}", function, signature, constants)


def cases(chip: str) -> list[KernelCase]:
    """The compiled variants of the kernels for a chip, with the tiles for wide, middle and narrow tokens.

    Dtypes and switches share one source, so not every combination is listed.
    """
    found = []
    for dtype in ("fp16", "bf16", "fp32"):
        for variant in VARIANTS:
            found.append(_case(chip, modulated_norm_forward, dtype, 6144, variant))
            trained = {"NEED_X": True, "NEED_STATISTICS": VARIANTS[variant][0] != "none"}
            found.append(_case(chip, modulated_norm_backward, dtype, 6144, variant, **trained))
    for channels in (640, 64, 1):
        found.append(_case(chip, modulated_norm_forward, "bf16", channels, "layer scale shift"))
        frozen = {"NEED_X": True, "NEED_STATISTICS": False}
        found.append(_case(chip, modulated_norm_backward, "bf16", channels, "layer scale shift", **frozen))
    only_statistics = {"NEED_X": False, "NEED_STATISTICS": True}
    found.append(_case(chip, modulated_norm_backward, "bf16", 6144, "rms scale weight", **only_statistics))
    return found + token_sums.cases(chip)


KERNELS: list[KernelCase] = cases("npu")

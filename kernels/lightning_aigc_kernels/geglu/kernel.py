"""Triton kernels of GEGLU and SwiGLU on a projection of values and gates, for NVIDIA and Ascend.

Dimensions: R rows (tokens), D features. A row of the projection has D values, then D gates, as in diffusers' GEGLU and
SwiGLU: product = value * act(gate).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_aigc_kernels.launch import KernelCase, LaunchConfig, config_for, on_device_of, tile_shape

Activation = Literal["gelu", "silu"]
FORWARD = {"cuda": LaunchConfig(4096, 65_535, 8), "npu": LaunchConfig(4096, 960), "cpu": LaunchConfig(64, 3)}
BACKWARD = {"cuda": LaunchConfig(2048, 65_535, 8), "npu": LaunchConfig(2048, 960), "cpu": LaunchConfig(64, 3)}


@triton.jit
def activated(gate, GELU: tl.constexpr):
    """act(gate) and its derivative in float32, with exact GELU."""
    if GELU:
        share = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        slope = share + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
    else:
        share = tl.sigmoid(gate)
        slope = share * (1.0 + gate * (1.0 - share))
    return gate * share, slope


@triton.jit
def tile_offsets(tile, across, rows, features, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    """A tile's start in [R, D], its offsets from there in [R, D] and in [R, 2 D], and its mask.

    The start is 64-bit, so that the offsets per element can be 32-bit.
    """
    first_row = (tile // across) * BLOCK_R
    row = tl.arange(0, BLOCK_R)
    feature = (tile % across) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (first_row + row < rows)[:, None] & (feature < features)[None, :]
    offsets = row[:, None] * features + feature[None, :]
    halves = row[:, None] * (2 * features) + feature[None, :]
    return tl.cast(first_row, tl.int64) * features, offsets, halves, inside


@triton.jit
def geglu_forward(
    projected_ptr, product_ptr, rows, features, GELU: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr
):
    """product = value * act(gate), tile by tile."""
    across = tl.cdiv(features, BLOCK_D)
    for tile in range(tl.program_id(0), tl.cdiv(rows, BLOCK_R) * across, tl.num_programs(0)):
        start, offsets, halves, inside = tile_offsets(tile, across, rows, features, BLOCK_R, BLOCK_D)
        value = tl.load(projected_ptr + start * 2 + halves, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(projected_ptr + start * 2 + features + halves, mask=inside, other=0.0).to(tl.float32)
        gated, _ = activated(gate, GELU)
        tl.store(product_ptr + start + offsets, (value * gated).to(product_ptr.dtype.element_ty), mask=inside)


@triton.jit
def geglu_backward(
    dproduct_ptr,
    projected_ptr,
    dprojected_ptr,
    product_ptr,
    rows,
    features,
    GELU: tl.constexpr,
    NEED_PRODUCT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Gradients of values and gates, and with NEED_PRODUCT the recomputed product for the next layer's backward."""
    across = tl.cdiv(features, BLOCK_D)
    for tile in range(tl.program_id(0), tl.cdiv(rows, BLOCK_R) * across, tl.num_programs(0)):
        start, offsets, halves, inside = tile_offsets(tile, across, rows, features, BLOCK_R, BLOCK_D)
        value = tl.load(projected_ptr + start * 2 + halves, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(projected_ptr + start * 2 + features + halves, mask=inside, other=0.0).to(tl.float32)
        dproduct = tl.load(dproduct_ptr + start + offsets, mask=inside, other=0.0).to(tl.float32)
        gated, slope = activated(gate, GELU)
        dvalue = (dproduct * gated).to(dprojected_ptr.dtype.element_ty)
        dgate = (dproduct * value * slope).to(dprojected_ptr.dtype.element_ty)
        tl.store(dprojected_ptr + start * 2 + halves, dvalue, mask=inside)
        tl.store(dprojected_ptr + start * 2 + features + halves, dgate, mask=inside)
        if NEED_PRODUCT:
            tl.store(product_ptr + start + offsets, (value * gated).to(product_ptr.dtype.element_ty), mask=inside)


def _sizes(projected: Tensor, activation: str) -> tuple[int, int]:
    """Return R and D.

    Raises: ValueError for a wrong shape, a strided tensor, or an unknown activation.
    """
    if projected.dim() != 2 or projected.shape[1] % 2 or not projected.is_contiguous():
        got = f"{tuple(projected.shape)}, strides {projected.stride()}"
        raise ValueError(f"projected must be contiguous [R, 2 D], got {got}")
    if activation not in ("gelu", "silu"):
        raise ValueError(f"activation must be 'gelu' or 'silu', got {activation!r}")
    return projected.shape[0], projected.shape[1] // 2


def _grid(rows: int, features: int, config: LaunchConfig) -> tuple[tuple[int], int, int]:
    """The grid, and the tile's rows and columns."""
    block_r, block_d = tile_shape(features, config.tile)
    return (min(triton.cdiv(rows, block_r) * triton.cdiv(features, block_d), config.programs),), block_r, block_d


def forward(projected: Tensor, activation: Activation) -> Tensor:
    """value * act(gate) of a contiguous [R, 2 D] projection, computed in float32, in the projection's dtype.

    Raises: ValueError for a wrong shape, a strided tensor, or an unknown activation.
    """
    rows, features = _sizes(projected, activation)
    product = projected.new_empty(rows, features)
    if product.numel() == 0:
        return product
    config = config_for(projected.device.type, FORWARD)
    grid, block_r, block_d = _grid(rows, features, config)
    with on_device_of(projected):
        geglu_forward[grid](
            projected,
            product,
            rows,
            features,
            GELU=activation == "gelu",
            BLOCK_R=block_r,
            BLOCK_D=block_d,
            **config.options,
        )
    return product


def backward(
    dproduct: Tensor, projected: Tensor, activation: Activation, need_product: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradient of the projection, and with `need_product` the recomputed product, in one launch.

    Raises: ValueError as `forward`, or if dproduct is not a contiguous [R, D].
    """
    rows, features = _sizes(projected, activation)
    if dproduct.shape != (rows, features) or not dproduct.is_contiguous():
        got = f"{tuple(dproduct.shape)}, strides {dproduct.stride()}"
        raise ValueError(f"dproduct must be contiguous {(rows, features)}, got {got}")
    dprojected = torch.empty_like(projected)
    product = projected.new_empty(rows, features) if need_product else None
    if dproduct.numel() == 0:
        return dprojected, product
    config = config_for(projected.device.type, BACKWARD)
    grid, block_r, block_d = _grid(rows, features, config)
    with on_device_of(projected):
        geglu_backward[grid](
            dproduct,
            projected,
            dprojected,
            dprojected if product is None else product,  # not written without need_product
            rows,
            features,
            GELU=activation == "gelu",
            NEED_PRODUCT=need_product,
            BLOCK_R=block_r,
            BLOCK_D=block_d,
            **config.options,
        )
    return dprojected, product


def _case(chip: str, direction: str, dtype: str, features: int, **switches: bool) -> KernelCase:
    backward = direction == "backward"
    function = geglu_backward if backward else geglu_forward
    block_r, block_d = tile_shape(features, (BACKWARD if backward else FORWARD)[chip].tile)
    constants = {"GELU": True, **switches, "BLOCK_R": block_r, "BLOCK_D": block_d}
    types = {name: f"*{dtype}" if name.endswith("_ptr") else "i32" for name in function.arg_names}
    signature = {name: kind for name, kind in types.items() if name not in constants}
    switched = "".join(f" {name.lower()}={int(value)}" for name, value in switches.items())
    return KernelCase(f"{direction} {dtype} {block_r}x{block_d}{switched}", function, signature, constants)


def cases(chip: str) -> list[KernelCase]:
    """The compiled variants of the kernels for a chip, with the widest, a middle and the narrowest tile."""
    dtypes = ("fp16", "bf16", "fp32")
    forwards = ((5120, True), (5120, False), (320, True), (1, True))
    backwards = ((5120, True, True), (5120, False, True), (320, True, False), (1, True, True))
    return [
        *(_case(chip, "forward", dtype, d, GELU=gelu) for dtype in dtypes for d, gelu in forwards),
        *(
            _case(chip, "backward", dtype, d, GELU=gelu, NEED_PRODUCT=product)
            for dtype in dtypes
            for d, gelu, product in backwards
        ),
    ]


KERNELS: list[KernelCase] = cases("npu")

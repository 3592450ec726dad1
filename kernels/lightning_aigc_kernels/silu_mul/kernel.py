"""Triton kernels of silu(gate) * up for two tensors, for NVIDIA and Ascend.

Dimensions: A outer rows, B rows, D features. Each tensor brings its own strides of A and B, so halves of a wider
projection are read where they lie; what is written is contiguous.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_aigc_kernels.launch import KernelCase, LaunchConfig, config_for, on_device_of, tile_shape

FORWARD = {"cuda": LaunchConfig(4096, 65_535, 8), "npu": LaunchConfig(4096, 960), "cpu": LaunchConfig(64, 3)}
BACKWARD = {"cuda": LaunchConfig(2048, 65_535, 8), "npu": LaunchConfig(2048, 960), "cpu": LaunchConfig(64, 3)}


@triton.jit
def load_tile(pointer, outer, first, outer_stride, row_stride, row, feature, inside):
    """A tile in float32, whose start is 64-bit, so that the offsets per element can be 32-bit."""
    start = pointer + tl.cast(outer, tl.int64) * outer_stride + tl.cast(first, tl.int64) * row_stride
    return tl.load(start + (row * row_stride)[:, None] + feature[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def silu_mul_forward(
    gate_ptr,
    up_ptr,
    product_ptr,
    outers,
    rows,
    features,
    gate_outer,
    gate_row,
    up_outer,
    up_row,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """product = silu(gate) * up, tile by tile."""
    across = tl.cdiv(features, BLOCK_D)
    down = tl.cdiv(rows, BLOCK_R)
    row = tl.arange(0, BLOCK_R)
    for tile in range(tl.program_id(0), outers * down * across, tl.num_programs(0)):
        outer = tile // across // down
        first = (tile // across % down) * BLOCK_R
        feature = (tile % across) * BLOCK_D + tl.arange(0, BLOCK_D)
        inside = (first + row < rows)[:, None] & (feature < features)[None, :]
        gate = load_tile(gate_ptr, outer, first, gate_outer, gate_row, row, feature, inside)
        up = load_tile(up_ptr, outer, first, up_outer, up_row, row, feature, inside)
        start = product_ptr + (tl.cast(outer, tl.int64) * rows + first) * features
        product = (gate * tl.sigmoid(gate) * up).to(product_ptr.dtype.element_ty)
        tl.store(start + (row * features)[:, None] + feature[None, :], product, mask=inside)


@triton.jit
def silu_mul_backward(
    dproduct_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    outers,
    rows,
    features,
    dproduct_outer,
    dproduct_row,
    gate_outer,
    gate_row,
    up_outer,
    up_row,
    NEED_GATE: tl.constexpr,
    NEED_UP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The needed gradients of gate and up."""
    across = tl.cdiv(features, BLOCK_D)
    down = tl.cdiv(rows, BLOCK_R)
    row = tl.arange(0, BLOCK_R)
    for tile in range(tl.program_id(0), outers * down * across, tl.num_programs(0)):
        outer = tile // across // down
        first = (tile // across % down) * BLOCK_R
        feature = (tile % across) * BLOCK_D + tl.arange(0, BLOCK_D)
        inside = (first + row < rows)[:, None] & (feature < features)[None, :]
        dproduct = load_tile(dproduct_ptr, outer, first, dproduct_outer, dproduct_row, row, feature, inside)
        gate = load_tile(gate_ptr, outer, first, gate_outer, gate_row, row, feature, inside)
        share = tl.sigmoid(gate)
        start = (tl.cast(outer, tl.int64) * rows + first) * features
        offsets = (row * features)[:, None] + feature[None, :]
        if NEED_GATE:
            up = load_tile(up_ptr, outer, first, up_outer, up_row, row, feature, inside)
            dgate = dproduct * up * (share * (1.0 + gate * (1.0 - share)))
            tl.store(dgate_ptr + start + offsets, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
        if NEED_UP:
            dup = (dproduct * (gate * share)).to(dup_ptr.dtype.element_ty)
            tl.store(dup_ptr + start + offsets, dup, mask=inside)


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up of two tensors of one shape, computed in float32, contiguous in the gate's dtype."""
    product = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if product.numel() == 0:
        return product
    gate, up = _outer_rows(gate, up)
    config = config_for(gate.device.type, FORWARD)
    grid, block_r, block_d = _grid(gate, config)
    with on_device_of(gate):
        silu_mul_forward[grid](
            gate, up, product, *gate.shape, *gate.stride()[:2], *up.stride()[:2], BLOCK_R=block_r, BLOCK_D=block_d,
            **config.options,
        )  # fmt: skip
    return product


def backward(
    dproduct: Tensor, gate: Tensor, up: Tensor | None, need_gate: bool, need_up: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The needed gradients of gate and up, contiguous; `up` may be None if the gate's is not needed."""
    dgate, dup = (
        torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) if need else None for need in (need_gate, need_up)
    )
    if gate.numel() == 0:
        return dgate, dup
    dproduct, gate, up = _outer_rows(dproduct, gate, gate if up is None else up)
    config = config_for(gate.device.type, BACKWARD)
    grid, block_r, block_d = _grid(gate, config)
    with on_device_of(gate):
        silu_mul_backward[grid](
            dproduct,
            gate,
            up,
            gate if dgate is None else dgate,  # not written, as the next
            gate if dup is None else dup,
            *gate.shape,
            *dproduct.stride()[:2],
            *gate.stride()[:2],
            *up.stride()[:2],
            NEED_GATE=need_gate,
            NEED_UP=need_up,
            BLOCK_R=block_r,
            BLOCK_D=block_d,
            **config.options,
        )
    return dgate, dup


def _outer_rows(*tensors: Tensor) -> list[Tensor]:
    """View tensors of one shape as [A, B, D] with contiguous rows, A = 1 if each one's rows are evenly spaced.

    Copies only where a row is strided, or more than two dimensions before the last are not evenly spaced.
    """
    features = tensors[0].shape[-1]
    rows = [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors]
    shape = 1, math.prod(tensors[0].shape[:-1]), features
    try:
        return [tensor.view(shape) for tensor in rows]
    except RuntimeError:  # some rows are not evenly spaced
        return [tensor.reshape(-1, *tensor.shape[-2:]) for tensor in rows]


def _grid(rows_ABD: Tensor, config: LaunchConfig) -> tuple[tuple[int], int, int]:
    """The grid, and the tile's rows and columns."""
    outers, rows, features = rows_ABD.shape
    block_r, block_d = tile_shape(features, config.tile)
    tiles = outers * triton.cdiv(rows, block_r) * triton.cdiv(features, block_d)
    return (min(tiles, config.programs),), block_r, block_d


def _case(chip: str, function: object, dtype: str, features: int, **switches: bool) -> KernelCase:
    is_forward = function is silu_mul_forward
    block_r, block_d = tile_shape(features, (FORWARD if is_forward else BACKWARD)[chip].tile)
    constants = {**switches, "BLOCK_R": block_r, "BLOCK_D": block_d}
    arguments: list[str] = function.arg_names  # type: ignore[attr-defined]
    types = {name: f"*{dtype}" if name.endswith("_ptr") else "i32" for name in arguments}
    signature = {name: kind for name, kind in types.items() if name not in constants}
    switched = "".join(f" {name.lower()}={int(value)}" for name, value in switches.items())
    direction = "forward" if is_forward else "backward"
    return KernelCase(f"{direction} {dtype} {block_r}x{block_d}{switched}", function, signature, constants)


def cases(chip: str) -> list[KernelCase]:
    """The compiled variants of the kernels for a chip, with the widest, a middle and the narrowest tile."""
    found = []
    for dtype in ("fp16", "bf16", "fp32"):
        for features in (10_240, 320, 1):
            found.append(_case(chip, silu_mul_forward, dtype, features))
            found.append(_case(chip, silu_mul_backward, dtype, features, NEED_GATE=True, NEED_UP=True))
    found.append(_case(chip, silu_mul_backward, "bf16", 10_240, NEED_GATE=True, NEED_UP=False))
    return [*found, _case(chip, silu_mul_backward, "bf16", 10_240, NEED_GATE=False, NEED_UP=True)]


KERNELS: list[KernelCase] = cases("npu")

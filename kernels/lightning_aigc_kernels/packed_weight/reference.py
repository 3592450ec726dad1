"""Pack a weight in blocks of 64 and unpack it, in plain torch, the reference of the kernel.

A block is 64 neighbours of the flattened weight, the last one filled up with zeros, with a float32 scale. `int8` has a
signed byte per number and value = byte * scale. `nf4` has half a byte, an index into CODES, and value = code * scale;
a byte holds an even place in its high half and the next place in its low half, as in bitsandbytes. `fp8` has a byte per
number, float8_e4m3fn, and the scale of least error, with which weights that were float8 keep their values, with a scale
of their own too. The product is computed in float32 and rounded once to the dtype asked for, on every device.

Dimensions: B blocks, S bytes or numbers of a block.
Source: Dettmers et al., QLoRA, arXiv:2305.14314, section 3 and appendix E.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

Format = Literal["int8", "nf4", "fp8"]
BLOCK = 64
BYTES_OF_A_BLOCK: dict[Format, int] = {"int8": 64, "nf4": 32, "fp8": 64}
FLOAT8 = torch.float8_e4m3fn
TINY = torch.finfo(torch.float32).tiny
LARGEST_CODES = (448.0, 416.0, 384.0, 352.0, 320.0, 288.0, 256.0, 240.0)
"""The eight largest numbers of float8_e4m3fn, one of each mantissa."""
CODES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""NF4's numbers: quantiles of a normal distribution, scaled to -1..1, with an exact zero."""
BLOCKS_AT_ONCE = 2048
"""Blocks converted at a time: half a MiB of float32, which stays in a core's cache and out of the peak memory."""


def packed_bytes(numel: int, kind: Format) -> int:
    """Bytes that a weight of `numel` numbers takes when packed, scales included."""
    blocks = -(-numel // BLOCK)
    return blocks * (BYTES_OF_A_BLOCK[kind] + 4)


def pack(weight: Tensor, kind: Format) -> tuple[Tensor, Tensor]:
    """Pack a weight of any shape; returns the bytes [B, S], int8 or uint8, and the scales, float32 [B].

    Raises: ValueError for a weight with NaN or infinity.
    """
    flat = weight.detach().reshape(-1)
    blocks = -(-flat.numel() // BLOCK)
    packed = flat.new_empty((blocks, BYTES_OF_A_BLOCK[kind]), dtype=torch.int8 if kind == "int8" else torch.uint8)
    scales = flat.new_empty(blocks, dtype=torch.float32)
    for some in _slices(blocks):
        part = flat[some.start * BLOCK : some.stop * BLOCK].float()
        missing = -part.numel() % BLOCK
        part = torch.nn.functional.pad(part, (0, missing)).view(-1, BLOCK) if missing else part.view(-1, BLOCK)
        largest = part.abs().amax(1)
        if not bool(largest.isfinite().all()):
            raise ValueError("the weight holds NaN or infinity")
        {"int8": _pack_int8, "nf4": _pack_nf4, "fp8": _pack_fp8}[kind](part, largest, packed[some], scales[some])
    return packed, scales


def unpack(packed: Tensor, scales: Tensor, kind: Format, dtype: torch.dtype) -> Tensor:
    """The numbers of all blocks, flat, in `dtype`."""
    flat = packed.new_empty(len(packed) * BLOCK, dtype=dtype)
    values = flat.view(-1, BLOCK)
    table = _pairs_of(packed.device) if kind == "nf4" else None
    for some in _slices(len(packed)):
        if kind == "fp8":
            part = _from_float8(packed[some])
        elif table is None:
            part = packed[some].to(torch.float32)
        else:
            # One look-up of eight bytes brings both numbers of a packed byte.
            part = table.index_select(0, packed[some].reshape(-1).to(torch.int32)).view(torch.float32).view(-1, BLOCK)
        torch.mul(part, scales[some, None], out=part)
        values[some].copy_(part)
    return flat


def _slices(blocks: int) -> Iterator[slice]:
    for start in range(0, blocks, BLOCKS_AT_ONCE):
        yield slice(start, min(start + BLOCKS_AT_ONCE, blocks))


def _pack_int8(part: Tensor, largest: Tensor, packed: Tensor, scales: Tensor) -> None:
    torch.div(largest, 127, out=scales)
    # A block of zeros has the scale zero; a block so small that its scale underflows becomes zero too.
    divisor = scales.clamp(min=torch.finfo(torch.float32).tiny)
    packed.copy_((part / divisor[:, None]).round_().clamp_(-127, 127))


def _pack_fp8(part: Tensor, largest: Tensor, packed: Tensor, scales: Tensor) -> None:
    """By a power of two where that changes no number, as in float8 files without scales; else by the best scale.

    A block's largest number takes each of the eight mantissas in turn; the scale is that of least squares. One of the
    eight has the numbers of a file with scales, whose products were rounded to bfloat16 since.
    """
    _, exponent = torch.frexp(largest / LARGEST_CODES[0])  # the least power of two that is not below
    exponent = exponent - (largest / LARGEST_CODES[0] == torch.ldexp(torch.full_like(largest, 0.5), exponent)).int()
    scales.copy_(torch.ldexp(torch.ones_like(largest), exponent.clamp(min=-100)))
    packed.copy_((part / scales[:, None]).to(FLOAT8).view(torch.uint8))
    if torch.equal(_from_float8(packed) * scales[:, None], part):
        return
    kept = torch.zeros_like(largest)
    code = torch.full_like(largest, LARGEST_CODES[0])
    for number in LARGEST_CODES:
        scaled = part * (number / largest.clamp(min=TINY))[:, None]
        shifted = scaled * (2**20 + 1)
        values = shifted - (shifted - scaled)  # float8's three bits behind the point
        explained, _ = _explained(values, part)
        code = torch.where(explained > kept, number, code)
        kept = torch.maximum(kept, explained)
    packed.copy_((part * (code / largest.clamp(min=TINY))[:, None]).to(FLOAT8).view(torch.uint8))
    scales.copy_(_explained(_from_float8(packed), part)[1])


def _explained(values: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of squares of each block that multiples of `values` explain, and the factor of the best multiple."""
    product, squares = torch.linalg.vecdot(values, part), torch.linalg.vecdot(values, values).clamp(min=TINY)
    return product.square() / squares, product / squares


def _from_float8(codes: Tensor) -> Tensor:
    """The numbers of float8_e4m3fn bytes in float32; on a CPU by float16's bits, ten times as fast as torch."""
    if codes.device.type != "cpu":
        return codes.view(FLOAT8).to(torch.float32)
    bits = codes.view(torch.int8).to(torch.int16) << 7  # the sign, twice, before exponent and mantissa
    return (bits & ~0x4000).view(torch.float16).to(torch.float32) * 2**8


def _pack_nf4(part: Tensor, largest: Tensor, packed: Tensor, scales: Tensor) -> None:
    scales.copy_(largest)
    scaled = part / scales.clamp(min=TINY)[:, None]
    # The nearest code is the number of limits below: a bin of -1..1 tells it but for one comparison. Five times as fast
    # as bucketize, with the same result.
    first, limits = _bins_of(part.device)
    below = first.index_select(0, (scaled + 1).mul_(BINS / 2).to(torch.int32).view(-1))
    below += scaled.view(-1) > limits.index_select(0, below)
    index = below.to(torch.uint8).view(part.shape)
    torch.bitwise_or(index[:, ::2] << 4, index[:, 1::2], out=packed)


BINS = 4096
"""Bins of -1..1 to look up a code in: far narrower than the distance of two limits."""


@functools.cache
def _bins_of(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the number of limits between codes below each bin, int32, and the limits, the last one infinite."""
    cpu = torch.device("cpu")  # also where new tensors go to a device, of which some compute in no float64
    codes = torch.tensor(CODES, dtype=torch.float64, device=cpu)
    limits = (codes[:-1] + codes[1:]) / 2
    edges = torch.arange(BINS + 2, dtype=torch.float64, device=cpu) / (BINS / 2) - 1
    first = torch.bucketize(edges - 2 / BINS, limits, out_int32=True)
    return first.to(device), torch.cat((limits.float(), torch.tensor([torch.inf], device=cpu))).to(device)


@functools.cache
def _pairs_of(device: torch.device) -> Tensor:
    """The two float32 numbers of each byte, high half first, as one int64 of their bits, [256]."""
    codes = torch.tensor(CODES, dtype=torch.float32, device=device)
    pairs = torch.stack((codes.repeat_interleave(16), codes.repeat(16)), dim=1)
    return pairs.view(torch.int64).view(256)

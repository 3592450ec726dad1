"""Values that quantization could get wrong, for all implementations of it to agree on to the bit."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_aigc_kernels.quantize_blocks.layout import BLOCK, GROUP, HUGE, TINY


def hard_blocks(seed: int = 0) -> Tensor:
    """Blocks [K, 32], as many as fill whole groups: one kind of difficulty each, and random ones of every size."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    blocks = [torch.zeros(BLOCK), -torch.zeros(BLOCK), torch.full((BLOCK,), TINY / 4), torch.full((BLOCK,), 1e-42)]
    for special in (math.nan, -math.nan, math.inf, -math.inf, HUGE, -HUGE, HUGE * 0.999, -HUGE * 0.999):
        block = randn(BLOCK)
        block[5] = special
        blocks.append(block)
    both = randn(BLOCK)
    both[3], both[4] = math.inf, -math.inf
    blocks.append(both)
    blocks.append(torch.full((BLOCK,), math.nan))
    for bits in (3, 4, 8):
        half = 2 ** (bits - 1)
        for sign in (1, -1):
            halves = torch.arange(BLOCK).sub(BLOCK // 2).mul(half / BLOCK).add(0.5)  # between two integers
            blocks.append(sign * torch.cat([torch.tensor([-1.0 * half]), halves[1:].clamp(-half + 0.5, half - 0.5)]))
        for size in (TINY * half, TINY * half * (1 - 2**-9), TINY * half * (1 - 2**-8), TINY * half * (1 - 2**-7)):
            blocks.append(randn(BLOCK).clamp(-0.9, 0.9) * size)
            blocks[-1][7] = size
        block = randn(BLOCK).clamp(-0.9, 0.9)
        block[9] = 1 + 2**-8  # its scale rounds down to 1 / half: it lies half a level below the lowest
        blocks.append(block)
    tied = randn(BLOCK).clamp(-2, 2)
    tied[[0, 31]] = torch.tensor([2.5, -2.5])  # the negative one of two extremes counts
    blocks += [tied, tied.flip(0)]
    zeros = randn(BLOCK)
    zeros[::2] = torch.tensor([0.0, -0.0]).repeat(8)
    blocks += [zeros, -zeros]
    every_size = randn(64, BLOCK) * torch.exp2(torch.linspace(-140, 125, 64)).view(-1, 1)
    within = randn(64, BLOCK) * torch.exp2(torch.empty(64, BLOCK).uniform_(-20, 20, generator=generator))
    found = torch.cat([torch.stack(blocks), every_size, within, randn(64, BLOCK)])
    padding = -len(found) % (GROUP // BLOCK)
    return torch.cat([found, randn(padding, BLOCK)]) if padding else found


def bits_of(values: Tensor) -> Tensor:
    """The bits of float32 values, with one NaN for all."""
    return values.masked_fill(values.isnan(), math.nan).view(torch.int32)

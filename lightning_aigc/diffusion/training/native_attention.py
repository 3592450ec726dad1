"""Keep torch's cuDNN attention away from gradients that it misreads.

torch 2.5 to 2.13 keeps one cuDNN backward for all calls whose q, k and v have equal strides, and with it the strides of
the first call's gradient (aten/src/ATen/native/cudnn/MHA.cpp). FLUX's single blocks join the attention's output with
the feed-forward's, so that its gradient is a slice, and its double blocks do not: one of the two reads wrong numbers,
or memory that is not its own. On an H100 small models gave NaN, and large ones an illegal memory access.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lightning_aigc._lightning import rank_zero_info

JOINING_BLOCKS = "single_transformer_blocks"
"""Attribute of denoisers with such blocks: FLUX.1, FLUX.2, Chroma and their ControlNets."""
PROBE = (1, 17, 3, 24)
"""Samples, tokens, heads and features of a call that no model makes, since torch keeps its backward."""


def avoid_misread_gradients(denoiser: nn.Module, device: torch.device) -> None:
    """Let torch's flash attention serve before cuDNN's in this process, if the denoiser needs it on this device.

    Fused blocks are not concerned: they give cuDNN gradients of one layout.
    """
    if device.type == "cuda" and hasattr(denoiser, JOINING_BLOCKS) and misreads_gradients(device):
        order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        torch._C._set_sdp_priority_order([kind.value for kind in (*order, SDPBackend.CUDNN_ATTENTION)])
        rank_zero_info(
            f"attention outside fused blocks runs as flash attention: the cuDNN attention of torch {torch.__version__}"
            " misreads gradients of this model"
        )


@functools.cache
def misreads_gradients(device: torch.device) -> bool:
    """Whether torch's cuDNN attention on this card reads a gradient with an earlier one's strides."""
    samples, tokens, heads, features = PROBE
    drawn = torch.randn(
        samples, tokens, heads, 3 * features, generator=torch.Generator().manual_seed(0)
    )  # a run's stay
    drawn = drawn.to(device, torch.bfloat16)
    query, wide = drawn[..., :features], drawn[..., features:]
    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), torch.enable_grad():
            query = query.contiguous().transpose(1, 2).requires_grad_()
            output = scaled_dot_product_attention(query, query.detach(), query.detach())
            sliced = wide.contiguous()[..., :features].transpose(1, 2)
            (first,) = torch.autograd.grad(output, query, sliced, retain_graph=True)
            (second,) = torch.autograd.grad(output, query, _dense_in_large_memory(sliced))
    except RuntimeError:  # this card or this torch has no cuDNN attention
        return False
    return not torch.allclose(first, second, rtol=0.02, atol=0.02)


def _dense_in_large_memory(sliced_NHTD: Tensor) -> Tensor:
    """The same numbers, dense, in memory that is large enough for the slice's strides."""
    memory = torch.zeros(2 * sliced_NHTD.numel(), device=sliced_NHTD.device, dtype=sliced_NHTD.dtype)
    samples, heads, tokens, features = sliced_NHTD.shape
    dense = memory[: sliced_NHTD.numel()].view(samples, tokens, heads, features).transpose(1, 2)
    return dense.copy_(sliced_NHTD)

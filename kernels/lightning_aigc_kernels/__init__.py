"""Fused ops that save little for backward, usable with torch alone.

`from lightning_aigc_kernels import group_norm_silu, lora_attention, ...`. Importing the ops needs no Triton. Only an
op's `kernel.py` does, which is imported for the first tensor on a GPU or NPU.
"""

from lightning_aigc_kernels.dispatch import FallbackWarning
from lightning_aigc_kernels.feed_forward import feed_forward
from lightning_aigc_kernels.frozen_conv2d import frozen_conv2d, frozen_linear
from lightning_aigc_kernels.geglu import geglu, swiglu
from lightning_aigc_kernels.group_norm_silu import group_norm_silu
from lightning_aigc_kernels.group_norm_silu_conv2d import group_norm_silu_conv2d
from lightning_aigc_kernels.joint_attention import AttentionStream, joint_attention
from lightning_aigc_kernels.keep_largest import keep_largest, keep_largest_per_head
from lightning_aigc_kernels.linear_with_lora import LoRAProjection
from lightning_aigc_kernels.lora_attention import KnownAttention, lora_attention
from lightning_aigc_kernels.modulated_norm import gated_residual, modulated_norm
from lightning_aigc_kernels.normalization import NormParameters
from lightning_aigc_kernels.packed_weight import PackedWeight
from lightning_aigc_kernels.protection import GradientProtection
from lightning_aigc_kernels.qk_norm_rope import qk_norm_rope, rotary_from_complex, rotary_from_repeated
from lightning_aigc_kernels.quantize_blocks import add_quantized_rows, dequantize_blocks, quantize_blocks
from lightning_aigc_kernels.silu_mul import silu_mul
from lightning_aigc_kernels.sparse_attention_backward import sparse_attention_backward

__all__ = [
    "AttentionStream",
    "FallbackWarning",
    "GradientProtection",
    "KnownAttention",
    "LoRAProjection",
    "NormParameters",
    "PackedWeight",
    "add_quantized_rows",
    "dequantize_blocks",
    "feed_forward",
    "frozen_conv2d",
    "frozen_linear",
    "gated_residual",
    "geglu",
    "group_norm_silu",
    "group_norm_silu_conv2d",
    "joint_attention",
    "keep_largest",
    "keep_largest_per_head",
    "lora_attention",
    "modulated_norm",
    "qk_norm_rope",
    "quantize_blocks",
    "rotary_from_complex",
    "rotary_from_repeated",
    "silu_mul",
    "sparse_attention_backward",
    "swiglu",
]

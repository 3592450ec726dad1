"""LayerNorm, the q, k, v projections with their LoRA branches, attention and the output projection as one op."""

from lightning_aigc_kernels.lora_attention.op import KnownAttention, lora_attention

__all__ = ["KnownAttention", "lora_attention"]

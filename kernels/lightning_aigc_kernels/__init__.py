"""Fused backward ops that keep little of what they are given, usable with torch alone.

Each op is a folder: `from lightning_aigc_kernels.group_norm_silu import group_norm_silu`, and so on for
`group_norm_silu_conv2d`, `frozen_conv2d` (and `frozen_linear`), `geglu` (and `swiglu`), `feed_forward`,
`lora_attention`, `sparse_attention_backward` and `keep_largest`. Importing them needs no Triton; `kernel.py` files do.
"""

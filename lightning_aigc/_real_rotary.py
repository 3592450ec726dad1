"""Rotary positions of Z-Image and Qwen-Image in real numbers on an NPU.

diffusers keeps their rotations cos + i sin as complex tensors and indexes them on the device; CANN's `aclnnIndex` takes
no complex numbers, so Z-Image stops in its first step. Here the positions are pairs of real numbers on an NPU, as
`torch.view_as_real` orders them, and attention rotates with them; other devices compute as before. Sources: diffusers
#12979 and #13689, DiffSynth-Studio #1176, vllm-omni #485 and #4911.

Dimensions: B samples, T tokens, H heads, D numbers of a head.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

Z_IMAGE = (
    "diffusers.models.transformers.transformer_z_image",
    "diffusers.models.controlnets.controlnet_z_image",  # which has copies of the first one's classes
)
QWEN_IMAGE = "diffusers.models.transformers.transformer_qwenimage"
LARGEST_CACHE = 64
"""Sizes of images and lengths of texts whose positions are kept on the device."""


def real_rotary_of(module_name: str) -> Callable[[], None]:
    """Return the function that changes one of diffusers' modules above."""

    def change() -> None:
        use_real_rotary(module_name)

    return change


def use_real_rotary(module_name: str) -> None:
    """Change one of diffusers' modules above, once."""
    module = importlib.import_module(module_name)
    if hasattr(module, "has_real_rotary"):
        return
    module.has_real_rotary = True  # type: ignore[attr-defined]
    if module_name == QWEN_IMAGE:
        for embedder in (module.QwenEmbedRope, module.QwenEmbedLayer3DRope):
            _make_qwen_real(embedder)
        module.apply_rotary_emb_qwen = _rotates_pairs(module.apply_rotary_emb_qwen)  # type: ignore[attr-defined]
    else:
        module.RopeEmbedder.__call__ = _z_image_positions(module.RopeEmbedder.__call__)
        processor = module.ZSingleStreamAttnProcessor
        processor.__call__ = _z_image_attention(processor.__call__, module.dispatch_attention_fn)


def rotate(x_BTHD: Any, pairs: Any) -> Any:
    """Rotate each two neighbours of the last dimension. Args: pairs: cos and sin, [T, D/2, 2] or [B, T, D/2, 2]."""
    import torch

    cos, sin = pairs.unsqueeze(-3).unbind(-1)
    first, second = x_BTHD.float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return rotated.flatten(-2).type_as(x_BTHD)


def _z_image_positions(stock: Any) -> Any:
    @functools.wraps(stock)
    def positions(self: Any, ids: Any) -> Any:
        import torch

        if ids.device.type != "npu":
            return stock(self, ids)
        if getattr(self, "pairs", None) is None:
            with torch.inference_mode(False):
                tables = self.precompute_freqs_cis(self.axes_dims, self.axes_lens, theta=self.theta)
                self.pairs = [torch.view_as_real(table).to(ids.device) for table in tables]
        return torch.cat([table[ids[:, axis]] for axis, table in enumerate(self.pairs)], dim=1)

    return positions


def _z_image_attention(stock: Any, attention: Any) -> Any:
    @functools.wraps(stock)
    def attend(
        self: Any,
        attn: Any,
        hidden_states: Any,
        encoder_hidden_states: Any = None,
        attention_mask: Any = None,
        freqs_cis: Any = None,
    ) -> Any:
        if freqs_cis is None or freqs_cis.is_complex():
            return stock(self, attn, hidden_states, encoder_hidden_states, attention_mask, freqs_cis)
        layers = (attn.to_q, attn.to_k, attn.to_v)
        query, key, value = (layer(hidden_states).unflatten(-1, (attn.heads, -1)) for layer in layers)
        query = rotate(query if attn.norm_q is None else attn.norm_q(query), freqs_cis)
        key = rotate(key if attn.norm_k is None else attn.norm_k(key), freqs_cis)
        if attention_mask is not None and attention_mask.ndim == 2:
            attention_mask = attention_mask[:, None, None, :]
        backend = {"backend": self._attention_backend, "parallel_config": self._parallel_config}
        attended = attention(query, key, value, attn_mask=attention_mask, **backend).flatten(2, 3).to(query.dtype)
        for layer in attn.to_out:
            attended = layer(attended)
        return attended

    return attend


def _make_qwen_real(embedder: Any) -> None:
    stock_init, stock_forward = embedder.__init__, embedder.forward

    @functools.wraps(stock_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        import torch

        with torch.device("cpu"):  # its tables are complex, and made where new tensors go
            stock_init(self, *args, **kwargs)

    @functools.wraps(stock_forward)
    def forward(self: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        import torch

        if device is None or torch.device(device).type != "npu":
            return stock_forward(self, *args, device=device, **kwargs)
        kept = self.__dict__.setdefault("pairs", {})
        key = str((args, kwargs, device))
        if key not in kept:
            if len(kept) >= LARGEST_CACHE:
                kept.clear()
            with torch.inference_mode(False):
                freqs = stock_forward(self, *args, device=torch.device("cpu"), **kwargs)
                kept[key] = tuple(torch.view_as_real(each).to(device) for each in freqs)
        return kept[key]

    embedder.__init__, embedder.forward = init, forward


def _rotates_pairs(stock: Any) -> Any:
    @functools.wraps(stock)
    def apply(x: Any, freqs_cis: Any, use_real: bool = True, *args: Any, **kwargs: Any) -> Any:
        if use_real or freqs_cis.is_complex():
            return stock(x, freqs_cis, use_real, *args, **kwargs)
        return rotate(x, freqs_cis)

    return apply

"""Run equal text tokens as one token with a weight.

Stable Diffusion 3 without its T5 reads 256 zero tokens per text instead of T5's tokens. Text tokens have no positions
there, so equal tokens stay equal through every block, and one of them can represent all: attention adds the log of
their number to its key's logits. Output and gradients are mathematically the same, with far fewer text tokens.

Legend: B batch, T text tokens, D text width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from diffusers.models.attention_processor import Attention, JointAttnProcessor2_0
from torch import Tensor, nn

from lightning_aigc.precision.blocks.layers import CannotSwapError
from lightning_aigc.precision.blocks.stream_attention import attend, check_attention


class EqualTokensProcessor(JointAttnProcessor2_0):  # type: ignore[misc]
    """Attention processor that treats the last of `tokens` text tokens as `count` identical ones."""

    def __init__(self, tokens: int, count: int) -> None:
        super().__init__()
        self.tokens, self.count = tokens, count

    def text_bias(self, text_BTD: Tensor) -> Tensor | None:
        """Return the bias of each text token's key, [1, T] in float32; None for a text of another length."""
        if text_BTD.shape[1] != self.tokens:
            return None
        bias_1T = torch.zeros(1, self.tokens, dtype=torch.float32, device=text_BTD.device)
        bias_1T[:, -1].fill_(math.log(self.count))  # an assignment would copy a number of the host, which no graph can
        return bias_1T

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Any:
        bias_1T = None if encoder_hidden_states is None else self.text_bias(encoder_hidden_states)
        if bias_1T is None:
            return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask)
        return attend(attn, hidden_states, encoder_hidden_states, image_first=True, text_bias=bias_1T)


def run_equal_tokens_once(network: nn.Module, first: int, count: int) -> None:
    """Make a transformer or its ControlNet run the last `count` of `first + count` text tokens, all equal, as one.

    Texts of another length, and networks whose attention is not diffusers' own, are not changed.
    """
    attentions = [module for module in network.modules() if isinstance(module, Attention)]
    try:
        for attention in attentions:
            check_attention(attention)
    except CannotSwapError:
        return
    processor = EqualTokensProcessor(first + 1, count)
    for attention in attentions:
        if attention.add_k_proj is not None:  # in the others, the image attends only to itself
            attention.set_processor(processor)

    def keep_one(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        text_BTD = kwargs.get("encoder_hidden_states")
        if text_BTD is not None and text_BTD.shape[1] == first + count:
            kwargs = {**kwargs, "encoder_hidden_states": text_BTD[:, : first + 1]}
        return args, kwargs

    network.register_forward_pre_hook(keep_one, with_kwargs=True)

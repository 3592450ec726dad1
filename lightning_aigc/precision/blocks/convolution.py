"""Fused forwards of ResNet blocks, convolutions and Sequentials, with the module's parameters.

Each forward takes the module as `self`. It checks every call, as adapters, dropout and masks change between calls, and
raises CannotSwapError if the class's forward must run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_aigc.precision.block_options import BlockOptions
from lightning_aigc.precision.blocks.layers import (
    CannotSwapError,
    check_conv2d,
    check_group_norm,
    check_same_dtype,
    check_silu,
    refuse_dropout,
)
from lightning_aigc.precision.context import options_of
from lightning_aigc.precision.memory import recompute
from lightning_aigc_kernels import frozen_conv2d, group_norm_silu, group_norm_silu_conv2d


def check_resnet(self: Any) -> None:
    """Raise CannotSwapError unless this diffusers ResnetBlock2D is built as in Stable Diffusion."""
    for norm in (self.norm1, self.norm2):
        check_group_norm(norm)
    check_silu(self.nonlinearity)
    if self.upsample is not None or self.downsample is not None:
        raise CannotSwapError("it changes the resolution inside")
    refuse_dropout(self.dropout)


def resnet(self: Any, input_tensor: Tensor, temb: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    """Forward of ResnetBlock2D, where each GroupNorm, SiLU and convolution together save one tensor."""
    check_resnet(self)
    if args or kwargs.get("scale") is not None or (temb is None and self.time_embedding_norm == "scale_shift"):
        raise CannotSwapError("arguments that diffusers refuses or deprecates")
    check_same_dtype(input_tensor, self.norm1.weight, self.conv1.weight if type(self.conv1) is nn.Conv2d else None)
    options = options_of(self)

    def run(x: Tensor, temb: Tensor | None) -> Tensor:
        if options.recomputes and self.conv_shortcut is not None:
            recompute.mark_unread(self.conv_shortcut)
        hidden = norm_act_conv(x, self.norm1, self.conv1, options.for_part("norm1"))
        scale = shift = None
        if self.time_emb_proj is not None and temb is not None:
            temb = self.time_emb_proj(temb if self.skip_time_act else self.nonlinearity(temb))
            if self.time_embedding_norm == "default":
                hidden = hidden + temb[:, :, None, None]
            elif self.time_embedding_norm == "scale_shift":
                scale, shift = temb.chunk(2, dim=1)
        hidden = norm_act_conv(hidden, self.norm2, self.conv2, options.for_part("norm2"), scale, shift, last=True)
        x = x if self.conv_shortcut is None else self.conv_shortcut(_as_diffusers(self, x))
        return (x + hidden) / self.output_scale_factor if self.output_scale_factor != 1 else x + hidden

    if options.recomputes:
        return lambda: recompute.checkpoint_block(self, run, input_tensor, temb)
    return lambda: run(input_tensor, temb)


def _as_diffusers(self: Any, x: Tensor) -> Tensor:
    """A contiguous x in training; on a card channels_last stays, in which cuDNN multiplies."""
    is_last = x.device.type == "cuda" and x.is_contiguous(memory_format=torch.channels_last)
    return x.contiguous() if self.training and not is_last else x


def norm_act_conv(
    x: Tensor,
    norm: nn.GroupNorm,
    conv: Any,
    options: BlockOptions,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    *,
    silu: bool = True,
    last: bool = False,
) -> Tensor:
    """Compute conv(silu(norm(x))) or conv(norm(x)) as one op, or as two if the convolution has a LoRA."""
    try:
        check_conv2d(conv)
    except CannotSwapError:
        y = group_norm_silu(
            x, norm.weight, norm.bias, norm.num_groups, norm.eps, scale=scale, shift=shift, silu=silu,
            input_grad_density=options.input_grad_density,
        )  # fmt: skip
        activated: Tensor = conv(y)
        return activated
    return group_norm_silu_conv2d(
        x, norm.weight, norm.bias, norm.num_groups, norm.eps, conv.weight, conv.bias, conv.stride, conv.padding,
        conv.dilation, conv.groups, scale=scale, shift=shift, silu=silu, input_grad_density=options.input_grad_density,
        grad_dtype=options.grad_dtype, skip_product=last and options.recomputes and recompute.is_recomputing(),
    )  # fmt: skip


def check_frozen_conv(self: Any) -> None:
    """Raise CannotSwapError for a trained or non-plain convolution."""
    check_conv2d(self)
    if self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad):
        raise CannotSwapError("its weight is trained")


def convolution(self: Any, input: Tensor) -> Any:  # noqa: A002  # torch's name
    """Forward of a frozen Conv2d, which saves nothing for backward."""
    check_frozen_conv(self)
    check_same_dtype(input, self.weight)
    if input.dim() != 4:
        raise CannotSwapError("an input without a batch dimension")
    skip = recompute.is_unread(self)
    return lambda: frozen_conv2d(
        input, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups, skip_product=skip
    )


def triples_of(self: Any) -> list[int]:
    """Find the indices in a Sequential at which GroupNorm, SiLU and Conv2d follow each other.

    Raises: CannotSwapError if there are none.
    """
    indices = []
    for i in range(len(self) - 2):
        try:
            check_group_norm(self[i])
            check_silu(self[i + 1])
            check_conv2d(self[i + 2])
        except CannotSwapError:
            continue
        indices.append(i)
    if not indices:
        raise CannotSwapError("no GroupNorm, SiLU and Conv2d in a row")
    return indices


def sequential(self: Any, input: Tensor) -> Any:  # noqa: A002  # torch's name
    """Forward of a Sequential, where each GroupNorm, SiLU, Conv2d triple runs as one op."""
    triples = triples_of(self)
    for i in triples:
        check_same_dtype(input, self[i].weight, self[i + 2].weight)
    options = options_of(self)

    def run() -> Tensor:
        x, i = input, 0
        while i < len(self):
            if i in triples:
                x, i = norm_act_conv(x, self[i], self[i + 2], options), i + 3
            else:
                x, i = self[i](x), i + 1
        return x

    return run


def normalized(x: Tensor, norm: nn.GroupNorm, options: BlockOptions) -> Tensor:
    """Compute a GroupNorm by the fused op."""
    return group_norm_silu(
        x, norm.weight, norm.bias, norm.num_groups, norm.eps, silu=False, input_grad_density=options.input_grad_density
    )

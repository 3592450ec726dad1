"""Small diffusers models, and their gradients, which a swap must not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from lightning_aigc.precision.swaps import Swapped, swap_forwards

LEVELS = ("balanced", "lean", "max")
EXACT = 1e-9
"""Relative difference that rounding in float64 stays under, through the deepest network here."""
ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]


def make_unet(**changes: Any) -> UNet2DConditionModel:
    torch.manual_seed(0)
    config = {
        "sample_size": 16,
        "block_out_channels": (16, 32),
        "cross_attention_dim": 24,
        "attention_head_dim": 2,
        "norm_num_groups": 4,
        "layers_per_block": 1,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    return UNet2DConditionModel(**config | changes).train()


def with_lora(model: nn.Module, targets: list[str] | None = None, **options: Any) -> nn.Module:
    torch.manual_seed(1)
    model.requires_grad_(False)
    config = LoraConfig(r=3, target_modules=targets or ATTENTION, init_lora_weights=False, **options)
    return inject_adapter_in_model(config, model)


def call_unet(unet: nn.Module, **extra: Any) -> Tensor:
    torch.manual_seed(2)
    given = torch.randn(2, 4, 16, 16), torch.tensor([10, 900]), torch.randn(2, 5, 24)
    output: Tensor = unet(*(t.to(next(unet.parameters()).device) for t in given), **extra).sample
    return output


def gradients(model: nn.Module, call: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    output = call(model)
    torch.manual_seed(3)
    weights = torch.randn(output.shape).to(output.device)  # randn_like would draw in the order of the strides
    (output * weights).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None} | {"output": output.detach()}


def worst_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    floor = 1e-4 * max(grad.norm() for grad in theirs.values())  # the gradient of a key's bias is rounding alone
    return max(((ours[n] - theirs[n]).norm() / theirs[n].norm().clamp_min(floor)).item() for n in theirs)


def same_gradients(model: nn.Module, call: Callable[[nn.Module], Tensor], memory: str) -> Swapped:
    """Assert that swapping changes no gradient beyond float64's rounding; the swaps, undone."""
    wanted = gradients(model, call)
    swapped = swap_forwards(model, memory=memory)  # type: ignore[arg-type]
    ours = gradients(model, call)
    swapped.restore()
    assert worst_difference(ours, wanted) < EXACT
    assert worst_difference(gradients(model, call), wanted) == 0  # restored
    return swapped


def call_with(*shapes: tuple[int, ...], **kwargs: Any) -> Callable[[nn.Module], Tensor]:
    def call(module: nn.Module) -> Tensor:
        torch.manual_seed(2)
        return module(*(torch.randn(shape) for shape in shapes), **kwargs)  # type: ignore[no-any-return]

    return call


def convolutions(model: nn.Module) -> list[nn.Conv2d]:
    """Convolutions whose weights have two different layouts, contiguous and channels_last."""
    return [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size != (1, 1) and m.in_channels > 1]

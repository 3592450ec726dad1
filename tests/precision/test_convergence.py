"""Two hundred steps of the tiny U-Net with each memory level end where native training ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor

from lightning_aigc.precision.swaps import swap_forwards

pytestmark = pytest.mark.long
STEPS = 200
LEVELS = ("balanced", "lean", "max")


def train(memory: str, lora: bool, dtype: torch.dtype, **lossy: Any) -> tuple[list[float], Tensor]:
    """Losses of a noise-prediction fit to eight latents, and all trained weights at its end."""
    torch.manual_seed(0)
    unet: Any = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        cross_attention_dim=16,
        attention_head_dim=2,
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    if lora:
        unet.requires_grad_(False)
        unet = inject_adapter_in_model(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]), unet)
    unet.to(dtype).train()
    trained = [p for p in unet.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.3 if lora else 0.02, momentum=0.9)
    swapped = swap_forwards(unet, memory=memory, **lossy)  # type: ignore[arg-type]
    latents, text = torch.randn(8, 4, 8, 8, dtype=dtype), torch.randn(8, 3, 16, dtype=dtype)
    losses = []
    for _ in range(STEPS):
        noise = torch.randn(4, 4, 8, 8, dtype=dtype)
        picked, steps = torch.randint(8, (4,)), torch.randint(1000, (4,))
        share = (steps / 1000).view(-1, 1, 1, 1).to(dtype)
        noisy = latents[picked] * (1 - share).sqrt() + noise * share.sqrt()
        loss = (unet(noisy, steps, text[picked]).sample - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(loss.item())
    swapped.restore()
    return losses, torch.cat([p.detach().flatten() for p in trained])


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_every_level_ends_at_the_losses_and_weights_of_native_training(lora: bool) -> None:
    native, weights = train("off", lora, torch.float64)
    start, end = sum(native[:20]) / 20, sum(native[-20:]) / 20
    assert end < 0.97 * start  # it learns, so that equal losses mean something
    for memory in LEVELS:
        losses, ours = train(memory, lora, torch.float64)
        assert losses == pytest.approx(native, rel=1e-7)  # float64's rounding, grown over 200 steps
        assert ((ours - weights).norm() / weights.norm()).item() < 1e-7


def test_in_bfloat16_every_level_learns_as_much_as_native_training() -> None:
    native, _ = train("off", False, torch.bfloat16)
    learned = sum(native[:20]) - sum(native[-20:])
    assert learned > 0
    for memory in LEVELS:
        losses, _ = train(memory, False, torch.bfloat16)
        # Rounding makes each run its own: three native runs of other seeds lie within 10 % of one another.
        assert sum(losses[:20]) - sum(losses[-20:]) > 0.85 * learned


def test_the_comparison_sees_a_lossy_gradient() -> None:
    native, weights = train("off", True, torch.float64)
    losses, ours = train("lean", True, torch.float64, attention_grad_density=0.9)
    assert losses != pytest.approx(native, rel=1e-7)
    assert ((ours - weights).norm() / weights.norm()).item() > 1e-6

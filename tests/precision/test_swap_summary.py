"""The line at fit start, and the refusals of strict: as many blocks as run fused, and why the others do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from diffusers.models.attention import BasicTransformerBlock, FeedForward
from diffusers.models.attention_processor import AttnProcessor, IPAdapterAttnProcessor2_0
from torch import Tensor, nn

from fakes.models.small_models import make_unet, with_lora
from lightning_aigc.errors import ConfigError
from lightning_aigc.precision.blocks.rules import COVERED
from lightning_aigc.precision.swaps import swap_forwards

pytestmark = pytest.mark.usefixtures("float64")


def test_counts_and_reasons_are_in_the_summary() -> None:
    unet = with_lora(make_unet(down_block_types=("ResnetDownsampleBlock2D", "CrossAttnDownBlock2D")))
    swapped = swap_forwards(unet, memory="lean")
    total = swapped.blocks.total()
    assert f"swapped {total} of {total + 1} blocks" in swapped.summary()
    assert swapped.summary().endswith("left alone: 1 ResnetBlock2D: it changes the resolution inside")
    assert 0.6 < swapped.saving < 0.9
    swapped.restore()


def test_strict_names_what_cannot_be_swapped() -> None:
    unet = make_unet(down_block_types=("ResnetDownsampleBlock2D", "CrossAttnDownBlock2D"))
    with pytest.raises(ConfigError, match=r"down_blocks\.0\.downsamplers\.0 \(ResnetBlock2D\).*resolution"):
        swap_forwards(unet, memory="lean", strict=True)
    assert not [module for module in unet.modules() if "forward" in vars(module)]


def with_ip_adapter() -> nn.Module:
    unet = make_unet()
    processors = unet.attn_processors
    for name in processors:
        if name.endswith("attn2.processor"):
            attention: Any = unet.get_submodule(name.removesuffix(".processor"))
            processors[name] = IPAdapterAttnProcessor2_0(attention.inner_dim, 24, num_tokens=(3,))
    unet.set_attn_processor(processors)
    return unet


def with_old_processor() -> nn.Module:
    unet = make_unet()
    unet.set_attn_processor(AttnProcessor())
    return unet


@pytest.mark.parametrize(
    ("make", "count", "reason"),
    [
        (lambda: with_lora(make_unet(), use_dora=True), 8, "DoraLinearVariant instead of plain LoRA"),
        (lambda: with_lora(make_unet(), lora_dropout=0.1), 8, "Dropout is active"),
        (with_old_processor, 8, "attention processor AttnProcessor"),
        (with_ip_adapter, 4, "attention processor IPAdapterAttnProcessor2_0"),
    ],
    ids=["dora", "lora dropout", "old processor", "ip adapter"],
)
def test_parts_that_run_natively_inside_a_swapped_block_are_counted_and_refused_by_strict(
    make: Any, count: int, reason: str
) -> None:
    plain = swap_forwards(with_lora(make_unet()), memory="lean")
    model = make()
    swapped = swap_forwards(model, memory="lean")
    assert swapped.left_alone == {("Attention", reason): count}
    total = swapped.blocks.total()
    assert f"swapped {total} of {total + count} blocks" in swapped.summary()
    assert f"left alone: {count} Attention: {reason}" in swapped.summary()
    # Four of a block's 24 tensors more for each attention: a fifth less is saved where both run natively.
    assert swapped.saving < plain.saving - 0.02 * count
    swapped.restore()
    with pytest.raises(ConfigError, match=rf"attn[12] \(Attention\) cannot be swapped: {reason}"):
        swap_forwards(model, memory="lean", strict=True)


def test_the_estimate_follows_what_attention_keeps() -> None:
    """lean keeps 5 of one block's 24 tensors, with one attention left alone 9."""
    savings = []
    for dora in (False, True):
        block: Any = BasicTransformerBlock(16, 2, 8, cross_attention_dim=12)
        if dora:
            block.attn1 = with_lora(block.attn1, use_dora=True)
        savings.append(swap_forwards(block, memory="lean").saving)
    assert savings == pytest.approx([19 / 24, 15 / 24])


def test_a_block_none_of_whose_parts_is_served_does_not_count_as_swapped() -> None:
    block = BasicTransformerBlock(16, 2, 8, activation_fn="gelu")
    block.attn1.set_processor(AttnProcessor())
    swapped = swap_forwards(block, memory="lean")
    assert not swapped.blocks and swapped.saving == 0
    assert swapped.left_alone["BasicTransformerBlock", "each of its parts is left alone"] == 1
    assert swapped.left_alone["FeedForward", "feed-forward with GELU"] == 1


def test_a_norm_that_no_op_knows_is_said() -> None:
    block: Any = BasicTransformerBlock(16, 2, 8)
    block.norm1.register_forward_hook(lambda module, given, output: None)
    assert swap_forwards(block, memory="lean").left_alone == {("BasicTransformerBlock", "a layer inside has hooks"): 1}


def test_lora_that_is_plain_again_is_served_without_a_new_swap() -> None:
    ran = []

    class Told(nn.Dropout):
        def forward(self, x: Tensor) -> Tensor:
            ran.append(self.p)
            return super().forward(x)

    layer: Any = with_lora(FeedForward(16, activation_fn="geglu"), ["net.2"], lora_dropout=0.5)
    layer.net[2].lora_dropout["default"] = Told(0.5)
    swapped = swap_forwards(layer, memory="lean")
    assert swapped.left_alone == {("FeedForward", "Told is active"): 1}
    x = torch.randn(2, 16)
    layer(x)
    assert ran == [0.5]
    layer.eval()
    layer(x)
    assert ran == [0.5]


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(nn.ReLU())], ids=["linear", "sequential"])
def test_a_model_without_blocks_is_told_what_is_covered(model: nn.Module) -> None:
    line = swap_forwards(model, memory="lean").summary()
    assert line == f"memory=lean: swapped nothing, backward keeps what it kept before; covered are {COVERED}"


def test_an_attention_of_another_kind_is_told_why_nothing_was_swapped() -> None:
    model = SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=16,
        out_channels=4,
    )
    line = swap_forwards(nn.ModuleList([model.transformer_blocks[0].attn]), memory="lean").summary()
    assert "swapped nothing" in line and f"covered are {COVERED}; left alone: 1 Attention: " in line

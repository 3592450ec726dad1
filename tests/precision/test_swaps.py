"""The table of swaps: what it serves gives the gradients of the class's own forward, what it cannot is left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DModel
from diffusers.models.attention import BasicTransformerBlock, FeedForward
from diffusers.models.attention_processor import Attention
from diffusers.models.resnet import ResnetBlock2D
from peft import LoraConfig
from torch import Tensor, nn

from fakes.models.small_models import (
    ATTENTION,
    EXACT,
    LEVELS,
    call_unet,
    call_with,
    gradients,
    make_unet,
    same_gradients,
    with_lora,
    worst_difference,
)
from lightning_aigc.precision.blocks import attention
from lightning_aigc.precision.swaps import swap_forwards
from lightning_aigc_kernels.lora_attention import lora_attention

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("memory", LEVELS)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"use_linear_projection": True, "transformer_layers_per_block": 2},
        {"resnet_time_scale_shift": "scale_shift"},
        {"down_block_types": ("ResnetDownsampleBlock2D", "CrossAttnDownBlock2D")},
    ],
    ids=["sd", "sdxl", "scale_shift", "resnet_down"],
)
def test_lora_gradients_are_those_of_the_unets_own_forward(memory: str, change: dict[str, Any]) -> None:
    swapped = same_gradients(with_lora(make_unet(**change)), call_unet, memory)
    assert swapped.blocks["ResnetBlock2D"] >= 4 and swapped.blocks["BasicTransformerBlock"] >= 3


def test_where_products_are_large_lean_keeps_keys_and_values_and_repeats_the_attention_to_the_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def watched(x: Tensor, context: Tensor | None, *args: Any, keeps: int, **options: Any) -> Any:
        asked.append((context is None, keeps))
        return lora_attention(x, context, *args, keeps=keeps, **options)

    monkeypatch.setattr(attention, "lora_attention", watched)
    same_gradients(with_lora(make_unet()), call_unet, "lean")
    assert {keeps for _, keeps in asked} == {1}
    asked.clear()
    monkeypatch.setattr(attention, "LARGE_PRODUCT", 0)
    same_gradients(with_lora(make_unet()), call_unet, "lean")
    assert set(asked) == {(True, 3), (False, 0)}


@pytest.mark.parametrize("memory", LEVELS)
def test_full_fine_tuning_gradients_are_those_of_the_unets_own_forward(memory: str) -> None:
    same_gradients(make_unet(), call_unet, memory)


@pytest.mark.parametrize("memory", LEVELS)
@pytest.mark.parametrize(
    "targets",
    [
        [*ATTENTION, "ff.net.0.proj", "ff.net.2"],
        ["conv1", "conv2", "conv_shortcut", "time_emb_proj"],
        ["proj_in", "to_q"],
    ],
    ids=["feed_forward", "convolutions", "projections"],
)
def test_lora_on_other_layers_is_trained_as_natively(memory: str, targets: list[str]) -> None:
    same_gradients(with_lora(make_unet(), targets), call_unet, memory)


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")  # merging is not the subject
@pytest.mark.parametrize("memory", LEVELS)
@pytest.mark.parametrize(
    "options",
    [{"lora_dropout": 0.5}, {"use_dora": True}, {"use_rslora": True}, {"lora_bias": True}],
    ids=lambda o: next(iter(o)),
)
def test_lora_variants_are_trained_as_natively(memory: str, options: dict[str, Any]) -> None:
    def call(unet: nn.Module) -> Tensor:
        torch.manual_seed(5)  # the same dropout masks in every run
        given = torch.randn(2, 4, 16, 16), torch.tensor([10, 900]), torch.randn(2, 5, 24)
        torch.manual_seed(6)
        return unet(*given).sample  # type: ignore[no-any-return]

    same_gradients(with_lora(make_unet(), **options), call, memory)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")  # two adapters are the subject
@pytest.mark.parametrize("memory", LEVELS)
def test_two_active_adapters_and_a_switched_off_one_are_trained_as_natively(memory: str) -> None:
    unet: Any = with_lora(make_unet())
    unet.add_adapter(LoraConfig(r=2, target_modules=ATTENTION, init_lora_weights=False), "second")
    for active in (["default", "second"], ["second"], ["default"]):
        unet.set_adapter(active)
        same_gradients(unet, call_unet, memory)


def test_gradients_reach_a_trained_text_encoder() -> None:
    unet = with_lora(make_unet())
    found = []
    for memory in ("off", *LEVELS):
        swapped = swap_forwards(unet, memory=memory)  # type: ignore[arg-type]
        torch.manual_seed(2)
        text = torch.randn(2, 5, 24, requires_grad=True)
        unet(torch.randn(2, 4, 16, 16), torch.tensor([10, 900]), text).sample.square().sum().backward()
        swapped.restore()
        found.append({"text": text.grad})
    assert all(worst_difference(own, found[0]) < EXACT for own in found[1:])


@pytest.mark.parametrize("memory", LEVELS)
@pytest.mark.parametrize(("samples", "slicing"), [(2, False), (1, False), (2, True)], ids=["two", "one", "sliced"])
def test_the_vae_is_trained_as_natively(samples: int, slicing: bool, memory: str) -> None:
    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
    ).train()
    if slicing:
        vae.enable_slicing()

    def call(vae: Any) -> Tensor:
        torch.manual_seed(2)
        return vae.decode(vae.encode(torch.randn(samples, 3, 16, 16)).latent_dist.mean).sample  # type: ignore[no-any-return]

    swapped = same_gradients(vae, call, memory)
    assert swapped.blocks["Attention"] == 2 and swapped.blocks["ResnetBlock2D"] >= 8


@pytest.mark.parametrize("memory", LEVELS)
@pytest.mark.parametrize(
    ("module", "call"),
    [
        (
            lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 4, 3, padding=1)),
            call_with((2, 3, 6, 5)),
        ),
        (
            lambda: ResnetBlock2D(in_channels=8, out_channels=12, groups=4, temb_channels=6),
            call_with((2, 8, 6, 5), (2, 6)),
        ),
        (lambda: ResnetBlock2D(in_channels=8, groups=4, temb_channels=None), call_with((2, 8, 6, 5), temb=None)),
        (lambda: BasicTransformerBlock(16, 2, 8, cross_attention_dim=None), call_with((2, 7, 16))),
        (lambda: FeedForward(16, activation_fn="geglu"), call_with((2, 7, 16))),
        (lambda: FeedForward(16, activation_fn="swiglu", bias=False), call_with((2, 7, 16))),
        (lambda: FeedForward(16, activation_fn="gelu"), call_with((2, 7, 16))),
        (lambda: Attention(16, heads=2, dim_head=8), call_with((2, 7, 16))),
        (
            lambda: Attention(16, heads=2, dim_head=8, norm_num_groups=4, residual_connection=True),
            call_with((1, 16, 9, 7)),
        ),
        (lambda: Attention(16, cross_attention_dim=6, heads=2, dim_head=8), call_with((2, 7, 16), (2, 3, 6))),
    ],
    ids=[
        "sequential",
        "resnet",
        "resnet-vae",
        "transformer",
        "geglu",
        "swiglu",
        "gelu",
        "attention",
        "attention of one picture",
        "cross-attention",
    ],
)
def test_a_block_alone_is_trained_as_natively(
    module: Callable[[], nn.Module], call: Callable[[nn.Module], Tensor], memory: str
) -> None:
    torch.manual_seed(0)
    same_gradients(module(), call, memory)


@pytest.mark.parametrize("memory", LEVELS)
def test_a_unet_with_attention_of_pixels_is_trained_as_natively_on_one_picture(memory: str) -> None:
    torch.manual_seed(0)
    unet = UNet2DModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).train()
    same_gradients(unet, lambda model: call_with((1, 3, 16, 16))(lambda x: model(x, torch.tensor([9])).sample), memory)


@pytest.mark.parametrize(
    "module",
    [
        lambda: FeedForward(16, activation_fn="geglu"),
        lambda: Attention(16, heads=2, dim_head=8),
        lambda: BasicTransformerBlock(16, 2, 8),
    ],
    ids=["feed-forward", "attention", "transformer"],
)
@pytest.mark.parametrize("memory", LEVELS)
def test_what_a_swapped_block_gives_may_be_changed_in_place(module: Callable[[], nn.Module], memory: str) -> None:
    torch.manual_seed(0)
    same_gradients(module(), lambda block: call_with((2, 7, 16))(block).mul_(3).add_(1), memory)


def test_masks_take_the_classes_own_forward() -> None:
    unet = with_lora(make_unet())
    mask = torch.tensor([[True, True, True, False, False]] * 2)
    same_gradients(unet, lambda model: call_unet(model, encoder_attention_mask=mask), "lean")


def test_gradient_checkpointing_beside_the_swaps_is_right() -> None:
    unet: Any = with_lora(make_unet())
    unet.enable_gradient_checkpointing()
    for memory in LEVELS:
        same_gradients(unet, call_unet, memory)


def test_without_gradients_the_classes_own_forward_runs_to_the_bit() -> None:
    unet = with_lora(make_unet())
    with torch.no_grad():
        wanted = call_unet(unet)
    for memory in LEVELS:
        swapped = swap_forwards(unet, memory=memory)  # type: ignore[arg-type]
        with torch.no_grad():
            assert torch.equal(call_unet(unet), wanted)
        with torch.inference_mode():
            assert torch.equal(call_unet(unet), wanted)
        swapped.restore()


def test_a_hook_on_an_inner_layer_still_fires() -> None:
    unet: Any = with_lora(make_unet())
    swapped = swap_forwards(unet, memory="lean")
    seen = []
    block = unet.mid_block.attentions[0].transformer_blocks[0]
    for layer in (block.attn1.to_q, block.ff.net[2], unet.mid_block.resnets[0].conv1):
        layer.register_forward_hook(lambda module, args, output: seen.append(type(module).__name__))
    call_unet(unet)
    swapped.restore()
    assert len(seen) == 3


def test_a_quantized_or_foreign_layer_is_left_alone() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return super().forward(input) * 2

    torch.manual_seed(0)
    block: Any = BasicTransformerBlock(16, 2, 8)
    block.attn1.to_k = Doubled(16, 16, bias=False)
    block.ff.net[0].proj = Doubled(16, 128)
    same_gradients(block, call_with((2, 7, 16)), "lean")


def test_density_one_is_the_dense_gradient_to_the_bit() -> None:
    unet = with_lora(make_unet())
    swapped = swap_forwards(unet, memory="lean")
    wanted = gradients(unet, call_unet)
    swapped.restore()
    swapped = swap_forwards(unet, memory="lean", input_grad_density=1.0, attention_grad_density=1.0)
    assert worst_difference(gradients(unet, call_unet), wanted) == 0
    swapped.restore()


def test_swaps_leave_parameters_keys_and_copies_alone() -> None:
    unet = with_lora(make_unet())
    keys, parameters = list(unet.state_dict()), [id(p) for p in unet.parameters()]
    swapped = swap_forwards(unet, memory="max")
    assert list(unet.state_dict()) == keys and [id(p) for p in unet.parameters()] == parameters
    twin = copy.deepcopy(unet)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert not torch.equal(call_unet(twin), call_unet(unet))
    swapped.restore()


def test_backward_can_run_twice_over_a_repeated_block() -> None:
    unet = with_lora(make_unet())
    swapped = swap_forwards(unet, memory="max")
    loss = call_unet(unet).square().sum()
    parameters = [p for p in unet.parameters() if p.requires_grad]
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    second = torch.autograd.grad(loss, parameters)
    swapped.restore()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("memory", LEVELS)
@pytest.mark.parametrize("linear", [False, True], ids=["convolutions", "linear"])
def test_a_layer_that_is_unfrozen_after_the_swap_is_trained_as_natively(memory: str, linear: bool) -> None:
    def unfreeze(unet: Any) -> None:
        for layer in (unet.mid_block.attentions[0].proj_out, unet.down_blocks[0].resnets[0].conv2, unet.conv_in):
            layer.requires_grad_(True)

    wanted_of: Any = with_lora(make_unet(use_linear_projection=linear))
    unfreeze(wanted_of)
    wanted = gradients(wanted_of, call_unet)
    unet = with_lora(make_unet(use_linear_projection=linear))
    swapped = swap_forwards(unet, memory=memory)  # type: ignore[arg-type]
    unfreeze(unet)
    assert worst_difference(gradients(unet, call_unet), wanted) < EXACT
    swapped.restore()

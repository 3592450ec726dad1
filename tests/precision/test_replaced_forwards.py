"""A forward that somebody else put on a layer is run, before and after the swap, and outlives its end."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.attention import BasicTransformerBlock
from torch import Tensor, nn

from fakes.models.small_models import (
    ATTENTION,
    EXACT,
    LEVELS,
    call_unet,
    gradients,
    make_unet,
    same_gradients,
    with_lora,
    worst_difference,
)
from lightning_aigc.precision.blocks.layers import CannotSwapError, check_conv2d
from lightning_aigc.precision.swaps import swap_forwards

pytestmark = pytest.mark.usefixtures("float64")


def test_a_forward_that_somebody_else_replaced_stays() -> None:
    block: Any = BasicTransformerBlock(16, 2, 8)
    block.forward = lambda x: x
    swapped = swap_forwards(block, memory="lean")
    assert "its forward was replaced before" in swapped.summary()
    swapped.restore()
    assert block.forward(3) == 3


class Kohya(nn.Module):
    """LoRA as kohya's scripts and LyCORIS put it on a layer: in the place of its forward."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        linear = isinstance(layer, nn.Linear)
        sizes = (layer.in_features, layer.out_features) if linear else (layer.in_channels, layer.out_channels)
        self.down = nn.Linear(sizes[0], 3, bias=False)
        self.up = nn.Linear(3, sizes[1], bias=False)
        self.linear = linear
        self.stride = 1 if linear else layer.stride[0]
        self.original = layer.forward
        layer.forward = self.forward

    def forward(self, x: Tensor) -> Tensor:
        if self.linear:
            return self.original(x) + self.up(self.down(x))
        branch = self.up(self.down(x.movedim(1, -1))).movedim(-1, 1)
        return self.original(x) + branch[..., :: self.stride, :: self.stride]


def patch(unet: nn.Module, targets: list[str]) -> nn.ModuleDict:
    """The U-Net and its LoRA, which is no part of it."""
    torch.manual_seed(5)
    layers = [
        m
        for name, m in unet.named_modules()
        if isinstance(m, (nn.Linear, nn.Conv2d)) and any(name.endswith(target) for target in targets)
    ]
    return nn.ModuleDict({"unet": unet, "lora": nn.ModuleList(Kohya(layer) for layer in layers)})


def call_inside(model: Any) -> Tensor:
    return call_unet(model["unet"])


@functools.cache
def native_with_lora(targets: tuple[str, ...], linear: bool) -> dict[str, Tensor]:
    """Gradients without a swap, which every memory level is compared with."""
    unet = make_unet(use_linear_projection=linear).requires_grad_(False)
    return gradients(patch(unet, list(targets)), call_inside)


@pytest.mark.parametrize("memory", LEVELS)
@pytest.mark.parametrize("linear", [False, True], ids=["convolutions", "linear"])
@pytest.mark.parametrize(
    "targets",
    [ATTENTION, ["ff.net.0.proj", "ff.net.2"], ["proj_in"], ["proj_out"], ["conv1", "conv2", "conv_shortcut"]],
    ids=lambda targets: targets[0],
)
def test_lora_in_place_of_a_layers_forward_is_trained_as_natively(
    targets: list[str], linear: bool, memory: str
) -> None:
    unet = make_unet(use_linear_projection=linear)
    unet.requires_grad_(False)
    same_gradients(patch(unet, targets), call_inside, memory)

    late = make_unet(use_linear_projection=linear).requires_grad_(False)
    swapped = swap_forwards(late, memory=memory)  # type: ignore[arg-type]
    patched, wanted = patch(late, targets), native_with_lora(tuple(targets), linear)
    assert worst_difference(gradients(patched, call_inside), wanted) < EXACT
    swapped.restore()
    assert worst_difference(gradients(patched, call_inside), wanted) == 0


def put_hook_as_accelerate_does(layer: nn.Module, after: Callable[[Tensor], Tensor]) -> None:
    old = layer.forward

    def hooked(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        return after(old(*args, **kwargs))

    vars(layer)["_old_forward"] = old
    layer.forward = functools.update_wrapper(functools.partial(hooked, layer), old)


def make_hooked(path: str, when: str, memory: str = "off") -> tuple[nn.ModuleDict, Any]:
    """A U-Net with a hook at `path`, put there before or after the swap, and the swap; "native" swaps nothing."""
    unet, scale = with_lora(make_unet()), nn.Parameter(torch.tensor(1.5))
    model, swapped = nn.ModuleDict({"unet": unet}), None
    model.register_parameter("scale", scale)
    if when == "after":
        swapped = swap_forwards(unet, memory=memory)  # type: ignore[arg-type]
    put_hook_as_accelerate_does(unet.get_submodule(path), lambda y, scale=scale: y * scale)
    if when == "before":
        swapped = swap_forwards(unet, memory=memory)  # type: ignore[arg-type]
    return model, swapped


@functools.cache
def native_with_hook(path: str) -> dict[str, Tensor]:
    """Gradients without a swap, which every memory level is compared with."""
    return gradients(make_hooked(path, "native")[0], call_inside)


@pytest.mark.parametrize("memory", LEVELS)
@pytest.mark.parametrize(
    "path",
    [
        "mid_block.attentions.0.transformer_blocks.0.attn1.to_v",
        "mid_block.attentions.0.transformer_blocks.0.attn1",
        "mid_block.attentions.0.transformer_blocks.0.ff.net.1",
        "mid_block.attentions.0.transformer_blocks.0",
        "mid_block.attentions.0.proj_out",
        "mid_block.attentions.0.norm",
        "mid_block.resnets.0",
        "mid_block.resnets.0.nonlinearity",
        "mid_block.resnets.0.dropout",
        "mid_block.resnets.0.conv2",
    ],
)
def test_a_hook_in_place_of_a_forward_is_run_before_and_after_the_swap(path: str, memory: str) -> None:
    """It has a parameter of its own, so that at max what it reads must be there when the block runs again."""
    wanted = native_with_hook(path)
    for when in ("before", "after"):
        model, swapped = make_hooked(path, when, memory)
        found = gradients(model, call_inside)
        assert "scale" in found and worst_difference(found, wanted) < EXACT
        swapped.restore()
        # The hook stays and works; under it the class's own forward runs again.
        assert "forward" in vars(model["unet"].get_submodule(path))
        assert worst_difference(gradients(model, call_inside), wanted) == 0


def test_a_copys_own_forwards_are_not_taken_for_somebody_elses() -> None:
    unet: Any = make_unet()
    unet.requires_grad_(False)
    swap_forwards(unet, memory="lean")
    twin = copy.deepcopy(unet)
    for model in (unet, twin):
        check_conv2d(model.mid_block.resnets[0].conv1)
        assert vars(model.mid_block.resnets[0].conv1)["forward"].__self__ is model.mid_block.resnets[0].conv1
    twin.conv_in.forward = twin.conv_out.forward
    with pytest.raises(CannotSwapError, match="other code replaced"):
        check_conv2d(twin.conv_in)

"""A protected module, or the part of a swapped block that it lies in, stays out of everything lossy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from fakes.models.small_models import EXACT, call_unet, call_with, gradients, make_unet, with_lora, worst_difference
from lightning_aigc.errors import ConfigError
from lightning_aigc.precision import FusedBackwardPrecision
from lightning_aigc.precision.block_options import BlockOptions
from lightning_aigc.precision.context import options_of
from lightning_aigc.precision.swaps import swap_forwards

pytestmark = pytest.mark.usefixtures("float64")
LOSSY: dict[str, Any] = {"grad_dtype": torch.float32, "input_grad_density": 0.5, "attention_grad_density": 0.3}


def test_a_protected_module_stays_exact_under_every_lossy_option() -> None:
    unet = with_lora(make_unet())
    wanted = gradients(unet, call_unet)
    lossy: dict[str, Any] = {"memory": "lean", "grad_dtype": torch.float16}
    lossy |= {"input_grad_density": 0.5, "attention_grad_density": 0.5}
    swapped = swap_forwards(unet, protect=["*"], **lossy)
    assert worst_difference(gradients(unet, call_unet), wanted) < EXACT
    swapped.restore()
    swapped = swap_forwards(unet, **lossy)
    assert worst_difference(gradients(unet, call_unet), wanted) > 0.05
    swapped.restore()
    # The last block of the backward's way in: nothing lossy lies between it and the loss.
    swapped = swap_forwards(unet, protect=["up_blocks.1"], **lossy)
    ours = gradients(unet, call_unet)
    swapped.restore()
    last = {name: grad for name, grad in wanted.items() if "up_blocks.1" in name}
    assert worst_difference({name: ours[name] for name in last}, last) < EXACT


def lossy_gradients(unet: nn.Module, **changes: Any) -> dict[str, Tensor]:
    swapped = swap_forwards(unet, memory="lean", **LOSSY | changes)
    found = gradients(unet, call_unet)
    swapped.restore()
    return found


@pytest.mark.parametrize("pattern", ["attn1", "*.attn2", "to_q", "ff", "norm1", "conv2", "to_out.0.lora_A", "proj_in"])
def test_a_pattern_below_a_swapped_block_changes_gradients(pattern: str) -> None:
    unet = with_lora(make_unet())
    assert worst_difference(lossy_gradients(unet, protect=[pattern]), lossy_gradients(unet)) > 0


@pytest.mark.parametrize(
    ("pattern", "exact", "lossy"),
    [
        ("attn1", ("attn1", "norm1"), ("attn2", "ff")),
        ("attn2", ("attn2", "norm2"), ("attn1", "ff")),
        ("to_q", ("attn1", "attn2"), ("ff",)),
        ("norm1", ("attn1", "norm1"), ("attn2",)),
        ("norm3", ("ff", "norm3"), ("attn1",)),
        ("ff.net.0", ("ff", "norm3"), ("attn1",)),
        ("*", ("",), ()),
    ],
)
def test_a_transformers_protected_part_is_exact_by_itself(
    pattern: str, exact: tuple[str, ...], lossy: tuple[str, ...]
) -> None:
    """Each part alone between the loss and its own parameters, so that no other part's loss reaches them."""
    for last in ("attn1", "attn2", "ff"):
        torch.manual_seed(0)
        block: Any = BasicTransformerBlock(16, 2, 8, cross_attention_dim=12)
        behind = {"attn1": (block.attn2, block.ff), "attn2": (block.ff,), "ff": ()}[last]
        for part in behind:  # what lies between the part and the loss passes its gradient on as it is
            for name, parameter in part.named_parameters():
                if name.startswith(("to_out", "net.2")):
                    torch.nn.init.zeros_(parameter)
        call = call_with((2, 7, 16), encoder_hidden_states=torch.randn(2, 5, 12))
        wanted = gradients(block, call)
        swapped = swap_forwards(block, memory="lean", protect=[pattern], **LOSSY)
        ours = gradients(block, call)
        swapped.restore()
        for part in (*exact, *lossy):
            if part and part != last:
                continue
            names = [name for name in wanted if name.startswith(part or last)]
            difference = worst_difference({n: ours[n] for n in names}, {n: wanted[n] for n in names})
            assert (difference < EXACT) is (part in exact), (last, part, difference)


def test_a_resnets_halves_are_protected_apart_and_the_rest_with_both() -> None:
    found = {}
    for pattern in ("norm1", "conv1", "norm2", "conv2", "conv_shortcut", "time_emb_proj"):
        resnet = ResnetBlock2D(in_channels=8, out_channels=12, groups=4, temb_channels=6)
        swap_forwards(resnet, memory="lean", protect=[pattern], **LOSSY)
        choices = options_of(resnet)
        found[pattern] = tuple(part for part in ("norm1", "norm2") if choices.for_part(part) == BlockOptions("lean"))
    first, second = dict.fromkeys(("norm1", "conv1"), ("norm1",)), dict.fromkeys(("norm2", "conv2"), ("norm2",))
    assert found == first | second | dict.fromkeys(("conv_shortcut", "time_emb_proj"), ("norm1", "norm2"))


def test_a_compiled_model_takes_the_names_that_its_source_has() -> None:
    unet = with_lora(make_unet())
    compiled = nn.ModuleDict({"unet": torch.compile(unet, backend="eager")})
    plugin = FusedBackwardPrecision("32-true", protect=["unet.mid_block"], input_grad_density=0.5)
    plugin.convert_module(compiled)
    densities = {name: options_of(unet.get_submodule(name)).input_grad_density for name in ("mid_block.resnets.0",
                 "mid_block.attentions.0", "up_blocks.0.resnets.0")}  # fmt: skip
    assert list(densities.values()) == [1.0, 1.0, 0.5]
    plugin.teardown()


@pytest.mark.parametrize("memory", ["off", "lean"])
def test_a_pattern_that_covers_nothing_is_refused_at_every_level(memory: Any) -> None:
    with pytest.raises(ConfigError, match=r"protect pattern 'nonsense\.name' covers no module"):
        FusedBackwardPrecision("32-true", memory=memory, protect=["nonsense.name"]).convert_module(make_unet())

"""Blocks of diffusion transformers on fused ops: what the class's own forward gives, and calls that are left to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fakes.models.tiny_transformers import TEXT, Given, flux, flux2, qwen, sd3, sd3_without_norms, z_image
from lightning_aigc.precision.blocks import mmdit, stream_attention
from lightning_aigc.precision.blocks.layers import CannotSwapError, class_path
from lightning_aigc.precision.blocks.mmdit import FORWARDS, forward_for
from lightning_aigc.precision.memory.selective import kind_of
from lightning_aigc.precision.swaps import swap_forwards

LORA = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "to_qkv_mlp_proj"]


def qwen_padded() -> tuple[nn.Module, Given]:
    """One text of five tokens, and padding that would be seen: far larger than any token."""
    model, given = qwen()
    mask = torch.ones(2, TEXT, dtype=torch.bool)
    mask[1, 5:] = False
    given["encoder_hidden_states"][1, 5:] = 100 * torch.randn(TEXT - 5, given["encoder_hidden_states"].shape[-1])
    return model, given | {"encoder_hidden_states_mask": mask}


def z_image_padded() -> tuple[nn.Module, Given]:
    """diffusers pads texts to a multiple of 32 with a token that takes part, and from there to the longest without."""
    return z_image((9, 40))


FAMILIES = [sd3, sd3_without_norms, flux, flux2, qwen, qwen_padded, z_image, z_image_padded]
Run = Callable[[], dict[str, Tensor]]


def double(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        return [double(part) for part in value]
    return value


def prepared(make: Callable[[], tuple[nn.Module, Given]]) -> tuple[nn.Module, Run]:
    """The model in float64 with a LoRA, all modulation and norms at work, and a step: its output and gradients."""
    torch.manual_seed(0)
    model, given = make()
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=4, target_modules=LORA))  # type: ignore[operator]
    for name, parameter in model.named_parameters():
        if "lora_B" in name or parameter.ndim == 1:
            nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, std=0.1)
    model.double()
    given = {name: double(value) for name, value in given.items()}

    def step() -> dict[str, Tensor]:
        model.zero_grad()
        output = model(**given, return_dict=False)[0]
        output = torch.stack(output) if isinstance(output, list) else output
        output.square().mean().backward()
        return {"output": output.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    return model.train(), step


@pytest.fixture
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Blocks on a device with kernels: the class of each block that a fused forward served, or "not" and the class."""
    served: list[str] = []

    def recording(path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                result = forward(self, *args, **kwargs)
            except CannotSwapError:
                served.append(f"not {path}")
                raise
            served.append(path)
            return result

        return call

    monkeypatch.setattr(mmdit, "KERNEL_DEVICES", ("cpu",))
    for path, forward in FORWARDS.items():
        monkeypatch.setitem(FORWARDS, path, recording(path, forward))
    return served


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # FLUX.2's own, of torch's RMSNorm
@pytest.mark.parametrize("make", FAMILIES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("level", ["balanced", "lean", "max"])
def test_a_fused_block_gives_what_its_class_gives(
    make: Callable[[], tuple[nn.Module, Given]], level: Any, on_kernels: list[str]
) -> None:
    model, step = prepared(make)
    native = step()
    assert not on_kernels
    swapped = swap_forwards(model, memory=level)
    blocks = {class_path(module) for module in model.modules()} & FORWARDS.keys()
    for _ in range(2):  # the second knows what backward reads
        on_kernels.clear()
        fused = step()
        assert set(on_kernels) == blocks
    swapped.restore()
    assert fused.keys() == native.keys()
    for name, expected in native.items():
        # Rotations and softmax statistics in float32 on either side.
        torch.testing.assert_close(fused[name], expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()), msg=name)


class Attentions(TorchDispatchMode):
    """Counts the attentions that run."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += kind_of(func) == "attention"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [sd3, flux2, qwen_padded], ids=lambda make: make.__name__)
def test_a_balanced_level_repeats_no_attention(
    make: Callable[[], tuple[nn.Module, Given]], on_kernels: list[str]
) -> None:
    model, step = prepared(make)
    swapped = swap_forwards(model, memory="off")
    with Attentions() as native:
        step()
    swapped.restore()
    swap_forwards(model, memory="balanced")
    counts = []
    for _ in range(2):  # the first learns what a block makes
        with Attentions() as ran:
            step()
        counts.append(ran.count)
    assert on_kernels and counts == [2 * native.count, native.count]


def test_without_kernels_a_block_keeps_its_own_forward() -> None:
    model, _ = sd3()
    assert forward_for(model.transformer_blocks[0], torch.device("cpu")) is None  # type: ignore[index,union-attr]


@pytest.mark.parametrize("kind", ["hook", "processor"])
def test_a_call_that_no_fused_forward_serves_runs_its_class(kind: str, on_kernels: list[str]) -> None:
    make = {"hook": flux2, "processor": sd3}[kind]
    model, given = make()
    seen: list[nn.Module] = []
    if kind == "hook":
        for block in (*model.transformer_blocks, *model.single_transformer_blocks):  # type: ignore[misc]
            block.attn.register_forward_hook(lambda module, *_: seen.append(module))
    else:

        class Other(diffusers.models.attention_processor.JointAttnProcessor2_0):
            pass

        model.set_attn_processor(Other())  # type: ignore[operator]

    def step() -> Tensor:
        output = model(**given, return_dict=False)[0]
        output = torch.stack(output) if isinstance(output, list) else output
        output.square().mean().backward()
        result: Tensor = output.detach()
        return result

    native = step()
    seen.clear()
    swapped = swap_forwards(model, memory="lean")
    assert torch.equal(step(), native)
    assert kind != "hook" or seen
    assert on_kernels and all(name.startswith("not ") for name in on_kernels)
    swapped.restore()


def test_the_attention_says_what_it_does_not_serve() -> None:
    model, _ = sd3()
    attention: Any = model.transformer_blocks[1].attn  # type: ignore[index,union-attr]
    stream_attention.check_attention(attention)
    attention.norm_k = nn.LayerNorm(32)
    with pytest.raises(CannotSwapError, match="not of one kind"):
        stream_attention.check_attention(attention)


def test_a_mask_is_one_of_tokens_that_take_part_or_left_to_the_class() -> None:
    mask = torch.tensor([[True, False]])
    assert torch.equal(stream_attention.key_bias_of(mask), torch.tensor([[0.0, -torch.inf]]))  # type: ignore[arg-type]
    for other in (mask.float(), mask[:, None, None]):
        with pytest.raises(CannotSwapError, match="a mask of"):
            stream_attention.key_bias_of(other)

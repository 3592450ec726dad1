"""joint_attention in the place of diffusers' attention processors: their outputs and gradients, with less kept."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import Attention, JointAttnProcessor2_0
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxPosEmbed
from diffusers.models.transformers.transformer_flux2 import (
    Flux2Attention,
    Flux2ParallelSelfAttention,
    Flux2PosEmbed,
)
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0, QwenEmbedRope
from diffusers.models.transformers.transformer_z_image import RopeEmbedder, ZSingleStreamAttnProcessor
from torch import Tensor, nn

from fakes.kept_bytes import kept_bytes
from lightning_aigc_kernels import AttentionStream, joint_attention, rotary_from_complex, rotary_from_repeated

HEADS, FEATURES = 2, 32
WIDTH = HEADS * FEATURES
TEXT, SIDE = 20, 6
PICTURE = SIDE * SIDE
AXES = [8, 12, 12]
Rotary = tuple[Tensor, Tensor]
Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Family:
    """An attention module, and how its model and how we call it, with the picture's tokens first and the text's."""

    make: Callable[[], nn.Module]
    native: Callable[..., Any]
    ours: Callable[..., Outputs]
    text: bool = True


def text_stream(attn: Any, text: Tensor, rotary: Rotary | tuple[()] = ()) -> AttentionStream:
    projected = attn.add_q_proj(text), attn.add_k_proj(text), attn.add_v_proj(text)
    return AttentionStream(*projected, weight_of(attn.norm_added_q), weight_of(attn.norm_added_k), *rotary)


def picture_stream(attn: Any, picture: Tensor, rotary: Rotary | tuple[()] = ()) -> AttentionStream:
    projected = attn.to_q(picture), attn.to_k(picture), attn.to_v(picture)
    return AttentionStream(*projected, weight_of(attn.norm_q), weight_of(attn.norm_k), *rotary)


def weight_of(norm: Any) -> Tensor | None:
    return None if norm is None else norm.weight


def attend(attn: Any, *streams: AttentionStream) -> list[Tensor]:
    options: dict[str, Any] = {"norm": False} if attn.norm_q is None else {"eps": attn.norm_q.eps}
    return joint_attention(streams, HEADS, **options)[0]


def ids(axes: int, tokens: int) -> Tensor:
    return torch.stack([torch.arange(tokens) * (axis + 1) % 7 for axis in range(axes)], 1)


def flux_rotary(embed: Any, axes: int, tokens: int) -> Rotary:
    cos, sin = embed(ids(axes, tokens))
    return cos, sin


def sd3(attn: Any, picture: Tensor, text: Tensor) -> Outputs:
    picture, text = attend(attn, picture_stream(attn, picture), text_stream(attn, text))
    return attn.to_out[0](picture), text if attn.context_pre_only else attn.to_add_out(text)


def sd35_second(attn: Any, picture: Tensor) -> Outputs:
    return (attn.to_out[0](attend(attn, picture_stream(attn, picture))[0]),)


def flux(attn: Any, picture: Tensor, text: Tensor, *, rotary: Rotary) -> Outputs:
    cos, sin = rotary
    rotary_of_text, rotary_of_picture = (cos[:TEXT], sin[:TEXT]), (cos[TEXT:], sin[TEXT:])
    text, picture = attend(
        attn, text_stream(attn, text, rotary_of_text), picture_stream(attn, picture, rotary_of_picture)
    )
    return attn.to_out[0](picture), attn.to_add_out(text)


def flux_single(attn: Any, joined: Tensor, *, rotary: Rotary) -> Outputs:
    return tuple(attend(attn, picture_stream(attn, joined, rotary)))


def flux2_single(attn: Any, joined: Tensor, *, rotary: Rotary) -> Outputs:
    *qkv, mlp = attn.to_qkv_mlp_proj(joined).split([WIDTH] * 3 + [attn.mlp_hidden_dim * attn.mlp_mult_factor], -1)
    stream = AttentionStream(*qkv, attn.norm_q.weight, attn.norm_k.weight, *rotary)
    return (attn.to_out(torch.cat([attend(attn, stream)[0], attn.mlp_act_fn(mlp)], -1)),)


def qwen(attn: Any, picture: Tensor, text: Tensor) -> Outputs:
    of_picture, of_text = QWEN_REAL
    text, picture = attend(attn, text_stream(attn, text, of_text), picture_stream(attn, picture, of_picture))
    return attn.to_out[0](picture), attn.to_add_out(text)


def z_image(attn: Any, joined: Tensor) -> Outputs:
    return (attn.to_out[0](attend(attn, picture_stream(attn, joined, Z_IMAGE_REAL))[0]),)


def attention(processor: Any, **options: Any) -> nn.Module:
    return Attention(WIDTH, dim_head=FEATURES, heads=HEADS, processor=processor(), **options)


joint = {"added_kv_proj_dim": WIDTH, "out_dim": WIDTH, "bias": True, "context_pre_only": False}
flux_sizes = {"query_dim": WIDTH, "heads": HEADS, "dim_head": FEATURES, "bias": True, "eps": 1e-6}
SAMPLES = 2
FLUX, FLUX_ALONE = (flux_rotary(FluxPosEmbed(10000, AXES), 3, n) for n in (TEXT + PICTURE, PICTURE))
FLUX2, FLUX2_ALONE = (flux_rotary(Flux2PosEmbed(2000, [8] * 4), 4, n) for n in (TEXT + PICTURE, PICTURE))
QWEN = QwenEmbedRope(10000, AXES, scale_rope=True)([(1, SIDE, SIDE)], torch.device("cpu"), TEXT)
"""Complex, of the picture and of the text."""
QWEN_REAL = [rotary_from_complex(freqs) for freqs in QWEN]
Z_ROPE = RopeEmbedder(axes_dims=AXES, axes_lens=[64] * 3)
Z_IMAGE = torch.stack([Z_ROPE(ids(3, PICTURE) + sample) for sample in range(SAMPLES)])
"""Complex, [N, T, D/2], as where each sample's picture has another shape."""
Z_IMAGE_REAL = rotary_from_complex(Z_IMAGE)


def with_text(attn: Any, picture: Tensor, text: Tensor, **options: Any) -> Any:
    return attn(picture, encoder_hidden_states=text, **options)


def without_text(attn: Any, joined: Tensor, **options: Any) -> Any:
    return (attn(joined, **options),)


FAMILIES = {
    "SD 3": Family(partial(attention, JointAttnProcessor2_0, **joint), with_text, sd3),
    "SD 3.5": Family(partial(attention, JointAttnProcessor2_0, qk_norm="rms_norm", eps=1e-6, **joint), with_text, sd3),
    "SD 3.5, last block": Family(
        partial(attention, JointAttnProcessor2_0, qk_norm="rms_norm", **(joint | {"context_pre_only": True})),
        with_text,
        sd3,
    ),
    "SD 3.5, second attention": Family(
        partial(attention, JointAttnProcessor2_0, qk_norm="rms_norm", bias=True), without_text, sd35_second, text=False
    ),
    "FLUX.1 double": Family(
        partial(FluxAttention, **flux_sizes, added_kv_proj_dim=WIDTH, context_pre_only=False, out_dim=WIDTH),
        partial(with_text, image_rotary_emb=FLUX),
        partial(flux, rotary=rotary_from_repeated(*FLUX)),
    ),
    "FLUX.1 single": Family(
        partial(FluxAttention, **flux_sizes, pre_only=True, out_dim=WIDTH),
        partial(without_text, image_rotary_emb=FLUX_ALONE),
        partial(flux_single, rotary=rotary_from_repeated(*FLUX_ALONE)),
        text=False,
    ),
    "FLUX.2 double": Family(
        partial(Flux2Attention, **flux_sizes, added_kv_proj_dim=WIDTH, out_dim=WIDTH),
        partial(with_text, image_rotary_emb=FLUX2),
        partial(flux, rotary=rotary_from_repeated(*FLUX2)),
    ),
    "FLUX.2 single": Family(
        partial(Flux2ParallelSelfAttention, **flux_sizes, out_dim=WIDTH, mlp_ratio=3.0),
        partial(without_text, image_rotary_emb=FLUX2_ALONE),
        partial(flux2_single, rotary=rotary_from_repeated(*FLUX2_ALONE)),
        text=False,
    ),
    "Qwen-Image": Family(
        partial(attention, QwenDoubleStreamAttnProcessor2_0, qk_norm="rms_norm", eps=1e-6, **joint),
        partial(with_text, image_rotary_emb=QWEN),
        qwen,
    ),
    "Z-Image": Family(
        partial(attention, ZSingleStreamAttnProcessor, qk_norm="rms_norm", eps=1e-5, bias=False, out_bias=False),
        partial(without_text, freqs_cis=Z_IMAGE),
        z_image,
        text=False,
    ),
}
families = pytest.mark.parametrize("name", FAMILIES)


def made(family: Family, dtype: torch.dtype, seed: int = 0) -> tuple[nn.Module, list[Tensor]]:
    """The attention with norms that matter, and its inputs, rounded to `dtype`."""
    torch.manual_seed(seed)
    attn = family.make().to(dtype)
    with torch.no_grad():
        for name, parameter in attn.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 2)
    tokens = [PICTURE, TEXT] if family.text else [PICTURE]
    return attn, [torch.randn(SAMPLES, length, WIDTH).to(dtype) for length in tokens]


def outcome(call: Callable[..., Outputs], attn: nn.Module, inputs: list[Tensor]) -> dict[str, Tensor]:
    """The outputs and every gradient."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    outputs = call(attn, *leaves)
    generator = torch.Generator().manual_seed(1)
    weighed = [(y * torch.randn(y.shape, generator=generator).to(y.dtype)).sum() for y in outputs]
    parameters = dict(attn.named_parameters())
    grads = torch.autograd.grad(sum(weighed), [*leaves, *parameters.values()], allow_unused=True)
    found = {f"y{i}": y.detach() for i, y in enumerate(outputs)}
    names = [f"input{i}" for i in range(len(leaves))] + list(parameters)
    return found | {name: grad for name, grad in zip(names, grads, strict=True) if grad is not None}


def relative_error(found: Tensor, truth: Tensor) -> float:
    return ((found.double() - truth.double()).norm() / truth.double().norm().clamp_min(1e-3)).item()


@families
def test_outputs_and_gradients_are_the_processors(name: str) -> None:
    family = FAMILIES[name]
    attn, inputs = made(family, torch.float32)
    theirs, ours = (outcome(call, attn, inputs) for call in (family.native, family.ours))
    assert ours.keys() == theirs.keys()
    for key, expected in theirs.items():
        assert ours[key].shape == expected.shape, key
        assert relative_error(ours[key], expected) < 3e-6, key


@families
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_errors_against_float64_are_at_most_the_processors(dtype: torch.dtype, name: str) -> None:
    """Errors of all gradients and outputs. Float64 runs ours: the processors' norms stay in float32."""
    family = FAMILIES[name]
    ratios: dict[str, list[float]] = {"outputs": [], "gradients": []}
    for seed in range(9):
        attn, inputs = made(family, dtype, seed)
        theirs, ours = (outcome(call, attn, inputs) for call in (family.native, family.ours))
        truth = outcome(family.ours, attn.double(), [tensor.double() for tensor in inputs])
        for kind in ratios:
            keys = [key for key in truth if key.startswith("y") == (kind == "outputs")]
            squares = [sum(relative_error(of[key], truth[key]) ** 2 for key in keys) for of in (ours, theirs)]
            ratios[kind].append((squares[0] / squares[1]) ** 0.5)
    worst = {kind: statistics.median(found) for kind, found in ratios.items()}
    assert max(worst.values()) <= 1.05, worst


@families
def test_projections_and_the_attentions_output_are_kept_alone(name: str) -> None:
    family = FAMILIES[name]
    attn, inputs = made(family, torch.bfloat16)
    attn.requires_grad_(False)
    leaves = [tensor.requires_grad_() for tensor in inputs]
    theirs, ours = (kept_bytes(attn, lambda m, call=call: call(m, *leaves)) for call in (family.native, family.ours))
    one = sum(tensor.nbytes for tensor in inputs)
    small = 0.6 * one  # float32 softmax sums, cos and sin: with more samples and heads they are less
    mlp = one * attn.mlp_ratio * 4 if isinstance(attn, Flux2ParallelSelfAttention) else 0  # gate, up and products
    # The input, the projections, the attention's output, and the module's output, which is no part of what is kept.
    assert ours <= 6 * one + mlp + small
    assert theirs >= ours + (4 * one if attn.norm_q is not None else 0)  # measured: 4.6 to 7.1, Qwen-Image 43


def test_any_layer_makes_the_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    """LoRA of peft on all eight layers of both streams, trained alone."""
    from peft import LoraConfig, inject_adapter_in_model

    family = FAMILIES["FLUX.1 double"]
    attn, inputs = made(family, torch.float32)
    targets = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
    inject_adapter_in_model(LoraConfig(r=2, target_modules=targets, init_lora_weights=False), attn)
    for name, parameter in attn.named_parameters():
        parameter.requires_grad_("lora" in name)

    def gradients(call: Callable[..., Outputs]) -> dict[str, Tensor]:
        attn.zero_grad()
        sum(y.square().sum() for y in call(attn, *inputs)).backward()  # type: ignore[union-attr]
        return {name: p.grad.clone() for name, p in attn.named_parameters() if p.grad is not None}

    theirs, ours = gradients(family.native), gradients(family.ours)
    assert len(theirs) == 16
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-4, atol=1e-5)

"""Equal text tokens that run as one: the same function and gradients as all of them, as in SD 3 without T5."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import SD3ControlNetModel, SD3Transformer2DModel
from torch import Tensor, nn

from lightning_aigc.diffusion import DiffusionLoRA
from lightning_aigc.diffusion.families import TRANSFORMERS
from lightning_aigc.diffusion.pipeline.loading import load_components
from lightning_aigc.precision import FusedBackwardPrecision
from lightning_aigc.precision.blocks import mmdit
from lightning_aigc.precision.blocks.equal_tokens import EqualTokensProcessor, run_equal_tokens_once

FIRST, COUNT, WIDTH = 5, 32, 24


def network(kind: Any = SD3Transformer2DModel, **options: Any) -> Any:
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 3,
        "attention_head_dim": 8, "num_attention_heads": 2, "joint_attention_dim": WIDTH, "caption_projection_dim": 16,
        "pooled_projection_dim": 12, "pos_embed_max_size": 8,
    }  # fmt: skip
    return kind(**(config | options)).double()


def inputs(tokens: int = FIRST + COUNT, samples: int = 2) -> dict[str, Any]:
    torch.manual_seed(1)
    text_BTD = torch.randn(samples, tokens, WIDTH, dtype=torch.float64)
    if tokens > FIRST:
        text_BTD[:, FIRST:] = text_BTD[:1, FIRST : FIRST + 1]
    return {
        "hidden_states": torch.randn(samples, 4, 8, 8, dtype=torch.float64), "timestep": torch.tensor([100.0, 800.0]),
        "encoder_hidden_states": text_BTD, "pooled_projections": torch.randn(samples, 12, dtype=torch.float64),
        "return_dict": False,
    }  # fmt: skip


def gradients(module: nn.Module, given: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    output: Tensor = module(**given)[0]
    output.square().sum().backward()  # type: ignore[no-untyped-call]
    return output, {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "options",
    [{}, {"qk_norm": "rms_norm"}, {"qk_norm": "rms_norm", "dual_attention_layers": (0, 1)}],
    ids=["plain", "norms", "second attention"],
)
def test_one_token_for_all_is_the_same_function(options: dict[str, Any]) -> None:
    plain = network(**options)
    once = copy.deepcopy(plain)
    run_equal_tokens_once(once, FIRST, COUNT)
    seen: list[int] = []
    once.transformer_blocks[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["encoder_hidden_states"].shape[1]), with_kwargs=True
    )
    wanted, wanted_gradients = gradients(plain, inputs())
    found, found_gradients = gradients(once, inputs())
    assert seen == [FIRST + 1]
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)  # norms are in float32
    assert set(found_gradients) == set(wanted_gradients)
    for name, gradient in wanted_gradients.items():
        torch.testing.assert_close(found_gradients[name], gradient, rtol=1e-5, atol=1e-5, msg=name)


def test_a_controlnet_answers_the_same() -> None:
    plain = network(SD3ControlNetModel)
    for zero in plain.controlnet_blocks:
        nn.init.normal_(zero.weight)
    once = copy.deepcopy(plain)
    run_equal_tokens_once(once, FIRST, COUNT)
    given = {**inputs(), "controlnet_cond": torch.randn(2, 4, 8, 8, dtype=torch.float64)}
    with torch.no_grad():
        torch.testing.assert_close(once(**given)[0], plain(**given)[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tokens", [FIRST, FIRST + COUNT - 1])
def test_a_text_of_another_length_runs_as_it_is(tokens: int) -> None:
    plain = network()
    once = copy.deepcopy(plain)
    run_equal_tokens_once(once, FIRST, COUNT)
    with torch.no_grad():
        assert torch.equal(once(**inputs(tokens))[0], plain(**inputs(tokens))[0])


def test_an_attention_of_somebody_else_keeps_all_tokens() -> None:
    class Own:
        def __call__(self, attn: Any, hidden_states: Tensor, **given: Any) -> Any: ...

    other = network()
    other.transformer_blocks[1].attn.set_processor(Own())
    run_equal_tokens_once(other, FIRST, COUNT)
    assert not any(isinstance(module, EqualTokensProcessor) for module in other.attn_processors.values())
    assert not other._forward_pre_hooks


@pytest.mark.parametrize("memory", ["off", "lean", "max"])
def test_memory_levels_and_fused_blocks_compute_it(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmdit, "KERNEL_DEVICES", ("cpu",))  # as on a card, with the references
    plain = network(qk_norm="rms_norm")
    once = copy.deepcopy(plain)
    run_equal_tokens_once(once, FIRST, COUNT)
    precision = FusedBackwardPrecision("32-true", memory=memory)
    swapped = precision.convert_module(once)
    given = {name: v.float() if torch.is_tensor(v) else v for name, v in inputs().items()}
    wanted, wanted_gradients = gradients(plain.float(), given)
    found, found_gradients = gradients(swapped.float(), given)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    for name, gradient in wanted_gradients.items():
        torch.testing.assert_close(found_gradients[name], gradient, rtol=1e-3, atol=1e-3, msg=name)


def test_a_pipeline_without_t5_runs_its_zeros_once(transformers: Callable[[str], str]) -> None:
    module = DiffusionLoRA(transformers("sd3"), rank=2)
    module.configure_model()
    parts = module.loaded()
    condition = TRANSFORMERS["sd3"].encode_prompts(parts, ["a red cup"], torch.device("cpu"))
    first = int(parts.tokenizers[0].model_max_length)
    processors = list(parts.denoiser.attn_processors.values())
    assert [(p.tokens, p.count) for p in processors if isinstance(p, EqualTokensProcessor)]
    assert condition["prompt_embeds"].shape[1] == first + 256 and not condition["prompt_embeds"][:, first:].any()


def test_a_pipeline_with_t5_is_left_alone(transformers: Callable[[str], str]) -> None:
    parts = load_components(transformers("sd3"), families=("sd3",))
    with_t5: Any = parts
    with_t5.tokenizers = (*parts.tokenizers, parts.tokenizers[0])
    fresh = SD3Transformer2DModel.from_config(parts.denoiser.config)
    TRANSFORMERS["sd3"].prepare(fresh, with_t5)
    assert not fresh._forward_pre_hooks

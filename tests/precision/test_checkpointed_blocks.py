"""Blocks of diffusion transformers at each level and to a budget: fewer bytes kept, gradients equal to the bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fakes.kept_bytes import kept_bytes
from fakes.models.graphed_denoisers import Run, same
from fakes.models.tiny_transformers import chroma, flux2, krea2, qwen_edit, sd3, z_image
from fakes.runs.cpu_bits import HAS_EQUAL_BITS
from lightning_aigc.precision.block_options import UNLIMITED, SaveLimit
from lightning_aigc.precision.blocks import mmdit
from lightning_aigc.precision.memory import selective
from lightning_aigc.precision.memory.budget import MemoryBudget
from lightning_aigc.precision.memory.profile import LastRunProfile
from lightning_aigc.precision.memory.selective import save_and_reuse
from lightning_aigc.precision.swaps import swap_forwards
from lightning_aigc.quantization import quantize_frozen_

Call = Callable[[nn.Module], Tensor]


def z_image_of_unequal_texts() -> tuple[nn.Module, dict[str, Any]]:
    return z_image(text=(5, 9))


@pytest.fixture(params=[sd3, z_image_of_unequal_texts, flux2], ids=lambda make: make.__name__)
def model_and_call(request: pytest.FixtureRequest) -> tuple[nn.Module, Call]:
    return with_lora(request.param)


def with_lora(make: Callable[[], tuple[nn.Module, dict[str, Any]]], dropout: float = 0.1) -> tuple[nn.Module, Call]:
    torch.manual_seed(0)
    model, given = make()
    model.requires_grad_(False)
    targets = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "to_qkv_mlp_proj"]
    model.add_adapter(LoraConfig(r=4, target_modules=targets, lora_dropout=dropout))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)

    def call(transformer: nn.Module) -> Tensor:
        torch.manual_seed(1)  # for the LoRA's dropout
        output = transformer(**given, return_dict=False)[0]
        return torch.stack(output) if isinstance(output, list) else output

    return model.train(), call


def gradients(model: nn.Module, call: Call) -> dict[str, Tensor]:
    model.zero_grad()
    call(model).float().square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def are_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def farthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest distance of two gradients, as a share of the second's length."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).norm() / other[name].norm().clamp(min=1e-12)) for name in other)


def test_a_leaner_level_keeps_less_and_no_gradient_changes_by_a_bit(model_and_call: tuple[nn.Module, Call]) -> None:
    model, call = model_and_call
    native = gradients(model, call)
    kept = {"off": kept_bytes(model, call)}
    for level in ("balanced", "lean", "max"):
        swapped = swap_forwards(model, memory=level)  # type: ignore[arg-type]
        for _ in range(2):  # the second saves less: it knows what backward reads
            assert are_equal(gradients(model, call), native), level
        kept[level] = kept_bytes(model, call)
        swapped.restore()
    assert kept["off"] > kept["balanced"] > kept["lean"] > kept["max"]
    assert kept["lean"] < 0.4 * kept["off"]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # Krea 2's own, of torch's RMSNorm
@pytest.mark.parametrize("quantized", [None, "int8", "nf4"])
@pytest.mark.parametrize("make", [qwen_edit, chroma, krea2], ids=lambda make: make.__name__)
def test_blocks_without_a_fused_forward_keep_their_gradients_at_each_level(make: Any, quantized: Any) -> None:
    """2511's second condition, Chroma's mask of weights and Krea 2's grouped heads reach the blocks' second run."""
    model, call = with_lora(make)
    if quantized is not None:
        quantize_frozen_(model, quantized)
    native, kept = gradients(model, call), [kept_bytes(model, call)]
    for level in ("balanced", "lean", "max"):
        swapped = swap_forwards(model, memory=level)  # type: ignore[arg-type]
        for _ in range(2):
            assert are_equal(gradients(model, call), native), level
        kept.append(kept_bytes(model, call))
        swapped.restore()
    assert kept == sorted(kept, reverse=True) and kept[-1] < 0.35 * kept[0]


def test_a_budget_is_met_and_says_what_it_repeats(model_and_call: tuple[nn.Module, Call]) -> None:
    model, call = model_and_call
    native, all_kept = gradients(model, call), kept_bytes(model, call)
    found = []
    for share in (0.35, 0.6):
        swapped = swap_forwards(model, memory=MemoryBudget(kept=share))
        for _ in range(2):
            assert are_equal(gradients(model, call), native)
        found.append(kept_bytes(model, call))
        assert found[-1] <= 1.03 * share * all_kept
        swapped.restore()
    assert found[0] < found[1]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # FLUX.2's own, of torch's RMSNorm
@pytest.mark.parametrize("quantized", [None, "nf4"])
def test_levels_train_under_autocast_and_on_a_packed_base(
    model_and_call: tuple[nn.Module, Call], quantized: str | None
) -> None:
    model, call = model_and_call
    if quantized is not None:
        quantize_frozen_(model, quantized)  # type: ignore[arg-type]

    def in_bfloat16(transformer: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return call(transformer)

    native = gradients(model, in_bfloat16)
    for level in ("balanced", "lean", "max"):
        swapped = swap_forwards(model, memory=level)  # type: ignore[arg-type]
        for _ in range(2):
            assert farthest(gradients(model, in_bfloat16), native) <= (0.0 if HAS_EQUAL_BITS else 0.02), level
        swapped.restore()


def test_a_pass_of_backward_may_be_repeated(model_and_call: tuple[nn.Module, Call]) -> None:
    model, call = model_and_call
    native = gradients(model, call)
    swapped = swap_forwards(model, memory="lean")
    model.zero_grad()
    loss = call(model).float().square().mean()
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    assert are_equal({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, native)
    swapped.restore()


LEVELS = ("balanced", "lean", "max", MemoryBudget(kept=0.35))


def unet() -> tuple[nn.Module, dict[str, Any]]:
    kinds = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
    kinds |= {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
    model = diffusers.UNet2DConditionModel(
        sample_size=8, layers_per_block=1, block_out_channels=(32, 64), norm_num_groups=8, attention_head_dim=8,
        cross_attention_dim=32, **kinds,
    )  # fmt: skip
    given = {"sample": torch.randn(1, 4, 8, 8), "timestep": 3, "encoder_hidden_states": torch.randn(1, 3, 32)}
    return model, given


def scaled(model: nn.Module, call: Call) -> Tensor:
    """A forward as diffusers' `scale` makes it: the layers' scaling is changed for its time alone."""
    layers = [part for part in model.modules() if isinstance(part, LoraLayer)]
    for layer in layers:
        layer.scale_layer(0.3)
    output = call(model)
    for layer in layers:
        layer.unscale_layer(0.3)
    return output


def slider(model: nn.Module, call: Call) -> Tensor:
    """Two forwards with a LoRA of opposite signs, and one backward."""
    outputs = []
    for sign in (1.0, -0.5):
        for part in model.modules():
            if isinstance(part, LoraLayer):
                part.scaling["default"] = sign
        outputs.append(call(model))
    return torch.cat([output.reshape(-1) for output in outputs])


def half_disabled(model: nn.Module, call: Call) -> Tensor:
    """A forward with the LoRA, one without it, and with it again for backward."""
    learned = call(model)
    layers = [part for part in model.modules() if isinstance(part, LoraLayer)]
    for layer in layers:
        layer._disable_adapters = True
    base = call(model)
    for layer in layers:
        layer._disable_adapters = False
    return torch.cat([learned.reshape(-1), base.reshape(-1)])


def another_mode(model: nn.Module, call: Call) -> Tensor:
    """A forward in training mode, whose backward comes in evaluation mode."""
    output = call(model.train())
    model.eval()
    return output


@pytest.mark.parametrize(
    ("make", "dropout"),
    [(sd3, 0.0), (sd3, 0.1), (flux2, 0.0), (unet, 0.1)],
    ids=["sd3", "sd3-dropout", "flux2", "unet-dropout"],
)
@pytest.mark.parametrize("change", [scaled, slider, half_disabled, another_mode], ids=lambda change: change.__name__)
def test_backward_recomputes_a_block_as_it_was_in_forward(
    make: Any, change: Callable[[nn.Module, Call], Tensor], dropout: float
) -> None:
    model, call = with_lora(make, dropout)
    model.requires_grad_(True)  # a forward without the LoRA has gradients too

    def changed(model: nn.Module) -> Tensor:
        return change(model, call)

    native = gradients(model, changed)
    state = [(part.scaling, part.disable_adapters) for part in model.modules() if isinstance(part, LoraLayer)]
    for level in LEVELS:
        swapped = swap_forwards(model, memory=level)  # type: ignore[arg-type]
        for _ in range(2):
            assert farthest(gradients(model, changed), native) < 1e-5, level
        swapped.restore()
    assert state == [(part.scaling, part.disable_adapters) for part in model.modules() if isinstance(part, LoraLayer)]


@pytest.mark.parametrize("make", [sd3, unet], ids=lambda make: make.__name__)
def test_a_weight_that_changes_before_backward_is_an_error_at_each_level(make: Any) -> None:
    model, call = with_lora(make, 0.0)
    for level in ("off", *LEVELS):
        swapped = swap_forwards(model, memory=level)  # type: ignore[arg-type]
        loss = call(model).square().mean()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(1)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|changed in place between forward"):
            loss.backward()
        swapped.restore()


def latents_and_texts() -> dict[str, Any]:
    texts = torch.randn(2, 5, 16)
    return {
        "hidden_states": torch.randn(2, 4, 8, 8), "encoder_hidden_states": texts, "timestep": torch.tensor([3.0, 4.0]),
    }  # fmt: skip


def sana() -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.SanaTransformer2DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, num_layers=2,
        num_cross_attention_heads=2, cross_attention_head_dim=8, cross_attention_dim=16, caption_channels=16,
        sample_size=8,
    )  # fmt: skip
    return model, latents_and_texts()


def aura_flow() -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.AuraFlowTransformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=16, caption_projection_dim=16, out_channels=4,
        pos_embed_max_size=64,
    )  # fmt: skip
    return model, latents_and_texts()


@pytest.mark.parametrize("make", [sana, aura_flow], ids=lambda make: make.__name__)
def test_blocks_without_biases_and_named_parts_without_weights_are_taken_or_left_alone(make: Any) -> None:
    model, call = with_lora(make, 0.0)
    native = gradients(model, call)
    for level in LEVELS:
        swapped = swap_forwards(model, memory=level)  # type: ignore[arg-type]
        for _ in range(2):
            assert farthest(gradients(model, call), native) < 1e-5, level
        swapped.restore()


@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_a_transform_of_torch_func_is_refused_by_name(level: Any) -> None:
    torch.manual_seed(0)
    model, given = sd3()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(weights: dict[str, Tensor]) -> Tensor:
        output: Tensor = torch.func.functional_call(model, weights, (), given | {"return_dict": False})[0]
        return output.square().mean()

    swapped = swap_forwards(model, memory=level)
    with pytest.raises(RuntimeError, match=r"no torch.func rules .* use torch.autograd, or memory: off"):
        torch.func.grad(loss)(weights)
    swapped.restore()


def test_the_summary_names_the_blocks_at_each_level() -> None:
    for level in ("balanced", "lean", "max"):
        model, _ = sd3()
        line = swap_forwards(model, memory=level).summary()  # type: ignore[arg-type]
        assert "3 JointTransformerBlock" in line
        kept = int(re.findall(r"about (\d+)%", line)[0])
        assert kept < 70 if level == "balanced" else kept < 35


def test_a_saved_result_that_was_changed_in_place_is_made_again() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(4, 8)

    def block(x: Tensor) -> Tensor:
        y = x @ weight
        y += 1  # in the storage that was saved
        return y.exp()

    block(x).sum().backward()
    native, weight.grad = weight.grad, None
    contexts = save_and_reuse(SaveLimit(UNLIMITED), LastRunProfile())
    checkpoint(block, x, use_reentrant=False, context_fn=lambda: contexts).sum().backward()
    assert native is not None and torch.equal(weight.grad, native)


def test_elementwise_ops_are_called_past_the_modes_that_save_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second step on: the first follows what backward reads, through every op."""
    monkeypatch.setattr(mmdit, "KERNEL_DEVICES", ("cpu",))
    run = Run(sd3, "lean", "bf16-mixed")
    seen: set[str] = set()
    kind_of = selective.kind_of

    def noting(operator: Any) -> Any:
        seen.add(operator._schema.name)
        return kind_of(operator)

    monkeypatch.setattr(selective, "kind_of", noting)
    first = run.eager_step(run.given)
    assert seen >= {"lightning_aigc::gated_residual", "lightning_aigc::modulated_norm"}
    seen.clear()
    assert same(run.eager_step(run.given), first)
    assert selective.JOINT in seen and not seen & selective.ELEMENTWISE

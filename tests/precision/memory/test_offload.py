"""memory="max" with offload: what blocks keep waits in host memory, and nothing that is computed changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn

from fakes.kept_bytes import npu_storages
from fakes.models.small_models import gradients, make_unet, with_lora
from fakes.npu import fake_npu
from fakes.processes.ranks import run_ranks
from lightning_aigc.errors import ConfigError
from lightning_aigc.precision import FusedBackwardPrecision
from lightning_aigc.precision.swaps import swap_forwards

LATENTS = 32
"""Pixels a side: the first attention has 1,024 tokens, which is long enough for its output to be kept."""


def make_transformer() -> nn.Module:
    torch.manual_seed(0)
    return SD3Transformer2DModel(
        sample_size=LATENTS, in_channels=4, out_channels=4, num_layers=4, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=24, caption_projection_dim=32, pooled_projection_dim=16, pos_embed_max_size=LATENTS,
    ).train()  # fmt: skip


def inputs_of(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(2)
    given = [torch.randn(2, 4, LATENTS, LATENTS), torch.randn(2, 5, 24), torch.tensor([10.0, 900.0])]
    return [tensor.to(next(model.parameters()).device) for tensor in given]


def call_unet(model: Any) -> Tensor:
    x, text, t = inputs_of(model)
    output: Tensor = model(x, t, text).sample
    return output


def call_transformer(model: Any) -> Tensor:
    x, text, t = inputs_of(model)
    torch.manual_seed(4)
    pooled = torch.randn(2, 16).to(x.device)
    output: Tensor = model(x, text, pooled, t).sample
    return output


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Tensor]]] = {
    "U-Net": (make_unet, call_unet),
    "U-Net with LoRA": (lambda: with_lora(make_unet()), call_unet),
    "transformer": (make_transformer, call_transformer),
}


def on_npu(rank: int) -> dict[str, Any]:
    fake_npu.install()
    fake_npu.pin_everything()
    results: dict[str, Any] = {}
    for name, (make, call) in MODELS.items():
        model = make().to("npu")
        for offload in (False, True):
            swapped = swap_forwards(model, memory="max", offload=offload)
            before = npu_storages()
            output = call(model)
            kept = sum(n for address, n in npu_storages().items() if address not in before) - output.nbytes
            del output
            found = {key: value.cpu() for key, value in gradients(model, call).items()}
            results[name, offload] = {"kept": kept, "gradients": found, "line": swapped.summary()}
            model.zero_grad(set_to_none=True)
            swapped.restore()
    return results


@pytest.fixture(scope="module")
def npu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(on_npu, 1, tmp_path_factory.mktemp("offload"), gloo=False)[0]
    return found


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_without_it_to_the_bit(name: str, npu: dict[str, Any]) -> None:
    ours, theirs = (npu[name, offload]["gradients"] for offload in (True, False))
    assert ours.keys() == theirs.keys() and len(ours) > 10
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("name", MODELS)
def test_what_blocks_keep_leaves_the_device(name: str, npu: dict[str, Any]) -> None:
    assert npu[name, True]["kept"] < 0.5 * npu[name, False]["kept"]


def test_the_line_at_fit_start_says_where_the_inputs_are(npu: dict[str, Any]) -> None:
    assert "% of their activations, inputs in host memory; " in npu["U-Net", True]["line"]
    assert "host" not in npu["U-Net", False]["line"]


@pytest.mark.parametrize("name", MODELS)
def test_on_a_cpu_nothing_is_copied_and_nothing_changes(name: str) -> None:
    make, call = MODELS[name]
    model = make()
    found = []
    for offload in (False, True):
        swapped = swap_forwards(model, memory="max", offload=offload)
        found.append(gradients(model, call))
        swapped.restore()
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


@pytest.mark.parametrize("memory", ["off", "balanced", "lean", "fit", {"kept": 0.2}])
def test_other_levels_are_refused_because_they_keep_more_than_inputs(memory: Any) -> None:
    with pytest.raises(ConfigError, match="which are what memory: max keeps, got memory: "):
        FusedBackwardPrecision("32-true", memory=memory, offload=True)
    assert "offload=True" in repr(FusedBackwardPrecision("32-true", memory="max", offload=True))


def test_offload_is_true_or_false() -> None:
    with pytest.raises(ConfigError, match="offload must be true or false, got 'cpu'"):
        FusedBackwardPrecision("32-true", memory="max", offload="cpu")  # type: ignore[arg-type]

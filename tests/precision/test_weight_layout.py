"""Frozen convolutions' weights in channels_last while blocks are fused, as on a CUDA card; here on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from fakes.models.pipelines import make_pipeline
from fakes.models.small_models import LEVELS, call_unet, convolutions, gradients, make_unet, with_lora
from fakes.runs.seeded_fits import fit
from lightning_aigc.diffusion import DiffusionControlNet, DiffusionLoRA
from lightning_aigc.precision import FusedBackwardPrecision, swaps
from lightning_aigc.precision.swaps import swap_forwards
from lightning_aigc.quantization.frozen import quantize_frozen_
from lightning_aigc_kernels.group_norm_silu.reference import is_channels_last


@pytest.fixture(autouse=True)
def as_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swaps, "multiplies_in_channels_last", lambda device: True)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("memory", LEVELS)
def test_gradients_stay_and_the_layout_is_put_back(memory: str) -> None:
    model = with_lora(make_unet())
    wanted = gradients(model, call_unet)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    swapped = swap_forwards(model, memory=memory)  # type: ignore[arg-type]
    assert all(is_channels_last(conv.weight) for conv in convolutions(model))
    found = gradients(model, call_unet)
    swapped.restore()
    assert wanted.keys() == found.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)
    assert all(p.is_contiguous() and torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_trained_and_quantized_weights_and_a_layout_of_the_users_stay() -> None:
    trained = make_unet()
    swap_forwards(trained, memory="lean")
    assert not any(is_channels_last(conv.weight) for conv in convolutions(trained))
    quantized = with_lora(make_unet())
    quantize_frozen_(quantized, "int8")
    packed = {conv: conv.weight for conv in convolutions(quantized) if type(conv.weight) is not nn.Parameter}
    swap_forwards(quantized, memory="lean").restore()
    assert packed and all(conv.weight is weight for conv, weight in packed.items())
    users = with_lora(make_unet()).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    swap_forwards(users, memory="lean").restore()
    assert all(is_channels_last(conv.weight) for conv in convolutions(users))


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_pipeline(tmp_path_factory.mktemp("sd")))


@pytest.mark.filterwarnings("ignore")  # advice on loaders
@pytest.mark.parametrize("strategy", ["auto", "ddp"])
@pytest.mark.parametrize("kind", [DiffusionLoRA, DiffusionControlNet])
def test_a_fit_trains_and_saves_the_same(
    kind: type, strategy: str, pipeline: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, where the layout changes the order of sums alone; files of safetensors take contiguous tensors."""
    laid_out_weights = []
    restore = swaps.Swapped.restore

    def noted(self: swaps.Swapped) -> None:
        laid_out_weights.append(len(self._laid_out))
        restore(self)

    monkeypatch.setattr(swaps.Swapped, "restore", noted)

    def files(laid_out: bool) -> dict[str, Tensor]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(swaps, "multiplies_in_channels_last", lambda device: laid_out)
            torch.manual_seed(0)
            module = kind(pipeline, num_inference_steps=2, learning_rate=1e-3, max_train_steps=3)
            folder = tmp_path / str(laid_out)
            plugins = [FusedBackwardPrecision("32-true", memory="lean")]
            fit(module, folder, accelerator="cpu", devices=1, plugins=plugins, strategy=strategy)
        found = [path for path in folder.rglob("*.safetensors") if "snapshots" not in path.parts]
        assert found, "the fit saved nothing"
        return {f"{p.relative_to(folder)} {k}": t for p in found for k, t in safetensors.torch.load_file(p).items()}

    laid = files(True)
    assert max(laid_out_weights) > 10
    laid_out_weights.clear()
    usual = files(False)
    assert max(laid_out_weights) == 0
    assert laid.keys() == usual.keys()
    for name, tensor in usual.items():
        torch.testing.assert_close(laid[name], tensor, rtol=0.05, atol=2e-4)

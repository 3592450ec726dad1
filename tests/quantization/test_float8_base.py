"""fp8: weights that were float8 keep their bits, others their size; a pipeline of float8 files is a base."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from fakes.models.pipelines import make_batch
from fakes.models.transformer_pipelines import MAKE
from fakes.runs.training_losses import example_losses
from lightning_aigc.diffusion import DiffusionLoRA
from lightning_aigc.quantization.frozen import quantize_frozen_
from lightning_aigc_kernels.packed_weight import PackedWeight, packed_weights

FLOAT8 = torch.float8_e4m3fn


@pytest.mark.parametrize("scale", [1.0, 1e-3, 100.0])
def test_weights_that_were_float8_keep_their_bits(scale: float) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(70, 30) * scale).clamp(-448, 448).to(FLOAT8).float()
    weight[:5] = 0
    for dtype in (torch.float32, torch.bfloat16):
        packed = PackedWeight.pack(weight.to(dtype), "fp8")
        assert torch.equal(packed.dequantize().float(), weight)
    assert packed.stored_bytes == -(-weight.numel() // 64) * 68


def test_the_error_of_other_weights_lies_between_int8s_and_nf4s() -> None:
    torch.manual_seed(0)
    weight = torch.randn(256, 256) * 0.02
    errors = {}
    for kind in ("int8", "fp8", "nf4"):
        errors[kind] = float((PackedWeight.pack(weight, kind).dequantize() - weight).norm() / weight.norm())  # type: ignore[arg-type]
    assert errors["int8"] == pytest.approx(0.006, rel=0.05)
    assert errors["fp8"] == pytest.approx(0.0208, rel=0.05)
    assert errors["nf4"] == pytest.approx(0.092, rel=0.05)


def test_not_a_number_is_refused() -> None:
    net = nn.Sequential(nn.Linear(64, 64)).requires_grad_(False)
    net[0].weight.data[0, 0] = torch.nan
    with pytest.raises(Exception, match="NaN or infinity"):
        quantize_frozen_(net, "fp8")


def test_a_pipeline_of_float8_files_trains_and_packs_without_loss(tmp_path: Path) -> None:
    folder = MAKE["flux"](tmp_path / "base")
    for file in (folder / "transformer").glob("*.safetensors"):
        state = safetensors.torch.load_file(file)
        small = {name: tensor.to(FLOAT8) if tensor.ndim == 2 else tensor for name, tensor in state.items()}
        safetensors.torch.save_file(small, file, {"format": "pt"})
    losses = {}
    for kind in (None, "fp8"):
        torch.manual_seed(0)
        module = DiffusionLoRA(str(folder), rank=4, base_quantization=kind, max_train_steps=1)  # type: ignore[arg-type]
        network = module.loaded().denoiser
        if kind is None:
            whole = network.x_embedder.weight.detach()
            assert whole.dtype == torch.float32 and torch.equal(whole, whole.to(FLOAT8).float())
            wanted = {name.replace(".base_layer", ""): p.detach().clone() for name, p in network.named_parameters()}
        else:
            packed = {name.replace(".base_layer", ""): weight for name, weight in packed_weights(network)}
            assert packed and all(torch.equal(w.dequantize(), wanted[name]) for name, w in packed.items())
        torch.manual_seed(3)
        losses[kind] = example_losses(module, make_batch()).detach()
    torch.testing.assert_close(losses["fp8"], losses[None], rtol=2e-3, atol=1e-4)  # text encoders are packed too

"""Z-Image and Qwen-Image rotate with real numbers on an NPU, as with the complex ones of other devices."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models.controlnets import controlnet_z_image
from diffusers.models.transformers import transformer_qwenimage, transformer_z_image
from torch import Tensor, nn

from fakes.processes.programs import WITHOUT_COLLECTIONS
from fakes.processes.ranks import run_ranks
from lightning_aigc import _real_rotary
from lightning_aigc._real_rotary import rotate
from lightning_aigc.precision.blocks.stream_attention import rotary_of_complex

B, T, H, D = 2, 6, 3, 16


def angles(*shape: int) -> Tensor:
    return torch.polar(torch.ones(shape), torch.randn(shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pairs_rotate_as_complex_numbers_do(dtype: torch.dtype) -> None:
    x, freqs = torch.randn(B, T, H, D, dtype=dtype), angles(T, D // 2)
    wanted = transformer_qwenimage.apply_rotary_emb_qwen(x, freqs, use_real=False)
    torch.testing.assert_close(rotate(x, torch.view_as_real(freqs)), wanted)


@pytest.mark.parametrize("module", [transformer_z_image, controlnet_z_image], ids=lambda module: module.__name__)
def test_z_images_attention_is_the_same_with_pairs(module: Any) -> None:
    processor = module.ZSingleStreamAttnProcessor()
    attention = SimpleNamespace(
        heads=H, norm_q=nn.RMSNorm(D), norm_k=None, to_out=nn.ModuleList([nn.Linear(H * D, H * D), nn.Dropout(0.0)]),
        **{name: nn.Linear(H * D, H * D) for name in ("to_q", "to_k", "to_v")},
    )  # fmt: skip
    x, freqs, mask = torch.randn(B, T, H * D), angles(B, T, D // 2), torch.arange(T) < torch.tensor([[4], [6]])
    stock = type(processor).__call__
    ours = _real_rotary._z_image_attention(stock, module.dispatch_attention_fn)
    wanted = stock(processor, attention, x, attention_mask=mask, freqs_cis=freqs)
    for given in (freqs, torch.view_as_real(freqs)):
        found = ours(processor, attention, x, attention_mask=mask, freqs_cis=given)
        torch.testing.assert_close(found, wanted)


def test_fused_blocks_take_both_forms() -> None:
    freqs = angles(T, D // 2)
    for one, other in zip(
        rotary_of_complex(freqs, freqs.device) or (),
        rotary_of_complex(torch.view_as_real(freqs), freqs.device) or (),
        strict=True,
    ):
        assert torch.equal(one, other) and other.is_contiguous()


def positions(rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Positions on the CPU, and as pairs on the fake npu, made where new tensors go to the npu."""
    from fakes.npu import fake_npu

    fake_npu.install()
    fake_npu.apply_patches()
    ids = torch.tensor([[0, 1, 2], [3, 2, 1]])

    def z_image(device: str) -> Tensor:
        return transformer_z_image.RopeEmbedder(axes_dims=[4, 6, 6], axes_lens=[8, 8, 8])(ids.to(device))

    def qwen(device: str, kind: Any) -> Tensor:
        sizes = [[(1, 4, 2), (1, 2, 2)]]
        with torch.device(device):
            embedder = kind(theta=10000, axes_dim=[4, 6, 6], scale_rope=True)
        with torch.inference_mode():
            embedder(sizes, max_txt_seq_len=5, device=torch.device(device))
        found = embedder(sizes, max_txt_seq_len=5, device=torch.device(device))
        assert device == "cpu" or not any(each.is_inference() for each in found)  # kept ones, which a step may save
        return torch.cat(found)

    kinds = (transformer_qwenimage.QwenEmbedRope, transformer_qwenimage.QwenEmbedLayer3DRope)
    found = {"z_image": (z_image("cpu"), z_image("npu").cpu())}
    return found | {kind.__name__: (qwen("cpu", kind), qwen("npu", kind).cpu()) for kind in kinds}


def test_positions_on_an_npu_are_those_of_the_cpu(tmp_path: Path) -> None:
    (found,) = run_ranks(positions, 1, tmp_path, gloo=False)
    assert len(found) == 3
    for complex_TD, pairs in found.values():
        assert torch.equal(torch.view_as_real(complex_TD), pairs)


def test_without_torch_npu_nothing_is_changed() -> None:
    for module in (transformer_z_image, controlnet_z_image, transformer_qwenimage):
        assert not hasattr(module, "has_real_rotary")
    assert not hasattr(transformer_z_image.RopeEmbedder.__call__, "__wrapped__")


SCRIPT = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
import lightning_aigc
from lightning_aigc._real_rotary import QWEN_IMAGE, Z_IMAGE
assert all(importlib.import_module(name).has_real_rotary for name in (*Z_IMAGE, QWEN_IMAGE))
"""


def test_diffusers_modules_are_changed_once_they_are_imported_where_torch_npu_is_installed(tmp_path: Path) -> None:
    (tmp_path / "torch_npu.py").write_text("")
    command = [sys.executable, "-c", WITHOUT_COLLECTIONS + SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

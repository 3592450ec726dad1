"""Masks reach an NPU's attention in a shape with both lengths, whoever made them; on other devices nothing changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fakes.npu.npu_ops import require_no_broadcast
from fakes.processes.programs import WITHOUT_COLLECTIONS
from fakes.processes.ranks import run_ranks
from lightning_aigc._attention_masks import expand_masks, full_mask

N, H, T, S, D = 2, 3, 5, 7, 16
SHAPES = [
    *((N, H, T, S), (N, 1, T, S), (1, 1, T, S), (T, S)),  # CANN's own
    *(
        (N, 1, 1, S),
        (N, H, 1, S),
        (1, 1, 1, S),
        (1, H, 1, S),
        (1, H, T, S),
        (1, S),
        (H, 1, S),
        (1, T, S),
        (T, 1),
        (1, 1),
    ),
]


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_mask_gets_both_lengths_and_masks_the_same(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    query, key, value = torch.randn(N, H, T, D), torch.randn(N, H, S, D), torch.randn(N, H, S, D)
    mask = torch.rand(shape) > 0.3 if dtype == torch.bool else torch.randn(shape)
    full = full_mask(mask, query, key)
    require_no_broadcast(full, query, key)
    assert full.untyped_storage().data_ptr() == mask.untyped_storage().data_ptr()  # a view takes no memory
    torch.testing.assert_close(
        F.scaled_dot_product_attention(query, key, value, full),
        F.scaled_dot_product_attention(query, key, value, mask),
        equal_nan=True,
    )


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_a_mask_in_one_of_canns_shapes_stays(shape: tuple[int, ...]) -> None:
    full = full_mask(torch.ones(shape, dtype=torch.bool), torch.empty(N, H, T, D), torch.empty(N, H, S, D))
    assert full.shape == shape


def padded_attention(rank: int, folder: str) -> dict[str, Any]:
    """Attention over padded texts by diffusers and transformers on the fake npu, before and with the expansion."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn
    from transformers import CLIPTextConfig, CLIPTextModel

    from fakes.npu import fake_npu

    fake_npu.install()
    torch.manual_seed(0)
    q, k, v = (torch.randn(N, T, H, D) for _ in range(3))  # diffusers has the heads behind
    lengths = torch.arange(T) < torch.tensor([[3], [5]])
    text = CLIPTextModel(
        CLIPTextConfig(vocab_size=9, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    ids = torch.tensor([[1, 2, 0, 0], [3, 4, 5, 6]])

    def attended(device: str) -> list[Tensor]:
        out = dispatch_attention_fn(*(x.to(device) for x in (q, k, v)), attn_mask=lengths.to(device))
        read = text.to(device)(ids.to(device), attention_mask=(ids > 0).to(device))
        return [out.cpu(), read.last_hidden_state.detach().cpu()]

    on_cpu = attended("cpu")
    try:
        attended("npu")
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    sys.path.insert(0, folder)  # a torch_npu for `find_spec`
    expand_masks()
    expand_masks()
    worst = max((ours - theirs).abs().amax().item() for ours, theirs in zip(attended("npu"), on_cpu, strict=True))
    return {
        "refused": refused,
        "difference": worst,
        "twice": hasattr(F.scaled_dot_product_attention.__wrapped__, "__wrapped__"),
    }


def test_padded_texts_reach_attention_on_an_npu_in_full_shapes(tmp_path: Path) -> None:
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "torch_npu.py").write_text("")
    (found,) = run_ranks(padded_attention, 1, tmp_path, str(tmp_path / "installed"), gloo=False)
    assert f"got a mask of shape {(N, 1, 1, T)}" in found["refused"]  # the fake npu takes none but CANN's shapes
    assert found["difference"] < 1e-6
    assert not found["twice"]


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import lightning_aigc
import torch
assert hasattr(torch.nn.functional.scaled_dot_product_attention, "__wrapped__")
"""


def test_masks_are_expanded_once_torch_is_imported_where_torch_npu_is_installed(tmp_path: Path) -> None:
    (tmp_path / "torch_npu.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_COLLECTIONS + SCRIPT, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    expand_masks()
    assert not hasattr(F.scaled_dot_product_attention, "__wrapped__")  # torch_npu is not installed here

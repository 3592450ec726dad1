"""Operators of the models' own forwards, by backend: what torch computes wrongly on a card, and how fits avoid it.

FLUX.1 with `memory: off` gave NaN on an H100 with torch 2.11, or ended with an illegal memory access: torch keeps one
cuDNN backward for gradients of different strides.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_aigc.diffusion.training.native_attention import misreads_gradients
from lightning_aigc_kernels.lora_attention.core import attend, attend_backward, cudnn_features

BACKENDS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
SHAPES = {"small": (2, 88, 2, 32), "1024 px": (1, 4608, 24, 128), "512 px": (1, 1536, 24, 128)}
"""Samples, tokens, heads and features."""


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def gradients_of_attention(shape: tuple[int, ...], dtype: torch.dtype, backend: SDPBackend) -> list[Tensor]:
    torch.manual_seed(0)
    query, key, value = (torch.randn(shape, device="cuda").to(dtype).requires_grad_() for _ in range(3))
    with sdpa_kernel(backend):
        y = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, key, value))).transpose(1, 2)
        return [y.detach(), *torch.autograd.grad(y.float().square().mean(), (query, key, value))]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", ["small", "512 px"])
def test_an_attentions_gradients(shape: str, backend: str) -> None:
    found = gradients_of_attention(SHAPES[shape], torch.bfloat16, getattr(SDPBackend, backend))
    wanted = gradients_of_attention(SHAPES[shape], torch.float32, SDPBackend.MATH)
    assert max(relative(a, b.double()) for a, b in zip(found, wanted, strict=True)) < 3e-2


def test_our_attention_reads_gradients_of_any_strides() -> None:
    """A slice, as FLUX's single blocks give it, then a dense one, with one kept backward; against float64."""
    torch.manual_seed(0)
    samples, tokens, heads, features = SHAPES["512 px"]
    q, k, v = (torch.randn(SHAPES["512 px"], device="cuda").bfloat16().transpose(1, 2) for _ in range(3))
    o, *softmax = attend(q, k, v)
    wide = torch.randn(samples, tokens, heads, 2 * features, device="cuda").bfloat16()
    for do in (wide[..., :features], wide[..., features:].contiguous()):
        found = attend_backward(do.transpose(1, 2), q, k, v, o, *softmax)
        exact = [x.double().requires_grad_() for x in (q, k, v)]
        with sdpa_kernel(SDPBackend.MATH):
            wanted = torch.autograd.grad(F.scaled_dot_product_attention(*exact), exact, do.transpose(1, 2).double())
        assert max(relative(a, b) for a, b in zip(found, wanted, strict=True)) < 3e-2


def test_the_probe_finds_what_torch_2_11_misreads_on_a_hopper() -> None:
    if torch.__version__.startswith("2.11") and cudnn_features(None) == 256:
        assert misreads_gradients(torch.device("cuda"))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["bf16", "autocast"])
def test_rms_norms_gradients(kind: str, shape: str, trains: bool) -> None:
    """Queries and keys are a part of a joint sequence, as in FLUX.1."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    norm = nn.RMSNorm(SHAPES[shape][-1], eps=1e-6).cuda().to(dtype).requires_grad_(trains)
    x = torch.randn(SHAPES[shape], device="cuda").bfloat16().requires_grad_()
    dy = torch.randn(x.shape[0], x.shape[1] + 24, *x.shape[2:], device="cuda").bfloat16()[:, 24:]
    with torch.autocast("cuda", torch.bfloat16, enabled=kind == "autocast"):
        y = norm(x)
    (found,) = torch.autograd.grad(y, x, dy.to(y.dtype))
    exact = x.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(F.rms_norm(exact, exact.shape[-1:], norm.weight.double(), 1e-6), exact, dy.double())
    assert relative(found, wanted) < 2e-2


STEP = """
import torch
from benchmarks.common.denoisers import denoiser_on, inputs_of, loss_of, random_inputs
from lightning_aigc.diffusion.training.native_attention import avoid_misread_gradients
model = denoiser_on("cuda", "flux", 16, num_layers=2, num_single_layers=2).bfloat16()
given = random_inputs(inputs_of(model.config, "flux", 1, 512, 512), "cuda")
avoid_misread_gradients(model, torch.device("cuda"))
loss_of(model, given).backward()
gradients = [p.grad for p in model.parameters() if p.grad is not None]
torch.cuda.synchronize()
assert gradients and all(g.isfinite().all() for g in gradients)
"""


def test_flux_trains_with_its_own_forward() -> None:
    """In a process of its own, which an illegal memory access would end."""
    ran = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]

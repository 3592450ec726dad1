"""Flow against diffusers' training script and its scheduler."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from torch import Tensor

from lightning_aigc.diffusion.families import TRANSFORMERS
from lightning_aigc.diffusion.objectives import Flow, ObjectiveSettings, SeededNoise
from lightning_aigc.diffusion.objectives.flow import linear_mu

SHIFTS = [1.0, 3.0, 6.5]
DYNAMIC = {
    "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}  # fmt: skip


def make(shift: float = 3.0, **options: Any) -> Flow:
    return Flow(FlowMatchEulerDiscreteScheduler(shift=shift).config, ObjectiveSettings(**options))


def script_timesteps(scheme: str, batch: int, shift: float) -> Tensor:
    """Timesteps as diffusers' train_dreambooth_lora_sd3.py draws them."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    if scheme == "logit_normal":
        u = torch.sigmoid(torch.normal(mean=0.0, std=1.0, size=(batch,)))
    elif scheme == "mode":
        u = torch.rand(batch)
        u = 1 - u - 1.29 * (torch.cos(torch.pi * u / 2) ** 2 - 1 + u)
    else:
        u = torch.rand(batch)
    return scheduler.timesteps[(u * scheduler.config.num_train_timesteps).long()]


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("scheme", ["uniform", "logit_normal", "mode"])
def test_timesteps_are_those_of_diffusers_script(scheme: Any, shift: float) -> None:
    latents = torch.zeros(500, 4, 8, 8)
    torch.manual_seed(3)
    wanted = script_timesteps(scheme, 500, shift)
    torch.manual_seed(3)
    torch.testing.assert_close(make(shift, timestep_sampling=scheme).draw_timesteps(latents), wanted)


@pytest.mark.parametrize("weighting", ["none", "sigma_sqrt", "sigma_squared", "cosmap"])
def test_the_loss_is_that_of_diffusers_script(weighting: Any) -> None:
    torch.manual_seed(0)
    objective, scheduler = make(loss_weighting=weighting), FlowMatchEulerDiscreteScheduler(shift=3.0)
    latents, noise, prediction = torch.randn(3, 6, 4, 8, 8).unbind()
    indices = torch.tensor([0, 1, 250, 500, 998, 999])
    timesteps, sigmas = scheduler.timesteps[indices], scheduler.sigmas[indices][:, None, None, None]

    noisy = sigmas * noise + (1.0 - sigmas) * latents
    is_preconditioned = weighting == "sigma_squared"
    answer = prediction * (-sigmas) + noisy if is_preconditioned else prediction
    target = latents if is_preconditioned else noise - latents
    scale = {"sigma_sqrt": sigmas**-2.0, "cosmap": 2 / (torch.pi * (1 - 2 * sigmas + 2 * sigmas**2))}
    wanted = (scale.get(weighting, torch.ones_like(sigmas)) * (answer - target) ** 2).flatten(1).mean(1)

    torch.testing.assert_close(objective.add_noise(latents, noise, timesteps), noisy, rtol=1e-6, atol=1e-6)
    error = (prediction - objective.target(latents, noise, timesteps)).square().flatten(1).mean(1)
    torch.testing.assert_close(error * objective.weights(timesteps), wanted, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(("height", "width"), [(16, 16), (64, 32), (128, 128)])
def test_a_dynamic_shift_follows_the_number_of_tokens(height: int, width: int) -> None:
    objective = Flow(FlowMatchEulerDiscreteScheduler(**DYNAMIC).config, ObjectiveSettings(timestep_sampling="uniform"))
    tokens = height * width // 4
    mu = 0.5 + (1.15 - 0.5) * (tokens - 256) / (4096 - 256)
    scheduler = FlowMatchEulerDiscreteScheduler(**DYNAMIC)
    scheduler.set_timesteps(sigmas=torch.linspace(1, 1 / 1000, 1000).tolist(), mu=mu)
    found = objective._sigma_table(torch.zeros(1, 4, height, width))
    torch.testing.assert_close(found, scheduler.sigmas[:-1], rtol=1e-5, atol=1e-6)


def test_flux2_trains_with_its_pipelines_shift_in_the_limit_of_many_steps() -> None:
    config = FlowMatchEulerDiscreteScheduler(**DYNAMIC).config
    shifts = {}
    for tokens in (1024, 4096, 9216):
        own = TRANSFORMERS["flux2"].mu(config, tokens)
        assert own == compute_empirical_mu(tokens, 200) == pytest.approx(linear_mu(config, tokens), abs=1e-5)
        shifts[tokens] = [math.exp(mu) for mu in (own, compute_empirical_mu(tokens, 50))]
    table = (Path(__file__).parents[3] / "docs" / "diffusion_transformers.md").read_text()
    for row, place in (("here, `flow_shift: auto`", 0), ("the pipeline's sampling in 50 steps", 1)):
        assert f"| {row} | {shifts[1024][place]:.2f} | {shifts[4096][place]:.2f} |" in table


def test_a_shift_of_ones_own_replaces_the_schedulers() -> None:
    latents = torch.zeros(1000, 4, 8, 8)
    torch.manual_seed(0)
    unshifted = make(3.0, timestep_sampling="uniform", flow_shift=1.0).draw_timesteps(latents) / 1000
    torch.manual_seed(0)
    shifted = make(1.0, timestep_sampling="uniform", flow_shift=4.0).draw_timesteps(latents) / 1000
    torch.testing.assert_close(shifted, 4 * unshifted / (1 + 3 * unshifted), rtol=1e-5, atol=1e-6)


def test_parts_of_the_schedule_hold_as_many_places_each() -> None:
    objective, latents = make(), torch.zeros(64, 4, 8, 8)
    parts = [objective.timesteps_in_part(SeededNoise(range(64)), part, 8, latents) for part in range(8)]
    edges = [(float(part.min()), float(part.max())) for part in parts]
    assert edges == sorted(edges) and all(one[1] <= other[0] for one, other in itertools.pairwise(edges))
    assert edges[0][0] < 60 and edges[-1][1] > 940


@pytest.mark.parametrize("scheme", ["uniform", "logit_normal", "mode"])
def test_the_density_is_told_without_disturbing_random_numbers(scheme: Any) -> None:
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    objective = make(timestep_sampling=scheme)
    said = objective.density(torch.zeros(2, 4, 8, 8))
    assert torch.equal(torch.rand(3), wanted)
    shares = [int(share) for share in re.findall(r"(\d+) % in", said)]
    drawn = objective.draw_timesteps(torch.zeros(20_000, 4, 8, 8))
    found = [float(((drawn >= 250 * i) & (drawn < 250 * (i + 1))).float().mean()) for i in range(4)]
    assert len(shares) == 4 and all(abs(s / 100 - f) < 0.02 for s, f in zip(shares, found, strict=True))

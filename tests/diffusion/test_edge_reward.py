"""The reward for edges: one-step predictions, decoded with gradients, at low timesteps."""

from __future__ import annotations

import lightning_aigc  # noqa: F401 - first: it mends torchvision's import

# isort: split
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    DDPMScheduler,
)

from fakes.seeded_fits import fit
from lightning_aigc.diffusion import ControlNetTraining
from lightning_aigc.diffusion.edge_reward import edge_losses, predict_latents
from lightning_aigc.diffusion.objectives import training_target
from lightning_aigc.errors import ModelError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice on workers, loggers and folders

QUICK: dict[str, Any] = {"num_inference_steps": 2, "learning_rate": 1e-3, "max_train_steps": 3, "output_name": "edges"}


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample"])
def test_one_step_finds_the_clean_latents_of_a_right_prediction(kind: str) -> None:
    schedule = DDPMScheduler(prediction_type=kind)
    latents, noise = torch.randn(3, 4, 8, 8), torch.randn(3, 4, 8, 8)
    timesteps = torch.tensor([0, 150, 900])
    noisy = schedule.add_noise(latents, noise, timesteps)
    target = training_target(schedule, latents, noise, timesteps)
    torch.testing.assert_close(predict_latents(schedule, noisy, target, timesteps), latents, atol=1e-4, rtol=1e-3)


def test_the_reward_counts_edges_at_low_timesteps_and_its_gradient_passes_the_decoder(sd: str) -> None:
    module = ControlNetTraining(sd, **QUICK)
    module.configure_model()
    vae, clean = module.loaded().vae, torch.randn(3, 4, 16, 16)
    drawn = (clean + 0.1 * torch.randn_like(clean)).requires_grad_(True)
    timesteps = torch.tensor([10, 200, 201])
    losses = edge_losses(vae, clean, drawn, timesteps, 200)
    assert (losses[:2] > 0).all() and losses[2] == 0
    assert edge_losses(vae, clean, clean, timesteps, 200).abs().max() == 0
    assert edge_losses(vae, clean, drawn, timesteps, 5).abs().max() == 0
    losses.sum().backward()
    assert drawn.grad is not None and drawn.grad[:2].abs().amax() > 0 and drawn.grad[2].abs().amax() == 0
    assert all(p.grad is None for p in vae.parameters())


def test_without_weight_or_before_its_step_the_reward_changes_no_bit(sd: str, tmp_path: Path) -> None:
    results = []
    for options in (
        {},
        {"reward_weight": 5.0, "reward_start_step": 9},
        {"reward_weight": 5.0, "reward_max_timestep": 999},
    ):
        torch.manual_seed(0)
        module = ControlNetTraining(sd, **QUICK | options)
        results.append(fit(module, tmp_path))
    assert results[0] == results[1] != results[2]
    assert results[2][0] > results[0][0]
    with pytest.raises(ModelError, match="reward_weight must not be negative"):
        ControlNetTraining(sd, reward_weight=-1.0)

"""Targets, weights, losses and noise against formulas written out by hand in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from torch import Tensor

from lightning_aigc.diffusion.objectives.ddpm import (
    MAX_DEBIASED_SNR,
    loss_weights,
    training_target,
)
from lightning_aigc.diffusion.objectives.losses import example_losses
from lightning_aigc.diffusion.objectives.noise import draw_noise

STEPS = 1000
EVERY_STEP = torch.arange(STEPS)


def schedule(prediction_type: str = "epsilon", **options: Any) -> DDPMScheduler:
    return DDPMScheduler(
        num_train_timesteps=STEPS,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type=prediction_type,
        **options,
    )


def signal_shares(zero_terminal: bool = False) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Alpha-bar of every step in float64; with zero terminal SNR after algorithm 1 of arXiv:2305.08891."""
    betas = np.linspace(0.00085**0.5, 0.012**0.5, STEPS) ** 2
    shares = np.cumprod(1 - betas)
    if zero_terminal:
        root = np.sqrt(shares)
        first, last = root[0], root[-1]
        shares = ((root - last) * first / (first - last)) ** 2
    return shares


def snr(zero_terminal: bool = False) -> np.ndarray[Any, np.dtype[np.float64]]:
    shares = signal_shares(zero_terminal)
    return shares / (1 - shares)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(got: Tensor, wanted: Any, rtol: float = 2e-4) -> None:
    # diffusers accumulates alpha-bar in float32 over 1000 steps: 6e-5 off at the noisy end, measured.
    np.testing.assert_allclose(got.double().numpy(), wanted, rtol=rtol, atol=1e-7)


@pytest.mark.parametrize("gamma", [1.0, 5.0, 20.0])
def test_min_snr_weights_of_epsilon_are_the_capped_share(gamma: float) -> None:
    close(loss_weights(schedule(), EVERY_STEP, gamma), np.minimum(snr(), gamma) / snr())


@pytest.mark.parametrize("gamma", [1.0, 5.0, 20.0])
def test_min_snr_weights_of_v_divide_by_snr_plus_one(gamma: float) -> None:
    close(loss_weights(schedule("v_prediction"), EVERY_STEP, gamma), np.minimum(snr(), gamma) / (snr() + 1))


def test_min_snr_weights_of_sample_prediction_are_the_capped_snr() -> None:
    close(loss_weights(schedule("sample"), EVERY_STEP, 5.0), np.minimum(snr(), 5))


def test_debiased_weights_are_one_over_the_root_of_snr() -> None:
    close(loss_weights(schedule(), EVERY_STEP, is_debiased=True), np.minimum(snr(), MAX_DEBIASED_SNR) ** -0.5)


def test_debiased_weights_of_v_are_one_over_snr_plus_one() -> None:
    wanted = 1 / (np.minimum(snr(), MAX_DEBIASED_SNR) + 1)
    close(loss_weights(schedule("v_prediction"), EVERY_STEP, is_debiased=True), wanted)


def test_without_weighting_every_example_counts_one() -> None:
    assert torch.equal(loss_weights(schedule(), EVERY_STEP), torch.ones(STEPS))


@pytest.mark.parametrize("kind", ["v_prediction", "sample", "epsilon"])
@pytest.mark.parametrize("options", [{"snr_gamma": 5.0}, {"is_debiased": True}, {}])
def test_weights_stay_finite_where_the_last_step_has_no_signal(kind: str, options: dict[str, Any]) -> None:
    rescaled = schedule(kind, rescale_betas_zero_snr=True, timestep_spacing="trailing")
    weights = loss_weights(rescaled, EVERY_STEP, **options)
    assert bool(torch.isfinite(weights).all()) and bool((weights >= 0).all())


def test_zero_terminal_snr_weights_follow_the_rescaled_schedule() -> None:
    rescaled = schedule("v_prediction", rescale_betas_zero_snr=True, timestep_spacing="trailing")
    ratio = snr(zero_terminal=True)
    # diffusers leaves 2**-24 of signal in the last step, where the paper leaves none.
    close(loss_weights(rescaled, EVERY_STEP[:-1], 5.0), (np.minimum(ratio, 5) / (ratio + 1))[:-1], rtol=5e-3)
    assert loss_weights(rescaled, EVERY_STEP[-1:], 5.0).item() < 1e-3


@pytest.mark.parametrize("step", [0, 1, 500, 998, 999])
@pytest.mark.parametrize("zero_terminal", [False, True])
def test_v_target_is_the_velocity_and_finite_at_the_last_step(step: int, zero_terminal: bool) -> None:
    options = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"} if zero_terminal else {}
    latents, noise = random(2, 4, 3, 3), random(2, 4, 3, 3, seed=1)
    got = training_target(schedule("v_prediction", **options), latents, noise, torch.tensor([step, step]))
    share = signal_shares(zero_terminal)[step]
    wanted = np.sqrt(share) * noise.double().numpy() - np.sqrt(1 - share) * latents.double().numpy()
    np.testing.assert_allclose(got.double().numpy(), wanted, atol=1e-3 if zero_terminal and step == 999 else 1e-4)


def test_epsilon_and_sample_targets_are_the_noise_and_the_latents() -> None:
    latents, noise, steps = random(2, 4, 3, 3), random(2, 4, 3, 3, seed=1), torch.tensor([3, 900])
    assert training_target(schedule(), latents, noise, steps) is noise
    assert training_target(schedule("sample"), latents, noise, steps) is latents


def test_an_unknown_prediction_type_is_named() -> None:
    odd = schedule()
    odd.register_to_config(prediction_type="flow")
    with pytest.raises(ValueError, match="prediction_type must be epsilon, v_prediction or sample, got 'flow'"):
        training_target(odd, random(1, 1, 1, 1), random(1, 1, 1, 1), torch.tensor([0]))


def by_hand(difference: Any, loss_type: str, c: float) -> Any:
    size = np.abs(difference)
    if loss_type == "l2":
        return difference**2
    huber = np.where(size <= c, 0.5 * difference**2, c * (size - 0.5 * c))
    return huber if loss_type == "huber" else huber / c


@pytest.mark.parametrize("c", [0.1, 1.0])
@pytest.mark.parametrize("loss_type", ["l2", "huber", "smooth_l1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_are_means_over_each_example_in_float32(loss_type: Any, c: float, dtype: torch.dtype) -> None:
    predicted, target = random(3, 4, 5, 7).to(dtype), random(3, 4, 5, 7, seed=1)
    got = example_losses(predicted, target, loss_type, c)
    wanted = by_hand((predicted.double() - target.double()).numpy(), loss_type, c).mean(axis=(1, 2, 3))
    assert got.dtype == torch.float32 and got.shape == (3,)
    close(got, wanted, rtol=1e-5)


@pytest.mark.parametrize("loss_type", ["l2", "huber", "smooth_l1"])
def test_a_masked_loss_is_the_mean_over_what_the_mask_shows(loss_type: Any) -> None:
    predicted, target = random(2, 4, 4, 4), random(2, 4, 4, 4, seed=1)
    mask = torch.zeros(2, 1, 32, 32)
    mask[0, :, :16] = 1  # the upper half
    mask[1, :, 8:16, 8:24] = 0.5  # a grey patch
    losses = by_hand((predicted - target).double().numpy(), loss_type, 0.1)
    small = mask.double().numpy().reshape(2, 1, 4, 8, 4, 8).mean(axis=(3, 5))
    wanted = (losses * small).sum(axis=(1, 2, 3)) / (4 * small.sum(axis=(1, 2, 3)))
    close(example_losses(predicted, target, loss_type, 0.1, mask), wanted, rtol=1e-5)


def test_what_a_mask_hides_has_no_gradient() -> None:
    predicted = random(1, 4, 4, 4).requires_grad_()
    mask = torch.zeros(1, 1, 4, 4)
    mask[..., :2] = 1
    example_losses(predicted, random(1, 4, 4, 4, seed=1), mask_B1HW=mask).sum().backward()
    assert predicted.grad is not None
    assert not predicted.grad[..., 2:].any() and bool(predicted.grad[..., :2].all())


def test_a_mask_of_ones_changes_nothing_and_one_of_zeros_gives_zero() -> None:
    predicted, target = random(2, 4, 4, 4), random(2, 4, 4, 4, seed=1)
    plain = example_losses(predicted, target)
    torch.testing.assert_close(example_losses(predicted, target, mask_B1HW=torch.ones(2, 1, 32, 32)), plain)
    assert not example_losses(predicted, target, mask_B1HW=torch.zeros(2, 1, 32, 32)).any()


def test_noise_offset_adds_one_value_a_channel() -> None:
    latents = torch.zeros(4, 3, 8, 8)
    torch.manual_seed(0)
    plain = draw_noise(latents)
    torch.manual_seed(0)
    shifted = draw_noise(latents, 0.1)
    shift = shifted - plain
    assert shift.std(dim=(2, 3)).max() < 1e-6
    torch.manual_seed(0)
    torch.randn(4, 3, 8, 8)
    torch.testing.assert_close(shift.mean(dim=(2, 3)), 0.1 * torch.randn(4, 3, 1, 1).flatten(1))


def test_offset_noise_has_the_variance_it_says() -> None:
    torch.manual_seed(0)
    means = draw_noise(torch.zeros(4000, 4, 8, 8), 0.5).double().mean(dim=(2, 3))
    # Of a channel's mean: offset squared and one over the number of pixels. 16,000 draws: 1.1 % standard error.
    assert means.var().item() == pytest.approx(0.5**2 + 1 / 64, rel=0.05)

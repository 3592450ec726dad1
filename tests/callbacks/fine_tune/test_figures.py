"""FineTuneCheck's findings from figures alone, and the copies and ranks that it measures."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from torch import Tensor, nn

from lightning_aigc.callbacks.fine_tune.copies import copy_ratios
from lightning_aigc.callbacks.fine_tune.figures import Figures, Pictures, find_all, summary
from lightning_aigc.callbacks.fine_tune.ranks import effective_rank, effective_ranks, singular_values
from lightning_aigc.diffusion import StableDiffusionLoRA
from tools.embedded import drawing, world


def pictures(clip_t: float, clip_i: float, colour: float = 0.5, count: int = 6) -> Pictures:
    jitter = [0.01 * (i % 3 - 1) for i in range(count)]
    return Pictures([clip_t + j for j in jitter], [clip_i + j for j in jitter], torch.full((count, 4), colour))


HEALTHY = Figures(
    trained=(pictures(0.2, 0.1), pictures(0.6, 0.5)),
    plain=(pictures(0.8, 0.0), pictures(0.8, 0.02)),
    copy_ratios=[1.5, 1.2, 1.0, 1.7],
    text_drift=0.05,
    ranks={"a": (16, 9.0), "b": (16, 8.0)},
)


def names(figures: Figures) -> list[str]:
    return [finding.check for finding in find_all(figures)]


def test_a_healthy_fine_tune_has_no_findings_and_one_line_of_figures() -> None:
    assert names(HEALTHY) == []
    assert summary(HEALTHY) == (
        "trained prompts +0.400 clip_t +0.400 clip_i; class prompts +0.000 clip_t +0.020 clip_i; their colours +0.000; "
        "0 of 4 samples copy a training image; text drift 0.05; effective rank 9.0 of 16"
    )


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"plain": (pictures(0.8, 0.0), pictures(0.5, 0.02))}, "forgotten"),
        ({"plain": (pictures(0.8, 0.0), pictures(0.8, 0.3))}, "bleeding"),
        ({"plain": (pictures(0.8, 0.0), pictures(0.8, 0.02, colour=0.8))}, "colour_shift"),
        ({"copy_ratios": [0.2, 0.3, 1.2, 1.4]}, "memorised"),
        ({"text_drift": 0.9}, "text_encoder_drift"),
        ({"trained": (pictures(0.2, 0.1), pictures(0.2, 0.1))}, "not_learned"),
        ({"ranks": {"a": (128, 12.0)}}, "rank_unused"),
        ({"ranks": {"a": (2, 1.95)}}, "rank_full"),
    ],
)
def test_each_figure_out_of_range_is_named(change: dict[str, object], check: str) -> None:
    found = find_all(dataclasses.replace(HEALTHY, **change))  # type: ignore[arg-type]
    assert check in [finding.check for finding in found]
    assert all("init_args" in f.remedy and f.line().startswith(f"fine-tune: {f.check}: ") for f in found)


def brand(count: int, seed: int) -> Tensor:
    rng = random.Random(seed)
    return world.to_pixels([drawing.draw_brand(drawing.BRAND_THINGS[i % 9], rng) for i in range(count)])  # type: ignore[misc]


@pytest.mark.parametrize("seed", range(5))
def test_new_pictures_of_the_same_brand_are_no_copies_and_noisy_or_mirrored_ones_are(seed: int) -> None:
    training = brand(18, seed)
    new, noisy = (
        copy_ratios(brand(18, 50 + seed), training),
        copy_ratios((training[:6] + 0.05 * torch.randn(6, 3, 64, 64)).clamp(0, 1), training),
    )
    mirrored = copy_ratios(training[:6].flip(-1), training)
    assert new is not None and noisy is not None and mirrored is not None
    assert (new < 0.5).float().mean() < 0.25
    assert (noisy < 0.5).all() and (mirrored < 0.5).all()


def test_copies_need_two_training_pictures_that_differ() -> None:
    one = brand(1, 0)
    assert copy_ratios(one, one) is None
    assert copy_ratios(one, one.repeat(3, 1, 1, 1)) is None


def test_layers_that_diverged_or_never_moved_have_no_rank() -> None:
    module = StableDiffusionLoRA("embedded:sd", rank=4)
    unet = module.loaded().denoiser
    assert effective_ranks(unet) == {}  # B is zero
    layers = [m for m in unet.modules() if isinstance(getattr(m, "lora_B", None), nn.ModuleDict)]
    with torch.no_grad():
        for layer, value in zip(layers[:2], (0.5, torch.nan), strict=True):
            layer.lora_B["default"].weight.fill_(value)
    ((rank, used),) = effective_ranks(unet).values()
    assert rank == 4 and used == pytest.approx(1.0, abs=1e-3)


def test_the_effective_rank_is_that_of_the_product() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(8, 20), torch.randn(30, 8)
    expected = torch.linalg.svdvals(b @ a)[:8]
    assert torch.allclose(singular_values(a, b), expected, rtol=1e-4)
    assert effective_rank(torch.tensor([1.0, 0.0, 0.0])) == pytest.approx(1.0)
    convolution = nn.Conv2d(4, 8, 3)
    assert len(singular_values(convolution.weight, torch.randn(6, 8, 1, 1))) == 6

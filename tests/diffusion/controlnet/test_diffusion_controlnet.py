"""DiffusionControlNet in every family that has one: diffusers' loss, what is trained, what runs again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from fakes.models.pipelines import SIDE, make_batch
from fakes.models.transformer_controlnets import (
    CAPTIONS,
    SCRIPTS,
    condition_latents,
    load_pipeline,
    make_module,
    stirred,
)
from fakes.runs.seeded_fits import cloned, fit, same
from fakes.runs.training_losses import example_losses
from lightning_aigc.callbacks.health.parameter_names import zero_convolution_gates
from lightning_aigc.diffusion.families import CONTROLLED
from lightning_aigc.precision import FusedBackwardPrecision

pytestmark = [
    pytest.mark.usefixtures("without_report_page"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Lightning's advice on workers, loggers and folders
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),  # diffusers' ControlNet imports it
]

Folder = Callable[[str], str]


def test_every_family_with_a_controlnet_is_tested() -> None:
    assert set(SCRIPTS) == set(CONTROLLED)


# What it learns ------------------------------------------------------------------------------------------------------


def test_the_first_loss_is_that_of_diffusers_script(family: str, folder: str) -> None:
    module = stirred(make_module(folder, flow_shift=3.0))
    batch = make_batch(CAPTIONS)
    conditions = torch.randint(0, 256, (2, 3, SIDE, SIDE), generator=torch.Generator().manual_seed(1)).byte()
    moments = module.encode_pixels(batch["pixel_values"]).contiguous()  # equal strides, for equal draws
    shown_moments = module.encode_pixels(conditions.float() / 255 * 2 - 1).contiguous()
    given = batch | {"latent_moments": moments, "conditioning": conditions, "conditioning_moments": shown_moments}
    torch.manual_seed(5)
    found = example_losses(module, given).mean()

    pipeline, (encode, velocity_of) = load_pipeline(family, folder), SCRIPTS[family]
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    torch.manual_seed(5)
    with torch.no_grad():
        latents = encode(pipeline.vae, moments)
        noise = torch.randn_like(latents)
        u = torch.sigmoid(torch.normal(mean=0.0, std=1.0, size=(len(latents),)))
        indices = (u * scheduler.config.num_train_timesteps).long()
        timesteps, sigmas = scheduler.timesteps[indices], scheduler.sigmas[indices][:, None, None, None]
        noisy, shown = (1.0 - sigmas) * latents + sigmas * noise, encode(pipeline.vae, shown_moments)
        velocity = velocity_of(pipeline, module.controlnet, noisy, timesteps, shown)
        wanted = (velocity.float() - (noise - latents).float()).square().mean()
    torch.testing.assert_close(found.detach(), wanted, rtol=1e-6, atol=1e-6)


def test_conditions_are_encoded_as_pictures(family: str, folder: str) -> None:
    module = make_module(folder)
    conditions = torch.randint(0, 256, (2, 3, SIDE, SIDE), generator=torch.Generator().manual_seed(1)).byte()
    batch = make_batch(CAPTIONS) | {"conditioning": conditions}
    given = batch | {"conditioning_moments": module.encode_pixels(conditions.float() / 255 * 2 - 1)}
    module.eval()
    assert torch.equal(condition_latents(module, batch), condition_latents(module, given))


def test_a_new_controlnet_leaves_the_transformers_prediction_as_it_is(family: str, folder: str) -> None:
    module, batch = make_module(folder), make_batch(CAPTIONS)
    pipeline = load_pipeline(family, folder)
    latents, timesteps = module.encoders.latents(batch), torch.tensor([300.0, 700.0])
    condition = module.encoders.condition(batch, with_gradients=False)
    with torch.no_grad():
        found = module.predict(latents, timesteps, condition, batch)
        wanted = CONTROLLED[family].velocity(module.transformer, latents, timesteps, condition, 1.0)  # type: ignore[arg-type]
    assert torch.equal(found, wanted)
    assert same(cloned(pipeline.transformer), cloned(module.transformer))
    begins = module.controlnet.state_dict()
    copied = CONTROLLED[family].control.copied_weights(module.controlnet, pipeline.transformer)
    assert copied and all(torch.equal(begins[name], weight) for name, weight in copied.items())
    assert all(
        name.startswith(CONTROLLED[family].control.edge_path(module.controlnet)) for name in begins.keys() - copied
    )
    assert dict(pipeline.transformer.config) == dict(module.transformer.config)  # type: ignore[arg-type, union-attr]


def test_a_fit_moves_every_trained_weight_of_the_controlnet_and_nothing_else(
    family: str, folder: str, tmp_path: Path
) -> None:
    module = make_module(folder, learning_rate=0.05)
    before, base = cloned(module.controlnet), cloned(module.transformer)
    fit(module, tmp_path, batch=make_batch(CAPTIONS))
    assert same(base, cloned(module.transformer))
    after = cloned(module.controlnet)
    moved = {f"controlnet.{name}" for name in before if not torch.equal(before[name], after[name])}
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert moved == trained and all(name.startswith("controlnet.") for name in trained)
    assert all(p.grad is not None for p in module.trainable_parameters())


@pytest.mark.parametrize("memory", ["balanced", "lean", "max"])
@pytest.mark.parametrize(
    ("name", "blocks"),  # of the transformer and of the ControlNet
    [
        ("sd3", ["3 JointTransformerBlock"]),
        ("z_image", ["5 ZImageTransformerBlock", "2 ZImageControlTransformerBlock"]),
    ],
)
def test_blocks_of_the_controlnet_run_again_too_and_give_the_same_loss(
    name: str, blocks: list[str], memory: str, transformers: Folder, tmp_path: Path
) -> None:
    plain = fit(stirred(make_module(transformers(name))), tmp_path / "plain", batch=make_batch(CAPTIONS))
    module = stirred(make_module(transformers(name)))
    plugin: Any = FusedBackwardPrecision("32-true", memory=memory)  # type: ignore[arg-type]
    plugin.convert_module(module)
    summary = vars(module)["_fused_backward_swaps"].summary()
    assert all(found in summary for found in blocks), summary
    plugin.teardown()
    assert fit(module, tmp_path / memory, batch=make_batch(CAPTIONS), plugins=[plugin]) == pytest.approx(
        plain, rel=1e-5
    )


def test_gradients_begin_behind_the_zero_projections(family: str, folder: str) -> None:
    """The gradients that are zero at the first step are those that the health monitor expects."""
    module = make_module(folder)
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    gates = zero_convolution_gates(tuple(named))
    example_losses(module, make_batch(CAPTIONS)).mean().backward()
    zero = {name for name, p in named.items() if p.grad is None or not p.grad.any()}
    assert zero == set(gates)
    opening = {gate for before in gates.values() for gate in before}
    assert opening <= set(named)
    # Z-Image's condition enters through a zero layer too, which opens a step later.
    assert all(name.endswith("before_proj.weight") for name in opening & zero)


def test_its_edge_path_is_protected_and_covers_modules(family: str, folder: str) -> None:
    module = make_module(folder)
    names = [name for name, _ in module.named_modules()]
    assert module.protected_gradients and all(part in names for part in module.protected_gradients)
    assert make_module(folder, protect_edges=False).protected_gradients == ()

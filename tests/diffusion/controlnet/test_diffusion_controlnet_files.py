"""DiffusionControlNet in every family that has one: files, images, resume, half precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import SD3ControlNetModel
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from fakes.models.pipelines import SIDE, make_batch
from fakes.models.transformer_controlnets import (
    CAPTIONS,
    QUICK,
    condition_latents,
    load_pipeline,
    make_module,
    stirred,
)
from fakes.runs.seeded_fits import cloned, fit, same
from fakes.runs.training_losses import example_losses
from lightning_aigc.callbacks import ExactSnapshot
from lightning_aigc.diffusion import DiffusionControlNet
from lightning_aigc.diffusion.families import CONTROLLED
from lightning_aigc.diffusion.samplers.controlnet import ControlNetSampler

pytestmark = [
    pytest.mark.usefixtures("without_report_page"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Lightning's advice on workers, loggers and folders
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),  # diffusers' ControlNet imports it
]

Folder = Callable[[str], str]


@pytest.mark.parametrize("use_ema", [False, True])
def test_the_folder_loads_in_diffusers_pipeline_and_draws_the_same_picture(
    family: str, folder: str, use_ema: bool, tmp_path: Path
) -> None:
    module = make_module(folder, learning_rate=0.05, use_ema=use_ema)
    fit(module, tmp_path, batch=make_batch(CAPTIONS))
    kind: Any = getattr(diffusers, CONTROLLED[family].control.network)
    saved = kind.from_pretrained(tmp_path / "edges")
    with module.averaged_weights():
        assert same(cloned(module.controlnet), cloned(saved))
    shown = torch.rand(1, 3, SIDE, SIDE * 2, generator=torch.Generator().manual_seed(1))  # not square
    ours = module.sample(["a red cup"], [5], guidance_scale=3.0, conditions=shown)
    assert ours.shape == (1, 3, SIDE, SIDE * 2)
    assert torch.equal(ours, module.sample(["a red cup"], [5], guidance_scale=3.0, conditions=shown))
    pipeline = load_pipeline(family, folder, controlnet=saved)
    scale: dict[str, Any] = {"guidance_scale": 3.0}
    if family == "qwen_image":
        scale = {"true_cfg_scale": 3.0, "negative_prompt": " "}
    torch.manual_seed(5)  # SD 3's pipeline draws the condition's latents from it
    theirs = pipeline(
        prompt="a red cup", control_image=shown * 2 - 1, height=SIDE, width=SIDE * 2, num_inference_steps=2,
        generator=torch.Generator().manual_seed(5), output_type="pt", controlnet_conditioning_scale=1.0, **scale,
    ).images.float().clamp(0, 1)  # fmt: skip
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    other = module.sample(["a red cup"], [5], guidance_scale=3.0, conditions=1 - shown)
    assert not torch.allclose(ours, other, atol=1e-3)


def test_sampling_leaves_the_random_state_alone(transformers: Folder) -> None:
    module = make_module(transformers("sd3"))
    before = torch.get_rng_state()
    module.sample(["a red cup"], [5], conditions=torch.rand(1, 3, SIDE, SIDE, generator=torch.Generator()))
    assert torch.equal(before, torch.get_rng_state())


def test_training_goes_on_from_a_saved_controlnet(family: str, folder: str, tmp_path: Path) -> None:
    first = make_module(folder)
    fit(first, tmp_path, batch=make_batch(CAPTIONS))
    again = make_module(folder, controlnet_model_name_or_path=str(tmp_path / "edges"))
    assert same(cloned(first.controlnet), cloned(again.controlnet))
    trained = [{name for name, p in module.named_parameters() if p.requires_grad} for module in (first, again)]
    assert trained[0] == trained[1]


def test_an_instantx_controlnet_reads_unshifted_latents_and_no_pooled_text(
    transformers: Folder, tmp_path: Path
) -> None:
    """The inputs are those of its pipeline, by its config."""
    folder = transformers("sd3")
    own = stirred(make_module(folder))
    config = {**own.controlnet.config, "force_zeros_for_pooled_projection": True}
    SD3ControlNetModel.from_config(config).save_pretrained(tmp_path / "instantx")
    module = make_module(folder, controlnet_model_name_or_path=str(tmp_path / "instantx"))
    vae, batch = module.loaded().vae, make_batch(CAPTIONS)
    found, shifted_latents = (condition_latents(m.eval(), batch) for m in (module, own))
    torch.testing.assert_close(found, shifted_latents + vae.config.shift_factor * vae.config.scaling_factor)
    seen: list[Tensor] = []
    module.controlnet.register_forward_pre_hook(
        lambda _, args, given: seen.append(given["pooled_projections"]), with_kwargs=True
    )
    with torch.no_grad():
        example_losses(module, batch)
    assert not seen[0].any()


@pytest.mark.parametrize("option", ["use_ema", "gradient_checkpointing", "optimizer_in_backward"])
def test_a_resumed_run_ends_in_the_same_bits_and_checkpoints_hold_the_controlnet(
    transformers: Folder, tmp_path: Path, option: str
) -> None:
    def build(steps: int) -> DiffusionControlNet:
        return make_module(transformers("sd3"), **{option: True, "max_train_steps": steps})

    whole, half, again = build(4), build(2), build(4)
    losses = fit(whole, tmp_path / "whole")
    fit(half, tmp_path, ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, filename="two"))
    names = torch.load(tmp_path / "two.ckpt", weights_only=True)["state_dict"]
    assert names and all(name.startswith("controlnet.") for name in names)
    assert fit(again, tmp_path / "again", ckpt=str(tmp_path / "two.ckpt")) == losses[2:]
    assert same(cloned(whole.controlnet), cloned(again.controlnet))


def test_a_stopped_run_goes_on_to_the_same_bits(family: str, folder: str, tmp_path: Path) -> None:
    """Its random states return with it, which the condition's latents are drawn from."""

    def run(module: DiffusionControlNet, name: str, steps: int, ckpt_path: str | None = None) -> None:
        quiet: dict[str, Any] = {"enable_checkpointing": False, "enable_progress_bar": False, "logger": False}
        trainer = Trainer(
            default_root_dir=tmp_path / name, accelerator="cpu", devices=1, max_steps=steps,
            enable_model_summary=False, callbacks=[ExactSnapshot(1)], **quiet,
        )  # fmt: skip
        batches: Any = [make_batch(CAPTIONS, seed=number) for number in range(4)]
        torch.manual_seed(1)
        trainer.fit(module, DataLoader(batches, batch_size=None), ckpt_path=ckpt_path)

    whole, half, again = (make_module(folder, max_train_steps=None) for _ in range(3))
    run(whole, "whole", 4)
    run(half, "half", 2)
    run(again, "half", 4, ckpt_path="latest")
    assert same(cloned(whole.controlnet), cloned(again.controlnet))
    assert not same(cloned(whole.controlnet), cloned(half.controlnet))


def test_beside_a_half_precision_transformer_it_trains_in_float32_and_draws(
    family: str, folder: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module = DiffusionControlNet(folder, **QUICK)
    losses = fit(module, tmp_path, batch=make_batch(CAPTIONS), precision="bf16-mixed")
    assert all(math.isfinite(loss) for loss in losses)
    assert module.transformer is not None and next(module.transformer.parameters()).dtype == torch.bfloat16
    assert {p.dtype for p in module.controlnet.parameters()} == {torch.float32}
    shown = torch.rand(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    assert module.sample(["a red cup"], [5], conditions=shown).isfinite().all()
    arguments = {"pretrained_model_name_or_path": folder, "num_inference_steps": 2}
    sampler = ControlNetSampler(arguments, "bf16-mixed", "cpu", tmp_path / "edges")  # all networks in bfloat16
    assert sampler.sample(["a red cup"], [5], shown).isfinite().all()


def test_a_packed_base_leaves_the_controlnet_in_float32(transformers: Folder, tmp_path: Path) -> None:
    module = make_module(transformers("sd3"), base_quantization="int8")
    fit(module, tmp_path)
    assert {p.dtype for p in module.controlnet.parameters()} == {torch.float32}
    assert module.packed_base is not None

"""ControlNet-LoRA: what it trains, its merged folder and its small file, resume, and its errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ControlNetModel
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch import Tensor

from fakes.models.pipelines import SIDE, make_batch
from fakes.runs.seeded_fits import cloned, fit, same
from lightning_aigc.callbacks import GradientHealthMonitor
from lightning_aigc.diffusion import ControlNetTraining
from lightning_aigc.diffusion.controlnet.lora import MARK, TRAINED_WHOLE, merged_controlnet
from lightning_aigc.diffusion.controlnet.unet import PREFIX, make_controlnet
from lightning_aigc.errors import ModelError
from lightning_aigc.precision import FusedBackwardPrecision

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice on workers, loggers and folders

QUICK: dict[str, Any] = {
    "num_inference_steps": 2, "learning_rate": 1e-2, "max_train_steps": 3, "output_name": "edges", "rank": 4,
}  # fmt: skip
FAMILIES = pytest.mark.parametrize("family", ["sd", "sdxl"])


def build(source: str, **options: Any) -> ControlNetTraining:
    torch.manual_seed(0)
    module = ControlNetTraining(source, **QUICK | options)
    module.configure_model()
    return module


def residuals(controlnet: ControlNetModel, module: ControlNetTraining) -> list[Tensor]:
    """The ControlNet's residuals for the module's U-Net and one fixed input."""
    generator = torch.Generator().manual_seed(0)
    assert module.unet is not None
    side = SIDE // 2
    batch = make_batch()
    with torch.no_grad():
        condition = module.encoders.condition(batch, with_gradients=False)
        down, middle = controlnet(
            torch.randn(2, 4, side, side, generator=generator),
            torch.tensor([3, 700]),
            condition["prompt_embeds"].float(),
            controlnet_cond=torch.rand(2, 3, SIDE, SIDE, generator=generator),
            added_cond_kwargs=module.loaded().family.added_conditions(  # type: ignore[attr-defined]
                condition, batch, module.device, torch.float32
            ),
            return_dict=False,
        )
    return [*down, middle]


@FAMILIES
def test_it_trains_a_lora_and_what_touches_the_edges_and_nothing_else(
    family: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    module = build(request.getfixturevalue(family))
    start = cloned(module.controlnet)
    fit(module, tmp_path)
    moved = {name for name, value in cloned(module.controlnet).items() if not torch.equal(value, start[name])}
    trained = {name for name, p in module.controlnet.named_parameters() if p.requires_grad}  # type: ignore[union-attr]
    assert moved == trained
    assert all(".lora_" in name or name.startswith(TRAINED_WHOLE) for name in trained)
    assert {name.partition(".")[0] for name in trained} >= {*TRAINED_WHOLE, "down_blocks", "mid_block"}
    assert not any(".lora_" in name for name in trained if name.startswith(TRAINED_WHOLE))
    whole = ControlNetTraining(request.getfixturevalue(family), **QUICK | {"rank": None})
    whole.configure_model()
    assert sum(p.numel() for p in module.trainable_parameters()) < sum(p.numel() for p in whole.trainable_parameters())


def test_its_first_loss_is_that_of_the_whole_controlnet(sd: str, tmp_path: Path) -> None:
    first = fit(build(sd), tmp_path)
    assert first[0] == fit(build(sd, rank=None), tmp_path)[0]


@FAMILIES
@pytest.mark.parametrize("use_ema", [False, True])
def test_the_merged_folder_gives_the_trained_models_output(
    family: str, use_ema: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    module = build(request.getfixturevalue(family), use_ema=use_ema)
    fit(module, tmp_path)
    saved = ControlNetModel.from_pretrained(tmp_path / "edges")
    assert cloned(saved).keys() == make_controlnet(module.loaded(), None, None).state_dict().keys()
    assert module.controlnet is not None
    with module.averaged_weights():
        wanted, found = residuals(module.controlnet, module), residuals(saved, module)
    for ours, theirs in zip(wanted, found, strict=True):
        torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-4)
    assert max(float(each.abs().max()) for each in wanted) > 1e-3  # it has learned to say something
    whole = load_file(tmp_path / "edges.safetensors")
    assert len(whole) == len(cloned(saved)) and all(name.startswith(PREFIX) for name in whole)


def test_the_small_file_over_the_unets_weights_is_the_merged_file(sd: str, tmp_path: Path) -> None:
    """ComfyUI's ControlLora computes the base's weight plus up @ down, under lllyasviel's names."""
    module = build(sd)
    fit(module, tmp_path)
    small, merged = load_file(tmp_path / "edges_lora.safetensors"), load_file(tmp_path / "edges.safetensors")
    assert small.pop(MARK).numel() == 0
    untrained = build(sd, rank=None)
    untrained.save_model(tmp_path / "base.safetensors")
    built = {n.removeprefix(PREFIX): value for n, value in load_file(tmp_path / "base.safetensors").items()}
    for name, value in small.items():
        if name.endswith(".up"):
            weight = built[f"{name.removesuffix('.up')}.weight"]
            down = small[f"{name.removesuffix('.up')}.down"]
            weight += (value.flatten(1) @ down.flatten(1)).reshape(weight.shape)
        elif not name.endswith(".down"):
            assert name in built
            built[name] = value
    assert built.keys() == {name.removeprefix(PREFIX) for name in merged}
    for name, value in built.items():
        torch.testing.assert_close(value, merged[PREFIX + name], atol=1e-6, rtol=1e-5)


def test_begun_from_a_controlnet_it_goes_on_and_writes_no_small_file(sd: str, tmp_path: Path) -> None:
    """A small file is read over the U-Net's weights, which that LoRA does not belong to."""
    first = build(sd)
    fit(first, tmp_path)
    again = build(sd, controlnet_model_name_or_path=str(tmp_path / "edges"), output_name="next")
    assert same(cloned(merged_controlnet(first.controlnet)), cloned(merged_controlnet(again.controlnet)))  # type: ignore[arg-type]
    fit(again, tmp_path)
    assert (tmp_path / "next").is_dir() and not (tmp_path / "next_lora.safetensors").exists()


@pytest.mark.parametrize("option", ["use_ema", "gradient_checkpointing"])
def test_a_resumed_run_ends_in_the_same_bits(sd: str, tmp_path: Path, option: str) -> None:
    whole, half, again = (build(sd, **{option: True, "max_train_steps": steps}) for steps in (4, 2, 4))
    losses = fit(whole, tmp_path / "whole")
    fit(half, tmp_path, ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, filename="two"))
    names = torch.load(tmp_path / "two.ckpt", weights_only=True)["state_dict"]
    assert names.keys() == {n for n, p in half.named_parameters() if p.requires_grad}
    assert fit(again, tmp_path / "again", ckpt=str(tmp_path / "two.ckpt")) == losses[2:]
    assert same(cloned(whole.controlnet), cloned(again.controlnet))


def test_swapped_blocks_train_it_to_the_same_losses_and_the_monitor_is_quiet(sd: str, tmp_path: Path) -> None:
    losses = []
    for plugins in ([], [FusedBackwardPrecision("32-true", memory="lean")]):
        monitor = GradientHealthMonitor(every_n_steps=1, page=False)
        module = build(sd, learning_rate=1e-3, max_train_steps=6)
        losses.append(fit(module, tmp_path, monitor, plugins=plugins))
        assert [alert for alert in monitor.alerts if alert.level != "info"] == []
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_what_does_not_fit_is_one_sentence(sd: str, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"rank must be at least 1, got 0; .* null trains the full ControlNet"
    ) as raised:
        ControlNetTraining(sd, rank=0)
    assert "\n" not in str(raised.value)
    half = build(sd, max_train_steps=1)
    fit(half, tmp_path, ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, filename="one"))
    with pytest.raises(ModelError, match="use the pretrained_model_name_or_path, controlnet_model_name_or_path, rank"):
        fit(build(sd, rank=None), tmp_path, ckpt=str(tmp_path / "one.ckpt"))
    with pytest.raises(ModelError, match="use the pretrained_model_name_or_path, controlnet_model_name_or_path, rank"):
        fit(build(sd, rank=2), tmp_path, ckpt=str(tmp_path / "one.ckpt"))

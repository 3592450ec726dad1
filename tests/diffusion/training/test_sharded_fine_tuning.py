"""StableDiffusionFineTuning under ZeRO: DDP's weights, saved whole, under the classes that diffusers knows.

The base of zero_3 is the same one as a single file, which has no index of classes to copy.
"""

from __future__ import annotations

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from fakes.models.pipelines import make_batch, make_pipeline, read_single_files_with, tiny_configs
from fakes.processes.ranks import run_ranks
from lightning_aigc.callbacks import SaveModel
from lightning_aigc.diffusion import StableDiffusionFineTuning
from lightning_aigc.diffusion.pipeline.loading import load_components
from lightning_aigc.diffusion.pipeline.saving import save_single_file
from lightning_aigc.precision import FusedBackwardPrecision

STRATEGIES = ("ddp", "zero_2", "zero_3")


def fit_all(rank: int, bases: dict[str, str], folder: str) -> None:
    warnings.simplefilter("ignore")
    read_single_files_with(tiny_configs())
    for name in STRATEGIES:
        torch.manual_seed(0)
        module = StableDiffusionFineTuning(
            # Not AdamW, whose first steps are as large where gradients are next to zero, and rounded by the strategy.
            bases[name],
            optimizer=partial(torch.optim.SGD, lr=0.1),
            max_train_steps=3,
            use_ema=True,
            output_name="model",
        )
        module.configure_callbacks = lambda: []  # type: ignore[method-assign]
        trainer = Trainer(
            default_root_dir=f"{folder}/{name}", accelerator="cpu", devices=2, strategy=name, max_epochs=-1,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False, callbacks=[SaveModel()],
            plugins=[FusedBackwardPrecision("32-true", memory="max")],
        )  # fmt: skip
        torch.manual_seed(1)
        batches: Any = [make_batch(seed=2 * step + rank) for step in range(3)]
        trainer.fit(module, DataLoader(batches, batch_size=None))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("sharded")
    pipeline = make_pipeline(folder / "sd")
    components = load_components(str(pipeline))
    save_single_file(folder / "sd.safetensors", components, {"unet": components.denoiser}, torch.float32)
    bases = dict.fromkeys(STRATEGIES, str(pipeline)) | {"zero_3": str(folder / "sd.safetensors")}
    run_ranks(fit_all, 2, folder, bases, str(folder), gloo=False)
    return pipeline, folder


@pytest.mark.parametrize("name", STRATEGIES[1:])
def test_the_saved_folder_has_ddps_weights_and_the_classes_own_names(name: str, saved: tuple[Path, Path]) -> None:
    pipeline, folder = saved
    ours, theirs, before = (
        UNet2DConditionModel.from_pretrained(path / "unet").state_dict()
        for path in (folder / name / "model", folder / "ddp" / "model", pipeline)
    )
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-6)
    assert sum(not torch.equal(ours[key], before[key]) for key in ours) > 0.9 * len(ours)
    config = json.loads((folder / name / "model" / "unet" / "config.json").read_text())
    assert config["_class_name"] == "UNet2DConditionModel"
    StableDiffusionPipeline.from_pretrained(folder / name / "model", safety_checker=None)
    assert (folder / name / "model.safetensors").stat().st_size == (folder / "ddp" / "model.safetensors").stat().st_size

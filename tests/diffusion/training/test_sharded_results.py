"""Every kind of result is written from sharded weights: DDP's file, in float32 where weights are gathered in less."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from safetensors.torch import load_file
from schedulefree import AdamWScheduleFree
from torch.utils.data import DataLoader

from fakes.models.pipelines import make_batch, make_pipeline
from fakes.processes.ranks import run_ranks
from lightning_aigc.callbacks import CLIPConvergenceGuard, SaveLoRA, SaveModel
from lightning_aigc.callbacks.sampling.gathered import gathered_weights, written_weights
from lightning_aigc.diffusion import ControlNetTraining, StableDiffusionFineTuning, StableDiffusionLoRA

STRATEGIES = ("ddp", "zero_2", "zero_3")
LORA: dict[str, Any] = {"rank": 2}
RESULTS: dict[str, tuple[Any, dict[str, Any], str, list[str]]] = {
    "lora": (StableDiffusionLoRA, LORA, "32-true", ["model_step_000001", "model"]),
    "lora, ema": (StableDiffusionLoRA, LORA | {"use_ema": True}, "32-true", ["model"]),
    "lora, schedule-free": (
        StableDiffusionLoRA,
        LORA | {"train_text_encoder": True, "optimizer": lambda groups: AdamWScheduleFree(groups, lr=1e-3)},
        "32-true",
        ["model"],
    ),
    "dora of both": (
        StableDiffusionLoRA,
        LORA | {"use_dora": True, "train_text_encoder": True},
        "32-true",
        ["model", "model.diffusers"],
    ),
    "text encoder": (
        StableDiffusionFineTuning, {"trained_parts": ["text_encoder"]}, "bf16-mixed", ["model_step_000001", "model"],
    ),
    "controlnet lora": (ControlNetTraining, LORA, "32-true", ["model", "model_lora"]),
}  # fmt: skip


def fit_all(rank: int, pipeline: str, folder: str) -> None:
    warnings.simplefilter("ignore")
    for result, (kind, arguments, precision, _) in RESULTS.items():
        for name in STRATEGIES:
            torch.manual_seed(0)
            module = kind(pipeline, learning_rate=1e-3, max_train_steps=2, output_name="model", **arguments)
            module.configure_callbacks = lambda: []
            saver: Any = SaveLoRA(1) if kind is StableDiffusionLoRA else SaveModel(1)
            trainer = Trainer(
                default_root_dir=f"{folder}/{result}/{name}", accelerator="cpu", devices=2, strategy=name,
                max_epochs=-1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                enable_model_summary=False, use_distributed_sampler=False, callbacks=[saver], precision=precision,
            )  # fmt: skip
            torch.manual_seed(1)
            batches: Any = [make_batch(seed=2 * step + rank) for step in range(2)]
            trainer.fit(module, DataLoader(batches, batch_size=None))
            if "schedule-free" in result:  # restoring weights that were freed meanwhile ends the process
                with gathered_weights(module):
                    module.sample(["a red cup"], [0], num_inference_steps=1)
            if result == "lora":
                CLIPConvergenceGuard()._write_best(trainer, module)
            if name == "zero_3":
                with written_weights(module) as writes:
                    kinds = {type(p.data) for p in module.trainable_parameters()}
                    assert (kinds == {torch.Tensor}) is writes is (rank == 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    run_ranks(fit_all, 2, folder, str(make_pipeline(folder / "sd")), str(folder), gloo=False)
    return folder


@pytest.mark.parametrize("name", STRATEGIES[1:])
@pytest.mark.parametrize("result", RESULTS)
def test_a_stage_writes_ddps_files(result: str, name: str, folder: Path) -> None:
    _, _, precision, files = RESULTS[result]
    for file in [*files, *["model_best"] * (result == "lora")]:
        ours, theirs = (load_file(folder / result / of / f"{file}.safetensors") for of in (name, "ddp"))
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert ours[key].dtype == value.dtype
            torch.testing.assert_close(ours[key], value, rtol=2e-3, atol=1e-4 if precision == "32-true" else 5e-3)
        if precision == "bf16-mixed":  # weights that were gathered in bfloat16 would have no more bits
            assert any(not torch.equal(value, value.bfloat16().float()) for value in ours.values())

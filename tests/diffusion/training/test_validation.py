"""The validation loss: equal for every batch size and number of ranks, harmless to the training, and what it shows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from fakes.models.pipelines import SIDE
from fakes.processes.ranks import run_ranks
from fakes.runs.killed_trainings import KillAt, Killed
from lightning_aigc.callbacks import CLIPConvergenceGuard, ExactSnapshot
from lightning_aigc.data import ImageCaptionData
from lightning_aigc.diffusion import StableDiffusionLoRA
from lightning_aigc.embedded import resolve
from lightning_aigc.errors import DataError, ModelError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice on workers, loggers and folders


def make_data(root: Path, pictures: Path | None = None, **arguments: Any) -> ImageCaptionData:
    given = {
        "train_data_dir": str(pictures or root / "photos"),
        "resolution": SIDE,
        "train_batch_size": 2,
        "validation_split": 0.3,
        "cache_latents": True,
        "cache_text_embeddings": True,
        "cache_dir": str(root / "cache"),
        "num_workers": 0,
    }
    return ImageCaptionData(**(given | arguments))


def make_module(root: Path, base: str | None = None, **arguments: Any) -> StableDiffusionLoRA:
    """On this base, or on the random one that lies beside the images."""
    seed_everything(3, verbose=False)
    quick = {"rank": 4, "learning_rate": 1e-2, "validation_steps": 2, "num_inference_steps": 2}
    return StableDiffusionLoRA(base or str(root / "sd"), **(quick | arguments))


def make_trainer(root: Path, *callbacks: Callback, **arguments: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    given = {"accelerator": "cpu", "devices": 1, "max_epochs": -1, "default_root_dir": root / "run"}
    return Trainer(**(quiet | given | {"enable_model_summary": False} | arguments), callbacks=list(callbacks))


@pytest.fixture
def pictures(tmp_path: Path, sd: str) -> Path:
    """Twelve images of the embedded brand, with captions, and beside them a pipeline with random weights."""
    (tmp_path / "sd").symlink_to(sd)
    return copy_pictures(tmp_path / "photos", 12)


def copy_pictures(folder: Path, count: int, first: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = (resolve("embedded:brand") / "metadata.jsonl").read_text().splitlines()[first : first + count]
    for line in lines:
        name = json.loads(line)["file_name"]
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(resolve("embedded:brand") / name, target)
        target.with_suffix(".txt").write_text(json.loads(line)["text"])
    return folder


class Seen(Callback):
    """Keeps the training's losses and every val_loss by step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.val: dict[int, float] = {}

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        assert trainer.global_step not in self.val, "validated twice at one step"
        self.val[trainer.global_step] = float(trainer.callback_metrics["val_loss"])


def validate(root: Path, trainer: Trainer, **arguments: Any) -> float:
    (result,) = trainer.validate(make_module(root), datamodule=make_data(root, **arguments), verbose=False)
    return result["val_loss"]


# The value ----------------------------------------------------------------------------------------------------------


def test_the_loss_is_equal_at_any_batch_size_with_and_without_caches(pictures: Path, tmp_path: Path) -> None:
    one = validate(tmp_path, make_trainer(tmp_path), train_batch_size=1)
    assert one > 0
    torch.manual_seed(99)
    assert validate(tmp_path, make_trainer(tmp_path), train_batch_size=1) == one, "no random state matters"
    assert validate(tmp_path, make_trainer(tmp_path), train_batch_size=4) == pytest.approx(one, rel=1e-5)
    plain = {"cache_latents": False, "cache_text_embeddings": False, "random_flip": True, "center_crop": False}
    uncached = validate(tmp_path, make_trainer(tmp_path), **plain, caption_dropout_rate=1.0)
    assert uncached == pytest.approx(one, rel=1e-4), "augmentation is of the training alone"


def of_two_ranks(rank: int, folder: str, batch_size: int, split: float) -> float:
    root = Path(folder)
    trainer = make_trainer(root, devices=2, strategy="ddp")
    return validate(root, trainer, train_batch_size=batch_size, validation_split=split)


def test_the_loss_is_equal_on_two_ranks(pictures: Path, tmp_path: Path) -> None:
    # One batch of four, so that the second rank has one that does not count; and three images, two on the first rank.
    for split, images, batch_size in ((0.34, 4, 4), (0.25, 3, 1)):
        data = make_data(tmp_path, validation_split=split)
        assert data.data_report.images_held_out == images
        one = validate(tmp_path, make_trainer(tmp_path), train_batch_size=4, validation_split=split)
        folder = tmp_path / f"ranks{images}"
        found = run_ranks(of_two_ranks, 2, folder, str(tmp_path), batch_size, split, gloo=False)
        assert found[0] == found[1] == pytest.approx(one, rel=1e-5)


def test_test_gives_the_same_loss_and_nothing_held_out_is_one_sentence(pictures: Path, tmp_path: Path) -> None:
    (result,) = make_trainer(tmp_path).test(make_module(tmp_path), datamodule=make_data(tmp_path), verbose=False)
    assert result["test_loss"] == validate(tmp_path, make_trainer(tmp_path))
    with pytest.raises(DataError, match=r"^no images are held out.*validation_split"):
        validate(tmp_path, make_trainer(tmp_path), validation_split=0.0)


def test_a_prompt_that_is_no_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"validation_prompts='a mug'; wanted a list of strings; write \['a mug'\]"):
        make_module(tmp_path, validation_prompts="a mug")


def test_predict_writes_a_sheet_and_names_missing_prompts(pictures: Path, tmp_path: Path) -> None:
    module = make_module(tmp_path, validation_prompts=["a zorp mug", "a zorp teapot"], num_validation_images=2)
    (images,) = make_trainer(tmp_path).predict(module)  # type: ignore[misc]
    torch.testing.assert_close(images, module.sample(["a zorp mug"] * 2 + ["a zorp teapot"] * 2, [0, 1, 0, 1]))
    assert (tmp_path / "run" / "predict.png").is_file()
    with pytest.raises(ModelError, match="validation_prompts"):
        make_trainer(tmp_path).predict(make_module(tmp_path))


# While training -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_fit_validates_every_so_many_optimizer_steps_and_at_both_ends(
    pictures: Path, tmp_path: Path, accumulate: int
) -> None:
    seen = Seen()
    trainer = make_trainer(tmp_path, seen, max_steps=5, accumulate_grad_batches=accumulate)
    trainer.fit(make_module(tmp_path), datamodule=make_data(tmp_path))
    assert list(seen.val) == [0, 2, 4, 5]
    assert seen.val[0] == pytest.approx(validate(tmp_path, make_trainer(tmp_path)), rel=1e-6)
    assert len(set(seen.val.values())) == 4


def test_the_trainers_own_interval_is_kept(pictures: Path, tmp_path: Path) -> None:
    seen = Seen()
    trainer = make_trainer(tmp_path, seen, max_steps=8, val_check_interval=3, num_sanity_val_steps=0)
    trainer.fit(make_module(tmp_path), datamodule=make_data(tmp_path))
    assert list(seen.val) == [3, 7], "batch 3 of each epoch of 4, as Lightning counts"


@pytest.mark.parametrize("arguments", [{}, {"use_ema": True, "ema_decay": 0.5}], ids=["plain", "ema"])
def test_the_training_is_the_same_bits_with_and_without_validation(
    pictures: Path, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    losses, weights = [], []
    for limit in (0, 1.0):
        seen, module = Seen(), make_module(tmp_path, **arguments, lora_dropout=0.2)
        data = make_data(tmp_path, caption_dropout_rate=0.3)
        make_trainer(tmp_path, seen, max_steps=6, limit_val_batches=limit).fit(module, datamodule=data)
        assert bool(seen.val) == bool(limit)
        losses.append(seen.losses)
        weights.append(torch.cat([p.detach().flatten() for p in module.trainable_parameters()]))
    assert losses[0] == losses[1] and torch.equal(*weights)


def test_averaged_weights_are_validated(pictures: Path, tmp_path: Path) -> None:
    module, seen = make_module(tmp_path, use_ema=True, ema_decay=0.9, learning_rate=3e-2), Seen()
    make_trainer(tmp_path, seen, max_steps=4).fit(module, datamodule=make_data(tmp_path))
    ema, module.ema = module.ema, None
    (plain,) = make_trainer(tmp_path).validate(module, datamodule=make_data(tmp_path), verbose=False)
    module.ema = ema
    (averaged,) = make_trainer(tmp_path).validate(module, datamodule=make_data(tmp_path), verbose=False)
    assert averaged["val_loss"] == pytest.approx(seen.val[4], rel=1e-6)
    assert plain["val_loss"] != pytest.approx(seen.val[4], rel=1e-4)


def test_a_killed_run_resumes_to_the_same_bits_and_the_same_validation(pictures: Path, tmp_path: Path) -> None:
    found = []
    for name, kill in (("whole", None), ("killed in a step", 2), ("killed in the next", 3)):
        root = tmp_path / name
        first, second = Seen(), Seen()
        callbacks = [ExactSnapshot(every_n_steps=1), first] + ([] if kill is None else [KillAt(kill)])
        try:
            trainer = make_trainer(root, *callbacks, max_steps=6)
            trainer.fit(make_module(tmp_path, use_ema=True), datamodule=make_data(tmp_path, caption_dropout_rate=0.3))
        except Killed:
            callbacks[0].abandon()  # type: ignore[attr-defined]
            trainer = make_trainer(root, ExactSnapshot(every_n_steps=1), second, max_steps=6)
            data = make_data(tmp_path, caption_dropout_rate=0.3)
            trainer.fit(make_module(tmp_path, use_ema=True), datamodule=data, ckpt_path="latest")
        module: Any = trainer.lightning_module
        weights = torch.cat([p.detach().flatten() for p in module.trainable_parameters()])
        found.append((first.losses + second.losses, first.val | second.val, weights))
    (losses, val, weights), *resumed = found
    assert list(val) == [0, 2, 4, 6]
    for losses_again, val_again, weights_again in resumed:
        assert losses == losses_again and val == val_again and torch.equal(weights, weights_again)


@pytest.mark.long
def test_the_loss_of_held_out_pictures_turns_up_while_the_training_loss_falls(tmp_path: Path) -> None:
    train = copy_pictures(tmp_path / "photos", 2)
    held_out = copy_pictures(tmp_path / "held_out", 8, first=4)
    seen = Seen()
    module = make_module(
        tmp_path, "embedded:sd", rank=16, learning_rate=6e-3, validation_steps=20, lora_targets=list(ALL_TARGETS)
    )
    data = make_data(
        tmp_path, train, validation_split=0.0, validation_data_dir=str(held_out), train_batch_size=4, resolution=64
    )
    make_trainer(tmp_path, seen, max_steps=160).fit(module, datamodule=data)
    val = list(seen.val.values())
    lowest = val.index(min(val))  # 0.216 before the first step, 0.129 at step 80, 0.185 at step 160
    assert 0 < lowest < len(val) - 1 and val[-1] > 1.2 * val[lowest], val
    assert sum(seen.losses[120:160]) < sum(seen.losses[40:80]), "the training loss hides it"


ALL_TARGETS = ("attention", "feed_forward", "convolutions")


def test_the_report_of_a_guarded_run_scores_the_images_of_the_guards_prompts(tmp_path: Path, pictures: Path) -> None:
    guard = CLIPConvergenceGuard(["a zorp teapot", "a zorp lamp"], 2, num_images=1, clip_model="embedded:clip")
    trainer = make_trainer(tmp_path, guard, max_steps=2)
    trainer.fit(make_module(tmp_path), make_data(tmp_path))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert None not in (summary["clip_t_before"], summary["clip_t_after"])
    assert not summary["verdict"].startswith("Not scored")

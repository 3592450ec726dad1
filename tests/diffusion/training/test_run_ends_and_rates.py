"""The step that ends a run, and the rates of its steps: plateaus, optimizers that find theirs, runs made longer."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.cli import ReduceLROnPlateau
from prodigyopt import Prodigy
from torch.utils.data import DataLoader
from transformers import Adafactor

from fakes.models.pipelines import make_batch
from lightning_aigc.callbacks import ExactSnapshot, SaveLoRA
from lightning_aigc.diffusion import FullFineTuning, LoRA, StableDiffusionFineTuning, StableDiffusionLoRA
from lightning_aigc.diffusion.training.default_callbacks import default_callbacks
from lightning_aigc.diffusion.training.optimization import build_schedule, read_scheduler
from lightning_aigc.errors import ConfigError, ModelError
from lightning_aigc.schedulers.deepspeed_rates import WarmupDecayLR

pytestmark = [
    pytest.mark.usefixtures("without_report_page"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Lightning's advice on workers, loggers and folders
]


class Rates(Callback):
    """The rate of each optimizer step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        self.found.append(float(optimizer.param_groups[0]["lr"] or 0))


def make_module(path: str, **options: Any) -> StableDiffusionLoRA:
    torch.manual_seed(0)
    return StableDiffusionLoRA(path, **({"rank": 2, "learning_rate": 1e-3, "num_inference_steps": 2} | options))


class Data(LightningDataModule):
    """Batches without class images or conditions."""

    has_class_images, has_condition_files = False, False

    def train_dataloader(self) -> Any:
        return DataLoader([make_batch(seed=n) for n in range(4)], batch_size=None)  # type: ignore[arg-type]


def make_trainer(root: Path, **options: Any) -> Trainer:
    given: dict[str, Any] = {
        "default_root_dir": root, "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False,
        "enable_checkpointing": False, "enable_model_summary": False,
    }  # fmt: skip
    return Trainer(**(given | options))


def fit(
    module: Any, root: Path, *, ckpt_path: str | None = None, data: Data | None = None, **options: Any
) -> tuple[Trainer, list[float]]:
    rates = Rates()
    trainer = make_trainer(root, callbacks=[*options.pop("callbacks", []), rates], **options)
    trainer.fit(module, data or Data().train_dataloader(), ckpt_path=ckpt_path)
    return trainer, rates.found


@pytest.mark.parametrize(
    ("limits", "train_steps", "wanted"),
    [
        ({"max_epochs": 1}, 9, 4),  # of four batches
        ({"max_epochs": 3}, 9, 9),
        ({"max_epochs": 2, "accumulate_grad_batches": 3}, 9, 4),
        ({}, 6, 6),  # Lightning's own limit of 1000 epochs is none
        ({"max_steps": 3}, 9, 3),
        ({"max_epochs": 1, "max_steps": 5}, 9, 4),
    ],
)
def test_whichever_limit_comes_first_ends_the_run(
    sd: str, tmp_path: Path, limits: dict[str, Any], train_steps: int, wanted: int
) -> None:
    module = make_module(sd, max_train_steps=train_steps, lr_scheduler="linear")
    trainer, rates = fit(module, tmp_path, **limits)
    assert trainer.global_step == trainer.max_steps == wanted
    assert rates == pytest.approx([1e-3 * (wanted - step) / wanted for step in range(wanted)])  # to the real end


def test_a_trainers_max_steps_and_another_max_train_steps_are_both_named(
    sd: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        fit(make_module(sd, max_train_steps=9), tmp_path, max_steps=1)
    assert "ends at step 1, trainer.max_steps, and not at model.init_args.max_train_steps=9" in caplog.text


def test_a_warm_up_that_the_run_does_not_end_is_named_before_the_first_step() -> None:
    with pytest.warns(UserWarning, match=r"lr_warmup_steps: 500, and the run has 20 steps; set lr_warmup_steps: 2,"):
        build_schedule(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 1e-3), "constant", 500, 20)


def unread_in_a_fit(module: Any, root: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fit(module, root, max_steps=1, data=Data())
    return [str(each.message) for each in found if "changes nothing" in str(each.message)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ema_decay": 0.9}, "ema_decay: 0.9 changes nothing while use_ema is false; set model.init_args.use_ema:"),
        ({"lokr_factor": 4}, "lokr_factor: 4 changes nothing while lora_type is lora; set model.init_args.lora_type:"),
        ({"preserve_share": 0.5}, "preserve_share: 0.5 changes nothing while preserve is unset"),
        ({"prior_loss_weight": 0.5}, "prior_loss_weight changes nothing without class images"),
        ({"huber_c": 0.2}, "huber_c: 0.2 changes nothing while loss_type is l2; set model.init_args.loss_type: huber"),
    ],
)
def test_a_setting_that_changes_nothing_is_named(sd: str, tmp_path: Path, given: dict[str, Any], said: str) -> None:
    named = unread_in_a_fit(make_module(sd, **given), tmp_path)
    assert len(named) == 1 and f"model.init_args.{said}" in named[0]
    assert named[0].endswith(f"remove {next(iter(given))}")


def test_conditions_that_a_lora_does_not_read_are_named(sd: str, tmp_path: Path) -> None:
    data = Data()
    data.has_condition_files = True
    with pytest.warns(UserWarning, match=r"LoRA does not read the data's conditions; train a DiffusionControlNet, or"):
        fit(make_module(sd), tmp_path, max_steps=1, data=data)


def test_a_warm_up_of_a_scheduler_class_and_sources_of_a_model_without_edits_are_named(sd: str, tmp_path: Path) -> None:
    constant = functools.partial(torch.optim.lr_scheduler.ConstantLR, factor=1.0)
    with pytest.warns(UserWarning, match=r"lr_warmup_steps: 3 changes nothing for a scheduler .* remove lr_warmup"):
        build_schedule(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 1e-3), constant, 3, 20)
    with pytest.raises(ModelError, match=r"validation_sources: SD 1\.5 draws from text alone; remove it"):
        fit(make_module(sd, validation_prompts=["a mug"], validation_sources=["mug.png"]), tmp_path, max_steps=1)


def test_limits_that_an_own_callback_replaces_and_a_revision_of_a_folder_are_named(sd: str, tmp_path: Path) -> None:
    named = unread_in_a_fit(make_module(sd, revision="fp16"), tmp_path)
    assert named == ["model.init_args.revision changes nothing for files of this disk; remove it"]
    module = make_module(sd, checkpoints_total_limit=5, step_files_total_limit=2)
    own: Any = [ExactSnapshot(every_n_steps=5), SaveLoRA()]
    trainer = Trainer(default_root_dir=tmp_path, callbacks=own, logger=False)
    with pytest.warns(UserWarning, match="total_limit changes nothing") as found:
        default_callbacks(trainer, module.settings, SaveLoRA())
    assert [str(each.message) for each in found] == [
        "model.init_args.checkpoints_total_limit changes nothing, because trainer.callbacks has ExactSnapshot; set its"
        " keep_last: 5 instead",
        "model.init_args.step_files_total_limit changes nothing, because trainer.callbacks has SaveLoRA; set its"
        " keep_last: 2 instead",
    ]


@pytest.mark.parametrize("given", [{"save_last": True}, {"filename": "mine-{step}"}, {"dirpath": "own"}])
def test_a_checkpoint_of_lightning_that_the_user_asks_for_is_written(
    sd: str, tmp_path: Path, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(**given)], "max_epochs": 1}
    fit(make_module(sd, max_train_steps=9, checkpointing_steps=2), tmp_path, **options)
    assert list(tmp_path.rglob("*.ckpt")) and list((tmp_path / "snapshots").iterdir())


def test_an_average_of_all_weights_by_lightning_is_refused(sd: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"EMAWeightAveraging.*remove it and set model.init_args.use_ema: true"):
        fit(make_module(sd), tmp_path, callbacks=[EMAWeightAveraging(decay=0.9)], enable_checkpointing=True)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (
            {"pixel_values": 255 * torch.rand(2, 3, 32, 32), "captions": ["a mug"] * 2},
            r"lie in -1\.\.1, got values up to 2",
        ),
        (
            {"pixel_values": torch.zeros(2, 3, 32, 32, dtype=torch.uint8)},
            r"floats in -1\.\.1, got torch.uint8; convert",
        ),
        (
            {"images": torch.zeros(2, 3, 32, 32)},
            r"`pixel_values` float .* got the keys images\. ImageCaptionData makes",
        ),
        ({"pixel_values": torch.zeros(2, 3, 32, 32)}, r"or `captions`, a list of texts; got the keys pixel_values"),
        ((torch.zeros(2, 3, 32, 32), ["a mug"]), r"a batch must be a dict with .* got a list"),
    ],
)
def test_a_batch_of_ones_own_says_what_it_lacks(sd: str, tmp_path: Path, batch: Any, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        make_trainer(tmp_path).fit(make_module(sd), DataLoader([batch], batch_size=None))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rank": 1.5}, "rank: got 1.5; wanted a whole number"),
        ({"rank": "4"}, "rank: got '4'; wanted a whole number"),
        ({"use_ema": "no"}, "use_ema: got 'no'; wanted true or false"),
        ({"learning_rate": True}, "learning_rate: got True; wanted a number or None"),
        (
            {"validation_prompts": "a mug"},
            r"validation_prompts: got 'a mug'; wanted a list of strings; write \['a mug'\]",
        ),
        ({"output_name": None}, "output_name: got None; wanted a string"),
        ({"lerning_rate": 1.0}, "has no argument 'lerning_rate'; it is called learning_rate here"),
    ],
)
def test_an_argument_of_another_type_or_name_is_refused_from_python(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        StableDiffusionLoRA("embedded:sd", **given)


def test_texts_that_are_no_list_are_refused_where_images_are_drawn(sd: str, tmp_path: Path) -> None:
    module = make_module(sd)
    with pytest.raises(ModelError, match=r"sample takes a list of prompts, got the text 'a mug'; give \['a mug'\]"):
        module.sample("a mug", [0])
    with pytest.raises(ModelError, match=r"predict draws prompts, got a batch of type dict; give a DataLoader of"):
        make_trainer(tmp_path).predict(module, DataLoader([make_batch()], batch_size=None))  # type: ignore[arg-type]


def test_settings_that_are_read_are_not_named(sd: str, tmp_path: Path) -> None:
    given = {"ema_decay": 0.9, "use_ema": True, "loss_type": "huber", "huber_c": 0.2}
    assert unread_in_a_fit(make_module(sd, **given), tmp_path) == []


def test_a_run_with_a_schedule_starts_without_a_warning_of_torch(sd: str, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit(make_module(sd, max_train_steps=1, lr_scheduler="linear"), tmp_path)
    assert [str(each.message) for each in said if "get_last_lr" in str(each.message)] == []


@pytest.mark.parametrize("kind", [ReduceLROnPlateau, torch.optim.lr_scheduler.ReduceLROnPlateau])
def test_a_plateau_is_looked_for_every_validation_steps(sd: str, tmp_path: Path, kind: Any) -> None:
    options = {"monitor": "loss"} if kind is ReduceLROnPlateau else {}
    module = make_module(
        sd,
        max_train_steps=8,
        validation_steps=2,
        # no loss is lower by so much, so that each look after the first finds a plateau
        lr_scheduler=lambda optimizer: kind(
            optimizer, patience=0, factor=0.5, threshold=1e6, threshold_mode="abs", **options
        ),
    )
    _, rates = fit(module, tmp_path)
    assert rates == pytest.approx([1e-3] * 4 + [5e-4] * 2 + [2.5e-4] * 2)


def test_adafactors_own_rate_needs_no_learning_rate(sd: str, tmp_path: Path) -> None:
    module = make_module(
        sd,
        learning_rate=None,
        max_train_steps=2,
        optimizer=lambda params: Adafactor(params, lr=None, relative_step=True),
    )
    module.configure_model()
    before = [p.detach().clone() for p in module.trainable_parameters()]
    trainer, _ = fit(module, tmp_path)
    assert trainer.global_step == 2
    assert any(not torch.equal(was, now) for was, now in zip(before, module.trainable_parameters(), strict=True))
    with pytest.raises(ModelError, match=r"Adafactor sets its own rate; set model\.init_args\.lr_scheduler: constant"):
        build_schedule(module.build_optimizer(module.parameter_groups()), "cosine", 0, 10)


@pytest.mark.parametrize(("rate", "warns"), [(1e-3, True), (1.0, False)])
def test_prodigys_rate_is_a_factor_and_a_small_one_is_said_before_the_first_step(
    sd: str, rate: float, warns: bool
) -> None:
    module = make_module(sd, learning_rate=rate, max_train_steps=2, optimizer=Prodigy)
    module.configure_model()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        module.configure_optimizers()
    assert any("Prodigy finds its rate itself" in str(each.message) for each in said) == warns


def test_an_optimizer_that_takes_one_rate_is_refused_two_before_the_first_step(sd: str) -> None:
    module = make_module(sd, learning_rate=1.0, text_encoder_lr=0.5, train_text_encoder=True, optimizer=Prodigy)
    module.configure_model()
    with pytest.raises(ModelError, match=r"takes one rate .* got 1 and 0.5; set model.init_args.text_encoder_lr: 1.0"):
        module.configure_optimizers()


def make_scheduled(sd: str, schedule: str, steps: int) -> StableDiffusionLoRA:
    if schedule != "deepspeed":
        return make_module(sd, max_train_steps=steps, lr_scheduler=schedule)
    scheduler = lambda optimizer: WarmupDecayLR(optimizer, warmup_num_steps=2, warmup_type="linear")  # noqa: E731
    return make_module(sd, max_train_steps=steps, lr_scheduler=scheduler)


@pytest.fixture(scope="module", params=["linear", "cosine", "deepspeed"])
def scheduled(
    request: pytest.FixtureRequest, sd: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[float]]:
    """A schedule, and the rates of its run of six steps."""
    return request.param, fit(make_scheduled(sd, request.param, 6), tmp_path_factory.mktemp("whole"))[1]


@pytest.mark.parametrize("kind", ["checkpoint", "snapshot"])
def test_a_run_made_longer_takes_no_step_at_its_old_end(
    sd: str, tmp_path: Path, scheduled: tuple[str, list[float]], kind: str
) -> None:
    schedule, whole = scheduled

    def callbacks() -> list[Callback]:
        return [ExactSnapshot(1)] if kind == "snapshot" else []

    trainer, _ = fit(make_scheduled(sd, schedule, 3), tmp_path / "run", callbacks=callbacks())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    resumed = "latest" if kind == "snapshot" else str(tmp_path / "last.ckpt")
    _, rates = fit(make_scheduled(sd, schedule, 6), tmp_path / "run", callbacks=callbacks(), ckpt_path=resumed)
    assert rates == pytest.approx(whole[3:]) and min(rates) > 0


def test_advice_names_arguments_of_the_users_own_class(sd: str) -> None:
    assert "use_dora" in LoRA.same_weights_advice and "trained_parts" in FullFineTuning.same_weights_advice
    from lightning_aigc.data.cache.encoder import frozen_text_setting

    assert frozen_text_setting(make_module(sd)) == "model.init_args.train_text_encoder: false"
    assert frozen_text_setting(StableDiffusionFineTuning(sd)) == "model.init_args.trained_parts: [unet]"


def test_a_scheduler_may_be_named_by_its_class_path_alone(sd: str, tmp_path: Path) -> None:
    module = make_module(sd, lr_scheduler="torch.optim.lr_scheduler.ConstantLR")
    assert fit(module, tmp_path, max_steps=2)[1] == pytest.approx([1e-3 / 3, 1e-3 / 3])  # ConstantLR's default factor


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            "torch.optim.lr_scheduler.StepLR",
            "StepLR needs step_size; set model.init_args.lr_scheduler.init_args.step_size",
        ),
        ("torch.optim.lr_scheduler.Nope", "cannot be imported .*; check the class path"),
        ("cosin", "got 'cosin'; did you mean cosine"),
    ],
)
def test_a_scheduler_that_cannot_be_made_is_one_sentence(given: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        read_scheduler(given)

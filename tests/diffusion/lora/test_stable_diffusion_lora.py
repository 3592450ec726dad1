"""StableDiffusionLoRA through real Trainer fits: what is trained, what is kept, and that images do not disturb it."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline, StableDiffusionXLPipeline
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fakes.models.pipelines import SIDE, make_batch
from fakes.runs.training_losses import example_losses
from lightning_aigc.cli.fit.aigc_cli import AIGCCLI
from lightning_aigc.data import ImageCaptionData
from lightning_aigc.diffusion import ControlNetTraining, DiffusionFineTuning, DiffusionLoRA, StableDiffusionLoRA
from lightning_aigc.diffusion.pipeline import encoders
from lightning_aigc.embedded import resolve
from lightning_aigc.errors import DataError, ModelError

pytestmark = [
    pytest.mark.usefixtures("without_report_page"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Lightning's advice on workers, loggers and folders
]

STEPS = 3
QUICK = {"num_inference_steps": 2, "learning_rate": 1e-2, "max_train_steps": STEPS}


def make_module(pipeline: str, **arguments: Any) -> StableDiffusionLoRA:
    """A module of the same random LoRA every time, as long as nothing is drawn before it loads."""
    torch.manual_seed(0)
    return StableDiffusionLoRA(pipeline, **{**QUICK, "rank": 4, **arguments})


def loader(*batches: dict[str, Any]) -> DataLoader[Any]:
    return DataLoader(list(batches or (make_batch(), make_batch(seed=1))), batch_size=None)  # type: ignore[arg-type]


class Losses(Callback):
    """Keeps each batch's loss, and does something at each batch's end."""

    def __init__(self, act: Callable[[Any], Any] | None = None) -> None:
        self.losses: list[float] = []
        self.rates: list[list[float]] = []
        self.act = act

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))
        if self.act is not None:
            self.act(pl_module)


def fit(
    module: StableDiffusionLoRA,
    folder: Path,
    *callbacks: Callback,
    data: DataLoader[Any] | None = None,
    ckpt_path: str | None = None,
    **options: Any,
) -> Trainer:
    arguments: dict[str, Any] = {
        "default_root_dir": str(folder),
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": -1,
        "logger": False,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": list(callbacks),
    }
    trainer = Trainer(**{**arguments, **options})
    torch.manual_seed(1)
    trainer.fit(module, data or loader(), ckpt_path=ckpt_path)
    return trainer


def trained(module: StableDiffusionLoRA) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


def frozen(module: StableDiffusionLoRA) -> dict[str, Tensor]:
    assert module.components is not None
    parts = module.components
    named = {"unet": parts.denoiser, "vae": parts.vae} | {f"text {i}": e for i, e in enumerate(parts.text_encoders)}
    return {
        f"{part}.{name}": tensor.detach().clone()
        for part, model in named.items()
        for name, tensor in model.state_dict().items()
        if "lora_" not in name
    }


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def loss_at_fixed_noise(module: StableDiffusionLoRA, batch: dict[str, Any] | None = None) -> float:
    torch.manual_seed(7)
    with torch.no_grad():
        return float(torch.stack([example_losses(module, batch or make_batch()).mean() for _ in range(8)]).mean())


# What is trained ----------------------------------------------------------------------------------------------------


def test_the_loss_falls(sd: str, tmp_path: Path) -> None:
    module = make_module(sd, rank=8, max_train_steps=40, lora_targets=["attention", "feed_forward", "convolutions"])
    module.configure_model()
    before = loss_at_fixed_noise(module)
    fit(module, tmp_path)
    assert loss_at_fixed_noise(module) < 0.9 * before


@pytest.mark.parametrize("train_text_encoder", [False, True])
def test_only_the_lora_is_trained(sd: str, tmp_path: Path, train_text_encoder: bool) -> None:
    module = make_module(sd, train_text_encoder=train_text_encoder)
    module.configure_model()
    base, lora = frozen(module), trained(module)
    fit(module, tmp_path)
    assert same(base, frozen(module))
    moved = trained(module)
    assert all("lora_" in name for name in moved)
    assert all(not torch.equal(lora[name], moved[name]) for name in moved if "lora_B" in name)
    assert any(name.startswith("text_encoders.") for name in moved) == train_text_encoder


@pytest.mark.parametrize(
    ("groups", "fragments"),
    [
        (["attention"], ["attn1.to_q"]),
        (["feed_forward"], ["ff.net.0.proj"]),
        (["convolutions"], ["conv1", "proj_in"]),
        (["attention", "feed_forward", "convolutions"], ["attn2.to_out.0", "ff.net.2", "conv_shortcut", "upsamplers"]),
    ],
)
def test_each_group_of_layers_is_adapted(sd: str, groups: list[str], fragments: list[str]) -> None:
    module = make_module(sd, lora_targets=groups)
    module.configure_model()
    names = list(trained(module))
    assert all(any(fragment in name for name in names) for fragment in fragments)


def test_a_new_lora_changes_nothing_yet(sd: str) -> None:
    module = make_module(sd)
    plain = StableDiffusionPipeline.from_pretrained(sd, safety_checker=None)
    plain.scheduler = DDIMScheduler.from_config(plain.scheduler.config)
    plain.set_progress_bar_config(disable=True)
    picture = plain("a red cup", generator=torch.Generator().manual_seed(3), num_inference_steps=2, output_type="pt")
    torch.testing.assert_close(module.sample(["a red cup"], [3]), picture.images, atol=1e-5, rtol=0)


def test_dora_and_rslora_train(sd: str, tmp_path: Path) -> None:
    dora = make_module(sd, use_dora=True)
    fit(dora, tmp_path / "dora")
    assert any("lora_magnitude_vector" in name for name in trained(dora))
    assert (tmp_path / "dora" / "lora.diffusers.safetensors").is_file()
    rank_stabilized = make_module(sd, use_rslora=True, rank=4, lora_alpha=6)
    fit(rank_stabilized, tmp_path / "rslora")
    assert rank_stabilized.unet is not None
    scales = {m.scaling["default"] for m in rank_stabilized.unet.modules() if hasattr(m, "scaling")}
    assert scales == {6 / math.sqrt(4)}


def gradients(module: StableDiffusionLoRA) -> dict[str, Tensor]:
    torch.manual_seed(5)
    module.zero_grad()
    example_losses(module, make_batch()).mean().backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.requires_grad and p.grad is not None}


def test_gradient_checkpointing_gives_the_same_gradients_and_recomputes(sd: str) -> None:
    plain, saving = (
        make_module(sd, train_text_encoder=True, gradient_checkpointing=on, lora_targets=["attention", "feed_forward"])
        for on in (False, True)
    )
    calls = dict.fromkeys(("plain", "saving"), 0)
    for name, module in (("plain", plain), ("saving", saving)):
        torch.manual_seed(0)
        module.configure_model()
        assert module.unet is not None

        def count(*_: Any, name: str = name) -> None:
            calls[name] += 1

        module.unet.up_blocks[-1].resnets[0].conv1.register_forward_hook(count)
        module.text_encoders[0].get_submodule("encoder.layers.0.mlp.fc1").register_forward_hook(count)
    for first, second in zip(plain.trainable_parameters(), saving.trainable_parameters(), strict=True):
        nn.init.normal_(first, std=0.1)
        second.data.copy_(first.data)
    wanted, got = gradients(plain), gradients(saving)
    assert wanted.keys() == got.keys() == trained(plain).keys()
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], msg=name)
    assert calls == {"plain": 2, "saving": 4}  # an up block, and a text encoder's layer


def test_text_encoders_learn_at_their_own_rate(sd: str, tmp_path: Path) -> None:
    watch = Losses()
    fit(make_module(sd, train_text_encoder=True, learning_rate=1e-3, text_encoder_lr=1e-4), tmp_path, watch)
    assert watch.rates[0] == [1e-3, 1e-4]


def test_without_a_learning_rate_the_optimizer_keeps_its_own(sd: str, tmp_path: Path) -> None:
    watch = Losses()
    fit(make_module(sd, learning_rate=None, optimizer=lambda p: torch.optim.SGD(p, lr=0.125)), tmp_path, watch)
    assert watch.rates[0] == [0.125]


# Steps, schedules, optimizers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_train_steps", "max_steps", "accumulate", "steps", "batches"),
    [(3, -1, 1, 3, 3), (5, 2, 1, 2, 2), (2, 4, 1, 4, 4), (2, -1, 2, 2, 4), (2, -1, 3, 2, 6)],
)
def test_steps_are_optimizer_steps_and_the_trainers_go_first(
    sd: str, tmp_path: Path, max_train_steps: int, max_steps: int, accumulate: int, steps: int, batches: int
) -> None:
    module, watch = make_module(sd, max_train_steps=max_train_steps, use_ema=True), Losses()
    data = loader(*(make_batch(seed=seed) for seed in range(6)))  # Lightning also steps at an epoch's end
    trainer = fit(module, tmp_path, watch, data=data, max_steps=max_steps, accumulate_grad_batches=accumulate)
    assert trainer.global_step == steps
    assert len(watch.losses) == batches
    assert module.ema is not None and module.ema.optimization_step == steps


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "cosine_with_restarts", "polynomial"])
def test_a_schedule_by_name_warms_up_and_ends_with_the_run(sd: str, tmp_path: Path, name: str) -> None:
    module, watch = (
        make_module(sd, lr_scheduler=name, lr_warmup_steps=2, max_train_steps=6, learning_rate=1e-2),
        Losses(),
    )
    trainer = fit(module, tmp_path, watch)
    rates = [rate for (rate,) in watch.rates]
    assert rates[:3] == pytest.approx([0, 0.5e-2, 1e-2])
    last = trainer.optimizers[0].param_groups[0]["lr"]
    assert last == pytest.approx(1e-2 if name == "constant" else 0, abs=2e-5)  # polynomial ends at a thousandth


def test_an_unknown_schedule_is_named(sd: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.init_args\.lr_scheduler.*cosinus"):
        fit(make_module(sd, lr_scheduler="cosinus"), tmp_path)


def from_cli(sd: str, *arguments: str) -> Any:
    """Built as the command line builds it, not run."""
    model = ["--model=StableDiffusionLoRA", f"--model.pretrained_model_name_or_path={sd}", "--model.rank=4"]
    model += ["--model.max_train_steps=4", "--model.num_inference_steps=2"]
    data = ["--data=ImageCaptionData", "--data.train_data_dir=embedded:brand"]
    quiet = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_progress_bar=false"]
    return AIGCCLI(args=[*quiet, *model, *data, *arguments], run=False)


OPTIMIZERS = {
    "prodigyopt.Prodigy": {"lr": 1.0},
    "schedulefree.AdamWScheduleFree": {"lr": 0.01, "warmup_steps": 2},
    "torch.optim.SGD": {"lr": 0.1},
}


@pytest.mark.parametrize("class_path", OPTIMIZERS)
def test_an_optimizer_by_class_path_trains(sd: str, tmp_path: Path, class_path: str) -> None:
    pytest.importorskip(class_path.partition(".")[0])
    options = [f"--model.optimizer.{name}={value}" for name, value in OPTIMIZERS[class_path].items()]
    cli = from_cli(sd, f"--model.optimizer={class_path}", *options, f"--trainer.default_root_dir={tmp_path}")
    cli.model.configure_model()
    before = trained(cli.model)
    cli.trainer.fit(cli.model, loader())
    optimizer = cli.trainer.optimizers[0]
    assert type(getattr(optimizer, "optimizer", optimizer)).__name__ == class_path.rpartition(".")[2]
    assert optimizer.param_groups[0]["weight_decay"] >= 0
    after = trained(cli.model)
    assert all(bool(torch.isfinite(value).all()) for value in after.values())
    assert not same(before, after)


def test_a_schedule_by_class_path_is_stepped_every_step(sd: str, tmp_path: Path) -> None:
    cli = from_cli(
        sd,
        "--model.learning_rate=0.01",
        "--model.lr_scheduler=torch.optim.lr_scheduler.StepLR",
        "--model.lr_scheduler.step_size=1",
        "--model.lr_scheduler.gamma=0.5",
        f"--trainer.default_root_dir={tmp_path}",
    )
    cli.trainer.fit(cli.model, loader())
    assert cli.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * 0.5**4)


def test_schedule_free_refuses_a_schedule(sd: str, tmp_path: Path) -> None:
    schedulefree = pytest.importorskip("schedulefree")
    module = make_module(sd, optimizer=lambda p: schedulefree.AdamWScheduleFree(p, lr=0.01), lr_scheduler="cosine")
    with pytest.raises(ModelError, match="AdamWScheduleFree schedules itself"):
        fit(module, tmp_path)


def make_optimizer(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    if name == "prodigy":
        prodigyopt = pytest.importorskip("prodigyopt")
        return lambda p: prodigyopt.Prodigy(p, lr=1.0)
    if name == "schedule-free":
        schedulefree = pytest.importorskip("schedulefree")
        return lambda p: schedulefree.AdamWScheduleFree(p, lr=0.01)
    return lambda p: torch.optim.AdamW(p, lr=0.01)


DROPOUT = {"lora_dropout": 0.3, "train_text_encoder": True}


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        *(("adamw", {}), ("adamw", {"use_ema": True}), ("adamw", DROPOUT)),
        *(("prodigy", {}), ("schedule-free", {}), ("schedule-free", {"use_ema": True})),
        # Images swap no weights for Prodigy, as for AdamW, and draw no random numbers for any optimizer.
        pytest.param("prodigy", {"use_ema": True}, marks=pytest.mark.long),
        pytest.param("prodigy", DROPOUT, marks=pytest.mark.long),
        pytest.param("schedule-free", DROPOUT, marks=pytest.mark.long),
    ],
)
def test_pictures_and_files_in_between_leave_training_bit_identical(
    sd: str, tmp_path: Path, optimizer: str, options: dict[str, Any]
) -> None:
    def look(module: Any) -> None:
        module.sample(["a zorp cup"], [0])
        module.save_lora(tmp_path / "between.safetensors")

    results = []
    for act in (None, look):
        watch = Losses(act)
        module = make_module(sd, learning_rate=None, optimizer=make_optimizer(optimizer), max_train_steps=4, **options)
        module.configure_model()
        fit(module, tmp_path, watch)
        results.append((watch.losses, trained(module)))
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1])


# Objectives ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [0.0, 0.5, 2.0])
def test_class_pictures_count_by_their_weight(sd: str, tmp_path: Path, weight: float) -> None:
    module = make_module(sd, prior_loss_weight=weight)
    batch = make_batch(["a zorp cup", "a zorp shoe", "a red cup"], priors=1)
    module.configure_model()
    torch.manual_seed(3)
    each = example_losses(module, batch)
    watch = Losses()
    watch.on_train_batch_start = lambda *_: torch.manual_seed(3)  # type: ignore[method-assign, assignment]
    fit(module, tmp_path, watch, data=loader(batch), max_steps=1)
    assert watch.losses[0] == pytest.approx(float(each[:2].mean() + weight * each[2:].mean()), rel=1e-5)


def test_a_batch_without_class_pictures_is_its_mean(sd: str) -> None:
    module = make_module(sd)
    module.configure_model()
    module.log = lambda *_, **__: None  # type: ignore[method-assign, assignment]
    torch.manual_seed(2)
    loss = module.training_step(make_batch(), 0)
    torch.manual_seed(2)
    assert torch.equal(loss, example_losses(module, make_batch()).mean())


def test_v_prediction_with_zero_terminal_snr_trains_and_draws(
    sd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = make_module(sd, prediction_type="v_prediction", zero_terminal_snr=True, snr_gamma=5.0)
    module.configure_model()
    assert module.objective is not None
    assert module.objective.schedule.config.prediction_type == "v_prediction"
    assert float(module.objective.schedule.alphas_cumprod[-1]) < 1e-6
    # Every example at the last step, where there is no signal.
    monkeypatch.setattr(torch, "randint", lambda low, high, size, **_: torch.full(size, high - 1))
    watch = Losses()
    fit(module, tmp_path, watch)
    assert all(math.isfinite(loss) for loss in watch.losses)
    assert all(bool(torch.isfinite(value).all()) for value in trained(module).values())
    assert bool(torch.isfinite(module.sample(["a red cup"], [0])).all())


def test_zero_terminal_snr_refuses_epsilon(sd: str) -> None:
    with pytest.raises(ModelError, match="prediction_type: v_prediction"):
        make_module(sd, zero_terminal_snr=True).configure_model()


def test_a_mask_in_the_batch_is_used(sd: str) -> None:
    module = make_module(sd)
    module.configure_model()
    nothing = torch.zeros(2, 1, SIDE, SIDE)
    assert loss_at_fixed_noise(module, make_batch() | {"mask": nothing}) == 0
    plain, ones = make_batch(), make_batch() | {"mask": torch.ones_like(nothing)}
    assert loss_at_fixed_noise(module, plain) == pytest.approx(loss_at_fixed_noise(module, ones), rel=1e-5)


def test_cached_latents_and_embeddings_give_the_loss_of_pixels_and_captions(sd: str) -> None:
    module = make_module(sd)
    module.configure_model()
    batch = make_batch()
    cached = batch | {"latent_moments": module.encode_pixels(batch["pixel_values"])}
    cached |= module.encode_captions(batch["captions"])
    del cached["pixel_values"]
    assert loss_at_fixed_noise(module, cached) == loss_at_fixed_noise(module, batch)


def test_large_pictures_are_encoded_a_few_at_a_time(sd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A float32 autoencoder's activations of a whole batch would be the most memory of the step."""
    module = make_module(sd)
    module.configure_model()
    pixels = torch.randn(5, 3, SIDE, SIDE).clamp(-1, 1)
    at_once = module.encode_pixels(pixels)
    vae, seen = module.loaded().vae, []
    encode = vae.encode
    monkeypatch.setattr(vae, "encode", lambda some: (seen.append(len(some)), encode(some))[1])
    monkeypatch.setattr(encoders, "PIXELS_ENCODED_AT_ONCE", 2 * SIDE * SIDE)
    torch.testing.assert_close(module.encode_pixels(pixels), at_once, rtol=1e-5, atol=1e-6)
    assert seen == [2, 2, 1]


def test_a_picture_whose_latents_are_not_finite_is_named(sd: str, tmp_path: Path) -> None:
    module = make_module(sd)
    batch = make_batch()
    batch["pixel_values"][1] = math.nan
    with pytest.raises(ModelError, match=r"1\.png.* in float32 already: look at the image"):
        fit(module, tmp_path, data=loader(batch))


@pytest.mark.parametrize("options", [{}, {"train_text_encoder": True}, {"gradient_checkpointing": True}])
def test_bf16_mixed_keeps_the_lora_and_the_autoencoder_in_float32(
    sd: str, tmp_path: Path, options: dict[str, Any]
) -> None:
    module, watch = make_module(sd, **options), Losses()
    fit(module, tmp_path, watch, precision="bf16-mixed")
    assert module.components is not None
    assert {p.dtype for p in module.trainable_parameters()} == {torch.float32}
    assert module.components.denoiser.conv_in.weight.dtype == torch.bfloat16
    assert module.components.vae.dtype == torch.float32
    assert all(math.isfinite(loss) for loss in watch.losses)
    assert bool(torch.isfinite(module.sample(["a red cup"], [0])).all())


# Images -----------------------------------------------------------------------------------------------------------


def test_a_sample_has_the_right_shape_and_range_and_repeats(sd: str) -> None:
    module = make_module(sd)
    prompts, seeds = ["a red cup", "a blue shoe", "a red cup"], [0, 1, 2]
    pictures = module.sample(prompts, seeds)
    assert pictures.shape == (3, 3, SIDE, SIDE) and pictures.dtype == torch.float32
    assert 0 <= float(pictures.min()) <= float(pictures.max()) <= 1
    assert torch.equal(pictures, module.sample(prompts, seeds))
    assert not torch.equal(pictures[0], pictures[2])
    torch.testing.assert_close(module.sample(prompts, seeds, batch_size=2), pictures, atol=1e-4, rtol=0)
    torch.testing.assert_close(module.sample(prompts[1:2], seeds[1:2])[0], pictures[1], atol=1e-4, rtol=0)


def test_a_sample_leaves_random_states_modes_and_gradients_alone(sd: str) -> None:
    module = make_module(sd, lora_dropout=0.5, train_text_encoder=True)
    module.configure_model()
    gradients(module)
    kept = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    modes = [m.training for m in module.modules()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    pictures = module.sample(["a red cup"], [0])
    assert torch.equal(states[0], torch.get_rng_state())
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]  # type: ignore[union-attr]
    assert [m.training for m in module.modules()] == modes
    assert same(kept, {name: p.grad for name, p in module.named_parameters() if p.grad is not None})
    assert not pictures.requires_grad and torch.is_grad_enabled()


def test_as_many_seeds_as_prompts_are_wanted(sd: str) -> None:
    with pytest.raises(ModelError, match="2 prompts and 1 seeds"):
        make_module(sd).sample(["a", "b"], [0])


def test_pictures_and_files_show_the_average(sd: str, tmp_path: Path) -> None:
    module = make_module(sd, use_ema=True, ema_decay=0.9, learning_rate=0.1, max_train_steps=6)
    fit(module, tmp_path)
    assert module.ema is not None
    now = trained(module)
    shown = module.sample(["a zorp cup"], [0])
    module.save_lora(tmp_path / "average.safetensors")
    assert same(now, trained(module))
    module.ema.copy_to(module.trainable_parameters())
    module.ema = None
    torch.testing.assert_close(module.sample(["a zorp cup"], [0]), shown)
    module.save_lora(tmp_path / "plain.safetensors")
    from safetensors.torch import load_file

    assert same(load_file(tmp_path / "average.safetensors"), load_file(tmp_path / "plain.safetensors"))
    for parameter, (name, value) in zip(module.trainable_parameters(), now.items(), strict=True):
        assert name in trained(module)
        parameter.data.copy_(value)
    assert (module.sample(["a zorp cup"], [0]) - shown).abs().max() > 1e-4


# Checkpoints --------------------------------------------------------------------------------------------------------


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in leaves(each)]
    if isinstance(value, list | tuple):
        return [leaf for each in value for leaf in leaves(each)]
    return [value]


@pytest.mark.parametrize("options", [{}, {"use_ema": True}, {"train_text_encoder": True, "use_ema": True}])
def test_a_checkpoint_holds_what_was_trained_and_resumes(sd: str, tmp_path: Path, options: dict[str, Any]) -> None:
    module = make_module(sd, max_train_steps=2, **options)
    keep = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, filename="two")
    fit(module, tmp_path, keep)
    path = str(tmp_path / "two.ckpt")
    saved = torch.load(path, weights_only=True)
    assert same(saved["state_dict"], trained(module))
    assert ("ema" in saved) == bool(options.get("use_ema"))
    for leaf in leaves({k: v for k, v in saved.items() if k != "callbacks"}):
        assert leaf is None or isinstance(leaf, Tensor | int | float | str | bool)
        assert not isinstance(leaf, Tensor) or leaf.device.type == "cpu"

    resumed, seen = make_module(sd, max_train_steps=4, **options), []

    class Look(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            seen.append((trainer.global_step, trained(pl_module)))  # type: ignore[arg-type]

    trainer = fit(resumed, tmp_path, Look(), ckpt_path=path)
    assert trainer.global_step == 4
    assert seen[0][0] == 2 and same(seen[0][1], saved["state_dict"])
    if resumed.ema is not None:
        assert resumed.ema.optimization_step == 4


def test_a_checkpoint_builds_the_module_again(sd: str, tmp_path: Path) -> None:
    module = make_module(sd, max_train_steps=2, use_ema=True)
    fit(module, tmp_path, ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, filename="two"))
    again = StableDiffusionLoRA.load_from_checkpoint(tmp_path / "two.ckpt", weights_only=True)
    assert same(trained(module), trained(again))
    assert torch.equal(module.sample(["a zorp cup"], [0]), again.sample(["a zorp cup"], [0]))


@pytest.mark.parametrize(
    "other", [{"rank": 8}, {"lora_targets": ["feed_forward"]}, {"train_text_encoder": True}, {"use_dora": True}]
)
def test_a_checkpoint_of_another_shape_is_refused(sd: str, tmp_path: Path, other: dict[str, Any]) -> None:
    keep = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, filename="two")
    fit(make_module(sd, max_train_steps=2), tmp_path, keep)
    with pytest.raises(ModelError, match="rank, lora_targets"):
        fit(make_module(sd, max_train_steps=4, **other), tmp_path, ckpt_path=str(tmp_path / "two.ckpt"))


# SDXL ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("train_text_encoder", [False, True])
def test_sdxl_trains_draws_and_its_file_loads_in_diffusers(sdxl: str, tmp_path: Path, train_text_encoder: bool) -> None:
    module = make_module(sdxl, train_text_encoder=train_text_encoder, max_train_steps=2, learning_rate=0.1)
    seen: list[dict[str, Any]] = []
    module.configure_model()
    assert module.unet is not None and module.components is not None
    module.unet.register_forward_pre_hook(lambda _, __, kwargs: seen.append(kwargs), with_kwargs=True)
    batch = make_batch()
    batch["original_size"] = torch.tensor([[64, 48], [40, 40]])
    batch["crop_top_left"] = torch.tensor([[0, 4], [8, 0]])
    fit(module, tmp_path, data=loader(batch))
    added = seen[0]["added_cond_kwargs"]
    assert added["time_ids"].tolist() == [[64, 48, 0, 4, SIDE, SIDE], [40, 40, 8, 0, SIDE, SIDE]]
    assert added["text_embeds"].shape == (2, 16)
    assert module.encode_captions(["a red cup"])["prompt_embeds"].shape[-1] == 32

    pictures = module.sample(["a zorp cup"], [0], num_inference_steps=4, guidance_scale=3.0)
    assert pictures.shape == (1, 3, SIDE, SIDE)
    plain = StableDiffusionXLPipeline.from_pretrained(sdxl)
    plain.set_progress_bar_config(disable=True)
    arguments = {"num_inference_steps": 4, "guidance_scale": 3.0, "output_type": "pt"}
    before = plain("a zorp cup", generator=torch.Generator().manual_seed(0), **arguments).images
    plain.load_lora_weights(str(tmp_path / "lora.safetensors"))
    after = plain("a zorp cup", generator=torch.Generator().manual_seed(0), **arguments).images
    assert (after - before).abs().max() > 0.01
    torch.testing.assert_close(after, pictures, atol=5e-3, rtol=0)  # the file holds float16


def test_sdxl_embeddings_are_the_pipelines_own(sdxl: str) -> None:
    module = make_module(sdxl)
    module.configure_model()
    captions = ["a red cup", "a cup on a red table"]  # an empty one: families/test_dropped_captions.py
    got = module.encode_captions(captions)
    plain = StableDiffusionXLPipeline.from_pretrained(sdxl)
    wanted, _, pooled, _ = plain.encode_prompt(captions, do_classifier_free_guidance=False)
    torch.testing.assert_close(got["prompt_embeds"], wanted)
    torch.testing.assert_close(got["pooled_prompt_embeds"], pooled)


# The embedded model -------------------------------------------------------------------------------------------------


def test_the_exported_lora_draws_the_same_pictures_in_plain_diffusers(tmp_path: Path) -> None:
    from lightning_aigc.data import ImageCaptionData

    module = make_module("embedded:sd", max_train_steps=3, train_text_encoder=True, learning_rate=5e-3)
    data = ImageCaptionData("embedded:brand", resolution=64, train_batch_size=4, num_workers=0)
    data.prepare()
    fit(module, tmp_path, data=data.loader())
    prompts, seeds = ["a zorp mug", "a red teapot on white"], [0, 1]
    pictures = module.sample(prompts, seeds, num_inference_steps=6, guidance_scale=3.0)
    plain = StableDiffusionPipeline.from_pretrained(str(resolve("embedded:sd")), safety_checker=None)
    plain.scheduler = DDIMScheduler.from_config(plain.scheduler.config)
    plain.set_progress_bar_config(disable=True)

    def draw() -> Tensor:
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        pictures: Tensor = plain(
            prompts, generator=generators, num_inference_steps=6, guidance_scale=3.0, output_type="pt"
        ).images
        return pictures

    before = draw()
    plain.load_lora_weights(str(tmp_path / "lora.safetensors"))
    after = draw()
    # The file holds float16, so the images are close, not equal; 8 bits a channel are 4e-3.
    assert (after - pictures).abs().mean() < 2e-3
    assert (after - before).abs().mean() > 10 * (after - pictures).abs().mean()


# Arguments ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "value", "said"),
    [
        ("rank", 0, "rank must be at least 1"),
        ("learning_rate", 0.0, "learning_rate must be above 0"),
        ("learning_rate", -1e-4, "learning_rate must be above 0"),
        ("max_train_steps", 0, "max_train_steps must be above 0"),
        ("lora_alpha", -1.0, "lora_alpha must be above 0"),
        ("lora_dropout", -0.1, "lora_dropout"),
        ("lora_dropout", 1.5, "lora_dropout"),
        ("ema_decay", 1.5, "ema_decay"),
        ("noise_offset", -0.1, "noise_offset must not be negative"),
        ("vae_dtype", "float16", "vae_dtype must be float32 or bfloat16"),
        ("lora_targets", [], "lora_targets must name some of attention"),
        ("lora_targets", ["attentions"], "lora_targets must name some of attention"),
        ("snr_gamma", 0.0, "snr_gamma must be above 0"),
        ("learning_rate", math.nan, "learning_rate"),
        ("checkpoints_total_limit", -2, "checkpoints_total_limit"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_read(argument: str, value: Any, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        StableDiffusionLoRA("no/such/folder", **{argument: value})


@pytest.mark.parametrize("kind", [DiffusionLoRA, DiffusionFineTuning])
def test_a_rate_of_text_encoders_that_are_not_trained_is_named(kind: Any, sd: str) -> None:
    with pytest.warns(UserWarning, match=r"text_encoder_lr: 0.0001 is not read, because text encoders are not trained"):
        kind(sd, text_encoder_lr=1e-4).configure_model()


@pytest.mark.parametrize("kind", [DiffusionLoRA, DiffusionFineTuning, ControlNetTraining])
def test_more_steps_than_the_schedule_has_are_refused(kind: Any, sd: str) -> None:
    with pytest.raises(ModelError, match=r"num_inference_steps must be at most 1000, the timesteps of .*, got 1001"):
        kind(sd, num_inference_steps=1001).configure_model()


@pytest.mark.parametrize("kind", [DiffusionLoRA, ControlNetTraining])
def test_a_rank_above_all_layers_is_named(kind: Any, sd: str) -> None:
    """The widest layers have convolutions over 2 x 16 channels of 3 x 3 pixels, and 64 outputs or fewer."""
    with pytest.warns(UserWarning, match=r"rank: 4000 is above the sides of all layers, and a LoRA of rank \d\d "):
        kind(sd, rank=4000).configure_model()


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (DiffusionLoRA, {}), (DiffusionLoRA, {"optimizer": "muon"}), (DiffusionFineTuning, {}),
        *((ControlNetTraining, {"conditions": name}) for name in ("canny", "lineart", "tile", "inpaint", "folder")),
    ],
)  # fmt: skip
def test_a_module_can_be_sent_to_spawned_ranks(kind: Any, arguments: dict[str, Any], sd: str) -> None:
    module = kind(sd, **arguments)
    assert pickle.loads(pickle.dumps(module)).hparams == module.hparams


def test_cached_embeddings_and_a_trained_text_encoder_exclude_each_other(tmp_path: Path) -> None:
    module = StableDiffusionLoRA("embedded:sd", train_text_encoder=True, max_train_steps=1)
    data = ImageCaptionData("embedded:brand", resolution=64, cache_text_embeddings=True, cache_dir=str(tmp_path))
    with pytest.raises(DataError, match="cache_text_embeddings: false"):
        Trainer(default_root_dir=tmp_path, accelerator="cpu", logger=False).fit(module, data)


def test_parts_that_the_caches_replace_wait_in_host_memory_and_still_sample(sd: str, tmp_path: Path) -> None:
    module = make_module(sd)
    parked: list[str] = []

    class Spy(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            vae = module.components.vae  # type: ignore[union-attr]
            vae.to = lambda *a, **k: (parked.append(str(a[0])), type(vae).to(vae, *a, **k))[1]

    batch = make_batch()
    batch["latent_moments"] = torch.randn(len(batch["captions"]), 8, SIDE // 2, SIDE // 2)
    fit(module, tmp_path, Spy(), data=loader(batch))
    assert parked[0] == "cpu"
    assert module.sample(["a mug"], [0]).isfinite().all()


def test_ranks_draw_noise_of_their_own(sd: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = make_module(sd)
    fit(module, tmp_path)
    monkeypatch.setattr(type(module.trainer), "world_size", 2)
    drawn = []
    for rank in (0, 1):
        torch.manual_seed(7)
        monkeypatch.setattr(type(module), "global_rank", rank)
        module.on_train_start()
        drawn.append(torch.randn(4))
    assert not torch.equal(*drawn)


@pytest.mark.parametrize("name", ["./no_such_folder", "~/no/such/model", "/no/such/model.safetensors"])
def test_a_local_model_that_is_not_there_is_refused_on_construction(name: str) -> None:
    with pytest.raises(ModelError, match=r"pretrained_model_name_or_path.*does not exist"):
        StableDiffusionLoRA(name)


@pytest.mark.parametrize("use_dora", [False, True])
def test_every_weight_of_sdxl_with_text_encoders_gets_a_gradient(sdxl: str, use_dora: bool) -> None:
    # DDP ends at the second step where one gets none.
    module = StableDiffusionLoRA(
        sdxl, rank=2, train_text_encoder=True, use_dora=use_dora, lora_targets=["attention", "feed_forward"]
    )
    module.configure_model()
    example_losses(module, make_batch()).mean().backward()
    assert [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None] == []

"""SampleGrid: when it draws, what it leaves on disk, and that training does not notice."""

from __future__ import annotations

import contextlib
import json
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fakes.processes.ranks import run_ranks
from lightning_aigc.callbacks.sample_grid import SampleGrid
from lightning_aigc.diffusion import StableDiffusionLoRA
from lightning_aigc.errors import ConfigError, ImageWarning, ModelError, SamplingTooSlow
from lightning_aigc.evaluation_mode import evaluating
from lightning_aigc.rng import isolate_rng

PROMPTS = ["a red cup", "zwei blaue Katzen, 猫 ünï, " + "very " * 60 + "long", "x" * 300]


class Painter(LightningModule):
    """A toy whose training and sampling both draw random numbers and have dropout."""

    def __init__(self, validation_prompts: list[str] | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
        self.frozen = nn.Dropout(0.1).eval()
        self.validation_prompts = validation_prompts
        self.losses: list[float] = []
        self.calls: list[tuple[list[str], list[int]]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        noise = torch.rand(1) + random.random() + float(np.random.rand())
        loss = (self.net(batch[0]) - noise).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)

    def sample(self, prompts: list[str], seeds: list[int]) -> Tensor:
        assert not self.training and not torch.is_grad_enabled()
        self.calls.append((prompts, seeds))
        torch.rand(7), random.random(), np.random.rand()  # a careless module
        colours = []
        for seed in seeds:
            noise = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
            colours.append(self.net(noise).T.reshape(3, 4, 4).sigmoid())
        return torch.stack(colours)


def data(length: int = 32) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(length, 4, generator=torch.Generator().manual_seed(0))), batch_size=4)


def make_trainer(folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    return Trainer(
        **{
            "default_root_dir": str(folder),
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 3,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        },
        callbacks=list(callbacks),
    )


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The '?train_dataloader|.*does not have many workers|.*`training_step`")
        warnings.filterwarnings("ignore", "The number of training batches|GPU available|.*LeafSpec")
        warnings.filterwarnings("ignore", ".*in eval mode at the start of training|You're resuming from a checkpoint")
        yield


def steps_of(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step_")) for path in (folder / "samples").glob("step_*.png"))


@pytest.mark.parametrize(("accumulate", "wanted"), [(1, [0, 5, 10, 15, 20, 24]), (2, [0, 5, 10, 12])])
def test_it_draws_at_zero_every_n_optimizer_steps_and_at_the_end(
    tmp_path: Path, accumulate: int, wanted: list[int]
) -> None:
    grid, module = SampleGrid(["a", "b"], every_n_steps=5, seeds=[7, 8, 9]), Painter()
    make_trainer(tmp_path, grid, accumulate_grad_batches=accumulate).fit(module, data())
    assert steps_of(tmp_path) == wanted == [step for step, _ in grid.history]
    assert module.calls == [(["a", "a", "a", "b", "b", "b"], [7, 8, 9, 7, 8, 9])] * len(wanted)
    assert not list((tmp_path / "samples").glob(".*"))


def test_the_last_step_is_drawn_once(tmp_path: Path) -> None:
    make_trainer(tmp_path, SampleGrid(["a"], every_n_steps=8), max_steps=16).fit(module := Painter(), data())
    assert steps_of(tmp_path) == [0, 8, 16] and len(module.calls) == 3


@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_with_the_grid_equals_training_without_bit_for_bit(tmp_path: Path, accumulate: int) -> None:
    runs = []
    for callbacks in ([], [SampleGrid(["a"], every_n_steps=1)]):
        seed_everything(3, verbose=False)
        module = Painter()
        make_trainer(tmp_path, *callbacks, accumulate_grad_batches=accumulate).fit(module, data())
        runs.append((module.losses, {name: value.clone() for name, value in module.state_dict().items()}))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(runs[0][1][name], runs[1][1][name]) for name in runs[0][1])


def test_evaluation_restores_modes_random_states_and_leaves_gradients() -> None:
    model = Painter()
    model.net(torch.rand(4, 4)).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    modes = [module.training for module in model.modules()]
    seed_everything(1, verbose=False)
    wanted = (random.random(), float(np.random.rand()), torch.rand(1).item())
    seed_everything(1, verbose=False)
    with contextlib.suppress(ZeroDivisionError), isolate_rng(torch.device("cpu")), evaluating(model):
        assert not any(module.training for module in model.modules()) and not torch.is_grad_enabled()
        random.random(), np.random.rand(), torch.rand(3)
        raise ZeroDivisionError
    assert (random.random(), float(np.random.rand()), torch.rand(1).item()) == wanted
    assert [module.training for module in model.modules()] == modes and torch.is_grad_enabled()
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, model.parameters(), strict=True))


def test_the_png_shows_and_holds_prompts_seeds_and_step(tmp_path: Path) -> None:
    grid = SampleGrid(every_n_steps=100, num_images=2, seed=5)
    make_trainer(tmp_path, grid, max_steps=2).fit(Painter(PROMPTS), data())
    with Image.open(grid.history[-1][1]) as sheet:
        assert json.loads(sheet.text["prompts"]) == PROMPTS
        assert json.loads(sheet.text["seeds"]) == [5, 6] and json.loads(sheet.text["step"]) == 2
        cells = np.asarray(sheet.convert("RGB"))
    assert cells.shape[1] == 2 * (160 + 8) + 8
    # Two columns, and under the first image some letters that are not white paper.
    assert (cells[8:168, 8:168].std(axis=(0, 1)) > 0).any() and (cells[170:185, 8:168] < 200).any()


def test_tensorboard_gets_the_picture_and_csv_is_left_alone(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = [TensorBoardLogger(tmp_path, name="tb"), CSVLogger(tmp_path, name="csv"), FakeWandb(tmp_path)]
    make_trainer(tmp_path, SampleGrid(["a"], every_n_steps=2), max_steps=4, logger=loggers).fit(Painter(), data())
    loggers[0].experiment.flush()
    events = EventAccumulator(loggers[0].log_dir)
    events.Reload()
    assert [event.step for event in events.Images("samples")] == [0, 2, 4]
    assert [(key, step) for key, _, step in loggers[2].logged] == [("samples", 0), ("samples", 2), ("samples", 4)]
    assert isinstance(loggers[2].logged[0][1][0], Image.Image)


class FakeWandb(CSVLogger):
    """Has WandbLogger's `log_image`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, name="wandb")
        self.logged: list[tuple[str, list[Any], int]] = []

    def log_image(self, key: str, images: list[Any], step: int | None = None) -> None:
        self.logged.append((key, images, step))


def test_other_callbacks_may_look_at_the_pictures(tmp_path: Path) -> None:
    class Onlooker(Callback):
        seen: list[tuple[list[int], list[tuple[str, int]], int]]

        def on_sample_images(
            self, trainer: Any, pl_module: Any, images: Tensor, pairs: list[tuple[str, int]], step: int
        ) -> None:
            self.seen.append((list(images.shape), pairs, step))

    onlooker = Onlooker()
    onlooker.seen = []
    make_trainer(tmp_path, SampleGrid(["a"], seeds=[1, 2]), onlooker, max_steps=1).fit(Painter(), data())
    assert onlooker.seen == [([2, 3, 4, 4], [("a", 1), ("a", 2)], step) for step in (0, 1)]


def test_history_survives_a_checkpoint_of_plain_types(tmp_path: Path) -> None:
    grid = SampleGrid(["a"], every_n_steps=4)
    trainer = make_trainer(tmp_path, grid, max_steps=4)
    trainer.fit(Painter(), data())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)["callbacks"][grid.state_key]
    assert state == {"history": [[0, grid.history[0][1]], [4, grid.history[1][1]]]}
    resumed = SampleGrid(["a"], every_n_steps=4)
    module = Painter()
    make_trainer(tmp_path, resumed, max_steps=10).fit(module, data(), ckpt_path=tmp_path / "a.ckpt")
    assert [step for step, _ in resumed.history] == [0, 4, 8, 10]
    assert len(module.calls) == 2, "step 0 and step 4 were drawn before"


@pytest.mark.parametrize(
    ("value", "kind"), [(0.0, "black"), (0.5, "constant"), (float("nan"), "not finite"), (float("inf"), "not finite")]
)
@pytest.mark.parametrize("knows_keys", [True, False])
def test_broken_pictures_raise_a_named_warning(tmp_path: Path, value: float, kind: str, knows_keys: bool) -> None:
    class Broken(Painter):
        if knows_keys:
            image_remedies = StableDiffusionLoRA.image_remedies

        def sample(self, prompts: list[str], seeds: list[int]) -> Tensor:
            images = torch.rand(len(prompts), 3, 4, 4)
            images[1] = value
            return images

    grid = SampleGrid(["a"], seeds=[3, 4])
    remedy = r"model\.init_args\." if knows_keys else r"(in float32|the learning rate)"
    with pytest.warns(ImageWarning, match=rf"{kind} images \(1 of 2\): step [01], seed 4, 'a'\. .*{remedy}"):
        make_trainer(tmp_path, grid, max_steps=1).fit(Broken(), data())
    assert steps_of(tmp_path) == [0, 1]


def test_a_number_of_images_with_seeds_is_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="num_images and seed change nothing while seeds is set"):
        make_trainer(tmp_path, SampleGrid(["a"], seeds=[3, 4], num_images=2), max_steps=1).fit(Painter(), data())


def test_settings_that_cannot_work_are_refused_before_training(tmp_path: Path) -> None:
    class NoSample(Painter):
        sample = None

    with pytest.raises(ModelError, match=r"NoSample has no `sample`; add .*def sample\(self, prompts: list\[str\]"):
        make_trainer(tmp_path, SampleGrid(["a"])).fit(module := NoSample(), data())
    assert module.losses == []
    with pytest.raises(ConfigError, match="validation_prompts"):
        make_trainer(tmp_path, SampleGrid()).fit(Painter(), data())
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write to .*file/samples"):
        make_trainer(tmp_path, SampleGrid(["a"], directory=str(tmp_path / "file" / "samples"))).fit(Painter(), data())
    two = [SampleGrid(["a"]), SampleGrid(["b"])]
    with pytest.raises(ConfigError, match=r"two SampleGrids write to .*samples and would .*set the `directory` of one"):
        make_trainer(tmp_path, *two).fit(Painter(), data())
    for arguments in ({"prompts": []}, {"prompts": "a"}, {"every_n_steps": 0}, {"seeds": []}, {"num_images": 0}):
        with pytest.raises(ConfigError, match="got SampleGrid"):
            SampleGrid(**arguments)


def test_exceptions_of_sample_propagate_and_wrong_shapes_are_named(tmp_path: Path) -> None:
    class Raises(Painter):
        def sample(self, prompts: list[str], seeds: list[int]) -> Tensor:
            raise ZeroDivisionError("in sample")

    class WrongShape(Painter):
        def sample(self, prompts: list[str], seeds: list[int]) -> Tensor:
            return torch.rand(3, 8, 8)

    with pytest.raises(ZeroDivisionError, match="in sample"):
        make_trainer(tmp_path, SampleGrid(["a"])).fit(Raises(), data())
    with pytest.raises(ModelError, match=r"returned \[3, 8, 8\] for 4 prompts; wanted \[4, 3, H, W\]"):
        make_trainer(tmp_path, SampleGrid(["a"])).fit(WrongShape(), data())


def test_too_slow_sampling_stops_the_pictures_not_the_training(tmp_path: Path) -> None:
    class Slow(Painter):
        def sample(self, prompts: list[str], seeds: list[int]) -> Tensor:
            self.calls.append((prompts, seeds))
            raise SamplingTooSlow("it would take an hour")

    with pytest.warns(UserWarning, match="draws no more: it would take an hour"):
        make_trainer(tmp_path, SampleGrid(["a"], every_n_steps=1), max_steps=4).fit(module := Slow(), data())
    assert len(module.losses) == 4 and len(module.calls) == 1


def test_a_disk_that_fills_up_warns_once_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid, module = SampleGrid(["a"], every_n_steps=1), Painter()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.warns(UserWarning, match="No space left on device; training continues") as caught:
        make_trainer(tmp_path, grid, max_steps=4).fit(module, data())
    assert sum("No space" in str(warning.message) for warning in caught) == 1
    assert len(module.losses) == 4 and grid.history == [] and not list((tmp_path / "samples").iterdir())


def test_a_fast_dev_run_draws_nothing(tmp_path: Path) -> None:
    make_trainer(tmp_path, SampleGrid(["a"]), fast_dev_run=True).fit(module := Painter(), data())
    assert module.calls == [] and not (tmp_path / "samples").exists()


def train_as_a_rank(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    grid = SampleGrid(["a"], every_n_steps=2)
    make_trainer(Path(folder), grid, max_steps=4, devices=2, strategy="ddp").fit(Counting(), data())


def test_with_two_ranks_only_rank_zero_draws(tmp_path: Path) -> None:
    run_ranks(train_as_a_rank, 2, tmp_path / "ranks", str(tmp_path), gloo=False)
    assert steps_of(tmp_path) == [0, 2, 4]
    assert sorted(path.name for path in tmp_path.glob("*.txt")) == ["rank0.txt", "trained0.txt", "trained1.txt"]
    assert (tmp_path / "rank0.txt").read_text() == "xxx"
    assert (tmp_path / "trained0.txt").read_text() == (tmp_path / "trained1.txt").read_text()


def fail_as_a_rank(rank: int, folder: str) -> str:
    class Raises(Painter):
        def sample(self, prompts: list[str], seeds: list[int]) -> Tensor:
            raise ZeroDivisionError("in sample")

    warnings.simplefilter("ignore")
    try:
        make_trainer(Path(folder), SampleGrid(["a"]), max_steps=4, devices=2, strategy="ddp").fit(Raises(), data())
    except (ZeroDivisionError, ConfigError) as error:
        return str(error)
    return "no error"


def test_an_error_of_rank_zero_is_raised_on_the_other_rank_before_its_next_step(tmp_path: Path) -> None:
    said = run_ranks(fail_as_a_rank, 2, tmp_path / "ranks", str(tmp_path), gloo=False)
    assert said[0] == "in sample"
    assert "stopped, and this rank with it: ZeroDivisionError: in sample" in said[1]


class Counting(Painter):
    """Leaves files named by rank: a letter for each call of `sample`, and the trained weights."""

    def on_train_end(self) -> None:
        weights = repr([parameter.tolist() for parameter in self.net.parameters()])
        (Path(self.trainer.default_root_dir) / f"trained{self.global_rank}.txt").write_text(weights)

    def sample(self, prompts: list[str], seeds: list[int]) -> Tensor:
        with (Path(self.trainer.default_root_dir) / f"rank{self.global_rank}.txt").open("a") as file:
            file.write("x")
        return super().sample(prompts, seeds)

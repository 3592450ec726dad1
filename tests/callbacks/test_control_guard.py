"""ControlGuard and EdgeReport: when control appears, what is kept, and that looking leaves the training alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_aigc.callbacks import ControlGuard, EdgeReport, GradientHealthMonitor, RunReport
from lightning_aigc.data import ImageCaptionData
from lightning_aigc.diffusion import ControlNetTraining
from lightning_aigc.embedded import resolve
from lightning_aigc.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Scripted(LightningModule):
    """A model whose loss with another condition rises as `gaps` says, by the step of the check."""

    output_name, saved_kind = "net", "controlnet"

    def __init__(self, gaps: list[float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.gaps, self.saved = gaps, []  # type: ignore[var-annotated]

    def control_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch

    def control_losses(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        assert not torch.is_grad_enabled()
        noise = torch.randn(len(batch["captions"]), generator=torch.Generator().manual_seed(0)) * 0.005
        right = torch.ones(len(batch["captions"]))
        return right, right + self.gaps[min(self.global_step, len(self.gaps) - 1)] + noise

    def save_model(self, path: str | Path) -> list[Path]:
        self.saved.append((self.global_step, Path(path).name))
        return []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.weight - 1).square().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class HeldOut(LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader([torch.zeros(1)] * 100, batch_size=None)  # type: ignore[arg-type]

    def held_out_loader(self, batch_size: int) -> Any:
        return [{"captions": ["a"] * batch_size}]


def train(model: LightningModule, folder: Path, *callbacks: Callback, data: Any = None, **options: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "default_root_dir": str(folder), "accelerator": "cpu", "devices": 1, "max_steps": 20, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "callbacks": list(callbacks),
    }  # fmt: skip
    trainer = Trainer(**(quiet | options))
    trainer.fit(model, datamodule=data or HeldOut())
    return trainer


def test_control_appears_at_the_first_of_two_clear_checks_and_the_run_stops_when_it_no_longer_grows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    # A single outlier at step 4, control from step 8, no better after step 12.
    gaps = [0.0] * 4 + [0.3] + [0.0] * 3 + [0.1, 0.1, 0.2, 0.2, 0.4] + [0.4] * 20
    model, guard = Scripted(gaps), ControlGuard(every_n_steps=1, patience=4)
    trainer = train(model, tmp_path, guard)
    assert guard.appeared_at == 8
    assert guard.best_step == 12 and trainer.global_step == 16
    assert model.saved[-1] == (12, "net_best.safetensors")
    said = " ".join(record.message for record in caplog.records)
    assert "control appeared at step 8" in said and "stopped at step 16" in said
    assert "control since step 8; best gap 40%, step 12" in said
    assert guard.report_entries()["figures"]["control_appeared_at_step"] == 8


def test_a_gap_within_its_noise_is_no_control_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    model, guard = Scripted([0.001] * 30), ControlGuard(every_n_steps=2, give_up_after=10, patience=2)
    with pytest.warns(UserWarning, match="no control after 10 steps") as said:
        trainer = train(model, tmp_path, guard)
    assert len([w for w in said if "no control" in str(w.message)]) == 1
    assert guard.appeared_at is None and trainer.global_step == 20 and model.saved == []
    assert "no control yet at step 20: another image's condition changes the loss by 0.1%" in caplog.messages[-1]


def test_a_guard_of_two_trainers_measures_each_by_itself(tmp_path: Path) -> None:
    guard = ControlGuard(every_n_steps=1)
    train(Scripted([0.0] * 3 + [0.5] * 20), tmp_path / "first", guard)
    assert guard.appeared_at == 3
    train(Scripted([0.0]), tmp_path / "second", guard, max_steps=5)
    assert [step for step, _, _ in guard.gaps] == [0, 1, 2, 3, 4, 5]
    assert guard.appeared_at is None and guard.best_step is None


def test_a_resumed_guard_remembers(tmp_path: Path) -> None:
    model, guard = Scripted([0.5] * 30), ControlGuard(every_n_steps=2)
    train(model, tmp_path, guard, max_steps=6)
    again = ControlGuard(every_n_steps=2)
    again.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert (again.appeared_at, again.best_step, again.gaps) == (guard.appeared_at, guard.best_step, guard.gaps)
    assert guard.appeared_at == 0


@pytest.mark.parametrize("options", [{"every_n_steps": 0}, {"num_images": 1}, {"patience": -1}])
def test_numbers_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="ControlGuard wants every_n_steps >= 1"):
        ControlGuard(**options)


def test_a_model_without_conditions_is_refused(tmp_path: Path) -> None:
    class Plain(Scripted):
        control_losses = None  # type: ignore[assignment]

    plain = Plain([])
    del Plain.control_losses

    class Bare(LightningModule):
        pass

    with pytest.raises(ConfigError, match="ControlGuard needs a model with control_batch and control_losses, got Bare"):
        ControlGuard().setup(Trainer(logger=False, accelerator="cpu"), Bare(), "fit")
    with pytest.raises(ConfigError, match="EdgeReport needs a model that samples from conditions"):
        EdgeReport().setup(Trainer(logger=False, accelerator="cpu"), plain, "fit")


# On the tiny model --------------------------------------------------------------------------------------------------


def tiny(tmp_path: Path, **options: Any) -> tuple[ControlNetTraining, ImageCaptionData]:
    torch.manual_seed(0)
    module = ControlNetTraining(
        "embedded:sd", learning_rate=2e-3, max_train_steps=3, num_inference_steps=2, output_name="edges", **options
    )
    photos = tmp_path / "photos"
    if not photos.exists():
        photos.mkdir()
        for number, file in enumerate(sorted(resolve("embedded:prior").glob("*.png"))[:16]):
            shutil.copy(file, photos / f"{number}.png")
            (photos / f"{number}.txt").write_text("a red mug on white")
    data = ImageCaptionData(
        str(photos), resolution=64, train_batch_size=4, num_workers=0, validation_split=0.3, cache_latents=True,
        cache_text_embeddings=True, cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    return module, data


def test_looking_leaves_the_training_bit_identical_and_the_summary_has_the_edges(tmp_path: Path) -> None:
    results = []
    for watched in (False, True):
        module, data = tiny(tmp_path)
        looking = [ControlGuard(every_n_steps=1, num_images=4), EdgeReport(num_images=4, every_n_steps=2, shown=2)]
        callbacks = [*looking, RunReport()] if watched else []
        torch.manual_seed(0)
        module.configure_model()
        torch.manual_seed(3)
        train(module, tmp_path / str(watched), *callbacks, data=data, max_steps=-1)
        assert module.controlnet is not None
        results.append([p.detach().clone() for p in module.controlnet.parameters()])
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))
    root = tmp_path / "True"
    summary = json.loads((root / "summary.json").read_text())
    assert 0 <= summary["edge_f1_floor"] <= 1 and 0.5 < summary["edge_f1_ceiling"] <= 1
    assert 0 <= summary["edge_f1"] <= 1 and summary["control_appeared_at_step"] is None
    assert Path(summary["controlnet_folder"]) == root / "edges"
    assert (root / "edges" / "config.json").is_file() and Path(summary["controlnet_file"]).is_file()
    assert Path(summary["edge_sheet"]).is_file()
    page = (root / "report.html").read_text()
    assert "Edges: condition, result" in page and "data:image/png;base64" in page and "edge F1, floor" in page


def test_a_condition_that_is_ignored_costs_nothing_and_one_that_is_used_does(tmp_path: Path) -> None:
    module, data = tiny(tmp_path)
    module.configure_model()
    data.prepare(module)
    batch = module.control_batch(next(iter(data.held_out_loader(8))))
    right, other = module.control_losses(batch)
    assert torch.equal(right, other)  # the residuals begin at zero
    assert module.controlnet is not None
    for convolution in (
        *module.controlnet.controlnet_down_blocks,
        module.controlnet.controlnet_cond_embedding.conv_out,
    ):
        nn.init.normal_(convolution.weight, std=0.3)
    right, other = module.control_losses(batch)
    assert not torch.equal(right, other)
    assert all(torch.equal(a, b) for a, b in zip((right, other), module.control_losses(batch), strict=True))


def test_the_monitor_raises_no_alarm_on_zero_convolutions(tmp_path: Path) -> None:
    module, data = tiny(tmp_path)
    monitor = GradientHealthMonitor(every_n_steps=1, page=False)
    train(module, tmp_path, monitor, data=data, max_steps=-1)
    assert [alert for alert in monitor.alerts if alert.level != "info"] == []

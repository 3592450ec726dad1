"""Runs in a folder where not everything can be written: what they end with, and what they save."""

from __future__ import annotations

import errno
import warnings
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer

from lightning_aigc.callbacks import (
    CLIPConvergenceGuard,
    ExactSnapshot,
    FineTuneCheck,
    GradientHealthMonitor,
    RunReport,
    SaveLoRA,
)
from lightning_aigc.checkpoint.files.writer import SnapshotWriter
from lightning_aigc.data import ImageCaptionData
from lightning_aigc.diffusion import DiffusionLoRA


class LosesItsFolder(Callback):
    """Puts a file where the run's folder was, and raises the error."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            root = Path(trainer.default_root_dir)
            root.rename(root.with_name("gone"))
            root.write_text("where the folder was", encoding="utf-8")
            raise self.error


class Last(Callback):
    error: BaseException | None = None

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self.error = exception


@pytest.mark.filterwarnings("ignore:Found .* module")
def test_a_result_that_does_not_fit_next_to_a_snapshot_is_written_once_the_snapshot_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, join, order = SaveLoRA._write, SnapshotWriter.join, []

    def fails_first(self: SaveLoRA, *arguments: Any) -> None:
        if not order:
            order.append("full")
            raise OSError(errno.ENOSPC, "No space left on device")
        order.append("written")
        write(self, *arguments)

    def joined(self: SnapshotWriter) -> None:
        if order == ["full"]:
            order.append("snapshot over")
        join(self)

    monkeypatch.setattr(SaveLoRA, "_write", fails_first)
    monkeypatch.setattr(SnapshotWriter, "join", joined)
    train(tmp_path / "run", SaveLoRA(0), ExactSnapshot(2))
    assert order == ["full", "snapshot over", "written"] and (tmp_path / "run" / "lora.safetensors").is_file()


@pytest.mark.parametrize(
    ("error", "ends_with"), [(ValueError("the training's own"), ValueError), (KeyboardInterrupt(), SystemExit)]
)
def test_no_callback_hides_the_error_that_ended_the_run(
    tmp_path: Path, error: BaseException, ends_with: type[BaseException]
) -> None:
    last = Last()
    with warnings.catch_warnings(record=True, action="always") as warned, pytest.raises(ends_with) as ended:
        train(tmp_path / "run", LosesItsFolder(error), *callbacks(), ExactSnapshot(2), last)
    assert last.error is error and (ended.value is error or isinstance(error, KeyboardInterrupt))
    said = [str(one.message) for one in warned]
    assert any("health.html" in one for one in said)
    after = [one for one in said if one.startswith("after the training was stopped: ")]
    assert any("snapshot of step 3 could not be written" in one for one in said)
    assert any("lora_step_000003.safetensors" in one for one in after) == isinstance(error, KeyboardInterrupt)


def test_weights_are_saved_where_no_page_can_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("health.html", "fine_tune.json", "report.html"):
        (tmp_path / "run" / name).mkdir(parents=True)
    (tmp_path / "run" / "guard").write_text("where a folder should be", encoding="utf-8")
    judge: dict[str, Any] = {"clip_model": "embedded:clip", "clip_pretrained": None}
    guard = CLIPConvergenceGuard(every_n_steps=2, num_images=1, **judge)
    check = FineTuneCheck(**judge)
    with warnings.catch_warnings(record=True, action="always") as warned:
        train(tmp_path / "run", check, guard, *callbacks())
    said = [str(one.message) for one in warned if "continues without it" in str(one.message)]
    for writer in ("GradientHealthMonitor", "FineTuneCheck", "RunReport", "CLIPConvergenceGuard"):
        assert any(one.startswith(f"{writer} cannot write") for one in said), writer
    assert "peak memory  " in (printed := capsys.readouterr().out) and "report  " not in printed
    assert all((tmp_path / "run" / name).is_file() for name in ("lora.safetensors", "report.json", "summary.json"))


def callbacks() -> list[Callback]:
    return [GradientHealthMonitor(), SaveLoRA(), RunReport()]


def train(root: Path, *callbacks: Callback) -> None:
    prompts = ["a zorp umbrella"]
    module = DiffusionLoRA("embedded:sd", rank=2, max_train_steps=4, num_inference_steps=2, validation_prompts=prompts)
    data = ImageCaptionData("embedded:brand", resolution=64, train_batch_size=1, num_workers=0, cache_dir=None)
    silent = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    given = {"accelerator": "cpu", "logger": False, "max_steps": 4}
    Trainer(default_root_dir=root, callbacks=list(callbacks), **given, **silent).fit(module, data)

"""A remedy is a line that the command line takes."""

from __future__ import annotations

import lightning_aigc  # noqa: F401 - first: it mends torchvision's import

# isort: split
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Trainer

from fakes.denoisers import Denoiser
from lightning_aigc.callbacks.health import GradientHealthMonitor
from lightning_aigc.callbacks.health.remedies import GENERAL, Remedies
from lightning_aigc.cli import main
from lightning_aigc.diffusion import StableDiffusionLoRA
from lightning_aigc.precision import FusedBackwardPrecision

CONFIG = Path(__file__).parents[3] / "configs" / "sd_lora.yaml"


def of_sd(precision: Any = "16-mixed") -> Remedies:
    trainer = Trainer(
        accelerator="cpu", logger=False, plugins=[FusedBackwardPrecision(precision, memory="off")], max_steps=1
    )
    return Remedies.of(trainer, StableDiffusionLoRA("embedded:sd"))


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as stop:
        main(["fit", "-c", str(CONFIG), *arguments, "--print_config"])
    said = capsys.readouterr()
    assert stop.value.code == 0, said.err
    config: dict[str, Any] = yaml.safe_load(said.out)
    return config


@pytest.mark.parametrize(
    "remedy",
    [
        Remedies(model_keys=["learning_rate"], rate=1e-4).learning_rate(0.5),
        of_sd().safe_precision(),
        of_sd("bf16-true").mixed_precision(),
        of_sd().clipping(1.5),
        of_sd().non_finite("forward"),
        of_sd("32-true").non_finite("input"),
    ],
)
def test_our_remedies_are_keys_and_values_that_the_command_line_accepts(
    remedy: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning"])
    key, value = remedy.split(": ")
    found: Any = printed(capsys, f"--{key}", value)
    for part in key.split("."):
        found = found[part]
    assert str(found) == value or float(found) == float(value)


def test_a_module_without_our_keys_gets_general_words() -> None:
    trainer = Trainer(accelerator="cpu", logger=False, precision="bf16-mixed", max_steps=1)
    remedies = Remedies.of(trainer, Denoiser())
    assert remedies.safe_precision() == "trainer.precision: 32-true"
    assert remedies.model("vae_dtype", "float32", "in words") == "in words"
    assert GENERAL.learning_rate(0.1) == "learning_rate: 0.1 times what it is"


def test_the_monitor_may_be_named_in_yaml_with_some_of_its_thresholds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning"])
    given = {"every_n_steps": 5, "on_error": "stop", "thresholds": {"exploding_norm": 3.0}}
    added = {"trainer": {"callbacks": [{"class_path": "GradientHealthMonitor", "init_args": given}]}}
    (tmp_path / "health.yaml").write_text(yaml.safe_dump(added))
    [callback] = printed(capsys, "-c", str(tmp_path / "health.yaml"))["trainer"]["callbacks"]
    assert callback["class_path"] in (
        "lightning_aigc.callbacks.GradientHealthMonitor",
        "lightning_aigc.callbacks.health.GradientHealthMonitor",
    )
    monitor = GradientHealthMonitor(**callback["init_args"])
    assert (monitor.every_n_steps, monitor.on_error, monitor.thresholds.exploding_norm) == (5, "stop", 3.0)
    assert monitor.thresholds.vanishing_norm == 1e-6

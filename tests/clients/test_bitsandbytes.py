"""`optimizer: adamw8bit` of bitsandbytes, whose CPU build takes the same steps in 8 bits as on a card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from fakes.models.pipelines import SIDE, make_pipeline
from lightning_aigc.checkpoint import find_snapshots
from lightning_aigc.cli import main

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Four steps; matrices of 4096 values and more, as those of a LoRA of rank 512, have states in 8 bits."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is missing: pip install bitsandbytes")
    folder = tmp_path_factory.mktemp("photos")
    for number in range(4):
        Image.new("RGB", (SIDE, SIDE), (40 * number, 90, 200 - 30 * number)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("a zorp cup")
    model = {
        "pretrained_model_name_or_path": str(make_pipeline(tmp_path_factory.mktemp("pipeline"))),
        "optimizer": "adamw8bit", "max_train_steps": 4, "checkpointing_steps": 1, "output_name": "mug",
    }  # fmt: skip
    data = {"train_data_dir": str(folder), "resolution": SIDE, "train_batch_size": 2, "num_workers": 0}
    return {
        "seed_everything": 1, "threads": 1,
        "trainer": {"accelerator": "cpu", "devices": 1, "logger": False},
        "model": {"class_path": "DiffusionLoRA", "init_args": model},
        "data": {"class_path": "ImageCaptionData", "init_args": data},
    }  # fmt: skip


def fit(config: dict[str, Any], root: Path, *more: str) -> dict[str, torch.Tensor]:
    path = root.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(SystemExit) as stop:
        main(["fit", "-c", str(path), f"--trainer.default_root_dir={root}", *more])
    assert stop.value.code == 0
    return load_file(root / "mug.safetensors")


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("DiffusionLoRA", {"rank": 512}),
        ("DiffusionLoRA", {"rank": 512, "use_ema": True}),
        ("DiffusionFineTuning", {"optimizer_in_backward": True}),
    ],
)
def test_a_run_by_name_has_states_in_8_bits_and_resumes_to_the_bit(
    config: dict[str, Any], tmp_path: Path, method: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["lightning"])
    config = config | {"model": {"class_path": method, "init_args": config["model"]["init_args"] | options}}
    whole = fit(config, tmp_path / "whole")
    half = fit(config, tmp_path / "stopped", "--model.init_args.max_train_steps=2")
    resumed = fit(config, tmp_path / "stopped", "--resume")
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert any(not torch.equal(whole[name], half[name]) for name in whole)
    snapshot = find_snapshots(tmp_path / "whole" / "snapshots")[0]
    held = {name: tensor for file in snapshot.path.rglob("*.safetensors") for name, tensor in load_file(file).items()}
    assert snapshot.step == 4
    assert any(name.endswith("state2") and tensor.dtype == torch.uint8 for name, tensor in held.items())

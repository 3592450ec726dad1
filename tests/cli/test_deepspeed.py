"""The second article's ds_config.json as it stands trains on two ranks: on the strategy, and as an imported YAML."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fakes.processes.ranks import run_ranks
from lightning_aigc.cli import main

pytestmark = pytest.mark.filterwarnings("ignore")  # what Lightning says about loggers and folders
ROOT = Path(__file__).parents[2]
DS_CONFIG = ROOT / "tests" / "strategies" / "ds_config.json"
FROM_THE_FILE = {
    "stage": 2, "offload_optimizer": True, "precision": "bf16-mixed", "memory": "max", "offload": True,
    "gradient_clip_val": 1.0, "accumulate_grad_batches": 4, "is_sharded": True, "optimizer": "AdamW", "steps": 2,
}  # fmt: skip


def fit(rank: int, paths: list[str]) -> tuple[int, str]:
    """The command as one of the ranks: its code, and what it said."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        sys.argv = ["lightning"]
        try:
            main(["fit", *(word for path in paths for word in ("-c", path))])
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else 99, said.getvalue()
    return 0, said.getvalue()


def whole_model_config(quick: dict[str, Any], folder: Path) -> dict[str, Any]:
    """sd_full_demo.yaml with the quick config's pipeline and images, and nothing that the file says."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "sd_full_demo.yaml").read_text(encoding="utf-8"))
    config["threads"] = 1
    trainer = config["trainer"]
    for key in ("strategy", "plugins", "accumulate_grad_batches", "gradient_clip_val"):
        del trainer[key]
    tell = {"class_path": "fakes.runs.tell_settings.TellSettings", "init_args": {"path": str(folder / "settings.json")}}
    trainer |= {"callbacks": [tell], "default_root_dir": str(folder / "run")}
    config["model"]["init_args"] |= {
        key: quick["model"]["init_args"][key]
        for key in ("pretrained_model_name_or_path", "max_train_steps", "num_inference_steps", "validation_prompts",
                    "num_validation_images")
    }  # fmt: skip
    config["model"]["init_args"] |= {"lr_scheduler": "constant", "lr_warmup_steps": 0}
    config["data"] = quick["data"]
    return config


def test_the_strategy_trains_with_the_articles_file(quick_config: dict[str, Any], tmp_path: Path) -> None:
    config = whole_model_config(quick_config, tmp_path)
    config["trainer"]["strategy"] = {"class_path": "ZeROStrategy", "init_args": {"deepspeed_config": str(DS_CONFIG)}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    for code, said in run_ranks(fit, 2, tmp_path, [str(tmp_path / "config.yaml")], gloo=False):
        assert code == 0, said
    found = json.loads((tmp_path / "settings.json").read_text())
    assert found.items() >= FROM_THE_FILE.items()
    assert found["losses"] and all(0 < loss < 5 for loss in found["losses"])
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2


def test_the_imported_yaml_trains_with_its_optimizer_too(quick_config: dict[str, Any], tmp_path: Path) -> None:
    own, imported = tmp_path / "config.yaml", tmp_path / "zero.yaml"
    own.write_text(yaml.safe_dump(whole_model_config(quick_config, tmp_path)))
    with pytest.raises(SystemExit, match="0"):
        main(["import-deepspeed", str(DS_CONFIG), "-o", str(imported)])
    for code, said in run_ranks(fit, 2, tmp_path, [str(own), str(imported)], gloo=False):
        assert code == 0, said
    found = json.loads((tmp_path / "settings.json").read_text())
    assert found.items() >= (FROM_THE_FILE | {"lr": 1e-5}).items()
    assert found["losses"] and all(0 < loss < 5 for loss in found["losses"])

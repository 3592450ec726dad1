"""What of a run's configuration decides its training, and how two of them differ."""

from __future__ import annotations

from typing import Any

import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback

TRAINER_KEYS = (
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "limit_train_batches",
    "overfit_batches",
    "precision",
    "plugins",
)
WITHOUT_EFFECT = {
    "model": (
        "max_train_steps", "output_name", "validation_prompts", "validation_steps", "num_validation_images",
        "validation_seed", "num_inference_steps", "guidance_scale", "sample_time_limit_s", "checkpointing_steps",
        "checkpoints_total_limit", "gradient_checkpointing",
    ),
    "data": ("cache_dir", "num_workers", "pin_memory", "prefetch_factor", "max_image_pixels"),
}  # fmt: skip
"""Arguments of our classes that name places, lengths and pictures; whatever else stands in model and data counts."""
MISSING = "(not set)"


def training_config(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """What decides the training, flat by dotted key: from the CLI's config, or else from the objects themselves."""
    written = next((c for c in trainer.callbacks if isinstance(c, SaveConfigCallback)), None)  # type: ignore[attr-defined]
    if written is not None:
        config = yaml.safe_load(written.parser.dump(written.config, skip_none=False))
        return relevant(config)
    data: Any = getattr(trainer, "datamodule", None)
    found: dict[str, Any] = {
        "trainer": {name: getattr(trainer, name) for name in TRAINER_KEYS if hasattr(trainer, name)},
        "model": {"class_path": type(module).__qualname__, "init_args": dict(module.hparams)},
        "data": {"class_path": type(data).__qualname__, "init_args": dict(data.hparams)} if data is not None else {},
        "optimizer": [_settings(optimizer) for optimizer in trainer.optimizers],
    }
    return relevant(found)


def relevant(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a nested config that decides the training, flat."""
    trainer = config.get("trainer") or {}
    kept: dict[str, Any] = {"seed_everything": config.get("seed_everything")}
    kept |= {"trainer": {key: trainer.get(key) for key in TRAINER_KEYS}}
    for block in ("model", "data"):
        whole = config.get(block) or {}
        given = whole.get("init_args", {}) if isinstance(whole, dict) else {}
        arguments = {key: value for key, value in given.items() if key not in WITHOUT_EFFECT[block]}
        kept[block] = {"class_path": whole.get("class_path"), "init_args": arguments}
    if "optimizer" in config:
        kept["optimizer"] = config["optimizer"]
    return {key: value for key, value in _flat(kept).items() if value is not None}


def differences(was: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """A line for each key whose values differ."""
    keys = dict.fromkeys([*was, *now])
    return [
        f"{key}: {was.get(key, MISSING)} in the snapshot, {now.get(key, MISSING)} now"
        for key in keys
        if was.get(key, MISSING) != now.get(key, MISSING)
    ]


def _settings(optimizer: Any) -> dict[str, Any]:
    values = {key: value for key, value in optimizer.defaults.items() if key != "lr"}  # a schedule may have moved lr
    return {"class_path": type(optimizer).__qualname__, **values}


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {
            k: v for key, one in value.items() for k, v in _flat(one, f"{path}.{key}" if path else str(key)).items()
        }
    if isinstance(value, (list, tuple)) and any(isinstance(one, (dict, list)) for one in value):
        return {k: v for at, one in enumerate(value) for k, v in _flat(one, f"{path}[{at}]").items()}
    if isinstance(value, (list, tuple)):
        return {path: [_plain(one) for one in value]}
    return {path: _plain(value)}


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)

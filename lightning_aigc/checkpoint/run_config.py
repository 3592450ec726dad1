"""Manifest entries about a run: the configuration that decides the training, its limits, whether it has ended."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import yaml

from lightning_aigc._lightning import LightningModule, SaveConfigCallback, Timer, Trainer
from lightning_aigc.atomic_file import sync_folder
from lightning_aigc.checkpoint.files.reader import Snapshot, find_snapshots
from lightning_aigc.errors import SnapshotError
from lightning_aigc.secrets import redact
from lightning_aigc.sharding.local_parts import original_class

TRAINER_KEYS = (
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "limit_train_batches",
    "overfit_batches",
    "precision",
    "plugins",
)
MISSING = "(not set)"
YAML_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Reads YAML of numbers, texts, lists and mappings; the C one, where it was compiled, is ten times as fast."""


@runtime_checkable
class WritesFinalFiles(Protocol):
    """Writes files at the end of a run; until they exist, ExactSnapshot does not count the run as finished."""

    def final_files(self, trainer: Any, pl_module: Any) -> Sequence[Path]:
        """Return their paths."""
        ...


@runtime_checkable
class DeclaresSnapshotArguments(Protocol):
    """Lists the hyperparameters that do not change the bits of a training, such as the folder of previews.

    ExactSnapshot ignores these when it compares the configuration of a resumed run with the snapshot's.
    """

    snapshot_ignored_arguments: frozenset[str]


@runtime_checkable
class HasConfigText(Protocol):
    """A SaveConfigCallback that keeps the YAML it writes, which takes the parser 0.1 s to make."""

    @property
    def text(self) -> str: ...


def training_config(trainer: Trainer, module: LightningModule, data: Any = None) -> dict[str, Any]:
    """The configuration that decides the training, by dotted key: the CLI's, or else that of the objects themselves."""
    data = data or getattr(trainer, "datamodule", None)
    ignored = {
        block: part.snapshot_ignored_arguments
        for block, part in (("model", module), ("data", data))
        if isinstance(part, DeclaresSnapshotArguments)
    }
    written = next((c for c in trainer.callbacks if isinstance(c, SaveConfigCallback)), None)  # type: ignore[attr-defined]
    if written is not None:
        if isinstance(written, HasConfigText):
            text = written.text
        else:
            text = written.parser.dump(written.config, skip_none=False, format="yaml")
        config = yaml.load(text, YAML_LOADER)
        return relevant(redact(config), ignored)
    found: dict[str, Any] = {
        "trainer": {name: getattr(trainer, name) for name in TRAINER_KEYS if hasattr(trainer, name)},
        "model": {"class_path": original_class(module).__qualname__, "init_args": dict(module.hparams)},
        "data": {"class_path": type(data).__qualname__, "init_args": dict(data.hparams)} if data is not None else {},
        "optimizer": [_settings(optimizer) for optimizer in trainer.optimizers],
    }
    return relevant(redact(found), ignored)


def relevant(config: dict[str, Any], ignored: Mapping[str, Collection[str]]) -> dict[str, Any]:
    """The part of a nested config that decides the training, by dotted key.

    Args: ignored: for `model` and `data` the arguments that do not.
    """
    trainer = config.get("trainer") or {}
    kept: dict[str, Any] = {"seed_everything": config.get("seed_everything")}
    kept |= {"trainer": {key: trainer.get(key) for key in TRAINER_KEYS}}
    for block in ("model", "data"):
        whole = config.get(block) or {}
        given = whole.get("init_args", {}) if isinstance(whole, dict) else {}
        arguments = {key: value for key, value in given.items() if key not in ignored.get(block, ())}
        kept[block] = {"class_path": whole.get("class_path"), "init_args": arguments}
    if "optimizer" in config:
        kept["optimizer"] = config["optimizer"]
    return {key: value for key, value in _flat(kept).items() if value is not None}


def differences(was: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line per key whose values differ."""
    keys = dict.fromkeys([*was, *now])
    return [
        f"{key}: {was.get(key, MISSING)} in the snapshot, {now.get(key, MISSING)} now"
        for key in keys
        if _comparable(key, was.get(key, MISSING)) != _comparable(key, now.get(key, MISSING))
    ]


def _comparable(key: str, value: Any) -> Any:
    """The value; a folder of the data without regard to how its path is written.

    torch's `Optimizer.load_state_dict` adds `differentiable` to an optimizer's options.
    """
    if key.endswith(".differentiable"):
        return value is True
    is_folder = key.startswith("data.init_args.") and key.endswith("_dir") and isinstance(value, str)
    return os.path.abspath(os.path.expanduser(value)) if is_folder and ":" not in value else value  # noqa: PTH100, PTH111


def _settings(optimizer: Any) -> dict[str, Any]:
    optimizer = getattr(optimizer, "optim", optimizer)  # of a ZeroRedundancyOptimizer the configured one
    values = {key: value for key, value in optimizer.defaults.items() if key != "lr"}  # a schedule may have changed lr
    return {"class_path": type(optimizer).__qualname__, **values}


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {
            k: v for key, item in value.items() for k, v in _flat(item, f"{path}.{key}" if path else str(key)).items()
        }
    if isinstance(value, (list, tuple)) and any(isinstance(item, (dict, list)) for item in value):
        return {k: v for index, item in enumerate(value) for k, v in _flat(item, f"{path}[{index}]").items()}
    if isinstance(value, (list, tuple)):
        return {path: [_plain(item) for item in value]}
    return {path: _plain(value)}


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


# The end of a run --------------------------------------------------------------------------------------------------


def limits_of(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """The limits of a run as plain JSON: steps, epochs, seconds and callbacks' patience; -1 and None mean no limit."""
    steps = trainer.max_steps
    if steps == -1:
        steps = module.hparams.get("max_train_steps") or -1
    found: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    seconds = [callback._duration for callback in found if isinstance(callback, Timer)]
    patience = {type(callback).__name__: callback.patience for callback in found if hasattr(callback, "patience")}
    return {"max_steps": steps, "max_epochs": trainer.max_epochs, "max_time": seconds, "patience": patience}


def final_facts(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """Manifest entries of a finished run's last snapshot: that it has finished, its limits, its final files.

    The files of callbacks with `final_files(trainer, module)` are made durable first.
    """
    found: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    writers = [callback for callback in found if isinstance(callback, WritesFinalFiles)]
    files = [path for writer in writers for path in writer.final_files(trainer, module)]
    root = Path(trainer.default_root_dir)
    epochs: Any = trainer.fit_loop.epoch_progress.current
    return {
        "is_finished": True,
        "limits": limits_of(trainer, module),
        "epochs": epochs.processed,
        "final_files": [_relative(path, root) for path in files if _made_durable(path)],
    }


def is_over(snapshot: Snapshot, trainer: Trainer, module: LightningModule) -> bool:
    """Whether nothing is left to do: the run finished, its files exist, and no limit was raised since."""
    facts = snapshot.facts
    root = Path(trainer.default_root_dir)
    if not facts.get("is_finished") or not all((root / name).is_file() for name in facts.get("final_files", ())):
        return False
    limits = limits_of(trainer, module)
    if limits == facts.get("limits"):  # also if an early stop or the time ended it
        return True
    steps, epochs = limits["max_steps"], limits["max_epochs"]
    return bool(0 <= steps <= snapshot.step or (epochs is not None and 0 <= epochs <= facts.get("epochs", 0)))


def find_finished(trainer: Trainer, module: LightningModule, data: Any, directory: Path) -> Snapshot | None:
    """The newest snapshot of a run with this configuration, if that run is over."""
    newest = next(iter(find_snapshots(directory)), None)
    if newest is None or not is_over(newest, trainer, module):
        return None
    if differences(newest.facts.get("config", {}), training_config(trainer, module, data)):
        return None
    try:
        newest.verify()
    except SnapshotError:
        return None
    return newest


def finished_sentence(snapshot: Snapshot, root: str | Path) -> str:
    limits = snapshot.facts.get("limits", {})
    stopped = f", stopped before max_steps={limits['max_steps']}" if snapshot.step < limits.get("max_steps", -1) else ""
    patience = limits.get("patience") if stopped else None
    raised = "".join(f", or {name}.patience above {value}," for name, value in (patience or {}).items())
    return (
        f"the run in {root} is finished: {snapshot.step} steps{stopped}, and its files are written; nothing to do"
        f" (a larger max_train_steps, max_steps or max_epochs{raised} continues from its end)"
    )


def _relative(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path.absolute())


def _made_durable(path: Path) -> bool:
    """Make a file survive a power cut; whether it exists."""
    try:
        # Windows flushes no file that is open for reading alone.
        file = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    except OSError:
        return False
    try:
        os.fsync(file)
    finally:
        os.close(file)
    sync_folder(path.parent)
    return True


def device_name(trainer: Trainer) -> str:
    """The device whose rounding decides the bits of a sum."""
    device = trainer.strategy.root_device
    name: str = device.type if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
    return name

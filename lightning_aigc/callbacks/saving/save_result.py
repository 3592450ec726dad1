"""SaveLoRA and SaveModel write what a training made, at its end and on the way; SaveResult is their base class."""

from __future__ import annotations

import errno
import re
import shutil
import time
from pathlib import Path
from typing import Any
from weakref import WeakSet

from lightning_aigc._lightning import Callback, LightningModule, Trainer, rank_zero_info
from lightning_aigc.atomic_file import warns_if_unwritten
from lightning_aigc.callbacks.sampling.gathered import written_weights
from lightning_aigc.checkpoint.resume import move_aside
from lightning_aigc.checkpoint.session import session_of
from lightning_aigc.errors import ConfigError, ModelError
from lightning_aigc.gradient_sync.transport.process_groups import errors_as_warnings
from lightning_aigc.protocols import DescribesTrainingData, HasOutputName, SavesLoRA, SavesModel
from lightning_aigc.report.record import SUMMARY_FILE
from lightning_aigc.setting_checks import check_types
from lightning_aigc.sharding.local_parts import original_class


class SaveResult(Callback):
    """Saves `<default_root_dir>/<output_name>.safetensors` at the end; on the way and on Ctrl-C a file named by step.

    Args:
        every_n_steps: Optimizer steps between the files on the way; 0 writes the last one only.
        output_name: Name without ending; unset means the module's `output_name`, or `unnamed`.
        keep_last: Files on the way to keep, the newest ones; -1 keeps all, 0 writes only that of Ctrl-C.
    """

    unnamed = "model"
    """The name where neither the callback nor the module has one."""

    def __init__(self, every_n_steps: int = 0, output_name: str | None = None, keep_last: int = -1) -> None:
        check_types(SaveResult.__init__, locals())
        if keep_last < -1:
            raise ConfigError(f"got {type(self).__name__} keep_last={keep_last}; wanted -1 (all) or more")
        self.every_n_steps, self.output_name, self.keep_last = every_n_steps, output_name, keep_last
        self._is_off = False
        self._last_step = 0
        self._started_at = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._is_off = bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
        argument = "output_name" if self.output_name else "model.init_args.output_name"
        check_output_name(self._name(pl_module), argument)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_off:
            set_aside_earlier_run(trainer, pl_module)
        self._last_step, self._started_at = trainer.global_step, time.time()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        is_due = self.every_n_steps and self.keep_last and step % self.every_n_steps == 0
        if is_due and not self._is_off and step > self._last_step:
            self._last_step = step
            self._save(trainer, pl_module, f"_step_{step:06d}")
            if trainer.is_global_zero and self.keep_last > 0:
                with warns_if_unwritten("the removal of old files by step", Path(trainer.default_root_dir)):
                    self._remove_old(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_off:
            self._save(trainer, pl_module, "")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        step = trainer.global_step
        if isinstance(exception, KeyboardInterrupt) and not self._is_off and step > self._last_step:
            with errors_as_warnings():
                self._save(trainer, pl_module, f"_step_{step:06d}")
                rank_zero_info(f"saved {self.file_path(trainer, pl_module, f'_step_{step:06d}')}")

    def file_path(self, trainer: Trainer, pl_module: LightningModule, suffix: str = "") -> Path:
        """The path of the final file; of one on the way with a suffix such as `_step_000100`."""
        return Path(trainer.default_root_dir) / f"{self._name(pl_module)}{suffix}.safetensors"

    def _name(self, pl_module: LightningModule) -> str:
        return self.output_name or (pl_module.output_name if isinstance(pl_module, HasOutputName) else self.unnamed)

    def final_files(self, trainer: Trainer, pl_module: LightningModule) -> list[Path]:
        """The files that a finished run must have, for ExactSnapshot."""
        return [] if self._is_off else [self.file_path(trainer, pl_module)]

    def _remove_old(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found = result_files(Path(trainer.default_root_dir), self._name(pl_module), pl_module)
        steps = sorted(step for step in set(found.values()) if 0 < step <= trainer.global_step)
        for step in steps[: -self.keep_last]:
            for path in (path for path, own in found.items() if own == step):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _save(self, trainer: Trainer, pl_module: LightningModule, suffix: str) -> None:
        with written_weights(pl_module) as writes:
            if writes:
                try:
                    self._write(trainer, pl_module, suffix)
                except OSError as error:
                    session = session_of(trainer)
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT) or session is None:
                        raise
                    session.taker.writer.join()  # a snapshot that does not fit either frees its space
                    self._write(trainer, pl_module, suffix)

    def _write(self, trainer: Trainer, pl_module: LightningModule, suffix: str) -> None:
        """Write the files of this suffix; called on rank 0, with whole weights."""
        raise NotImplementedError


ENDINGS = re.compile(r"(\.(safetensors|ckpt|pt|pth|bin))+$", re.IGNORECASE)
FORBIDDEN = re.compile(r'[\x00-\x1f<>:"/\\|?*]')
"""Characters that divide folders, or that a file system does not take."""
MOST_BYTES = 200
"""File systems take 255, and the name gets endings such as `_step_000100.safetensors`."""
TAKEN = frozenset(("snapshots", "samples", "guard", "checkpoints", "lightning_logs"))
"""Folders that a run writes next to its result; a ControlNet or pipeline folder of this name would replace one."""
SHEETS = ("samples/step_[0-9]*.png", "guard/step_[0-9]*.png", "guard/before_after.png")


def check_output_name(name: str, argument: str) -> None:
    """Check a result's name, which `argument` set. Raises: ModelError with a name that can be."""
    plain = ENDINGS.sub("", name)
    wrong = [
        said
        for said, is_so in (
            ("a folder or a character that file systems do not take", FORBIDDEN.search(name) is not None),
            ("an ending, which is added", plain != name),
            ("no name", not name.strip(". ")),
            ("a dot or space at its start or end", bool(name.strip(". ")) and name.strip(". ") != name),
            (f"more than {MOST_BYTES} bytes", len(name.encode("utf-8", errors="replace")) > MOST_BYTES),
            ("the name of a folder that the run writes itself", name.lower() in TAKEN),
        )
        if is_so
    ]
    if wrong:
        last = re.split(r"[/\\]", plain)[-1]
        possible = FORBIDDEN.sub("_", last).strip(". ").encode()[:MOST_BYTES].decode("utf-8", errors="ignore")
        possible = f"{possible}_result" if possible.lower() in TAKEN else possible
        raise ModelError(
            f"{argument} must be the name of a file without folder and ending, got {name!r}, which has"
            f" {wrong[0]}; set {argument}: {possible or 'result'}, and the folder by"
            " trainer.default_root_dir"
        )


def best_path(trainer: Trainer, pl_module: LightningModule, default_name: str) -> Path:
    """The file of a guard's best weights, `<default_root_dir>/<output_name>_best.safetensors`."""
    name = pl_module.output_name if isinstance(pl_module, HasOutputName) else default_name
    return Path(trainer.default_root_dir) / f"{name}_best.safetensors"


def result_files(folder: Path, name: str, module: Any) -> dict[Path, int]:
    """The files and folders of a module's result and of its best weights, with their step; 0 if not by step."""
    wanted = re.compile(rf"{re.escape(name)}(_best|_step_(\d{{6,}}))?(\.diffusers)?(\.safetensors)?")
    matches = {path: wanted.fullmatch(path.name) for path in sorted(folder.glob("*"))}
    may_be_folder = isinstance(module, SavesModel)  # another folder of this name is not a result
    return {
        path: int(match[2] or 0)
        for path, match in matches.items()
        if match and (match[1] or may_be_folder or path.is_file())
    }


_BEGUN: WeakSet[Trainer] = WeakSet()


def set_aside_earlier_run(trainer: Trainer, pl_module: LightningModule) -> None:
    """Move an earlier run's results, summary and sheets to `earlier-1`: where they are, they would pass for this run's.

    Each callback that writes at the start of a training calls it first; a resumed run keeps what is there. A file that
    an argument of the module names, such as `lora_from`, stays.
    """
    if trainer in _BEGUN or trainer.global_step or not trainer.is_global_zero:
        return
    _BEGUN.add(trainer)
    root = Path(trainer.default_root_dir)
    found: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    names = {callback._name(pl_module) for callback in found if isinstance(callback, SaveResult)}
    names |= {pl_module.output_name} if isinstance(pl_module, HasOutputName) else {SaveLoRA.unnamed, SaveModel.unnamed}
    given = {Path(value).expanduser().resolve() for value in pl_module.hparams.values() if isinstance(value, str)}
    results = {path for name in names for path in result_files(root, name, pl_module) if path.resolve() not in given}
    sheets = [path for shown in SHEETS for path in sorted(root.glob(shown))]
    _set_aside(sorted(results) + [path for path in [root / SUMMARY_FILE] if path.is_file()] + sheets, root)


def set_aside_best(trainer: Trainer, pl_module: LightningModule, default_name: str) -> None:
    """Move the best weights of an earlier run to `earlier-1`."""
    best = best_path(trainer, pl_module, default_name)
    if trainer.is_global_zero:
        _set_aside(list(result_files(best.parent, best.stem, pl_module)), best.parent)


def _set_aside(earlier: list[Path], root: Path) -> None:
    if earlier:
        with warns_if_unwritten("the start of the training", root / "earlier-1"):
            aside = move_aside(earlier, root)
            shown = " and ".join([earlier[0].name, *([f"{len(earlier) - 1} more"] if earlier[1:] else [])])
            rank_zero_info(f"files of an earlier run, {shown}, are in {aside} now; delete them when no longer needed")


class SaveLoRA(SaveResult):
    """Saves `<default_root_dir>/<output_name>.safetensors` at the end; on the way and on Ctrl-C a file named by step.

    Works with any LightningModule that has `save_lora(path, **metadata)`.

    Args:
        every_n_steps: Optimizer steps between the files on the way; 0 writes the last one only.
        output_name: Name without ending; unset means the module's `output_name`, or lora.
        keep_last: Files on the way to keep, the newest ones; -1 keeps all, 0 writes only that of Ctrl-C.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_aigc.callbacks import SaveLoRA
        >>> trainer = Trainer(callbacks=[SaveLoRA(every_n_steps=500)])
    """

    unnamed = "lora"

    def __init__(self, every_n_steps: int = 500, output_name: str | None = None, keep_last: int = -1) -> None:
        super().__init__(every_n_steps, output_name, keep_last)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and not isinstance(pl_module, SavesLoRA):
            raise ModelError(
                f"SaveLoRA needs a module with save_lora(path, **metadata), "
                f"{original_class(pl_module).__name__} has none"
            )

    def _write(self, trainer: Trainer, pl_module: LightningModule, suffix: str) -> None:
        path = self.file_path(trainer, pl_module, suffix)
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        of_data = data.lora_metadata() if isinstance(data, DescribesTrainingData) else {}
        assert isinstance(pl_module, SavesLoRA)
        pl_module.save_lora(
            path,
            output_name=path.stem,
            steps=trainer.global_step,
            num_epochs=trainer.current_epoch + 1,
            started_at=self._started_at,
            finished_at=time.time(),
            gradient_accumulation_steps=trainer.accumulate_grad_batches,
            mixed_precision=str(trainer.precision),
            **of_data,
        )


class SaveModel(SaveResult):
    """Saves `<output_name>/` and `<output_name>.safetensors` in `default_root_dir` at the end; by step on the way.

    Works with any LightningModule that has `save_model(path)`.

    Args:
        every_n_steps: Optimizer steps between the files on the way, each as large as the model; 0 writes the last only.
        output_name: Name without ending; unset means the module's `output_name`, or model.
        keep_last: Files on the way to keep, the newest ones; -1 keeps all, 0 writes only that of Ctrl-C.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_aigc.callbacks import SaveModel
        >>> trainer = Trainer(callbacks=[SaveModel(every_n_steps=500)])
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and not isinstance(pl_module, SavesModel):
            raise ModelError(
                f"SaveModel needs a module with save_model(path), {original_class(pl_module).__name__} has none"
            )
        self._written: list[Path] = []
        self._kind = pl_module.saved_kind if isinstance(pl_module, SavesModel) else "model"

    def report_entries(self) -> dict[str, Any]:
        """The written folder and files, for the summary; a second file's key ends in `_2`."""
        found: dict[str, str] = {}
        for path in self._written:
            key = f"{self._kind}_{'folder' if path.is_dir() else 'file'}"
            found[f"{key}_2" if key in found else key] = str(path)
        return {"result_files": found}

    def _write(self, trainer: Trainer, pl_module: LightningModule, suffix: str) -> None:
        path = self.file_path(trainer, pl_module, suffix)
        assert isinstance(pl_module, SavesModel)
        self._written = list(pl_module.save_model(path))

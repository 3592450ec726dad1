"""ExactSnapshot: a training that was killed at any moment resumes as if it had not been."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_aigc._lightning import Callback, LightningModule, Trainer
from lightning_aigc.callbacks.order import FIRST, order_callbacks
from lightning_aigc.callbacks.run_progress import RunProgress
from lightning_aigc.callbacks.run_report.run_facts import snapshots_in
from lightning_aigc.checkpoint.session import Mode, SnapshotOptions, SnapshotSession
from lightning_aigc.errors import ConfigError
from lightning_aigc.setting_checks import check_types


class ExactSnapshot(Callback):
    """Saves the whole state of a training regularly, so that `lightning fit --resume` ends with the same bits.

    Works with any LightningModule and any loader. In Python: `trainer.fit(module, data, ckpt_path="latest")`, or the
    folder of one snapshot. The run itself does not change by a bit. docs/resume.md says what is saved, and what cannot
    be exact.

    Args:
        every_n_steps: Optimizer steps between two snapshots; 0 for none of these.
        keep_last: Snapshots to keep.
        every_n_seconds: Seconds after which a snapshot is due as well.
        on_signal: On SIGTERM, Ctrl-C and SLURM's requeue signal, take a snapshot after the running batch, then end.
        keep_best: A logged metric; the snapshot with its best value is kept in addition to the last ones.
        best_mode: Whether the best value is the max or the min.
        directory: Where they go; unset means `<default_root_dir>/snapshots`.

    Raises: ConfigError that names the wrong argument.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_aigc.callbacks import ExactSnapshot
        >>> trainer = Trainer(callbacks=[ExactSnapshot(every_n_steps=500, keep_last=2)])
    """

    callback_order = FIRST  # so that copies are complete before another callback writes a weight

    def __init__(
        self,
        every_n_steps: int = 500,
        keep_last: int = 5,
        every_n_seconds: float | None = None,
        on_signal: bool = True,
        keep_best: str | None = None,
        best_mode: Mode = "min",
        directory: str | None = None,
    ) -> None:
        check_types(ExactSnapshot.__init__, locals())
        for name, value, least in (("every_n_steps", every_n_steps, 0), ("keep_last", keep_last, 1)):
            if value < least:
                raise ConfigError(f"ExactSnapshot.{name} must be {least} or more, got {value!r}")
        if every_n_seconds is not None and not every_n_seconds > 0:
            raise ConfigError(f"ExactSnapshot.every_n_seconds must be more than 0, or unset; got {every_n_seconds!r}")
        if best_mode not in Mode.__args__:  # type: ignore[attr-defined]
            raise ConfigError(f"ExactSnapshot.best_mode must be min or max, got {best_mode!r}")
        if keep_best is None and best_mode != "min":
            raise ConfigError(
                f"ExactSnapshot.best_mode: {best_mode} is of the metric of keep_best, which is unset; set"
                " ExactSnapshot.keep_best: val_loss or another logged metric, or remove best_mode"
            )
        self.directory = directory
        self.options = SnapshotOptions(
            every_n_steps, keep_last, every_n_seconds, on_signal, keep_best, best_mode, directory
        )
        self.blocked_s: list[float] = []
        """Seconds for which each snapshot of this fit blocked training."""
        self._session: SnapshotSession | None = None

    @property
    def session(self) -> SnapshotSession | None:
        """The snapshots of the running fit; None outside a fit."""
        return None if self._session is None or self._session.is_closed else self._session

    @property
    def resumed_step(self) -> int:
        """Step of the snapshot that the last fit continued from; -1 without one."""
        return -1 if self._session is None else self._session.resumed_step

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        order_callbacks(trainer)
        self.blocked_s = []
        self._session = SnapshotSession(trainer, self.options, self.blocked_s)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.session is not None:
            self.session.start(pl_module)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self.session is not None:
            self.session.before_backward()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self.session is not None:
            self.session.before_write()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.session is not None:
            self.session.taker.finish_copy()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.session is not None:
            self.session.touch()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(trainer.progress_bar_callback, RunProgress):
            trainer.progress_bar_callback.finish()  # what is said next begins a line
        if self.session is not None:
            self.session.on_exception(exception)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.session is not None:
            self.session.save_end()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.session is not None:
            self.session.end_fit(pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.session is not None:
            self.session.record_end()

    def report_entries(self) -> dict[str, Any]:
        """This fit's snapshots and the newest that is complete, for RunReport's page."""
        session = self._session  # closed by an exception before the page is written
        return {} if session is None else {"snapshots": snapshots_in(session.taker.writer.directory, self.blocked_s)}

    def wait(self) -> None:
        """Return when the last snapshot of this run is durable; raises what its writing raised."""
        assert self.session is not None
        self.session.taker.writer.wait()

    def abandon(self) -> None:
        """Release the folder as a killed process does: nothing more is written for this run."""
        if self.session is not None:
            self.session.abandon()

"""DDP under a watchdog: when no step finishes, the run's folder says where each rank waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.constants import default_pg_timeout

from lightning_aigc.errors import ConfigError
from lightning_aigc.gradient_sync.watch.stall_watchdog import StallWatchdog, report_folder
from lightning_aigc.strategies.device_ddp import DeviceDDPStrategy


class WatchedDDPStrategy(DeviceDDPStrategy):
    """Reports a stall of the ranks. A step, a batch of any stage and a new barrier count as progress."""

    def __init__(self, *args: Any, stall_after_s: float | None = None, **kwargs: Any) -> None:
        if stall_after_s is not None and stall_after_s < 0:
            raise ConfigError(
                f"stall_after_s must be above 0, 0 for no report, or null for a third of timeout; got {stall_after_s}"
            )
        super().__init__(*args, **kwargs)
        self._stall_after_s = stall_after_s
        self._watchdog: StallWatchdog | None = None

    def describe_wait(self) -> Sequence[str]:
        """Lines on what this rank waits for."""
        return []

    def _watch(self) -> None:
        """Begin to watch, once there is a process group."""
        trainer = None if self.lightning_module is None else self.lightning_module.trainer
        root = "" if trainer is None else str(trainer.default_root_dir)
        self._watchdog = StallWatchdog(
            self._stall_after_s,
            report_folder(root),
            self.global_rank,
            self.world_size,
            self._timeout or default_pg_timeout,
            lambda: self.describe_wait(),
        )
        self._watchdog.start()

    def _note_progress(self, steps: int | None = None, doing: str | None = None) -> None:
        if self._watchdog is not None:
            self._watchdog.progress(steps, doing)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._note_progress()
        return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._note_progress(doing="a validation batch")
        return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self._note_progress(doing="a test batch")
        return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._note_progress(doing="a prediction batch")
        return super().predict_step(*args, **kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        name = args[0] if args else kwargs.get("name")
        self._note_progress(doing=f"the barrier {name}" if name else "a barrier")
        super().barrier(*args, **kwargs)

    def teardown(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None
        super().teardown()

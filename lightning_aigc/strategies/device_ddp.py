"""DDP on Ascend NPUs, CUDA GPUs and CPUs, with late parameters and an optional stall watchdog."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from lightning_aigc._lightning import DDPStrategy
from lightning_aigc.errors import ConfigError
from lightning_aigc.gradient_sync.watch.stall_watchdog import StallWatchdog, report_folder
from lightning_aigc.setting_checks import as_timedelta
from lightning_aigc.strategies.device_process_group import DeviceProcessGroup
from lightning_aigc.strategies.late_parameters import LateParameters


class DeviceDDPStrategy(DeviceProcessGroup, DDPStrategy):
    """Lightning's DDP with a backend for each kind of device, and ranks on devices in the order of their links.

    A subclass that calls `_watch` gets a report of a stall. A step, a batch of any stage and a new barrier count as
    progress.
    """

    _late: LateParameters | None = None
    _watchdog: StallWatchdog | None = None

    def __init__(self, *args: Any, stall_after_s: float | None = None, **kwargs: Any) -> None:
        if stall_after_s is not None and stall_after_s < 0:
            raise ConfigError(
                f"stall_after_s must be above 0, 0 for no report, or null for a third of timeout; got {stall_after_s}"
            )
        if "timeout" in kwargs:
            kwargs["timeout"] = as_timedelta(kwargs["timeout"], "timeout")
        super().__init__(*args, **kwargs)
        self._stall_after_s = stall_after_s

    def determine_ddp_device_ids(self) -> list[int] | None:
        return [self.root_device.index] if self.root_device.type == "cuda" else None

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        if self.root_device.type == "npu":
            wrapped = DistributedDataParallel(model, **self._ddp_kwargs)  # its parent would open a CUDA stream
        else:
            wrapped = super()._setup_model(model)
        if self.world_size > 1:
            self._late = LateParameters(model, self.label, bool(self._ddp_kwargs.get("find_unused_parameters")))
        return wrapped

    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self._late is not None and getattr(self.model, "require_backward_grad_sync", True):
            self._late.average()

    @property
    def _is_late_finite(self) -> bool:
        """Whether the gradients that are in no bucket are finite, the same on every rank."""
        return self._late is None or self._late.is_finite

    # Progress, for the watchdog

    def describe_wait(self) -> Sequence[str]:
        """Return lines that say what this rank waits for."""
        return []

    def _watch(self) -> None:
        """Start the watchdog; needs the process group."""
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
        if self._late is not None:
            self._late.refuse_frozen()
        try:
            return super().training_step(*args, **kwargs)
        except RuntimeError as error:
            explained = None if self._late is None else self._late.explain_unused(error)
            if explained is None:
                raise
            raise explained from error

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
        self._late = None
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None
        super().teardown()

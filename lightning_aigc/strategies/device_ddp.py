"""DDP on Ascend NPUs, CUDA GPUs and CPUs."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_aigc.strategies.device_process_group import DeviceProcessGroup
from lightning_aigc.strategies.late_parameters import LateParameters


class DeviceDDPStrategy(DeviceProcessGroup, DDPStrategy):
    """Lightning's DDP with a backend for each kind of device, and ranks on the devices in the order of their links."""

    def determine_ddp_device_ids(self) -> list[int] | None:
        return [self.root_device.index] if self.root_device.type == "cuda" else None

    _late: LateParameters | None = None

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        if self.root_device.type == "npu":
            wrapped = DistributedDataParallel(model, **self._ddp_kwargs)  # its parent would open a CUDA stream
        else:
            wrapped = super()._setup_model(model)
        if self.world_size > 1:
            self._late = LateParameters(model, self.label, bool(self._ddp_kwargs.get("find_unused_parameters")))
        return wrapped

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._late is not None:
            self._late.refuse_frozen()
        return super().training_step(*args, **kwargs)

    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self._late is not None and getattr(self.model, "require_backward_grad_sync", True):
            self._late.average()

    @property
    def _is_late_finite(self) -> bool:
        """Whether the gradients that are in no bucket are finite, the same on every rank."""
        return self._late is None or self._late.is_finite

    def teardown(self) -> None:
        self._late = None
        super().teardown()

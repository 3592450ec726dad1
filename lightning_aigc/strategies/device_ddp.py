"""DDP on Ascend NPUs, CUDA GPUs and CPUs."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_aigc.strategies.device_process_group import DeviceProcessGroup


class DeviceDDPStrategy(DeviceProcessGroup, DDPStrategy):
    """Lightning's DDP with a backend for each kind of device, and ranks on the devices in the order of their links."""

    def determine_ddp_device_ids(self) -> list[int] | None:
        return [self.root_device.index] if self.root_device.type == "cuda" else None

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        if self.root_device.type != "npu":
            return super()._setup_model(model)
        return DistributedDataParallel(model, **self._ddp_kwargs)  # its parent would open a CUDA stream

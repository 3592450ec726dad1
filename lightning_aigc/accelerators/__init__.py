"""Accelerators for Lightning's Trainer. Importing this package registers "npu" and patches Lightning for it."""

from lightning_aigc._lightning import AcceleratorRegistry
from lightning_aigc.accelerators import lightning_patches
from lightning_aigc.accelerators.npu import NPUAccelerator

__all__ = ["NPUAccelerator"]

if "npu" not in AcceleratorRegistry:
    AcceleratorRegistry.register("npu", NPUAccelerator, description="Ascend NPU, through torch_npu")
lightning_patches.apply(NPUAccelerator)

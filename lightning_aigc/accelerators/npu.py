"""NPUAccelerator: Ascend NPUs in Lightning, `Trainer(accelerator="npu")`.

torch loads an installed torch_npu automatically, so without CANN `import torch` itself fails. With
`TORCH_DEVICE_BACKEND_AUTOLOAD=0` in the environment torch starts, and this accelerator reports what is missing.

A process that has used the NPU must not be forked for more NPU work. Strategies that start fresh processes are safe.
A DataLoader that forks workers after the first step needs `multiprocessing_context="spawn"` or "forkserver", or
`persistent_workers=True`, which forks them once. Such workers may touch CPU tensors only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_aigc._lightning import Accelerator, CheckpointIO, DDPStrategy, Strategy, Trainer, package, rank_zero_info
from lightning_aigc.accelerators.lightning_patches import warn_if_unpatched
from lightning_aigc.accelerators.torch_npu_import import explain_absence, npu_count, warn_of_transfer_to_npu
from lightning_aigc.errors import ConfigError
from lightning_aigc.host_state import to_cpu

BYTES_OF = {
    "allocated_mib": "allocated_bytes.all.current",
    "peak_allocated_mib": "allocated_bytes.all.peak",
    "reserved_mib": "reserved_bytes.all.current",
    "peak_reserved_mib": "reserved_bytes.all.peak",
}


class NPUAccelerator(Accelerator):
    """torch_npu behind Lightning's interface; registered as "npu".

    Raises: ConfigError without an NPU. Lightning creates the object before it calls `is_available()`, so the user
        sees this message instead of a list of available accelerators.
    """

    def __init__(self) -> None:
        if not self.is_available():
            raise ConfigError(explain_absence())
        warn_of_transfer_to_npu()
        warn_if_unpatched()

    def __repr__(self) -> str:
        """The hint that the other Lightning's Trainer prints, which does not know this class."""
        return f"<NPUAccelerator for the Trainer of {package()}: from {package()} import Trainer>"

    def setup_device(self, device: torch.device) -> None:
        """Set this process's current NPU.

        Raises: ConfigError for any other device, since a strategy that fell back to the CPU is a mistake, and in a
            process that was forked after the NPU was used, where torch_npu would crash.
        """
        if device.type != "npu":
            raise ConfigError(
                f"accelerator='npu' got the device {str(device)!r} from its strategy, wanted an npu; give no strategy, "
                "or one on an npu such as SingleDeviceStrategy('npu:0')"
            )
        if torch.npu._is_in_bad_fork():  # type: ignore[attr-defined]
            raise ConfigError(
                "this process was forked from one that had used the NPU, where torch_npu cannot work; use a strategy "
                "that starts fresh processes (not *_fork or *_notebook), or do nothing on the NPU before Trainer.fit"
            )
        torch.npu.set_device(device)  # type: ignore[attr-defined]

    @staticmethod
    def check_strategy(strategy: Strategy) -> None:
        """Raise ConfigError for Lightning's own DDP."""
        if isinstance(strategy, DDPStrategy) and _opens_cuda_stream(strategy):
            count = len(strategy.parallel_devices or ())
            raise ConfigError(
                f"{type(strategy).__name__} got {count} npu, wanted cuda or cpu, as it opens a CUDA stream; train on"
                " several NPUs with strategy: npu_sparse"
            )

    def setup(self, trainer: Trainer) -> None:
        """Wrap the checkpoint IO, so that every checkpoint of this Trainer holds CPU tensors.

        Raises: ConfigError for Lightning's own DDP, which would open a CUDA stream next.
        """
        strategy = trainer.strategy
        self.check_strategy(strategy)
        if not isinstance(strategy.checkpoint_io, CheckpointOnCPU):
            strategy.checkpoint_io = CheckpointOnCPU(strategy.checkpoint_io)
        device = strategy.root_device
        used, name = trainer.num_devices, torch.npu.get_device_name(device)  # type: ignore[attr-defined]
        rank_zero_info(f"NPU available: {npu_count()} ({name}), used: {used}")

    def teardown(self) -> None:
        torch.npu.empty_cache()  # type: ignore[attr-defined]

    def get_device_stats(self, device: torch.device | str | int) -> dict[str, float]:
        """Memory in MiB and utilisation in percent, for DeviceStatsMonitor; fewer entries with an older torch_npu."""
        npu = torch.npu  # type: ignore[attr-defined]
        measured = npu.memory_stats(device)
        stats = {name: measured.get(key, 0) / 2**20 for name, key in BYTES_OF.items()}
        if hasattr(npu, "mem_get_info"):
            free, total = npu.mem_get_info(device)
            stats |= {"free_mib": free / 2**20, "total_mib": total / 2**20}
        if hasattr(npu, "utilization"):
            stats["utilization_percent"] = float(npu.utilization(device))
        return stats

    @staticmethod
    def parse_devices(devices: int | str | Sequence[int]) -> list[int]:
        """NPU indices from Trainer's `devices`: 2, "2", "0,1", "1,", [0, 1], -1, "-1".

        Raises: ConfigError for no device, an index out of range, or a repeated index.
        """
        count = npu_count()
        try:
            indices = _indices(devices, count)
        except ValueError as error:
            raise ConfigError(
                f"devices={devices!r} got {error}; wanted a number of NPUs from 1 to {count}, -1 for all of them, "
                f"or different indices from 0 to {count - 1}, as in devices=[0] or devices='0,'"
            ) from None
        return indices

    @staticmethod
    def get_parallel_devices(devices: Sequence[int]) -> list[torch.device]:
        return [torch.device("npu", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return npu_count()

    @staticmethod
    def is_available() -> bool:
        """Whether torch_npu is installed and sees an NPU; never raises and never initialises an NPU."""
        return npu_count() > 0

    @staticmethod
    def name() -> str:
        return "npu"


class CheckpointOnCPU(CheckpointIO):
    """Wrapper of a CheckpointIO that passes it CPU tensors only, so that files load on machines without an NPU."""

    def __init__(self, wrapped: CheckpointIO) -> None:
        self.wrapped = wrapped

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        self.wrapped.save_checkpoint(to_cpu(checkpoint), path, storage_options=storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.wrapped.load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        self.wrapped.remove_checkpoint(path)

    def teardown(self) -> None:
        self.wrapped.teardown()


def _opens_cuda_stream(strategy: DDPStrategy) -> bool:
    """Whether this is Lightning's own DDP, whose `_setup_model` opens a CUDA stream on any device but the CPU."""
    if type(strategy)._setup_model is not DDPStrategy._setup_model:
        return False
    return strategy.determine_ddp_device_ids() is not None


def _indices(devices: Any, count: int) -> list[int]:
    """Parse `devices` to indices. Raises: ValueError with a few words for `parse_devices`' message."""
    if isinstance(devices, str):
        parts = [part.strip() for part in devices.split(",")]
        try:
            numbers = [int(part) for part in parts if part]
        except ValueError:
            raise ValueError("something that is no number") from None
        return _indices(numbers[0] if len(parts) == 1 and numbers else numbers, count)
    if isinstance(devices, int) and not isinstance(devices, bool):
        if devices == -1:
            return list(range(count))
        if not 1 <= devices <= count:
            raise ValueError(
                f"{devices} NPUs, and {count} are here" if devices > 0 else f"{devices} as a number of NPUs"
            )
        return list(range(devices))
    if not isinstance(devices, (list, tuple)) or not all(type(index) is int for index in devices):
        raise ValueError("neither a number nor indices")
    if not devices:
        raise ValueError("no index")
    if len(set(devices)) < len(devices):
        raise ValueError("the same index twice")
    if not all(0 <= index < count for index in devices):
        raise ValueError(f"an index that is not here ({count} NPUs)")
    return list(devices)

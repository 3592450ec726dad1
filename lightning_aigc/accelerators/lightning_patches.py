"""Patches for four places where lightning 2.6 knows only cuda, mps, tpu and cpu, and would silently ignore an NPU.

| stock Lightning                                         | with an NPU                                    |
|---------------------------------------------------------|------------------------------------------------|
| accelerator="auto" finds no NPU and takes the CPU       | finds it, after tpu, mps and cuda              |
| one device: SingleDeviceStrategy("cpu")                 | SingleDeviceStrategy("npu:0")                  |
| precision="16-mixed" autocasts for cuda, and does nothing | autocasts for npu, with the NPU's loss scaler |
| strategy="ddp" ends in a collective or a CUDA stream    | refuses it when the Trainer is created         |

Each patch acts when a Trainer is created, and calls Lightning's function for any other accelerator. They can go when
Lightning asks its accelerators instead of naming them (its issue 19498).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

from lightning_aigc import _lightning
from lightning_aigc._lightning import (
    Accelerator,
    MixedPrecision,
    SingleDeviceStrategy,
    Strategy,
    _AcceleratorConnector,
    accelerator_connector,
    rank_zero_info,
)
from lightning_aigc.accelerators.torch_npu_import import warn_of_broken_torch_npu
from lightning_aigc.devices import grad_scaler

WRITTEN_FOR = "2.6."


def is_written_for_this_lightning() -> bool:
    return _lightning.version().startswith(WRITTEN_FOR)


@functools.cache
def warn_if_unpatched() -> None:
    """Warn once that this version of Lightning is not patched."""
    if not is_written_for_this_lightning():
        warnings.warn(
            f"{_lightning.package()} {_lightning.version()} is not patched for NPUs, wanted {WRITTEN_FOR}x; unless it "
            "knows them itself, give Trainer accelerator='npu', strategy=SingleDeviceStrategy('npu:0') and "
            "plugins=MixedPrecision(..., device='npu')",
            stacklevel=3,
        )


def apply(npu: type[Accelerator]) -> None:
    """Patch the connector of lightning 2.6 for this accelerator, once; do nothing in other versions."""
    if not is_written_for_this_lightning() or hasattr(_AcceleratorConnector._choose_strategy, "__wrapped__"):
        return
    _replace(accelerator_connector, "_select_auto_accelerator", functools.partial(_find_npu, npu))
    _replace(_AcceleratorConnector, "_choose_strategy", functools.partial(_stay_on_npu, npu))
    _replace(_AcceleratorConnector, "_check_and_init_precision", functools.partial(_cast_for_npu, npu))
    _replace(_AcceleratorConnector, "_lazy_init_strategy", functools.partial(_check_strategy, npu))


def _replace(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    """Replace a function by `ours`, which gets the stock function first; `__wrapped__` keeps the stock function."""
    stock = getattr(owner, name)

    @functools.wraps(stock)
    def patched(*args: Any) -> Any:
        return ours(stock, *args)

    setattr(owner, name, patched)


def _find_npu(npu: type[Accelerator], stock: Callable[[], str]) -> str:
    chosen = stock()
    if chosen != "cpu":
        return chosen
    if npu.is_available():
        return npu.name()
    warn_of_broken_torch_npu()
    return chosen


def _stay_on_npu(
    npu: type[Accelerator], stock: Callable[[_AcceleratorConnector], Strategy | str], connector: _AcceleratorConnector
) -> Strategy | str:
    one_device = connector._num_nodes_flag == 1 and len(connector._parallel_devices) == 1
    if isinstance(connector.accelerator, npu) and one_device:
        return SingleDeviceStrategy(device=connector._parallel_devices[0])
    return stock(connector)


def _check_strategy(
    npu: type[Accelerator], stock: Callable[[_AcceleratorConnector], None], connector: _AcceleratorConnector
) -> None:
    stock(connector)
    if isinstance(connector.accelerator, npu):
        npu.check_strategy(connector.strategy)  # type: ignore[attr-defined]


def _cast_for_npu(
    npu: type[Accelerator], stock: Callable[[_AcceleratorConnector], Any], connector: _AcceleratorConnector
) -> Any:
    precision = connector._precision_flag
    if (
        not isinstance(connector.accelerator, npu)
        or connector._precision_plugin_flag is not None
        or precision not in ("16-mixed", "bf16-mixed")
    ):
        return stock(connector)
    connector._validate_precision_choice()
    rank_zero_info(f"Using {precision} Automatic Mixed Precision (AMP) on npu")
    scaler = grad_scaler("npu") if precision == "16-mixed" else None
    return MixedPrecision(precision, "npu", scaler)

"""NPUAccelerator by itself, on a torch.npu that answers what a test wants."""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_aigc.accelerators import NPUAccelerator, lightning_patches
from lightning_aigc.errors import ConfigError


def npu_device(index: int) -> Any:
    """Without torch_npu, torch knows no device of that name."""
    return SimpleNamespace(type="npu", index=index)


@pytest.fixture
def four_npus(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """torch.npu of a machine with four."""
    module = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 4,
        set_device=lambda device: None,
        memory_stats=lambda device: {"allocated_bytes.all.current": 2**20, "allocated_bytes.all.peak": 3 * 2**20},
        _is_in_bad_fork=lambda: False,
    )
    monkeypatch.setattr(torch, "npu", module, raising=False)
    return module


@pytest.mark.parametrize(
    ("devices", "indices"),
    [
        (1, [0]),
        (3, [0, 1, 2]),
        (4, [0, 1, 2, 3]),
        ("2", [0, 1]),
        ("3,", [3]),
        ("0,1", [0, 1]),
        (" 2 , 0 ", [2, 0]),
        ([0, 1], [0, 1]),
        ((3,), [3]),
        (-1, [0, 1, 2, 3]),
        ("-1", [0, 1, 2, 3]),
    ],
)
@pytest.mark.usefixtures("four_npus")
def test_devices_are_a_number_or_indices(devices: Any, indices: list[int]) -> None:
    assert NPUAccelerator.parse_devices(devices) == indices


@pytest.mark.parametrize(
    ("devices", "got"),
    [
        (0, "0 as a number of NPUs"),
        ("0", "0 as a number of NPUs"),
        (-2, "-2 as a number of NPUs"),
        (5, "5 NPUs, and 4 are here"),
        ("5", "5 NPUs, and 4 are here"),
        ("0,4", r"an index that is not here \(4 NPUs\)"),
        ([-1], r"an index that is not here \(4 NPUs\)"),
        ([1, 1], "the same index twice"),
        ([], "no index"),
        ("", "no index"),
        ("npu:0", "something that is no number"),
        ([0.0], "neither a number nor indices"),
        (True, "neither a number nor indices"),
        ([True], "neither a number nor indices"),
        (None, "neither a number nor indices"),
        (1.0, "neither a number nor indices"),
    ],
)
@pytest.mark.usefixtures("four_npus")
def test_other_devices_are_refused_with_what_was_got_and_what_is_wanted(devices: Any, got: str) -> None:
    with pytest.raises(ConfigError, match=f"got {got}; wanted a number of NPUs from 1 to 4, -1 .* indices from 0 to 3"):
        NPUAccelerator.parse_devices(devices)


@pytest.mark.usefixtures("four_npus")
def test_all_npus_are_the_automatic_choice() -> None:
    assert NPUAccelerator.is_available()
    assert NPUAccelerator.auto_device_count() == 4
    assert NPUAccelerator.name() == "npu"


@pytest.mark.usefixtures("four_npus")
@pytest.mark.parametrize("kind", ["cpu", "cuda:0"])
def test_another_device_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"got the device '{kind}' from its strategy, wanted an npu"):
        NPUAccelerator().setup_device(torch.device(kind))


def test_a_process_forked_after_the_npu_was_used_is_refused(four_npus: SimpleNamespace) -> None:
    chosen: list[torch.device] = []
    four_npus.set_device = chosen.append
    NPUAccelerator().setup_device(npu_device(3))
    four_npus._is_in_bad_fork = lambda: True
    with pytest.raises(ConfigError, match="was forked from one that had used the NPU"):
        NPUAccelerator().setup_device(npu_device(2))
    assert chosen == [npu_device(3)]


def test_a_driver_that_refuses_is_no_npu(four_npus: SimpleNamespace) -> None:
    def refuse() -> int:
        raise RuntimeError("drvGetDevNum failed")

    four_npus.device_count = refuse
    assert not NPUAccelerator.is_available()
    with pytest.raises(ConfigError, match="got torch_npu, which sees no NPU"):
        NPUAccelerator()


def test_an_older_torch_npu_gives_fewer_statistics(four_npus: SimpleNamespace) -> None:
    device = npu_device(0)
    old = {"allocated_mib": 1.0, "peak_allocated_mib": 3.0, "reserved_mib": 0.0, "peak_reserved_mib": 0.0}
    assert NPUAccelerator().get_device_stats(device) == old
    four_npus.mem_get_info = lambda device: (2**30, 2**31)
    four_npus.utilization = lambda device: 7
    new = {"free_mib": 1024.0, "total_mib": 2048.0, "utilization_percent": 7.0}
    assert NPUAccelerator().get_device_stats(device) == old | new


@pytest.mark.usefixtures("four_npus")
def test_transfer_to_npu_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NPUAccelerator()
    monkeypatch.setitem(sys.modules, "torch_npu.contrib.transfer_to_npu", SimpleNamespace())
    with pytest.warns(UserWarning, match="torch.cuda report the NPU.*remove that import"):
        NPUAccelerator()


@pytest.mark.usefixtures("four_npus")
def test_another_lightning_is_left_alone_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning_patches._lightning, "version", lambda: "2.7.0")
    chooser = lightning_patches._AcceleratorConnector._choose_strategy
    monkeypatch.setattr(lightning_patches._AcceleratorConnector, "_choose_strategy", chooser.__wrapped__)
    lightning_patches.apply(NPUAccelerator)
    assert lightning_patches._AcceleratorConnector._choose_strategy is chooser.__wrapped__
    lightning_patches.warn_if_unpatched.cache_clear()
    with pytest.warns(UserWarning, match=r"lightning\.pytorch 2\.7\.0 is not patched for NPUs"):
        NPUAccelerator()
    NPUAccelerator()  # a second warning would be an error

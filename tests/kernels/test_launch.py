"""Tile sizes and the table they come from: no Triton needed."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from lightning_aigc_kernels.launch import LaunchConfig, config_for, next_power_of_two, on_device_of, tile_shape


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 64, 100, 4096, 5000])
@pytest.mark.parametrize("tile", [64, 2048])
def test_a_tile_keeps_its_size_and_holds_whole_rows_while_they_fit(columns: int, tile: int) -> None:
    rows, width = tile_shape(columns, tile)
    assert rows * width == tile
    assert width == next_power_of_two(width) >= min(16, tile)
    assert width >= min(columns, tile)


def test_powers_of_two() -> None:
    assert [next_power_of_two(n) for n in (0, 1, 2, 3, 4, 5, 1023, 1024)] == [1, 1, 2, 4, 4, 8, 1024, 1024]


def test_a_config_is_checked_when_made() -> None:
    with pytest.raises(ValueError, match="tile must be a power of two, got 1000"):
        LaunchConfig(1000, 1)
    with pytest.raises(ValueError, match=r"programs must be in \[1, 65535\], got 65536; Ascend allows no larger grid"):
        LaunchConfig(1024, 65_536)


def test_a_device_without_a_row_is_named_with_those_that_have_one() -> None:
    table = {"cuda": LaunchConfig(64, 1), "npu": LaunchConfig(128, 2)}
    assert config_for("npu", table).tile == 128
    with pytest.raises(ValueError, match="no Triton kernel for device 'xpu', only for cuda, npu; use the reference"):
        config_for("xpu", table)


def test_a_launch_goes_to_the_card_of_its_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [torch.device("cuda:0")]

    @contextlib.contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        current.append(wanted)
        yield
        current.pop()

    monkeypatch.setattr(torch, "get_device_module", lambda of: SimpleNamespace(device=device))
    with on_device_of(SimpleNamespace(device=torch.device("cuda:1"))):  # type: ignore[arg-type]
        assert current[-1] == torch.device("cuda:1")
    assert current == [torch.device("cuda:0")]

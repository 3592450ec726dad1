"""Imports go one way: the arrows of the architecture, held by walking every import statement."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from lightning_aigc import _lightning

ROOT = Path(__file__).parents[2]
PACKAGE, KERNELS = ROOT / "lightning_aigc", ROOT / "kernels" / "lightning_aigc_kernels"

HOOKS = {"_registration", "_third_party_imports", "_attention_masks", "_real_rotary", "_lightning"}
"""Modules that `import lightning_aigc` runs, now or after another import."""
# A room may import from the floors below its own; docs/architecture.md draws them.
FLOORS_UPWARDS = [
    {"errors", "atomic_file", "cache_folder", "protocols"} | HOOKS,
    {"devices", "rng", "accumulation", "cluster", "knapsack", "sharding", "secrets", "setting_checks"}
    | {"embedded", "_second_lightning"},
    {"host_state", "evaluation_mode", "schedulers", "report"},
    {"gradient_sync"},
    {"accelerators", "precision", "checkpoint", "metrics", "quantization"},
    {"strategies"},
    {"callbacks", "data"},
    {"diffusion"},
    {"cli"},
    {"__main__"},
]
KERNEL_FLOORS_UPWARDS = [
    {"dispatch", "custom_op", "matmul", "kth_magnitude", "launch", "protection", "numba_cache"},
    {"convolution", "linear_with_lora", "normalization"},
    {"packing"},
    {"geglu", "keep_largest", "modulated_norm", "qk_norm_rope", "quantize_blocks", "silu_mul", "frozen_conv2d"},
    {"group_norm_silu", "lora_attention", "feed_forward", "packed_weight"},
    {"group_norm_silu_conv2d", "joint_attention", "sparse_attention_backward"},
]
FLOORS = {room: number for number, rooms in enumerate(FLOORS_UPWARDS) for room in rooms}
TOP = "lightning_aigc"


@cache
def imports_of(path: Path) -> tuple[str, ...]:
    return tuple(_imports_of(path))


def _imports_of(path: Path) -> Iterator[str]:
    """Dotted names of everything that a file imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide their direction"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def wrong_imports(path: Path) -> list[str]:
    here = module_name(path)
    room = here.split(".")[0]
    wrong = []
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] != TOP or len(parts) < 2 or parts[1] in (room, "__version__"):
            continue
        there = parts[1]
        if there not in FLOORS or room not in FLOORS or FLOORS[there] >= FLOORS[room]:
            wrong.append(f"{here} imports {name}")
    return wrong


FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


# One test for all files: a test for each took 4 ms of pytest's own.
def test_rooms_import_only_from_the_floors_below() -> None:
    assert [line for path in FILES for line in wrong_imports(path)] == []


def test_every_room_has_a_floor() -> None:
    rooms = {module_name(path).split(".")[0] for path in FILES}
    assert rooms <= FLOORS.keys()


def test_the_cluster_is_described_without_torch() -> None:
    known = {*sys.stdlib_module_names, TOP}
    paths = sorted((PACKAGE / "cluster").glob("*.py"))
    assert (
        paths and [(path, name) for path in paths for name in imports_of(path) if name.split(".")[0] not in known] == []
    )


def test_kernels_do_not_know_the_lightning_side() -> None:
    above = {"lightning_aigc", "lightning", "pytorch_lightning", "diffusers", "transformers", "peft"}
    paths = sorted(KERNELS.rglob("*.py"))
    assert paths and [(path, name) for path in paths for name in imports_of(path) if name.split(".")[0] in above] == []


def test_the_packages_do_not_import_what_stays_in_a_checkout() -> None:
    """tools/, benchmarks/ and tests/ are in no wheel."""
    outside = {"tools", "benchmarks", "tests", "fakes"}
    paths = (*PACKAGE.rglob("*.py"), *KERNELS.rglob("*.py"))
    assert [(path, name) for path in paths for name in imports_of(path) if name.split(".")[0] in outside] == []


KERNEL_FLOORS = {room: number for number, rooms in enumerate(KERNEL_FLOORS_UPWARDS) for room in rooms}


def wrong_ops(path: Path) -> list[str]:
    here = path.relative_to(KERNELS).with_suffix("").parts[0]
    others = {name.split(".")[1] for name in imports_of(path) if name.startswith(f"{KERNELS.name}.")} - {here}
    return [f"{here} builds on {room}" for room in sorted(others) if KERNEL_FLOORS[room] >= KERNEL_FLOORS[here]]


def test_ops_build_on_simpler_ops_only() -> None:
    paths = sorted(p for p in KERNELS.rglob("*.py") if p != KERNELS / "__init__.py")
    assert paths and [line for path in paths for line in wrong_ops(path)] == []


def test_importing_the_package_mends_torchvision_and_registers_names_only() -> None:
    imported = {name for name in imports_of(PACKAGE / "__init__.py") if name.startswith(TOP)}
    once_torch_is_imported = {"_attention_masks"}
    at_once = {"_third_party_imports", "_registration", "_real_rotary"}  # of the standard library alone
    registration = {"accelerators", "strategies", "_lightning", "_second_lightning"}  # once Lightning is imported
    assert {name.split(".")[1] for name in imported} <= at_once | once_torch_is_imported | registration


def test_lightning_is_imported_by_way_of_its_resolver_alone() -> None:
    """So that a program with `pytorch_lightning` loads no `lightning`, and the other way round."""
    roots = {"lightning", "pytorch_lightning", "lightning_fabric"}
    direct = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if roots & {name.partition(".")[0] for name in imports_of(path)}
    }
    assert direct == {"_lightning.py"}


def test_the_resolver_finds_at_run_time_what_it_shows_to_a_type_checker() -> None:
    tree = ast.parse((PACKAGE / "_lightning.py").read_text(encoding="utf-8"))
    shown = {
        alias.name: node.module.removeprefix("lightning.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("lightning.")
        for alias in node.names
    }
    assert shown == _lightning.MODULE_OF
    used = {
        name.rpartition(".")[2]
        for path in PACKAGE.rglob("*.py")
        for name in imports_of(path)
        if name.startswith("lightning_aigc._lightning.")
    }
    assert shown.keys() <= used | {"package", "rank_zero_logger"}


def test_the_walk_sees_a_wrong_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "metrics" / "bad.py"
    bad.parent.mkdir()
    bad.write_text("def f() -> None:\n    from lightning_aigc.callbacks import SampleGrid\n")
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    assert wrong_imports(bad) == ["metrics.bad imports lightning_aigc.callbacks.SampleGrid"]

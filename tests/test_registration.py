"""Names get into Lightning's registries without importing Lightning, and nothing that goes wrong there spreads."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fakes.processes.programs import WITHOUT_COLLECTIONS
from lightning_aigc._registration import _finder, when_imported


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Puts a module with this source on the path, under a name that is forgotten afterwards; returns the name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source: str) -> str:
        name = f"some_module_{tmp_path.name}"
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)
        importlib.invalidate_caches()
        return name

    return write


def test_an_action_waits_for_the_import_and_sees_the_whole_module(write_module: Callable[[str], str]) -> None:
    name = write_module("first = 1\nlast = 2\n")
    seen: list[int] = []
    when_imported(name, lambda: seen.append(importlib.import_module(name).last))
    when_imported(name, lambda: seen.append(3))
    assert seen == [] and name not in sys.modules and _finder in sys.meta_path
    module = importlib.import_module(name)
    assert seen == [2, 3]
    assert inspect.getsource(module) == "first = 1\nlast = 2\n"
    importlib.reload(module)
    assert seen == [2, 3]


def test_an_action_on_an_imported_module_happens_now(write_module: Callable[[str], str]) -> None:
    name = write_module("")
    importlib.import_module(name)
    seen: list[int] = []
    when_imported(name, lambda: seen.append(1))
    assert seen == [1]


@pytest.mark.parametrize("imported_first", [True, False])
def test_a_failing_action_is_one_warning_and_stops_nothing(
    imported_first: bool, write_module: Callable[[str], str]
) -> None:
    name = write_module("")
    seen: list[int] = []

    def fail() -> None:
        raise KeyError("no such registry")

    def steps() -> None:
        for step in (fail, lambda: seen.append(1)):
            when_imported(name, step)

    if imported_first:
        importlib.import_module(name)
        with pytest.warns(UserWarning, match="KeyError: 'no such registry'; what it registers cannot be used"):
            steps()
    else:
        steps()
        with pytest.warns(UserWarning, match=f"{name} was imported, but .*fail failed after it: KeyError"):
            importlib.import_module(name)
    assert seen == [1] and name in sys.modules


def test_an_import_that_fails_keeps_its_actions_for_the_next_try(
    write_module: Callable[[str], str], tmp_path: Path
) -> None:
    name = write_module("raise ImportError('not yet')")
    seen: list[int] = []
    when_imported(name, lambda: seen.append(1))
    with pytest.raises(ImportError, match="not yet"):
        importlib.import_module(name)
    assert seen == []
    (tmp_path / f"{name}.py").write_text("ready = True  # longer than before, so that its byte code is made anew\n")
    importlib.invalidate_caches()
    importlib.import_module(name)
    assert seen == [1]


SCRIPT = """
import sys
import lightning_aigc
assert not {"lightning", "pytorch_lightning", "lightning_aigc.accelerators"} & sys.modules.keys()
import pytorch_lightning
assert "lightning" not in sys.modules
registries = {"accelerator": pytorch_lightning.accelerators.AcceleratorRegistry["npu"],
              "strategy": pytorch_lightning.strategies.StrategyRegistry["npu_sparse"]}
assert registries["accelerator"]["accelerator"].__module__ == "lightning_aigc.accelerators.npu"
assert issubclass(registries["strategy"]["strategy"], pytorch_lightning.strategies.DDPStrategy)
from lightning import Trainer
for arguments in ({"accelerator": "npu"}, {"strategy": "npu_sparse"}):
    try:
        Trainer(**arguments)
    except ValueError as error:
        said = "need the Trainer of pytorch_lightning, which was imported first, got lightning.pytorch's; replace the "
        assert said + "imports from lightning.pytorch by `from pytorch_lightning import Trainer" in str(error), error
    else:
        raise AssertionError(arguments)
assert not any(type(finder).__module__ == "lightning_aigc._registration" for finder in sys.meta_path)
"""


def test_importing_the_package_registers_names_with_the_first_lightning_and_refuses_the_second() -> None:
    root = Path(__file__).parents[1]
    paths = os.pathsep.join((str(root), str(root / "kernels")))
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_COLLECTIONS + SCRIPT],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]

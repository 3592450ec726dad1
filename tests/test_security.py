"""Files that must run no code: a model folder with Python files, and a checkpoint with a pickle at an http address."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_aigc.cli import main
from lightning_aigc.diffusion.pipeline.loading import load_components
from lightning_aigc.embedded.folders import resolve
from lightning_aigc.errors import ModelError


class WritesAFile:
    """A pickle that writes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("part", ["pipeline", "unet"])
def test_python_files_of_a_model_folder_are_not_run(part: str, tmp_path: Path) -> None:
    folder, mark = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(resolve("embedded:sd"), folder)
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    index["_class_name" if part == "pipeline" else part] = ["own", "Own"]
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    code = f"import pathlib; pathlib.Path({str(mark)!r}).touch()\nclass Own: pass\n"
    (folder / ("" if part == "pipeline" else part) / "own.py").write_text(code, encoding="utf-8")
    with pytest.raises(ModelError, match=r"\['own', 'Own'\]|contains custom code"):
        load_components(str(folder))
    assert not mark.exists()


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of an http server of the folder, on this machine."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@pytest.mark.filterwarnings("ignore")  # what Lightning says about loggers and loaders
def test_a_checkpoint_of_an_http_address_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "ran"
    torch.save({"state_dict": WritesAFile(mark)}, tmp_path / "last.ckpt")
    torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert mark.exists()  # the file does what it is made for
    mark.unlink()
    config = {
        "trainer": {"accelerator": "cpu", "devices": 1, "logger": False, "default_root_dir": str(tmp_path / "run")},
        "model": {"class_path": "lightning.pytorch.demos.boring_classes.BoringModel"},
        "data": {"class_path": "lightning.pytorch.demos.boring_classes.BoringDataModule"},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["lightning"])
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "downloads"))
    with served(tmp_path) as address, pytest.raises(SystemExit) as stop:
        main(["fit", "-c", str(tmp_path / "config.yaml"), "--ckpt_path", f"{address}/last.ckpt"])
    assert stop.value.code == 1 and (tmp_path / "downloads" / "hub" / "checkpoints" / "last.ckpt").exists()
    assert not mark.exists()

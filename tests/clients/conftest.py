from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from clients.comfyui import import_comfyui


def checkout(variable: str, repository: str, marker: str) -> Path:
    """The folder that the environment variable names; skips, with the remedy, where there is none."""
    folder = os.environ.get(variable)
    if not folder:
        pytest.skip(
            f"{variable} names no checkout: git clone --depth 1 {repository}, then make test-clients {variable}=FOLDER"
        )
    assert Path(folder, marker).exists(), f"{variable}={folder} is no checkout of {repository}: it has no {marker}"
    return Path(folder)


@pytest.fixture(scope="session")
def comfy() -> SimpleNamespace:
    return import_comfyui(checkout("COMFYUI", "https://github.com/comfyanonymous/ComfyUI", "comfy/sd.py"))


@pytest.fixture(scope="session")
def sd_scripts() -> Path:
    folder = checkout("SD_SCRIPTS", "https://github.com/kohya-ss/sd-scripts", "networks/lora.py")
    sys.path.insert(0, str(folder))
    return folder

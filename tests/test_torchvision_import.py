"""torchvision can be imported once lightning_aigc is, whatever of the three comes first, and torch is not imported."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("first", ["lightning_aigc, torchvision", "lightning_aigc, torch", "torch, lightning_aigc"])
def test_torchvision_works_in_every_order_of_imports(first: str) -> None:
    done = run(f"import {first}\nfrom torchvision.transforms.functional import resize")
    assert done.returncode == 0, done.stderr[-2000:]


def test_importing_the_package_leaves_torch_alone() -> None:
    done = run("import sys, lightning_aigc, lightning_aigc.cli\nprint('torch' in sys.modules)")
    assert done.stdout == "False\n", done.stderr[-2000:]

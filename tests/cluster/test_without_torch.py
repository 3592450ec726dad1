"""Nothing in cluster/ imports torch: `lightning doctor` reads topologies on hosts where torch does not start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lightning_aigc.cluster

MODULES = sorted(path.stem for path in Path(lightning_aigc.cluster.__path__[0]).glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("module", MODULES)
def test_a_fresh_process_imports_it_without_torch(module: str) -> None:
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}; import lightning_aigc.cluster.{module}; "
        "print([name for name in ('torch', 'lightning', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_the_room_has_modules() -> None:
    assert {"cost_model", "env_settings", "hccl_errors", "modes", "topology"} <= set(MODULES)

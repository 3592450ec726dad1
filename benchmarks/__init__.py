"""Benchmarks, one folder per room; README.md lists them. Run from the repository root:

python -m benchmarks.<room>.<name>
"""

import contextlib
import sys
from pathlib import Path

with contextlib.suppress(ModuleNotFoundError):  # benchmarks.kernels runs without Lightning too
    import lightning_aigc  # noqa: F401 - before torchvision, which fails to import with a CPU build of torch without it

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

# For `fakes`, the inputs that benchmarks share with the tests, and for the kernels where nothing is installed.
sys.path += [str(ROOT / "tests"), str(ROOT / "kernels")]

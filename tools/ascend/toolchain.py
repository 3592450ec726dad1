"""Find the compilers for lowering, or raise an error that says how to install them."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tools.ascend.errors import AscendToolchainError

REMEDY = (
    "use a separate venv: `make test-ascend` builds .venv-ascend, or "
    "`pip install -c constraints-kernels.txt triton-ascend ascendnpu-ir pybind11` in a fresh one"
)


def installed_version(distribution: str) -> str | None:
    """A distribution's version, None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def require_toolchain() -> None:
    """Check that triton-ascend and ascendnpu-ir are installed, without upstream Triton.

    Raises: AscendToolchainError naming the missing or conflicting package. Both Tritons install the folder `triton`,
        and pip silently overwrites either with the other.
    """
    upstream, ascend = installed_version("triton"), installed_version("triton-ascend")
    if upstream and ascend:
        both = f"triton {upstream} and triton-ascend {ascend} are installed over each other"
        raise AscendToolchainError(f"{both}; {REMEDY}")
    if upstream:
        raise AscendToolchainError(f"triton {upstream} is installed, which does not support Ascend; {REMEDY}")
    missing = [d for d in ("triton-ascend", "ascendnpu-ir", "pybind11") if installed_version(d) is None]
    if missing:
        raise AscendToolchainError(f"not installed: {', '.join(missing)}; {REMEDY}")


def bishengir_binary(name: str) -> Path:
    """The path of an ascendnpu-ir binary: `bishengir-compile`, `bishengir-compile-a5` or `bishengir-opt`.

    Raises: AscendToolchainError if the package or the binary is missing.
    """
    spec = importlib.util.find_spec("ascendnpuir")
    if spec is None or spec.origin is None:
        raise AscendToolchainError(f"not installed: ascendnpu-ir; {REMEDY}")
    path = Path(spec.origin).parent / "bin" / name
    if not path.exists():
        raise AscendToolchainError(f"ascendnpu-ir {installed_version('ascendnpu-ir')} has no {name}; {REMEDY}")
    return path

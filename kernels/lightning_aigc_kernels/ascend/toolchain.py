"""The two compilers that lowering needs, found or refused with the way to get them."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lightning_aigc_kernels.ascend.errors import AscendToolchainError

REMEDY = (
    "give it a venv of its own: `make test-ascend` builds .venv-ascend, or "
    "`pip install -c constraints-kernels.txt triton-ascend ascendnpu-ir pybind11` in a fresh one"
)


def installed_version(distribution: str) -> str | None:
    """A distribution's version, or None when it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def require_toolchain() -> None:
    """Pass when triton-ascend and ascendnpu-ir are here, without upstream Triton.

    Raises: AscendToolchainError that names what is missing or in the way. Both Tritons own the folder `triton`, and pip
        installs either over the other without a word.
    """
    upstream, ascend = installed_version("triton"), installed_version("triton-ascend")
    if upstream and ascend:
        both = f"triton {upstream} and triton-ascend {ascend} are installed over each other"
        raise AscendToolchainError(f"{both}; {REMEDY}")
    if upstream:
        raise AscendToolchainError(f"triton {upstream} is installed, which knows no Ascend; {REMEDY}")
    missing = [d for d in ("triton-ascend", "ascendnpu-ir", "pybind11") if installed_version(d) is None]
    if missing:
        raise AscendToolchainError(f"not installed: {', '.join(missing)}; {REMEDY}")


def bishengir_binary(name: str) -> Path:
    """A binary of ascendnpu-ir: `bishengir-compile`, `bishengir-compile-a5`, `bishengir-opt`.

    Raises: AscendToolchainError when the package or the binary is absent.
    """
    spec = importlib.util.find_spec("ascendnpuir")
    if spec is None or spec.origin is None:
        raise AscendToolchainError(f"not installed: ascendnpu-ir; {REMEDY}")
    path = Path(spec.origin).parent / "bin" / name
    if not path.exists():
        raise AscendToolchainError(f"ascendnpu-ir {installed_version('ascendnpu-ir')} has no {name}; {REMEDY}")
    return path

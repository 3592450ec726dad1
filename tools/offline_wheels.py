"""Pack the wheels that a machine without a network needs to run the benchmarks and the demo.

    python -m tools.offline_wheels --installed installed.txt --output build/wheels [--python 3.12]

On that machine, write `python3 -m pip list --format=freeze > installed.txt`; versions are ignored, so a plain list
of names works too. Packages that the project needs and the list lacks are downloaded here with their requirements;
installed packages, torch above all, are not fetched. Versions are those of constraints.txt. On that machine:

    python3 -m pip install --no-index --no-deps --target site build/wheels/*.whl && export PYTHONPATH=site
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis", "accelerate")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
DEFAULT_LIMIT_MIB = 48


def installed_names(path: Path) -> set[str]:
    """Canonical names from `pip list --format=freeze`, or from one name a line."""
    lines = (
        re.split(r"[=@ \t<>]", line.strip(), maxsplit=1)[0] for line in path.read_text(encoding="utf-8").splitlines()
    )
    return {canonicalize_name(name) for name in lines if name and not name.startswith(("#", "-"))}


def pinned_versions() -> dict[str, str]:
    pins = (line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    return {canonicalize_name(name): version.strip() for name, version in pins}


def needed_here(requirement: Requirement, python: str, extras: set[str]) -> bool:
    environment: dict[str, Any] = {
        **default_environment(),
        "python_version": python,
        "python_full_version": f"{python}.0",
    }
    environment |= {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
    marker = requirement.marker
    return marker is None or any(marker.evaluate({**environment, "extra": extra}) for extra in ("", *extras))


def requirements_of(wheel: Path) -> Iterator[Requirement]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    yield from map(Requirement, metadata.get_all("Requires-Dist") or [])


def download(requirement: Requirement, pins: dict[str, str], python: str, output: Path) -> Path:
    pin = pins.get(canonicalize_name(requirement.name))
    wanted = f"{requirement.name}=={pin}" if pin else f"{requirement.name}{requirement.specifier}"
    before = set(output.glob("*.whl"))
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"),
        *("--only-binary=:all:", "--implementation", "cp", "--python-version", python, "--dest", str(output)),
        *(flag for platform in PLATFORMS for flag in ("--platform", platform)),
        wanted,
    ]
    subprocess.run(command, check=True)
    new = set(output.glob("*.whl")) - before
    if len(new) != 1:
        raise SystemExit(f"error: {wanted} gave {len(new)} new wheels in {output}, wanted one; empty that folder first")
    return new.pop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--installed", type=Path, required=True, help="packages of the other machine: `pip list` output, or names"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "wheels")
    parser.add_argument("--python", default="3.12", help="the other machine's Python")
    parser.add_argument("--limit_mib", type=float, default=DEFAULT_LIMIT_MIB)
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    if any(given.output.glob("*.whl")):
        raise SystemExit(f"error: {given.output} has wheels already; remove them or name another --output")

    seen, pins = installed_names(given.installed), pinned_versions()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting = [Requirement(text) for text in (*project["dependencies"], *TEST_TOOLS)]
    packed = []
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in seen:
            continue
        seen.add(name)
        packed.append(download(requirement, pins, given.python, given.output))
        own = [r for r in requirements_of(packed[-1]) if needed_here(r, given.python, requirement.extras)]
        waiting += own
    size = sum(path.stat().st_size for path in packed) / 2**20
    for path in sorted(packed):
        print(f"{path.stat().st_size / 2**20:7.2f} MiB  {path.name}")
    print(f"{size:7.2f} MiB in {given.output}")
    if size > given.limit_mib:
        raise SystemExit(f"error: the wheels take {size:.1f} MiB, the limit is {given.limit_mib}; see --limit_mib")


if __name__ == "__main__":
    main()

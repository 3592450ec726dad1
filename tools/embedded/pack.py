"""Pack the embedded folders as the archives that ship.

`python -m tools.embedded.pack build/embedded lightning_aigc/embedded` after `make embedded`, in a checkout.
The same files give the same archive: sorted names, fixed times and modes, stored without compression, which PNG files
and weights in half precision hardly need.
"""

from __future__ import annotations

import argparse
import zipfile
from pathlib import Path

from lightning_aigc.embedded.folders import LINKS

NAMES = ("brand", "clip", "edit", "prior", "sd", "sd3")
FIRST_TIME = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip archive can hold
MODE = 0o644


def pack(folders: Path, output: Path) -> list[Path]:
    """Write an archive per folder of `folders` into `output`; files in `LINKS` are left out.

    Raises: ValueError if a linked file differs from its target.
    """
    output.mkdir(parents=True, exist_ok=True)
    return [_pack_one(folders, name, output / f"{name}.zip") for name in NAMES]


def _pack_one(folders: Path, name: str, path: Path) -> Path:
    links = LINKS.get(name, {})
    for file, target in links.items():
        if (folders / name / file).read_bytes() != (folders / target).read_bytes():
            raise ValueError(f"{name}/{file} differs from {target}; remove it from LINKS in embedded/folders.py")
    files = {f.relative_to(folders / name).as_posix(): f for f in (folders / name).rglob("*") if f.is_file()}
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(files.keys() - links.keys()):
            entry = zipfile.ZipInfo(file, FIRST_TIME)
            entry.create_system = 3  # Unix, on every system
            entry.external_attr = MODE << 16
            archive.writestr(entry, files[file].read_bytes())
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, help="the folder with brand/, clip/, edit/, prior/, sd/ and sd3/")
    parser.add_argument("output", type=Path, help="where the archives go")
    arguments = parser.parse_args()
    for path in pack(arguments.folders, arguments.output):
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

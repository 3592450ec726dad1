"""Embedded folders: the files that ship, where they are unpacked, and by how many processes at once."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_aigc.embedded import embedded_names, folders, resolve
from lightning_aigc.errors import DataError
from tools.embedded.pack import NAMES, pack

# sha256 of what `sha256sum` prints of a folder's sorted files, as they were before they were archives.
FILES = {
    "brand": (505, "a37b94a25fe540eeefd788724c34fc0954c19ee1e7cd0297a6fc38c94241efb7"),
    "clip": (4, "92d00f96af267467716c0b75991f27a61713004d281e815d52e409152bc242ee"),
    "edit": (801, "8af32a3d7acbc517688b0ff809a286faf9ae2a7e98ca80cc6f4200211c0d7e42"),
    "prior": (373, "a7bf8202d47927724356dde3273b12f922d79252f47671a08fb0a7df4392f152"),
    "sd": (10, "d5b93d425f2f2c41fe1958d0be7385c0d9786c75fedf95a6b12c91c588be0904"),
    "sd3": (18, "103800ca2c4d4024c4d5ea4852586100fa1f3cd5c8594e63bf09a42022b3245b"),
}
PACKAGE = Path(folders.__file__).parent


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that archives are unpacked into, empty; nothing is resolved yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(folders, "_resolved", {})
    return tmp_path / "cache" / "lightning_aigc" / "embedded"


def files_of(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def digest(folder: Path) -> tuple[int, str]:
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder).as_posix()}\n"
        for path in files_of(folder)
    ]
    return len(lines), hashlib.sha256("".join(lines).encode()).hexdigest()


@pytest.mark.parametrize("name", FILES)
def test_an_unpacked_folder_holds_the_files_that_shipped_as_files(name: str, cache: Path) -> None:
    folder = resolve(f"embedded:{name}")
    assert digest(folder) == FILES[name]
    assert folder == cache / f"{name}-{FILES[name][1][:8]}"
    assert [path.name for path in cache.iterdir()] == [folder.name], "no temporary folder stays"


def test_the_names_are_those_of_the_archives() -> None:
    assert embedded_names() == sorted(FILES) == sorted(NAMES)


def test_an_unknown_name_is_answered_with_those_that_exist() -> None:
    wanted = "'embedded:bran' is not embedded in this package; embedded are: brand, clip, edit, prior, sd, sd3"
    with pytest.raises(DataError, match=wanted):
        resolve("embedded:bran")


def test_other_paths_only_expand_the_home_folder() -> None:
    assert resolve("photos") == Path("photos")
    assert resolve("~/photos") == Path.home() / "photos"


@pytest.mark.parametrize("given", ["", "relative"])
def test_the_cache_is_in_the_home_folder_where_xdg_names_no_absolute_path(
    given: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    assert folders.folder_of_sets() == tmp_path / ".cache" / "lightning_aigc" / "embedded"


def test_the_second_use_writes_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve("embedded:sd3")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    monkeypatch.setattr(folders, "_resolved", {})
    assert resolve("embedded:sd3") == folder
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_folder_that_is_half_unpacked_or_damaged_is_completed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve("embedded:sd3")
    shutil.rmtree(folder / "vae")
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    config = folder / "model_index.json"
    config.write_bytes(bytes(config.stat().st_size))
    monkeypatch.setattr(folders, "_resolved", {})
    assert digest(resolve("embedded:sd3")) == FILES["sd3"]


def test_a_folder_that_was_deleted_is_unpacked_again(cache: Path) -> None:
    shutil.rmtree(resolve("embedded:clip"))
    assert digest(resolve("embedded:clip")) == FILES["clip"]


@pytest.mark.parametrize("is_half_unpacked", [False, True])
def test_processes_may_unpack_at_once(is_half_unpacked: bool, cache: Path) -> None:
    if is_half_unpacked:
        for path in list(resolve("embedded:prior").iterdir())[::2]:
            path.unlink()
    code = "from lightning_aigc.embedded.folders import resolve; print(resolve('embedded:prior'))"
    command = [sys.executable, "-c", code]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=PACKAGE.parents[1]) for _ in range(3)]
    said = {process.communicate()[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert said == {str(resolve("embedded:prior"))}
    assert digest(resolve("embedded:prior")) == FILES["prior"]
    assert len(list(cache.iterdir())) == 1


def test_the_loser_of_a_race_uses_the_winners_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def second(path: Path, target: Path) -> Path:
        shutil.copytree(path, target)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", second)
    assert digest(resolve("embedded:clip")) == FILES["clip"]
    assert len(list(cache.iterdir())) == 1


@pytest.fixture
def no_cache(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache that cannot be made, because a file has its name; returns the folder for temporary files."""
    cache.parent.parent.mkdir()
    cache.parent.write_text("a file")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


def test_without_a_cache_a_temporary_folder_serves(no_cache: Path) -> None:
    with pytest.warns(UserWarning, match=r"cannot unpack embedded:clip into the cache .*; set XDG_CACHE_HOME"):
        folder = resolve("embedded:clip")
    assert folder.parent == no_cache / f"lightning_aigc-{os.getuid()}"
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    assert digest(folder) == FILES["clip"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve("embedded:clip") == folder


def test_without_a_home_folder_a_temporary_folder_serves(no_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(Path, "home", missing)
    with pytest.warns(UserWarning, match="Could not determine home directory"):
        assert digest(resolve("embedded:clip")) == FILES["clip"]


def test_a_temporary_folder_that_another_user_made_is_not_used(no_cache: Path, tmp_path: Path) -> None:
    (no_cache / f"lightning_aigc-{os.getuid()}").symlink_to(tmp_path)
    with pytest.raises(DataError, match=r"wanted to write into .* belongs to another user.*set XDG_CACHE_HOME"):
        resolve("embedded:clip")


def test_without_any_folder_the_error_says_what_to_set(no_cache: Path) -> None:
    no_cache.rmdir()
    wanted = (
        r"cannot unpack embedded:clip: wanted to write into the cache \(.*\) or a folder for temporary files \(.*\)"
    )
    with pytest.raises(DataError, match=wanted + "; set XDG_CACHE_HOME to a folder that can be written"):
        resolve("embedded:clip")


# The archives -------------------------------------------------------------------------------------------------------


def test_packing_the_folders_gives_the_archives_that_ship(cache: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in NAMES:
        shutil.copytree(resolve(f"embedded:{name}"), source / name)
    for path in pack(source, tmp_path / "packed"):
        assert path.read_bytes() == (PACKAGE / path.name).read_bytes(), path.name


def test_a_linked_file_that_differs_is_refused(cache: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in NAMES:
        shutil.copytree(resolve(f"embedded:{name}"), source / name)
    (source / "sd3" / "tokenizer_2" / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"sd3/tokenizer_2/tokenizer.json differs from sd3/tokenizer/tokenizer.json"):
        pack(source, tmp_path / "packed")


def test_no_large_file_ships_twice() -> None:
    hashes: dict[str, str] = {}
    for name in NAMES:
        with zipfile.ZipFile(PACKAGE / f"{name}.zip") as archive:
            for file in (entry.filename for entry in archive.infolist() if entry.file_size > 1000):
                key = hashlib.sha256(archive.read(file)).hexdigest()
                assert key not in hashes, f"{name}/{file} equals {hashes[key]}; add it to LINKS"
                hashes[key] = f"{name}/{file}"

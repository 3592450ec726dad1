"""Torn, changed and hostile files are named and passed over, and never run."""

from __future__ import annotations

import json
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.runs.snapshot_states import same, small_state
from lightning_aigc.checkpoint import Snapshot, SnapshotWriter, find_snapshots, newest_complete
from lightning_aigc.checkpoint.files.storage import sealed
from lightning_aigc.errors import SnapshotError

FILES = ["manifest.json", "rank0.json", "rank0.safetensors", "rank1.json", "rank1.safetensors", "shared.json"]
FILES += ["shared.safetensors"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Snapshots of steps 1 and 2, of two ranks."""
    stores = [SnapshotWriter(tmp_path, rank=k, world_size=2) for k in range(2)]
    for store in stores:
        store.open()
    for step in (1, 2):
        for store in stores:
            store.save(step, small_state(10 * step + store.rank), small_state(step) if store.rank == 0 else None)
    for store in stores:
        store.close()
    return tmp_path


def read_all(snapshot: Snapshot) -> list[Any]:
    return [snapshot.shared(), snapshot.rank(0), snapshot.rank(1)]


def newest_and_words(folder: Path) -> tuple[Snapshot | None, str]:
    said: list[str] = []
    return newest_complete(folder, said.append), "\n".join(said)


def assert_passed_over(run: Path, *words: str) -> None:
    newest, said = newest_and_words(run)
    assert newest is not None and newest.step == 1
    assert same(read_all(newest), [small_state(1), small_state(10), small_state(11)])
    assert said.startswith("step-00000002 is skipped: ") and "\n" not in said
    assert all(word in said for word in words), said


def test_the_newest_comes_first_and_all_of_it_can_be_read(run: Path) -> None:
    assert [snapshot.step for snapshot in find_snapshots(run)] == [2, 1]
    newest, said = newest_and_words(run)
    assert newest is not None and said == ""
    assert same(read_all(newest), [small_state(2), small_state(20), small_state(21)])


def test_no_folder_or_an_empty_one_has_no_snapshots(tmp_path: Path) -> None:
    assert find_snapshots(tmp_path) == find_snapshots(tmp_path / "gone") == []
    assert newest_and_words(tmp_path / "gone") == (None, "")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(name: str, run: Path) -> None:
    (run / "step-00000002" / name).unlink()
    assert_passed_over(run, f"{name} is missing")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("left", [0, 5, 0.5, -1], ids=str)
def test_a_truncated_file_is_named(name: str, left: float, run: Path) -> None:
    path = run / "step-00000002" / name
    size = path.stat().st_size
    os.truncate(path, int(left * size) if isinstance(left, float) else left % size)
    assert_passed_over(run, name)


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit_is_noticed(name: str, run: Path) -> None:
    snapshot, path = find_snapshots(run)[0], run / "step-00000002" / name
    good = path.read_bytes()
    places = range(len(good)) if len(good) < 1200 else [*range(0, len(good), len(good) // 400), *range(-30, 0)]
    for place in places:
        bad = bytearray(good)
        bad[place] ^= 1 << (place % 8)
        path.write_bytes(bad)
        with pytest.raises(SnapshotError, match=name.replace(".", r"\.")):
            Snapshot.at(snapshot.path).verify()
        if name != "manifest.json":
            with pytest.raises(SnapshotError, match=name.replace(".", r"\.")):
                read_all(snapshot)
    assert_passed_over(run, name)


def test_a_longer_file_is_named(run: Path) -> None:
    with (run / "step-00000002" / "rank0.safetensors").open("ab") as file:
        file.write(b"\0")
    assert_passed_over(run, "rank0.safetensors has", "the manifest says")


def test_a_snapshot_of_a_newer_format_is_named(run: Path) -> None:
    path = run / "step-00000002" / "manifest.json"
    fields = json.loads(path.read_bytes())
    del fields["crc32"]
    path.write_bytes(sealed(fields | {"format": 3}))
    assert_passed_over(run, "is of format 3; this version reads 2")


@pytest.mark.parametrize("change", [{"world_size": 3}, {"files": {}}, {"facts": 1}, {"step": None}], ids=str)
def test_a_manifest_that_lacks_something_is_named(change: dict[str, Any], run: Path) -> None:
    path = run / "step-00000002" / "manifest.json"
    fields = json.loads(path.read_bytes())
    del fields["crc32"]
    path.write_bytes(sealed(fields | change))
    assert_passed_over(run, "manifest.json is no manifest")


class Payload:
    """A pickle that leaves a file behind when it is loaded."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.target),)


def hostile(kind: str, folder: Path) -> bytes:
    ran = folder / "ran"
    if kind == "torch":
        torch.save({"a": Payload(ran)}, folder / "x")
        return (folder / "x").read_bytes()
    return pickle.dumps(Payload(ran), protocol=int(kind))


@pytest.mark.parametrize("kind", ["0", "2", "4", "5", "torch"])
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("signed", [False, True], ids=["alone", "with its checksum in the manifest"])
def test_code_in_place_of_a_file_is_refused_and_not_run(kind: str, name: str, signed: bool, run: Path) -> None:
    code, folder = hostile(kind, run), run / "step-00000002"
    (folder / name).write_bytes(code)
    if signed and name != "manifest.json":
        fields = json.loads((folder / "manifest.json").read_bytes())
        del fields["crc32"]
        fields["files"][name] = {"size": len(code), "crc32": f"{zlib.crc32(code):08x}"}
        (folder / "manifest.json").write_bytes(sealed(fields))
        with pytest.raises(SnapshotError, match=name.replace(".", r"\.")) as caught:
            read_all(find_snapshots(run)[0])
        assert kind == "0" or "can run code when it is loaded; it was not read" in str(caught.value)
    else:
        assert_passed_over(run, name)
        if name.endswith("safetensors") and kind != "0":
            assert "can run code" in newest_and_words(run)[1]
    assert not (run / "ran").exists()
    pickle.loads(pickle.dumps(Payload(run / "ran")))
    assert (run / "ran").exists()  # the payload is a real one


def test_a_remote_address_is_refused_unless_asked_for(run: Path) -> None:
    for look in (find_snapshots, lambda address: newest_complete(address, print)):
        with pytest.raises(SnapshotError, match=r"https://host/run is a remote address; copy it to a local folder"):
            look("https://host/run")  # type: ignore[operator]
    (found, _) = find_snapshots(f"file://{run}", allow_remote=True)
    assert same(found.shared(), small_state(2)) and not found.path.is_relative_to(run)


def test_a_folder_that_cannot_be_read_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def failing(path: Path, *arguments: Any, **more: Any) -> Any:
        if path.name == "shared.safetensors" and "00000002" in str(path):
            raise OSError(5, "Input/output error", str(path))
        return opened(path, *arguments, **more)

    monkeypatch.setattr(Path, "open", failing)
    assert_passed_over(run, "shared.safetensors cannot be read: Input/output error")

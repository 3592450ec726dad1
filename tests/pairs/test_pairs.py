"""`make test-pairs`: every pair of options that a user combines, in short trainings by the command line.

The device npu is the fake one.

PAIRS_SEED chooses the array (unset: the week of the year), PAIRS_MINUTES how long rows may start (unset: no limit),
PAIRS_COMPARED of how many rows one is compared with a whole run, if it is killed and resumed (unset: 5).
"""

from __future__ import annotations

import datetime
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from fakes.models.edit_pipelines import scale_sources_to
from fakes.models.pipelines import SIDE
from pairs.configs import (
    Inputs,
    folder_data,
    kind_of,
    make_base,
    make_config,
    make_images,
    make_masks,
    make_single_file,
    make_sources,
    make_training_adapter,
    precision_of,
    quantization_of,
)
from pairs.options import PLAIN, U_NETS, Row, allowed_pairs, completed, covering_array, refused
from pairs.outcomes import Ended, check_export, check_result, export, result_of, run, train

pytestmark = pytest.mark.filterwarnings("ignore")  # of diffusers, where this process loads results
SEED = int(os.environ.get("PAIRS_SEED") or "{0.year}{0.week:02}".format(datetime.date.today().isocalendar()))
MINUTES = float(os.environ.get("PAIRS_MINUTES") or "inf")
BEGUN = time.monotonic()
ROWS = covering_array(SEED)
COMPARED = int(os.environ.get("PAIRS_COMPARED") or 5)
"""One of this many rows is also trained without a kill, if it is killed and resumed; both must give the same bits."""
TOO_SMALL = "wants at least as many blocks as ranks"


def name_of(row: Row) -> str:
    """A row's options that are not the plain ones."""
    return "-".join(f"{key}={value}" for key, value in row.items() if value != PLAIN[key]) or "plain"


@pytest.fixture(scope="session")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Bases, images, shards and LoRA files, made when they are first asked for."""
    made: dict[tuple[str, ...], Path] = {}

    def get(*key: str) -> Path:
        if key not in made:
            folder = tmp_path_factory.mktemp("-".join(key))
            if key[0] == "base":
                made[key] = make_base(key[1], folder / "base")
            elif key[0] == "single":
                made[key] = make_single_file(get("base", key[1]), key[1], folder / "single.safetensors")
            elif key[0] == "images":
                made[key] = make_images(folder / "images", key[1], 8)
            elif key[0] == "sources":
                made[key] = make_sources(folder / "sources", get("images", "zorp"))
            elif key[0] == "masks":
                made[key] = make_masks(folder / "masks", get("images", "zorp"))
            elif key[0] == "adapter":
                made[key] = make_training_adapter(folder / "adapter.safetensors", get("base", key[1]), key[1])
            elif key[0] == "lora":
                made[key] = _train_lora(*key[1:], get, folder)
            else:
                made[key] = _encode(*key[1:], get, folder)
        return made[key]

    return get


def _encode(
    family: str, weights: str, precision: str, memory: str, base: str, get: Callable[..., Path], folder: Path
) -> Path:
    row = PLAIN | {"family": family, "precision": precision, "memory": memory, "base": base}
    data = folder_data(row, get("images", "zorp"), get("images", "plain"), folder)
    base_folder = get("base", family)
    model = {
        "pretrained_model_name_or_path": str(get("single", family) if weights == "single" else base_folder),
        "base_quantization": quantization_of(row, base_folder),
    }
    if family not in U_NETS:
        model["sample_resolution"] = SIDE
    config = {
        "trainer": {"accelerator": "cpu", **precision_of(row)},
        "model": {"class_path": kind_of(row), "init_args": model},
        "data": {"class_path": "ImageCaptionData", "init_args": data},
    }
    (folder / "encode.yaml").write_text(yaml.safe_dump(config))
    ended = run("encode", "-c", folder / "encode.yaml", "-o", folder / "shards", log=folder / "encode.log")
    assert ended.code == 0, ended.said[-2000:]
    return folder / "shards"


def _train_lora(family: str, method: str, get: Callable[..., Path], folder: Path) -> Path:
    ended, _, root = _fit(completed({"family": family, "method": method}), get, folder)
    assert ended.code == 0, ended.said[-2000:]
    return root / "zorp.safetensors"


def _fit(row: Row, materials: Callable[..., Path], folder: Path) -> tuple[Ended, Path, Path]:
    family, base, root = row["family"], materials("base", row["family"]), folder / "run"
    folder.mkdir(exist_ok=True)
    shards = adapter = lora = folder
    if row["source"] == "shards":
        memory = "stock" if row["memory"] == "stock" else "off"  # on a CPU Lightning turns 16-mixed into bf16-mixed
        weights = "pipeline" if row["weights"] == "file" else row["weights"]  # a denoiser's file encodes nothing
        shards = materials("shards", family, weights, row["precision"], memory, row["base"])
    if row["adapter"]:
        adapter = materials("adapter", family)
    if row["continued"]:
        lora = materials("lora", family, "lokr" if row["method"] == "lokr" else "lora")
    model = materials("single", family) if row["weights"] == "single" else base
    images = (materials("images", "zorp"), materials("images", "plain"), materials("sources"), materials("masks"))
    config = make_config(row, Inputs(base, model, *images, shards, adapter, lora), root)
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return train(row, folder / "config.yaml", root), base, root


def test_an_array_holds_every_allowed_pair() -> None:
    for pair in allowed_pairs():
        assert any(pair.items() <= row.items() for row in ROWS), pair


def test_two_seeds_give_two_arrays_and_one_seed_one() -> None:
    assert covering_array(1) == covering_array(1) != covering_array(2)


@pytest.fixture
def time_left() -> None:
    if time.monotonic() - BEGUN > 60 * MINUTES:
        pytest.skip(f"PAIRS_MINUTES={MINUTES:g} are over; `make test-pairs` without it runs every row")


@pytest.fixture
def small_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    scale_sources_to(2 * SIDE, monkeypatch.setattr)


@pytest.mark.pairs
@pytest.mark.usefixtures("time_left", "small_sources")
@pytest.mark.parametrize("row", ROWS, ids=[f"{number}-{name_of(row)}" for number, row in enumerate(ROWS)])
def test_a_row_trains_and_its_result_works_in_plain_diffusers(
    row: Row, materials: Callable[..., Path], tmp_path: Path
) -> None:
    ended, base, root = _fit(row, materials, tmp_path)
    assert "Traceback" not in ended.said, ended.said[-3000:]
    if ended.code != 0 and len(ended.errors) == 1 and TOO_SMALL in ended.errors[0]:
        return  # a tiny ControlNet has one block
    assert ended.code == 0, ended.said[-3000:]
    if row["ending"] == "killed" and ROWS.index(row) % COMPARED == 0:
        whole, _, whole_root = _fit(row | {"ending": "whole"}, materials, tmp_path / "whole")
        assert whole.code == 0, whole.said[-3000:]
        resumed, uninterrupted = result_of(root), result_of(whole_root)
        assert resumed.keys() == uninterrupted.keys()
        assert not [name for name, tensor in uninterrupted.items() if not torch.equal(resumed[name], tensor)]
    source = next(materials("sources").glob("*.png")) if row["source"] == "pairs" else None
    check_result(row, base, root, source)
    if row["export"] != "none":
        model = materials("single", row["family"]) if row["weights"] == "single" else base
        check_export(row, base, model, root, tmp_path, source)


@pytest.mark.parametrize(
    "options",
    [{"family": "z_image", "base": "budget", "memory": "lean"}, {"family": "qwen_image", "memory": "stock"}],
    ids=name_of,
)
def test_families_with_complex_positions_train_and_draw_on_an_npu(
    options: Row, materials: Callable[..., Path], tmp_path: Path
) -> None:
    row = completed({"device": "npu"} | options)
    ended, base, root = _fit(row, materials, tmp_path)
    assert ended.code == 0, ended.said[-3000:]
    check_result(row, base, root, None)


@pytest.mark.pairs
@pytest.mark.usefixtures("time_left")
@pytest.mark.parametrize("pair", list(refused()), ids=name_of)
def test_a_refused_pair_ends_in_one_sentence_before_the_first_step(
    pair: Row, materials: Callable[..., Path], tmp_path: Path
) -> None:
    row = completed(pair)
    ended, base, root = _fit(row, materials, tmp_path)
    if "export" in pair:
        assert ended.code == 0, ended.said[-3000:]
        ended = export(row, base, root, tmp_path)
    else:
        assert not list(root.glob("**/*.safetensors"))
    assert ended.code != 0 and "Traceback" not in ended.said, ended.said[-3000:]
    assert len(ended.errors) == 1, ended.said[-3000:]


def test_pairs_of_one_option_are_not_asked_for() -> None:
    assert all(len(pair) == 2 for pair in itertools.chain(refused(), allowed_pairs()))

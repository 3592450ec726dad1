"""Pipeline folders, whole and broken: what is missing is named together with the key and the way out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_aigc.diffusion.pipeline.loading import KEY, load_components
from lightning_aigc.embedded import resolve
from lightning_aigc.errors import ModelError, UserError

PARTS = ["unet", "vae", "text_encoder", "tokenizer", "scheduler"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the embedded pipeline that a test may break."""
    return Path(shutil.copytree(resolve("embedded:sd"), tmp_path / "my pipeline"))


def refusal(name: Path | str) -> str:
    with pytest.raises(UserError) as raised:
        load_components(str(name))
    said = str(raised.value)
    assert "Traceback" not in said and "\n" not in said, said
    assert len(said) < 600, said
    return said


def test_the_embedded_pipeline_loads_frozen_and_in_eval_mode() -> None:
    parts = load_components("embedded:sd")
    assert parts.family.name == "sd" and len(parts.text_encoders) == len(parts.tokenizers) == 1
    for module in (parts.denoiser, parts.vae, *parts.text_encoders):
        assert not module.training
        assert not any(p.requires_grad for p in module.parameters())


def test_the_autoencoder_keeps_its_own_dtype() -> None:
    parts = load_components("embedded:sd", denoiser_dtype=torch.bfloat16)
    assert parts.denoiser.dtype == parts.text_encoders[0].dtype == torch.bfloat16
    assert parts.vae.dtype == torch.float32


@pytest.mark.parametrize("part", PARTS)
def test_a_missing_part_is_named(folder: Path, part: str) -> None:
    shutil.rmtree(folder / part)
    said = refusal(folder)
    assert KEY in said and f"{part}/" in said and "copy the whole pipeline folder" in said


def test_several_missing_parts_are_named_at_once(folder: Path) -> None:
    shutil.rmtree(folder / "unet")
    shutil.rmtree(folder / "vae")
    said = refusal(folder)
    assert "unet/" in said and "vae/" in said


BROKEN_INDEX = {
    "not json": "{",
    "a list": "[]",
    "no class": "{}",
    "empty": "",
    "binary": "\x00\x01",
    "a number": "3",
}


@pytest.mark.parametrize("content", BROKEN_INDEX.values(), ids=BROKEN_INDEX.keys())
def test_a_broken_index_is_named_with_its_file(folder: Path, content: str) -> None:
    (folder / "model_index.json").write_text(content)
    said = refusal(folder)
    assert KEY in said and "model_index.json" in said and "copy the pipeline folder again" in said


def test_another_pipelines_class_is_refused_with_what_is_trained(folder: Path) -> None:
    index = folder / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"_class_name": "HiDreamImagePipeline"}))
    said = refusal(folder)
    assert "HiDreamImagePipeline" in said and "StableDiffusionPipeline" in said and "StableDiffusionXLPipeline" in said


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncate, empty, Path.unlink])
@pytest.mark.parametrize(
    "file",
    [
        "unet/config.json",
        "vae/config.json",
        "text_encoder/config.json",
        "scheduler/scheduler_config.json",
        "unet/diffusion_pytorch_model.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
        "text_encoder/model.safetensors",
    ],
)
def test_a_damaged_part_is_one_line_that_names_key_and_folder(
    folder: Path, file: str, damage: Callable[[Path], None]
) -> None:
    assert (folder / file).is_file()
    damage(folder / file)
    said = refusal(folder)
    assert KEY in said and str(folder) in said


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_is_broken_never_a_traceback(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("any") / "pipeline"
    shutil.copytree(resolve("embedded:sd"), folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in data.draw(st.lists(st.sampled_from(files), min_size=1, max_size=3, unique=True)):
        kept = data.draw(st.integers(0, path.stat().st_size))
        path.write_bytes(path.read_bytes()[:kept] + data.draw(st.binary(max_size=8)))
    said = KEY
    try:
        load_components(str(folder))
    except UserError as error:
        said = str(error)
    finally:
        shutil.rmtree(folder)
    assert KEY in said


def test_a_folder_of_pictures_is_not_a_pipeline(tmp_path: Path) -> None:
    (tmp_path / "cup.png").write_bytes(b"")
    said = refusal(tmp_path)
    assert KEY in said and "model_index.json" in said and "point it at the folder" in said


def test_the_unet_folder_alone_is_not_a_pipeline(folder: Path) -> None:
    assert "model_index.json" in refusal(folder / "unet")


@pytest.mark.parametrize("content", [b"", b"not weights", bytes(range(256)) * 8])
def test_a_single_file_that_is_no_checkpoint_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    said = refusal(path)
    assert KEY in said and str(path) in said and "checkpoint" in said


def test_an_unknown_embedded_name_lists_what_is_embedded() -> None:
    said = refusal("embedded:sdd")
    assert "sd" in said and "brand" in said


@pytest.mark.parametrize(
    "name", ["stable-diffusion-v1-5/stable-diffusion-v1-5", "./no/such/folder", "photos", "a b/c", ""]
)
def test_a_name_that_is_neither_here_nor_on_the_hub_says_how_to_get_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The hub's client has read the variable HF_HUB_OFFLINE by now.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError) as refused:
        load_components(name)
    said = str(refused.value)
    assert KEY in said and "\n" not in said
    if name not in ("a b/c", ""):  # those are no names of the hub
        assert "download it first and give its folder" in said and "embedded:sd" in said


def test_model_errors_are_value_errors() -> None:
    assert issubclass(ModelError, ValueError)

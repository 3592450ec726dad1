"""Pipeline folders, whole and broken: what is missing is named together with the key and the way out."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from huggingface_hub import errors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_aigc.diffusion import DiffusionLoRA
from lightning_aigc.diffusion.families import SHORT, full_name
from lightning_aigc.diffusion.pipeline.loading import load_components
from lightning_aigc.diffusion.pipeline.single_file import KEY
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


@pytest.mark.parametrize("name", ["./no/such/folder", "photos", "a b/c", "sd16"])
def test_a_name_that_is_no_folder_and_no_hub_id_says_what_is_wanted(name: str) -> None:
    said = refusal(name)
    assert KEY in said and "check the spelling" in said
    assert name.startswith(".") or ("sd15, " in said and "embedded:sd" in said)


HUB_ERRORS = {
    errors.GatedRepoError: "accept its terms at https://huggingface.co/owner/name, then run: hf auth login",
    errors.RepositoryNotFoundError: "it has no model of this name",
    errors.RevisionNotFoundError: "set model.init_args.revision",
    errors.LocalEntryNotFoundError: "run: hf download owner/name",
    errors.EntryNotFoundError: "it has no model_index.json",
}


@pytest.mark.parametrize("kind", HUB_ERRORS)
def test_a_download_that_fails_says_why_and_what_to_do(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        answer = httpx.Response(404, request=httpx.Request("GET", "https://huggingface.co"))
        raise (
            kind("<html> Request ID 1", response=answer)
            if issubclass(kind, httpx.HTTPStatusError) or (issubclass(kind, errors.HfHubHTTPError))
            else kind("<html> Request ID 1")
        )

    monkeypatch.setattr("diffusers.configuration_utils.hf_hub_download", fails)
    said = refusal("owner/name")
    assert HUB_ERRORS[kind] in said and "html" not in said and "appear to have" not in said


@pytest.mark.filterwarnings("ignore:.*local_dir_use_symlinks")  # diffusers gives the hub's client an old argument
def test_without_a_network_the_command_that_downloads_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # The hub's client has read the variable HF_HUB_OFFLINE by now.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = refusal("stable-diffusion-v1-5/stable-diffusion-v1-5")
    assert "HF_HUB_OFFLINE=1 forbids the download" in said
    (command,) = re.findall(r"run: (hf download \S+);", said)
    program, verb, _ = command.split()
    beside_python = Path(sys.executable).with_name(program)  # an environment that is used need not be on PATH
    help_page = subprocess.run([beside_python, verb, "--help"], capture_output=True, text=True, check=True)
    assert "REPO_ID" in help_page.stdout


def test_a_short_name_is_its_hub_id_unless_a_folder_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, family in SHORT.items():
        assert full_name(name) == family.base and full_name(family.base) == family.base
    assert DiffusionLoRA("sd15").hparams["pretrained_model_name_or_path"] == SHORT["sd15"].base
    shutil.copytree(resolve("embedded:sd"), tmp_path / "sd15")
    assert DiffusionLoRA("sd15").hparams["pretrained_model_name_or_path"] == "sd15"


def test_model_errors_are_value_errors() -> None:
    assert issubclass(ModelError, ValueError)

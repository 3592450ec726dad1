"""`lightning export --to hub`: a folder with a card that the hub reads, nothing private in it, and its upload."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import safetensors.torch
import torch
import yaml
from huggingface_hub import ModelCard
from PIL import Image

from fakes.models.pipelines import SIDE, make_pipeline, make_sd3_pipeline
from fakes.models.transformer_pipelines import (
    make_flux2_pipeline,
    make_flux_pipeline,
    make_qwen_image_pipeline,
    make_z_image_pipeline,
)
from fakes.processes.hub_server import Hub, served_hub
from lightning_aigc.cli.hub.card import LICENCES, TO_FILL_IN, licence_of
from lightning_aigc.cli.hub.contents import MOST_IMAGES, Contents, find_contents
from lightning_aigc.diffusion import DiffusionControlNet, DiffusionFineTuning, DiffusionLoRA
from lightning_aigc.diffusion.families import FAMILIES
from lightning_aigc.diffusion.lora.file import read_lora
from lightning_aigc.secrets import without_local_paths

Command = Callable[..., Any]
TOKEN = "hf_abcdefghijklmnopqrstuvwxyz0123"
MAKERS: dict[str, Callable[[Path], Path]] = {
    "sd": make_pipeline,
    "sdxl": lambda folder: make_pipeline(folder, sdxl=True),
    "sd3": make_sd3_pipeline,
    "flux": make_flux_pipeline,
    "flux2": make_flux2_pipeline,
    "z_image": make_z_image_pipeline,
    "qwen_image": make_qwen_image_pipeline,
}


@pytest.fixture
def run(quick_config: dict[str, Any], tmp_path: Path, command: Command) -> Path:
    """The folder of a short run whose base, images and cache are at local paths."""
    folder = tmp_path / "runs" / "mug"
    quick_config["trainer"]["default_root_dir"] = str(folder)
    quick_config["trainer"]["callbacks"][0]["init_args"] |= {"prompts": ["a zorp cup", "a zorp shoe"], "num_images": 4}
    quick_config["model"]["init_args"]["output_name"] = "mug"
    quick_config["data"]["init_args"]["trigger_word"] = "zorp"
    (tmp_path / "mug.yaml").write_text(yaml.safe_dump(quick_config), encoding="utf-8")
    assert command("fit", "-c", tmp_path / "mug.yaml").code == 0
    return folder


@pytest.fixture
def hub() -> Iterator[Hub]:
    with served_hub() as found:
        yield found


def card_of(folder: Path) -> tuple[Any, str]:
    """Metadata and text of a folder's card, as huggingface_hub reads them."""
    card = ModelCard.load(folder / "README.md", ignore_metadata_errors=False)
    return card.data, card.text


def no_private_text(folder: Path, *texts: object) -> None:
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        for text in (*texts, Path.home()):
            assert str(text).encode() not in content, f"{path.name} holds {text}"


def test_a_run_becomes_a_folder_that_holds_all_and_nothing_private(
    run: Path, command: Command, tmp_path: Path, photos: Path
) -> None:
    said = command("export", run, "--to", "hub", "-o", tmp_path / "hub")
    assert said.code == 0, said.err
    folder = tmp_path / "hub"
    no_private_text(folder, tmp_path, photos.parent, TOKEN)
    mine, sent = read_lora(run / "mug.safetensors"), read_lora(folder / "mug.safetensors")
    assert mine.state.keys() == sent.state.keys() and all(torch.equal(mine.state[k], sent.state[k]) for k in mine.state)
    changed = {key for key, value in mine.metadata.items() if sent.metadata[key] != value}
    assert changed - {"sshs_legacy_hash"} == {"ss_sd_model_name"}  # a path; the hash is that of the header too
    data, text = card_of(folder)
    assert data.instance_prompt == "zorp" and data.library_name == "diffusers" and data.pipeline_tag == "text-to-image"
    assert {"lora", "text-to-image", "sd-1.5"} <= set(data.tags)
    prompts = [each["text"] for each in data.widget]
    assert prompts == ["a zorp cup", "a zorp shoe", "a zorp cup", "a zorp shoe"]
    for each in data.widget:
        with Image.open(folder / each["output"]["url"]) as image:
            assert image.size == (SIDE, SIDE) and not image.info
    assert data.base_model is None and data.license is None  # the run's base is a folder of this machine
    assert text.count(TO_FILL_IN) == 2 and TO_FILL_IN in said.out
    assert "| rank | 2 |" in text and "| steps taken | 2 |" in text and "Trigger word: `zorp`" in text
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    assert config["model"]["init_args"]["rank"] == 2
    assert config["data"]["init_args"]["train_data_dir"] == photos.name


def test_a_known_base_gives_its_id_and_licence(run: Path, command: Command, tmp_path: Path) -> None:
    text = (run / "config.yaml").read_text(encoding="utf-8")
    config = yaml.safe_load(text)
    config["model"]["init_args"]["pretrained_model_name_or_path"] = FAMILIES["flux"].base
    config["data"]["init_args"]["storage_options"] = {"key": TOKEN}
    (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    assert command("export", run, "--to", "hub", "-o", tmp_path / "hub").code == 0
    no_private_text(tmp_path / "hub", tmp_path, TOKEN)
    data, text = card_of(tmp_path / "hub")
    assert data.base_model == FAMILIES["flux"].base and data.base_model_relation == "adapter"
    assert data.license == "other" and data.license_name == "flux-1-dev-non-commercial-license"
    assert data.license_link.startswith("https://huggingface.co/black-forest-labs/FLUX.1-dev/")
    assert TO_FILL_IN not in text
    assert f'from_pretrained("{FAMILIES["flux"].base}")' in text and 'load_lora_weights("OWNER/mug"' in text


@pytest.mark.parametrize("name", FAMILIES)
def test_the_licence_of_each_familys_base_is_known(name: str) -> None:
    family = FAMILIES[name]
    found = licence_of(Contents("lora", "x", [], family.base, family))
    assert found is LICENCES[family.base]
    assert (found.license == "other") == (found.license_name is not None) == (found.license_link is not None)


@pytest.mark.parametrize(
    "base", ["runs/base", "embedded:sd", "model.safetensors", "/srv/models/sd15", "models/sd15", None]
)
def test_what_is_no_hub_id_is_not_given_as_base_model(base: str) -> None:
    assert Contents("lora", "x", [], base, None).hub_base is None


def make_run(folder: Path, module: Any, name: str, **model: Any) -> Path:
    """A run's folder with a config, as fit leaves it without a report."""
    folder.mkdir()
    config = {"model": {"init_args": {"output_name": name, **model}}, "data": {"init_args": {"trigger_word": "zorp"}}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    module.configure_model()
    if isinstance(module, DiffusionLoRA):
        module.save_lora(folder / f"{name}.safetensors", output_name=name)
    else:
        module.save_model(folder / f"{name}.safetensors")
    return folder


@pytest.mark.parametrize(("name", "use_dora"), [*((name, False) for name in MAKERS), ("sd", True), ("sdxl", True)])
@pytest.mark.filterwarnings("ignore:.*DoRA in the kohya layout")
def test_all_files_of_each_familys_lora_go_along(name: str, use_dora: bool, tmp_path: Path, command: Command) -> None:
    module = DiffusionLoRA(str(MAKERS[name](tmp_path / "base")), rank=2, use_dora=use_dora)
    base = FAMILIES[name].base
    run = make_run(tmp_path / "run", module, "mug", pretrained_model_name_or_path=base, use_dora=use_dora)
    written = sorted(path.name for path in run.glob("*.safetensors"))
    said = command("export", run, "--to", "hub", "-o", tmp_path / "hub")
    assert said.code == 0, said.err
    assert sorted(path.name for path in (tmp_path / "hub").glob("*.safetensors")) == written
    no_private_text(tmp_path / "hub", tmp_path)
    data, text = card_of(tmp_path / "hub")
    assert data.base_model == base and ("dora" in data.tags) == use_dora
    assert FAMILIES[name].title.lower().replace(" ", "-") in data.tags
    for_diffusers = "mug.diffusers.safetensors" if "mug.diffusers.safetensors" in written else "mug.safetensors"
    assert f'weight_name="{for_diffusers}"' in text


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("flux2", 'pipe(image=load_image("before.png")'), ("sd3", "lightning sample -c config.yaml --source before.png")],
)
def test_the_card_of_an_edit_begins_with_an_image(name: str, wanted: str, tmp_path: Path, command: Command) -> None:
    module = DiffusionLoRA(str(MAKERS[name](tmp_path / "base")), rank=2)
    run = make_run(tmp_path / "run", module, "mug", pretrained_model_name_or_path=FAMILIES[name].base)
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    config["data"]["init_args"]["source_data_dir"] = "before"
    (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    assert command("export", run, "--to", "hub", "-o", tmp_path / "hub").code == 0
    data, text = card_of(tmp_path / "hub")
    assert data.pipeline_tag == "image-to-image" and "text-to-image" not in data.tags
    assert wanted in text and "ComfyUI" not in text and "A1111" not in text


def test_a_lokr_of_a_unet_goes_along_in_the_names_that_diffusers_reads(tmp_path: Path, command: Command) -> None:
    module = DiffusionLoRA(str(make_pipeline(tmp_path / "base")), lora_type="lokr", lokr_factor=2)
    run = make_run(tmp_path / "run", module, "mug", pretrained_model_name_or_path=FAMILIES["sd"].base)
    assert command("export", run, "--to", "hub", "-o", tmp_path / "hub").code == 0
    state = safetensors.torch.load_file(tmp_path / "hub" / "mug.diffusers.safetensors")
    assert all(key.startswith("unet.") and ".lokr_w" in key for key in state)
    _, text = card_of(tmp_path / "hub")
    assert 'load_lora_adapter("OWNER/mug", weight_name="mug.diffusers.safetensors", prefix="unet", ' in text


def test_the_card_of_a_lokr_with_whole_convolutions_merges_it_because_diffusers_does_not_load_it(
    tmp_path: Path, command: Command
) -> None:
    options = {"lora_type": "lokr", "lokr_factor": 2, "rank": 64, "lora_targets": ["attention", "convolutions"]}
    module = DiffusionLoRA(str(make_pipeline(tmp_path / "base")), **options)
    run = make_run(tmp_path / "run", module, "mug", pretrained_model_name_or_path=FAMILIES["sd"].base)
    assert command("export", run, "--to", "hub", "-o", tmp_path / "hub").code == 0
    assert not (tmp_path / "hub" / "mug.diffusers.safetensors").exists()
    _, text = card_of(tmp_path / "hub")
    assert "load_lora_adapter" not in text
    merge = re.search(r"lightning (export mug.safetensors --merge_into) PIPELINE -o FOLDER", text)[1]  # type: ignore[index]
    verb, file, option = merge.split()
    assert command(verb, tmp_path / "hub" / file, option, tmp_path / "base", "-o", tmp_path / "merged").code == 0
    said = command(verb, tmp_path / "hub" / file, "--to", "diffusers", "-o", tmp_path / "x.safetensors")
    assert said.code != 0 and "a convolution, and diffusers reads decomposed ones alone there" in said.err


@pytest.mark.parametrize("kind", ["pipeline", "controlnet"])
@pytest.mark.parametrize("name", ["sd", "sd3"])
def test_a_pipeline_and_a_controlnet_lie_at_the_root(kind: str, name: str, tmp_path: Path, command: Command) -> None:
    base = str(MAKERS[name](tmp_path / "base"))
    module = DiffusionFineTuning(base) if kind == "pipeline" else DiffusionControlNet(base)
    run = make_run(tmp_path / "run", module, "mine", pretrained_model_name_or_path=FAMILIES[name].base)
    said = command("export", run, "--to", "hub", "-o", tmp_path / "hub")
    assert said.code == 0, said.err
    assert (tmp_path / "hub" / ("model_index.json" if kind == "pipeline" else "config.json")).is_file()
    no_private_text(tmp_path / "hub", tmp_path)
    data, text = card_of(tmp_path / "hub")
    assert ("controlnet" in data.tags) == (kind == "controlnet")
    assert data.base_model_relation == ("finetune" if kind == "pipeline" else "adapter")
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]  # type: ignore[index]
    assert "OWNER/mine" in code
    compile(code, "README.md", "exec")
    weights = list((tmp_path / "hub").rglob("*.safetensors"))
    assert weights and all(path.read_bytes() for path in weights)


def test_another_programs_header_loses_its_paths_and_keeps_its_weights(tmp_path: Path, command: Command) -> None:
    key = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
    state = {f"{key}.lora_down.weight": torch.randn(2, 8), f"{key}.lora_up.weight": torch.randn(8, 2)}
    header = {
        "ss_dataset_dirs": json.dumps({"/home/anna/my photos/10_zorp": {"n_repeats": 10}}),
        "ss_sd_model_name": r"C:\Users\anna\models\sd15.safetensors",
        "ss_training_comment": "made from /home/anna/photos/a.png, see ~/notes/x.txt",
        "ss_api_key": TOKEN,
        "ss_network_dim": "2",
    }
    safetensors.torch.save_file(state, tmp_path / "mug.safetensors", header)
    assert command("export", tmp_path / "mug.safetensors", "--to", "hub", "-o", tmp_path / "hub").code == 0
    no_private_text(tmp_path / "hub", "anna", TOKEN, tmp_path)
    found = read_lora(tmp_path / "hub" / "mug.safetensors")
    assert found.metadata["ss_network_dim"] == "2" and found.metadata["ss_sd_model_name"] == "sd15.safetensors"
    assert json.loads(found.metadata["ss_dataset_dirs"]) == {"10_zorp": {"n_repeats": 10}}
    assert found.metadata["ss_training_comment"] == "made from a.png, see x.txt"
    assert all(torch.equal(found.state[name], value) for name, value in state.items())


@pytest.mark.parametrize(
    "text", ["https://huggingface.co/a/b/c", "a / b", "1/2", "runs/my/x", "OWNER/NAME", "s3://bucket/a/b", "2026/11/26"]
)
def test_what_is_no_local_path_stays(text: str) -> None:
    assert without_local_paths(f"see {text} there") == f"see {text} there"
    assert without_local_paths(text) == text


def test_no_more_images_than_a_page_shows(run: Path, tmp_path: Path, command: Command) -> None:
    record = json.loads((run / "report.json").read_text(encoding="utf-8"))
    record["pictures"] *= 5
    (run / "report.json").write_text(json.dumps(record), encoding="utf-8")
    assert command("export", run, "--to", "hub", "-o", tmp_path / "hub").code == 0
    assert len(list((tmp_path / "hub" / "images").iterdir())) == MOST_IMAGES


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nothing", "--to", "hub", "-o", "out"], "there is no run and no file nothing; give a run's folder"),
        (["empty", "--to", "hub", "-o", "out"], "empty is no run: it has no config.yaml"),
        (["untrained", "--to", "hub", "-o", "out"], "has no LoRA, model or ControlNet yet; train it to its end first"),
        (["untrained", "--to", "hub", "-o", "full"], "full is not empty; name another folder with -o, or add --overwr"),
        (["untrained", "--to", "hub", "-o", "full/a.txt"], "-o full/a.txt is a file; name a folder"),
        (["untrained", "--to", "hub", "-o", "untrained", "--overwrite"], "-o untrained holds the run itself"),
        (["untrained", "--to", "kohya", "-o", "x", "--push", "a/b"], "--push belongs to --to hub"),
        (["untrained", "--to", "hub", "-o", "out", "--public"], "--public belongs to --push; add --push OWNER/NAME"),
        (["untrained", "--to", "hub", "-o", "out", "--push", "zorp"], "--push must be owner/name, got 'zorp'"),
        (["untrained", "--to", "hub", "-o", "out", "--push", "a/zorp"], "HF_HUB_OFFLINE is set, which forbids the hub"),
    ],
)
def test_what_cannot_be_written_is_one_sentence(
    arguments: list[str], sentence: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name in ("empty", "untrained", "full"):
        (tmp_path / name).mkdir()
    (tmp_path / "untrained" / "config.yaml").write_text("model: {init_args: {output_name: mug}}\n", encoding="utf-8")
    (tmp_path / "full" / "a.txt").touch()
    said = command("export", *arguments)
    assert said.code == 1 and len(said.errors) == 1 and sentence in said.err, said.err
    assert not (tmp_path / "out").exists()


def export_and_push(folder: Path, hub: Hub, tmp_path: Path, *more: str, **variables: str) -> Any:
    """Run the command in a process of its own, whose hub is this machine's."""
    home = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.address, "HF_HUB_DISABLE_XET": "1"}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")} | home | variables
    arguments = ["export", str(folder), "--to", "hub", "-o", str(tmp_path / "hub"), "--push", "anna/zorp-mug", *more]
    return subprocess.run(
        [sys.executable, "-m", "lightning_aigc", *arguments], capture_output=True, text=True, env=environment
    )


def test_the_hub_receives_every_file(hub: Hub, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", DiffusionLoRA(str(make_pipeline(tmp_path / "base")), rank=2), "mug")
    done = export_and_push(run, hub, tmp_path, HF_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    assert f"sent to {hub.address}/anna/zorp-mug" in done.stdout
    assert hub.repositories["anna/zorp-mug"]["visibility"] == "private"
    folder = tmp_path / "hub"
    sent = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert hub.files["anna/zorp-mug"] == sent and {"README.md", "mug.safetensors", "config.yaml"} <= sent.keys()
    assert hub.tokens - {""} == {f"Bearer {TOKEN}"}
    assert b'load_lora_weights("anna/zorp-mug"' in sent["README.md"]


@pytest.mark.parametrize(
    ("answer", "token", "sentence"),
    [
        (403, TOKEN, "the token may not write there; make one with write access at http://127.0.0.1:"),
        (401, TOKEN, "the token is not valid; log in again: hf auth login"),
        (200, "", "there is no token for the hub; log in with `hf auth login`, or leave out --push"),
        (0, TOKEN, "cannot be reached"),
    ],
)
def test_a_hub_that_refuses_is_one_sentence(
    answer: int, token: str, sentence: str, hub: Hub, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", DiffusionLoRA(str(make_pipeline(tmp_path / "base")), rank=2), "mug")
    assert find_contents(run).name == "mug"
    hub.answer = answer
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", hub.address if answer else "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("HF_TOKEN", token)
    said = command("export", run, "--to", "hub", "-o", tmp_path / "hub", "--push", "anna/zorp-mug")
    assert said.code == 1 and len(said.errors) == 1 and sentence in said.err, said.err
    assert (tmp_path / "hub" / "README.md").is_file() == bool(token)
    assert TOKEN not in said.err

"""`lightning init` for diffusion transformers: bases by name and folder, values for a card, and a run of each."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from fakes.models.short_texts import shorten_texts
from fakes.models.transformer_pipelines import MAKE
from lightning_aigc.cli.init.base import SHORT, find_base
from lightning_aigc.cli.init.card_sizes import CARD_GIB, CARDS
from lightning_aigc.cli.init.cards import FREE_SHARE, Card, find_card, values_for
from lightning_aigc.diffusion.families import TRANSFORMERS
from lightning_aigc.diffusion.pipeline.loading import find_family
from lightning_aigc.errors import ConfigError, ModelError
from tools.embedded.drawing import draw_brand

Command = Callable[..., Any]
ROWS = Path(__file__).parents[3] / "benchmarks" / "results" / "precision" / "step_shapes.jsonl"


@pytest.fixture(autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))  # its cache of checked images


@pytest.fixture(autouse=True, scope="module")
def short_texts() -> Iterator[None]:
    """Captions of 64 tokens instead of 512; tests/test_golden.py has the whole length."""
    with pytest.MonkeyPatch.context() as patch:
        shorten_texts(patch)
        yield


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for number in range(3):
        draw_brand("mug", random.Random(number), 64).resize((640, 480)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a zorp mug number {number}")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = MAKE[family](tmp_path_factory.mktemp(family))
        return made[family]

    return folder


def init(command: Command, photos: Path, output: Path, *more: object) -> tuple[dict[str, Any], str]:
    said = command("init", photos, "-o", output, *more)
    assert said.code == 0, said.err
    text = output.read_text(encoding="utf-8")
    return yaml.safe_load(text), text


def quick(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The config with three steps, and without what takes minutes on a CPU or downloads."""
    config["threads"] = 1
    config["trainer"] |= {"accelerator": "cpu", "default_root_dir": str(folder), "accumulate_grad_batches": 1}
    config["trainer"]["callbacks"] = [c for c in config["trainer"]["callbacks"] if c["class_path"] == "RunReport"]
    config["trainer"]["callbacks"][0]["init_args"] |= {"clip_model": None, "num_images": 1}
    config["model"]["init_args"] |= {
        "max_train_steps": 3, "lr_warmup_steps": 0, "num_inference_steps": 2, "num_validation_images": 1,
        "validation_steps": 3, "validation_prompts": ["a zorp mug"], "sample_resolution": 64,
    }  # fmt: skip
    config["data"]["init_args"] |= {"resolution": 64, "cache_dir": str(folder / "cache")}
    return config


@pytest.mark.filterwarnings("ignore")  # what Lightning says about loaders and precisions
@pytest.mark.parametrize("family", list(MAKE))
def test_what_it_writes_for_a_pipeline_folder_trains_and_draws(
    command: Command, tmp_path: Path, photos: Path, folders: Callable[[str], Path], family: str
) -> None:
    base = folders(family)
    config, text = init(command, photos, tmp_path / "my.yaml", "--base", base, "--card", "24gb")
    assert config["model"]["class_path"] == "DiffusionLoRA" and "YOUR_" not in text
    assert f"a {TRANSFORMERS[family].pipeline} folder" in text
    (tmp_path / "quick.yaml").write_text(yaml.safe_dump(quick(config, tmp_path / "run")))
    said = command("fit", "-c", tmp_path / "quick.yaml")
    assert said.code == 0, said.err
    drawn = command(
        "sample", "-c", tmp_path / "run" / "config.yaml", "--prompts", "a zorp mug", "-o", tmp_path / "grid.png"
    )
    assert drawn.code == 0 and (tmp_path / "grid.png").is_file(), drawn.err


@pytest.mark.filterwarnings("ignore")
def test_the_embedded_transformer_passes_a_dry_run_with_nothing_edited(
    command: Command, tmp_path: Path, photos: Path
) -> None:
    config, _ = init(command, photos, tmp_path / "my.yaml", "--base", "embedded:sd3", "--card", "8gb")
    assert config["data"]["init_args"]["resolution"] == 64  # 16 latent pixels of 4 each
    said = command("fit", "-c", tmp_path / "my.yaml", "--dry_run", "--trainer.accelerator", "cpu")
    assert said.code == 0 and "one step:" in said.out, said.err


@pytest.mark.parametrize(
    ("base", "card", "template", "memory", "kept"),
    [
        ("sd3", "4gb", "sd3_lora.yaml", "max", "nf4"),
        ("sd3", "8gb", "sd3_lora.yaml", "max", None),
        ("sd3", "24gb", "sd3_lora.yaml", "off", None),
        ("flux", "12gb", "flux_qlora_12gb.yaml", "max", "nf4"),
        ("flux2", "12gb", "flux2_klein_lora.yaml", "max", None),
        ("z_image", "8gb", "z_image_qlora_8gb.yaml", "max", "nf4"),
        ("z_image", "24gb", "z_image_qlora_8gb.yaml", "max", None),
        ("qwen_image", "24gb", "qwen_image_qlora.yaml", "max", "nf4"),
        ("flux", "8gb", "flux_qlora_12gb.yaml", "max", "int8"),
        ("qwen_image", "12gb", "qwen_image_qlora.yaml", "max", "int8"),
    ],
)
def test_a_short_name_and_a_card_choose_the_config_the_memory_level_and_the_bases_bits(
    command: Command, tmp_path: Path, photos: Path, base: str, card: str, template: str, memory: str, kept: str | None
) -> None:
    config, text = init(command, photos, tmp_path / "my.yaml", "--base", base, "--card", card)
    model = config["model"]["init_args"]
    assert f"from {template}" in text.splitlines()[0]
    assert model["pretrained_model_name_or_path"] == TRANSFORMERS[base].base
    assert config["trainer"]["plugins"]["init_args"]["memory"] == memory
    assert model["base_quantization"] == kept
    assert "counted on shapes" in text and "no card has run it" in text
    whole_base_gib = {kind: TRANSFORMERS[base].step_memory.gib_of(kind) for kind in (None, "int8", "nf4")}  # type: ignore[union-attr]
    assert (model.get("base_location") == "fit") == (min(whole_base_gib.values()) > FREE_SHARE * CARD_GIB[card])


def test_a_base_that_waits_in_host_memory_says_how_much_and_what_is_assumed(
    command: Command, tmp_path: Path, photos: Path
) -> None:
    """Qwen-Image has 20.2 GiB in int8 and a step takes 2.7: 12 GiB * 0.85 leave 13 of them in host memory."""
    _, text = init(command, photos, tmp_path / "my.yaml", "--base", "qwen_image", "--card", "12gb")
    (line,) = (line for line in text.splitlines() if "base_location: fit" in line)
    assert "13 of the base's 20 GiB wait in host memory" in line and "25 TFLOP/s and 22 GB/s, which are assumed" in line
    _, text = init(command, photos, tmp_path / "second.yaml", "--base", "flux", "--card", "12gb")
    assert "or int8 and base_location: fit, with 5 GiB in host memory" in text


def test_its_figures_are_those_of_the_benchmarks_rows() -> None:
    models = {"sd3": "sd35", "flux2": "klein"}
    read = [json.loads(line) for line in ROWS.read_text().splitlines()]
    stepped = [row for row in read if row["pixels"] == 1024 and "peak_mib" in row]
    stepped = [row for row in stepped if (row["model"], row["rank"]) != ("flux2_dev", 16)]  # of `lightning bench`
    rows = {(row["model"], row["variant"]): row for row in stepped}
    weights = {(row["model"], row["variant"]): row["weights_mib"] for row in read if "peak_mib" not in row}
    for family in TRANSFORMERS:
        counted = TRANSFORMERS[family].step_memory
        assert counted is not None
        for kind, gib in counted.gib.items():
            variant = "max" if kind is None else f"max-{kind}"
            if family == "flux_kontext":  # FLUX.1's weights, and the activations of as many tokens as with a source
                (with_source,) = (row for row in read if (row["model"], row["pixels"]) == ("flux", 1456))
                activations = with_source["peak_mib"] - with_source["resident_mib"]
                peak = rows["flux", variant]["resident_mib"] + activations
            elif "blocks" in rows.get((family, "max"), {}):  # counted by blocks, and its weights in each format
                of = family.removesuffix("_plus")
                peak = rows[family, "max"]["peak_mib"] + weights[of, variant] - weights[of, "max"]
            else:
                row = rows[models.get(family, family), variant]
                peak = row["peak_mib"]
                assert row["batch"] == 1
            assert gib == round(peak / 1024, 1), (family, kind)


def test_a_card_that_is_too_small_is_one_sentence_and_without_a_card_it_takes_one_that_is_not() -> None:
    with pytest.raises(ConfigError, match=r"--card 6gb: a step of Qwen-Image .* too much for 6 GB; use --card 8gb"):
        values_for(TRANSFORMERS["qwen_image"], Card("6gb", "--card 6gb"))
    assert find_card(None, TRANSFORMERS["qwen_image"]).kind in ("24gb", "910b") or "found" in find_card(None).reason
    for family in TRANSFORMERS.values():
        assert values_for(family, Card("24gb", ""))
    assert list(CARDS) == sorted(CARDS, key=lambda card: CARD_GIB[card])


def test_an_npu_is_named_in_the_config(command: Command, tmp_path: Path, photos: Path) -> None:
    config, text = init(command, photos, tmp_path / "my.yaml", "--base", "z_image", "--card", "910b")
    assert config["trainer"]["accelerator"] == "npu" and "not run on this chip yet" in text


@pytest.mark.parametrize(
    ("given", "family"),
    [
        *((name, family.name) for name, family in SHORT.items()),
        *((family.base, name) for name, family in TRANSFORMERS.items()),
        ("Qwen/Qwen-Image-Edit-2509", "qwen_image_edit_plus"), ("Qwen/Qwen-Image-2512", "qwen_image"),
        ("stabilityai/stable-diffusion-3-medium-diffusers", "sd3"), ("someone/sd3.5-large-mine", "sd3"),
        ("black-forest-labs/FLUX.1-Krea-dev", "flux"), ("someone/flux-2024-style", "flux"),
        ("someone/blitz-images", "sd"), ("stabilityai/stable-diffusion-2-1", "sd"), ("someone/xl-thing", "sdxl"),
    ],
)  # fmt: skip
def test_a_name_tells_the_family(given: str, family: str) -> None:
    base = find_base(given)
    assert (base.family.name, base.side) == (family, 512 if family == "sd" else 1024)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("Tongyi-MAI/Z-Image-Turbo", "by its name a distilled model"),
        ("black-forest-labs/FLUX.1-schnell", "by its name a distilled model"),
        ("black-forest-labs/FLUX.2-klein-4B", "such as black-forest-labs/FLUX.2-klein-base-4B"),
        ("stabilityai/stable-diffusion-3.5-large-turbo", "by its name a distilled model"),
        ("someone/FLUX.2-style", "a FLUX.2 that is named neither klein nor dev, which differ"),
        ("krea/Krea-2-Turbo", "by its name a distilled model"),
        ("lodestones/Chroma1-Flash", "by its name a distilled model"),
    ],
)
def test_a_hub_id_that_does_not_train_is_one_sentence_at_once(given: str, said: str) -> None:
    with pytest.raises((ModelError, ConfigError), match=said):
        find_base(given)


def test_a_folder_that_does_not_train_is_one_sentence(
    command: Command, tmp_path: Path, photos: Path, folders: Callable[[str], Path]
) -> None:
    def copy(family: str, name: str, file: str, **changes: Any) -> Path:
        folder = Path(shutil.copytree(folders(family), tmp_path / name))
        described = json.loads((folder / file).read_text()) | changes
        (folder / file).write_text(json.dumps(described))
        return folder

    unknown = copy("sd3", "unknown", "model_index.json", _class_name="SanaPipeline")
    distilled = copy("flux2", "few_steps", "model_index.json", is_distilled=True)
    sizeless = copy("sd3", "sizeless", "transformer/config.json", sample_size=None)
    broken = copy("z_image", "broken", "vae/config.json")
    (broken / "vae" / "config.json").write_text("{")
    for base, says in (
        (
            unknown,
            "is a SanaPipeline; known are ChromaPipeline, FluxPipeline, Flux2KleinPipeline, Flux2Pipeline, FluxKon",
        ),
        (distilled, "by its configuration a distilled model"),
        (sizeless, "do not say at which size it was trained"),
        (broken, "vae/ cannot be read"),
    ):
        said = command("init", photos, "-o", tmp_path / "my.yaml", "--base", base)
        assert said.code == 1 and len(said.errors) == 1 and says in said.errors[0], (base, said.errors)
        assert not (tmp_path / "my.yaml").exists()


@pytest.fixture
def transformer_file(tmp_path: Path) -> Callable[[str], str]:
    """A file with a layer of a transformer, under a name."""

    def file(name: str) -> str:
        save_file({"double_blocks.0.img_attn.norm.key_norm.scale": torch.ones(4)}, tmp_path / name)
        return str(tmp_path / name)

    return file


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("flux1-dev-fp8.safetensors", "flux"), ("flux1-krea-dev_fp8_scaled.safetensors", "flux"),
        ("flux1-dev-kontext_fp8_scaled.safetensors", "flux_kontext"), ("flux2_dev_fp8mixed.safetensors", "flux2_dev"),
        ("sd3.5_large_fp8_scaled.safetensors", "sd3"), ("qwen_image_fp8_e4m3fn.safetensors", "qwen_image"),
        ("qwen_image_edit_2509_fp8_e4m3fn.safetensors", "qwen_image_edit_plus"),
        ("z_image_bf16.safetensors", "z_image"),
        ("Chroma1-HD-fp8mixed.safetensors", "chroma"), ("flux-2-klein-base-4b-fp8.safetensors", "flux2"),
    ],
)  # fmt: skip
def test_a_transformers_file_is_the_denoiser_of_its_familys_pipeline(
    transformer_file: Callable[[str], str], name: str, family: str
) -> None:
    base = find_base(transformer_file(name))
    assert (base.source, base.family.name) == (TRANSFORMERS[family].base, family)
    assert base.denoiser_file == transformer_file(name)


def test_a_file_that_does_not_train_is_one_sentence(transformer_file: Callable[[str], str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not tell which.* --base flux --denoiser_file .*mine.safetensors$"):
        find_base(transformer_file("mine.safetensors"))
    with pytest.raises(ModelError, match=r"by its name a distilled model.*training_adapter"):
        find_base(transformer_file("z_image_turbo_bf16.safetensors"))
    with pytest.raises(ConfigError, match=r"give it as the base: --base .*mine.safetensors$"):
        find_base("sd15", transformer_file("mine.safetensors"))
    save_file({"lora_unet_down_blocks_0.lora_down.weight": torch.ones(4, 4)}, tmp_path / "style.safetensors")
    with pytest.raises(ConfigError, match=r"is a LoRA file.* model.init_args.lora_from: .*style.safetensors$"):
        find_base(str(tmp_path / "style.safetensors"))
    with pytest.raises(ModelError, match=r"there is no file gone\.safetensors"):
        find_base("flux", "gone.safetensors")
    assert find_base("flux", transformer_file("mine.safetensors")).denoiser_file == transformer_file("mine.safetensors")


def test_a_checkpoint_of_a_transformer_is_not_taken_for_a_u_nets(transformer_file: Callable[[str], str]) -> None:
    with pytest.raises(ModelError, match=r"is a checkpoint of flux-.*; single files are read of Stable Diffusion 1.x"):
        find_family(transformer_file("flux.safetensors"))


def test_a_float8_file_keeps_its_values_where_the_card_wants_8_bits(
    command: Command, tmp_path: Path, photos: Path
) -> None:
    for dtype, kinds in ((torch.float8_e4m3fn, ("nf4", "fp8")), (torch.bfloat16, ("nf4", "int8"))):
        file = tmp_path / f"flux1-dev-{str(dtype)[6:]}.safetensors"
        save_file({"double_blocks.0.img_attn.qkv.weight": torch.ones(4, 4).to(dtype)}, file)
        for card, kind in zip(("12gb", "24gb"), kinds, strict=True):
            config, _ = init(command, photos, tmp_path / f"{card}-{file.stem}.yaml", "--base", file, "--card", card)
            assert config["model"]["init_args"]["base_quantization"] == kind


def test_a_file_beside_a_pipelines_folder_trains(
    command: Command, tmp_path: Path, photos: Path, folders: Callable[[str], Path]
) -> None:
    (weights,) = (folders("sd3") / "transformer").glob("*.safetensors")
    output = tmp_path / "my.yaml"
    config, text = init(command, photos, output, "--base", folders("sd3"), "--denoiser_file", weights)
    assert config["model"]["init_args"]["denoiser_file"] == str(weights)
    assert config["model"]["init_args"].get("base_quantization") is None
    assert "# the weights of Stable Diffusion 3" in text
    output.write_text(yaml.safe_dump(quick(config, tmp_path / "run")))
    assert command("fit", "-c", output).code == 0
    assert (tmp_path / "run" / "my.safetensors").is_file()

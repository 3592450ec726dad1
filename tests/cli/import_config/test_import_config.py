"""`lightning import-config`: configs of other trainers become ours, with a line for each key."""

from __future__ import annotations

import inspect
import json
import shutil
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Trainer

from lightning_aigc.cli.import_config import ai_toolkit, kohya, one_trainer, simple_tuner
from lightning_aigc.cli.import_config.command import as_yaml, import_given, read_file, recognised
from lightning_aigc.cli.import_config.imported import PLACES, Take, flat
from lightning_aigc.data import ImageCaptionData
from lightning_aigc.diffusion import DiffusionFineTuning, DiffusionLoRA, DiffusionTraining
from lightning_aigc.diffusion.families import FAMILIES
from lightning_aigc.diffusion.training.settings import TrainingSettings
from lightning_aigc.precision import FusedBackwardPrecision

Command = Callable[..., Any]
FILES = Path(__file__).parent / "files"
CONFIGS = ("ai_toolkit.yaml", "kohya.toml", "one_trainer.json", "simple_tuner.json")
EXPECTED: dict[str, dict[str, Any]] = {
    "ai_toolkit.yaml": {
        "trainer.default_root_dir": "output/my_first_flux_lora_v1",
        "trainer.accumulate_grad_batches": 2,
        "trainer.gradient_clip_val": 1.0,
        "plugin.precision": "bf16-mixed",
        "plugin.memory": "max",
        "model.pretrained_model_name_or_path": "black-forest-labs/FLUX.1-dev",
        "model.rank": 16,
        "model.lora_alpha": 16.0,
        "model.lora_targets": ["attention", "feed_forward"],
        "model.optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"weight_decay": 1e-4}},
        "model.learning_rate": 1e-4,
        "model.lr_scheduler": "constant",
        "model.lr_warmup_steps": 0,
        "model.max_train_steps": 2000,
        "model.use_ema": True,
        "model.ema_decay": 0.99,
        "model.base_quantization": "int8",
        "model.validation_prompts": [
            "p3r5on holding a sign that says 'I LOVE PROMPTS!'",
            "a bear building a log cabin in the snow covered mountains",
        ],
        "model.validation_steps": 250,
        "model.checkpointing_steps": 250,
        "model.step_files_total_limit": 4,
        "model.num_inference_steps": 20,
        "model.guidance_scale": 4.0,
        "model.output_name": "my_first_flux_lora_v1",
        "data.train_data_dir": "/path/to/images/folder",
        "data.caption_extension": ".txt",
        "data.resolution": 1024,
        "data.train_batch_size": 1,
        "data.caption_dropout_rate": 0.05,
        "data.trigger_word": "p3r5on",
        "data.cache_latents": True,
    },
    "kohya.toml": {
        "seed_everything": 42,
        "trainer.default_root_dir": "output/my_lora",
        "trainer.accumulate_grad_batches": 2,
        "plugin.precision": "bf16-mixed",
        "plugin.memory": "max",
        "model.pretrained_model_name_or_path": "stabilityai/stable-diffusion-xl-base-1.0",
        "model.rank": 16,
        "model.lora_alpha": 8.0,
        "model.lora_targets": ["attention", "feed_forward", "convolutions"],
        "model.optimizer": {
            "class_path": "torch.optim.AdamW",
            "init_args": {"weight_decay": 0.01, "betas": [0.9, 0.99]},
        },
        "model.learning_rate": 2e-4,
        "model.train_text_encoder": True,
        "model.text_encoder_lr": 1e-5,
        "model.lr_scheduler": "cosine_with_restarts",
        "model.lr_warmup_steps": 100,
        "model.max_train_steps": 1000,
        "model.snr_gamma": 5.0,
        "model.noise_offset": 0.0357,
        "model.use_ema": False,
        "model.checkpointing_steps": 200,
        "model.step_files_total_limit": 3,  # as sd-scripts: those of the last 500 steps, and the newest
        "model.validation_steps": 100,
        "model.validation_prompts": ["hoge girl, smiling", "hoge girl in the snow"],
        "model.output_name": "my_lora",
        "data.train_data_dir": "C:\\hoge",
        "data.num_repeats": 10,
        "data.class_data_dir": "C:\\reg",
        "data.class_prompt": "human",
        "data.trigger_word": "hoge",
        "data.missing_captions": "trigger",
        "data.caption_extension": ".txt",
        "data.resolution": 768,
        "data.max_bucket_reso": 1536,
        "data.train_batch_size": 4,
        "data.shuffle_caption": True,
        "data.keep_tokens": 2,
        "data.cache_text_embeddings": False,
    },
    "one_trainer.json": {
        "trainer.default_root_dir": "runs/lora",
        "trainer.max_epochs": 20,
        "trainer.accumulate_grad_batches": 2,
        "plugin.precision": "16-mixed",
        "model.pretrained_model_name_or_path": "stable-diffusion-v1-5/stable-diffusion-v1-5",
        "model.rank": 32,
        "model.lora_alpha": 16.0,
        "model.lora_targets": ["attention", "feed_forward"],
        "model.optimizer": {
            "class_path": "prodigyopt.Prodigy",
            "init_args": {"weight_decay": 0.01, "d_coef": 0.8, "betas": [0.9, 0.99]},
        },
        "model.learning_rate": 1.0,
        "model.train_text_encoder": True,
        "model.text_encoder_lr": 5e-5,
        "model.lr_scheduler": "linear",
        "model.lr_warmup_steps": 25,  # 50 batches, 2 a step
        "model.max_train_steps": None,
        "model.snr_gamma": 4.0,
        "model.noise_offset": 0.05,
        "model.use_ema": True,
        "model.ema_decay": 0.998,
        "model.base_quantization": "int8",
        "model.validation_prompts": ["a photo of zorp"],
        "model.num_inference_steps": 20,
        "model.guidance_scale": 7.0,
        "model.output_name": "lora",
        "data.train_data_dir": "C:/images/zorp",
        "data.num_repeats": 3,
        "data.class_data_dir": "C:/images/person",
        "data.random_flip": True,
        "data.shuffle_caption": True,
        "data.keep_tokens": 2,
        "data.resolution": 512,
        "data.train_batch_size": 4,
        "data.enable_bucket": True,
    },
    "simple_tuner.json": {
        "seed_everything": 42,
        "trainer.default_root_dir": "output/models/qwen",
        "trainer.gradient_clip_val": 0.5,
        "plugin.precision": "bf16-mixed",
        "plugin.memory": "max",
        "model.pretrained_model_name_or_path": "Qwen/Qwen-Image",
        "model.rank": 8,
        "model.lora_alpha": 16.0,
        "model.optimizer": {
            "class_path": "transformers.Adafactor",
            "init_args": {"scale_parameter": False, "relative_step": False, "warmup_init": False},
        },
        "model.learning_rate": 1e-4,
        "model.lr_scheduler": "polynomial",
        "model.lr_warmup_steps": 100,
        "model.max_train_steps": 10000,
        "model.flow_shift": 1.73,
        "model.use_ema": False,
        "model.base_quantization": "nf4",
        "model.checkpointing_steps": 500,
        "model.checkpoints_total_limit": 5,
        "model.validation_steps": 250,
        "model.validation_prompts": ["A photo-realistic image of a cat"],
        "model.sample_resolution": 1024,
        "model.num_inference_steps": 20,
        "model.output_name": "qwen",
        "data.train_data_dir": "/path/to/data/tree",
        "data.num_repeats": 5,
        "data.trigger_word": "zorp",
        "data.resolution": 1024,
        "data.caption_dropout_rate": 0.1,
    },
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the files, where a test may change them."""
    return Path(shutil.copytree(FILES, tmp_path / "files"))


def imported(command: Command, file: Path, *more: object) -> tuple[dict[str, Any], Any]:
    """The config that `lightning fit --print_config` makes of an imported file, and what the import said."""
    output = file.with_suffix(".out.yaml")
    said = command("import-config", file, "-o", output, "--force", *more)
    assert said.code == 0, said.err
    printed = command("fit", "-c", output, "--print_config")
    assert printed.code == 0, printed.err
    config: dict[str, Any] = yaml.safe_load(printed.out)
    return config, said


def at(config: Mapping[str, Any], place: str) -> Any:
    block, _, name = place.partition(".")
    found: Any = config
    for part in [*PLACES.get(block, "").split("."), *(name or block).split(".")]:
        found = found[part] if part else found
    return found


def given_keys(file: Path) -> set[str]:
    """The keys of a file as its lines name them, without the sections and lists that others are told of."""
    given = read_file(file)
    if file.suffix == ".toml":
        return {key for section in given.values() for key in section}
    if file.name == "ai_toolkit.yaml":
        process = dict(given["config"]["process"][0])
        (dataset,) = process.pop("datasets")
        return {*flat(process), *(f"datasets.{key}" for key in dataset)} - {"type", "training_folder"}
    return {key.removeprefix("--") for key in flat(given)} - {"samples"}


@pytest.mark.parametrize("name", CONFIGS)
def test_each_programs_values_arrive_and_fit_accepts_them(name: str, folder: Path, command: Command) -> None:
    config, _ = imported(command, folder / name)
    for place, value in EXPECTED[name].items():
        found = at(config, place)
        if place == "model.optimizer":
            own = found["init_args"]
            found = {"class_path": found["class_path"], "init_args": {key: own[key] for key in value["init_args"]}}
            assert found["class_path"].rpartition(".")[2] == value["class_path"].rpartition(".")[2]
            found["class_path"] = value["class_path"]
        assert found == value, place
    assert "AdaptiveLR" not in str(config["trainer"]["callbacks"])
    guard = next(each for each in config["trainer"]["callbacks"] if each["class_path"].endswith("CLIPConvergenceGuard"))
    assert guard["init_args"]["stop"] is False


@pytest.mark.parametrize("name", CONFIGS)
def test_each_key_has_one_line_and_secrets_have_no_value(name: str, folder: Path, command: Command) -> None:
    _, said = imported(command, folder / name)
    lines = [line for line in said.err.splitlines() if ":" in line]
    for key in given_keys(folder / name):
        places = (key, key.partition(".")[0])
        begins = tuple(f"{place}{mark}" for place in places for mark in ":.")
        assert any(line.startswith(begins) for line in lines), key
    assert "no key of" not in said.err
    written = (folder / name).with_suffix(".out.yaml").read_text(encoding="utf-8")
    for secret in ("0123456789abcdef", "hf_abcdefgh"):
        assert secret not in said.err and secret not in written


@pytest.mark.parametrize("name", CONFIGS)
def test_the_classes_take_what_was_imported(name: str, folder: Path, command: Command) -> None:
    config, _ = imported(command, folder / name)
    model = {key: value for key, value in config["model"]["init_args"].items() if key != "optimizer"}
    DiffusionLoRA(**model)
    ImageCaptionData(**config["data"]["init_args"])


def test_an_imported_config_trains(folder: Path, command: Command, quick_config: dict[str, Any]) -> None:
    base, photos = (quick_config[block]["init_args"][key] for block, key in
                    (("model", "pretrained_model_name_or_path"), ("data", "train_data_dir")))  # fmt: skip
    text = f"""
        pretrained_model_name_or_path = '{base}'
        train_data_dir = '{photos}'
        output_dir = '{folder / "output"}'
        output_name = "cup"
        caption_extension = ".txt"
        network_module = "networks.lora"
        network_dim = 2
        network_args = ["conv_dim=2"]
        network_train_unet_only = true
        optimizer_type = "AdamW8bit"
        learning_rate = 1e-3
        lr_scheduler = "cosine"
        max_train_steps = 2
        train_batch_size = 2
        resolution = "32,32"
        mixed_precision = "no"
        min_snr_gamma = 5
    """
    (folder / "quick.toml").write_text(text, encoding="utf-8")
    assert command("import-config", folder / "quick.toml", "-o", folder / "quick.yaml").code == 0
    more = {
        "threads": 1,
        "trainer": {"accelerator": "cpu", "devices": 1, "callbacks": quick_config["trainer"]["callbacks"]},
        "model": {"init_args": {"num_inference_steps": 2, "num_validation_images": 1}},
        "data": {"init_args": {"cache_dir": quick_config["data"]["init_args"]["cache_dir"]}},
    }
    (folder / "more.yaml").write_text(yaml.safe_dump(more), encoding="utf-8")
    said = command("fit", "-c", folder / "quick.yaml", "-c", folder / "more.yaml")
    assert said.code == 0, said.err
    summary = json.loads((folder / "output" / "cup" / "summary.json").read_text(encoding="utf-8"))
    assert summary["steps"] == 2 and (folder / "output" / "cup" / "cup.safetensors").is_file()


BASES = {
    "sd": "stable-diffusion-v1-5/stable-diffusion-v1-5",
    "sdxl": "stabilityai/stable-diffusion-xl-base-1.0",
    "sd3": "stabilityai/stable-diffusion-3.5-medium",
    "flux": "black-forest-labs/FLUX.1-dev",
    "flux_kontext": "black-forest-labs/FLUX.1-Kontext-dev",
    "flux2": "black-forest-labs/FLUX.2-klein-base-4B",
    "z_image": "Tongyi-MAI/Z-Image",
    "qwen_image": "Qwen/Qwen-Image",
    "qwen_image_edit": "Qwen/Qwen-Image-Edit",
    "qwen_image_edit_plus": "Qwen/Qwen-Image-Edit-2511",
    "flux2_dev": "black-forest-labs/FLUX.2-dev",
    "chroma": "lodestones/Chroma1-HD",
    "krea2": "krea/Krea-2-Raw",
}
TYPES = {
    "sd": "STABLE_DIFFUSION_15", "sdxl": "STABLE_DIFFUSION_XL_10_BASE", "sd3": "STABLE_DIFFUSION_35",
    "flux": "FLUX_DEV_1", "flux_kontext": "FLUX_DEV_1", "flux2": "FLUX_2", "z_image": "Z_IMAGE", "qwen_image": "QWEN",
    "qwen_image_edit": "QWEN", "qwen_image_edit_plus": "QWEN", "flux2_dev": "FLUX_2", "chroma": "CHROMA_1",
    "krea2": "KREA_2",
}  # fmt: skip


FLAVOURS = {
    "sd": "sd1x", "flux_kontext": "flux", "flux2_dev": "flux2", "qwen_image_edit": "qwen_image",
    "qwen_image_edit_plus": "qwen_image",
}  # fmt: skip
"""SimpleTuner's names of families that it has as flavours of another."""


def minimal(program: str, family: str) -> dict[str, Any]:
    """A short config of a program that trains a family's base."""
    base = BASES[family]
    if program == "ai-toolkit":
        process: dict[str, Any] = {"network": {"type": "lora"}, "model": {"name_or_path": base}}
        process["train"] = {"timestep_type": "sigmoid"}
        if FAMILIES[family].needs_sources:
            process["datasets"] = [{"folder_path": "after", "control_path": "before"}]
        return {"job": "extension", "config": {"name": "x", "process": [process]}}
    if program == "OneTrainer":
        return {"training_method": "LORA", "model_type": TYPES[family], "base_model_name": base}
    if program == "SimpleTuner":
        of_base = {
            "model_family": FLAVOURS.get(family, family),
            "pretrained_model_name_or_path": base,
        }
        return {"model_type": "lora", "flow_schedule_shift": 3} | of_base
    network = {"network_module": "networks.lora", "network_dim": 4}
    return {"pretrained_model_name_or_path": base, "min_snr_gamma": 5} | network


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("program", ["ai-toolkit", "OneTrainer", "SimpleTuner", "sd-scripts"])
def test_every_family_of_every_program_is_accepted(program: str, family: str, tmp_path: Path, command: Command) -> None:
    file, given = tmp_path / "theirs.json", minimal(program, family)
    file.write_text(json.dumps(given), encoding="utf-8")
    found = import_given(given, file, str(recognised(given)))
    config = yaml.safe_load(as_yaml(found))
    assert found.program == program and found.family == family
    model = config["model"]["init_args"]
    assert model["pretrained_model_name_or_path"] == BASES[family]
    if program == "ai-toolkit" and FAMILIES[family].needs_sources:
        assert config["data"]["init_args"]["source_data_dir"] == "before"
    DiffusionLoRA(**{key: value for key, value in model.items() if key != "optimizer"})
    if program == "sd-scripts":
        assert any("min_snr_gamma: has no counterpart" in line for line in found.lines) == FAMILIES[family].is_flow
    if program == "ai-toolkit":
        imported(command, file)


@pytest.mark.parametrize("program", ["ai-toolkit", "OneTrainer", "SimpleTuner", "sd-scripts"])
def test_a_transformers_file_stays_the_base(program: str, tmp_path: Path) -> None:
    """The file that sd-scripts' users name, with the other components of the family's own base."""
    theirs = tmp_path / "flux1-dev-fp8.safetensors"
    given = json.loads(json.dumps(minimal(program, "flux")).replace(BASES["flux"], str(theirs)))
    found = import_given(given, tmp_path / "theirs.json", str(recognised(given)))
    model = yaml.safe_load(as_yaml(found))["model"]["init_args"]
    assert (model["pretrained_model_name_or_path"], model["denoiser_file"]) == (BASES["flux"], str(theirs))


@pytest.mark.parametrize("family", ["sd", "sd3"])
def test_a_full_fine_tuning_stays_one(family: str, tmp_path: Path, command: Command) -> None:
    given = {"training_method": "FINE_TUNE", "model_type": TYPES[family], "base_model_name": BASES[family], "epochs": 3}
    (tmp_path / "full.json").write_text(json.dumps(given), encoding="utf-8")
    config, _ = imported(command, tmp_path / "full.json")
    assert config["model"]["class_path"].endswith("DiffusionFineTuning")
    model = {key: value for key, value in config["model"]["init_args"].items() if key != "optimizer"}
    assert isinstance(DiffusionFineTuning(**model), DiffusionFineTuning)
    assert config["trainer"]["max_epochs"] == 3 and "rank" not in model


@pytest.mark.parametrize(
    ("name", "class_name", "remark"),
    [
        ("AdamW8bit", "torch.optim.AdamW", "in 32 bits"),
        ("bnb.optim.PagedAdamW8bit", "torch.optim.AdamW", "in 32 bits"),
        ("Prodigy", "prodigyopt.Prodigy", ""),
        ("prodigy8bit", "prodigyopt.Prodigy", ""),
        ("DAdaptAdam", "prodigyopt.Prodigy", "instead of DAdaptAdam: it finds its rate too"),
        ("Adafactor", "transformers.Adafactor", ""),
        ("Lion", "lion_pytorch.Lion", ""),
        ("optimi-lion", "lion_pytorch.Lion", ""),
        ("adamw_bf16", "torch.optim.AdamW", ""),
        ("AdamWScheduleFree", "schedulefree.AdamWScheduleFree", ""),
        ("CAME", "came_pytorch.CAME", ""),
        ("Sophia", "torch.optim.AdamW", "instead of Sophia, which is not known here"),
    ],
)
def test_an_optimizer_is_the_same_or_the_nearest(name: str, class_name: str, remark: str, tmp_path: Path) -> None:
    given = {"pretrained_model_name_or_path": BASES["sd"], "network_dim": 4, "optimizer_type": name}
    found = import_given(given, tmp_path / "x.toml", "kohya")
    assert found.value("model.optimizer")["class_path"] == class_name
    (line,) = [line for line in found.lines if line.startswith("optimizer_type:")]
    assert remark in line


@pytest.mark.parametrize(
    ("kind", "ours"),
    [("qfloat8", "int8"), ("uint3", "nf4"), ("int8-quanto", "int8"), ("nf4-bnb", "nf4"), ("NFLOAT_4", "nf4"),
     ("FLOAT_8", "int8"), ("INT_W8A8", "int8"), ("no_change", None), ("BFLOAT_16", None), ("FLOAT_32", None)],
)  # fmt: skip
def test_few_bits_are_eight_or_four(kind: str, ours: str | None) -> None:
    from lightning_aigc.cli.import_config.common import quantization_of

    assert quantization_of(kind) == ours


@pytest.mark.parametrize("module", [ai_toolkit, kohya, one_trainer, simple_tuner])
def test_every_rule_that_takes_a_value_names_a_key_of_the_classes(module: Any) -> None:
    tables = [module.RULES, getattr(module, "DATASET", {}), getattr(module, "BACKEND", {})]
    places = {rule.place for table in tables for rule in table.values() if isinstance(rule, Take)}
    classes: dict[str, tuple[Any, ...]] = {
        "model": (DiffusionLoRA, DiffusionTraining, TrainingSettings),
        "data": (ImageCaptionData,),
        "trainer": (Trainer,),
        "plugin": (FusedBackwardPrecision,),
    }
    for place in places - {"seed_everything"}:
        block, _, name = place.partition(".")
        assert any(name in inspect.signature(each).parameters for each in classes[block]), place


def test_a_dataset_config_alone_is_imported(folder: Path, command: Command) -> None:
    config, said = imported(command, folder / "kohya_dataset.toml", "--base", "sdxl")
    assert config["data"]["init_args"]["train_data_dir"] == "C:\\hoge"
    assert config["model"]["init_args"]["pretrained_model_name_or_path"] == BASES["sdxl"]
    assert "datasets.subsets.is_reg: data.init_args.class_data_dir" in said.err


def test_files_that_are_named_and_not_there_are_said(folder: Path, command: Command) -> None:
    for name in ("kohya_dataset.toml", "kohya_prompts.txt", "one_trainer_concepts.json", "simple_tuner_backend.json"):
        (folder / name).unlink()
    _, said = imported(command, folder / "kohya.toml")
    assert "dataset_config: has no counterpart: kohya_dataset.toml is not there; set data.init_args" in said.err
    assert "sample_prompts: has no counterpart: kohya_prompts.txt is not there" in said.err
    _, said = imported(command, folder / "one_trainer.json")
    assert "concept_file_name: has no counterpart: set data.init_args.train_data_dir to the folder" in said.err
    _, said = imported(command, folder / "simple_tuner.json")
    assert "simple_tuner_backend.json is not there; set data.init_args.train_data_dir" in said.err


@pytest.mark.parametrize(
    ("config", "key", "file", "place"),
    [
        ("one_trainer.json", "concept_file_name", "one_trainer_concepts.json", "train_data_dir"),
        ("simple_tuner.json", "data_backend_config", "simple_tuner_backend.json", "train_data_dir"),
    ],
)
def test_a_file_that_is_named_by_another_machines_path_is_found_beside_the_config(
    folder: Path, command: Command, config: str, key: str, file: str, place: str
) -> None:
    given = json.loads((folder / config).read_text(encoding="utf-8"))
    found, _ = imported(command, folder / config)
    (folder / "moved.json").write_text(json.dumps(given | {key: rf"C:\\trainer\{file}"}), encoding="utf-8")
    again, _ = imported(command, folder / "moved.json")
    assert again["data"]["init_args"][place] == found["data"]["init_args"][place]


def test_a_misspelt_key_is_named_with_the_nearest(folder: Path) -> None:
    given = tomllib.loads((folder / "kohya.toml").read_text(encoding="utf-8"))
    given["training"]["gradient_acumulation_steps"] = 3
    found = import_given(given, folder / "kohya.toml", "kohya")
    assert (
        "gradient_acumulation_steps: no key of sd-scripts that is known here; ignored; did you mean"
        " gradient_accumulation_steps?" in found.lines
    )


@pytest.mark.parametrize(
    ("text", "name", "sentence"),
    [
        ("x = [", "a.toml", "a.toml is no TOML: "),
        ("{", "a.json", "a.json is no JSON: "),
        ("a: [", "a.yaml", "a.yaml is no YAML: "),
        ("a: 1", "a.yaml", "a.yaml is no config of ai-toolkit, sd-scripts, OneTrainer, SimpleTuner; give the file"),
        ("trainer: {}\ndata: {}", "a.yaml", "a.yaml is a config of lightning fit already; give it to lightning fit -c"),
        (
            '{"zero_optimization": {}}',
            "a.json",
            "a.json is DeepSpeed's or accelerate's; give it to lightning import-d",
        ),
        (
            '{"training_method": "LORA", "model_type": "SANA"}',
            "a.json",
            "a.json trains SANA, which does not train",
        ),
        ('{"training_method": "EMBEDDING"}', "a.json", "a.json trains by EMBEDDING; here are LORA and FINE_TUNE"),
        (
            "job: extension\nconfig: {name: x, process: [{network: {type: lora}, model: {arch: wan21}}]}",
            "a.yaml",
            "a.yaml trains wan21, which does not train here; families here are chroma",
        ),
        ("job: extension\nconfig: {name: x}", "a.yaml", "config.process must be a list of one training"),
        (
            'pretrained_model_name_or_path = "black-forest-labs/FLUX.1-schnell"\nnetwork_dim = 4',
            "a.toml",
            "for that, add --base black-forest-labs/FLUX.1-dev",
        ),
        ('network_dim = "many"\nnetwork_alpha = 1', "a.toml", "network_dim is 'many', which cannot be read"),
        ('network_dim = 4\nmixed_precision = "int4"', "a.toml", "mixed_precision is int4, which is not known here"),
    ],
)
def test_what_cannot_be_imported_is_one_sentence(
    text: str, name: str, sentence: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text, encoding="utf-8")
    said = command("import-config", name, "-o", "mine.yaml")
    assert said.code == 1 and len(said.errors) == 1 and sentence in said.err, said.err
    assert not Path("mine.yaml").exists()


def test_the_remedy_of_a_distilled_base_works(tmp_path: Path, command: Command) -> None:
    file = tmp_path / "schnell.toml"
    text = 'pretrained_model_name_or_path = "black-forest-labs/FLUX.1-schnell"\nnetwork_module = "networks.lora_flux"'
    file.write_text(text, encoding="utf-8")
    config, _ = imported(command, file, "--base", BASES["flux"])
    assert config["model"]["init_args"]["pretrained_model_name_or_path"] == BASES["flux"]


def test_an_existing_file_is_kept_without_force(folder: Path, command: Command) -> None:
    (folder / "mine.yaml").write_text("mine", encoding="utf-8")
    said = command("import-config", folder / "kohya.toml", "-o", folder / "mine.yaml")
    assert said.code == 1 and "mine.yaml exists already; name another with -o, or add --force" in said.err
    assert (folder / "mine.yaml").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("name", [*CONFIGS, "kohya_dataset.toml"])
def test_fit_names_the_verb_that_imports_it_and_the_command_works(
    name: str, folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    said = command("fit", "-c", name)
    (error,) = said.errors
    assert said.code == 2 and len(said.err.splitlines()) == 1
    remedy = error.partition("import it first: lightning ")[2].split()
    assert command(*remedy).code == 0
    assert command("fit", "-c", remedy[-1], "--print_config").code == 0


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[3] / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_our_own_configs_are_not_taken_for_others(path: Path) -> None:
    assert recognised(read_file(path)) is None

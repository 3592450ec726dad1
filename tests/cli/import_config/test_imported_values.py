"""Values of other trainers' keys: folders, repeats, rates, sizes, adapters and prompts arrive as they mean there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_aigc.cli.import_config.command import as_yaml, import_given, read_file, recognised
from lightning_aigc.cli.import_config.imported import Imported
from lightning_aigc.data import ImageCaptionData
from lightning_aigc.diffusion import DiffusionLoRA

Command = Callable[..., Any]
SD = "stable-diffusion-v1-5/stable-diffusion-v1-5"
SDXL = "stabilityai/stable-diffusion-xl-base-1.0"
KOHYA: dict[str, Any] = {"pretrained_model_name_or_path": SD, "network_module": "networks.lora", "network_dim": 4}
ONE_TRAINER: dict[str, Any] = {"training_method": "LORA", "model_type": "STABLE_DIFFUSION_15", "base_model_name": SD}
SIMPLE_TUNER: dict[str, Any] = {"model_family": "sd1x", "model_type": "lora", "pretrained_model_name_or_path": SD}


def ai_toolkit(**process: Any) -> dict[str, Any]:
    """A config of ai-toolkit whose process has these keys."""
    own = {"network": {"type": "lora"}, "model": {"name_or_path": SD, "arch": "sd1"}}
    return {"job": "extension", "config": {"name": "x", "process": [own | process]}}


def values(given: dict[str, Any], folder: Path) -> tuple[dict[str, Any], dict[str, Any], Imported]:
    """Arguments of the model and of the data that a file becomes, which both classes accept, and the import."""
    file = folder / "theirs.json"
    found = import_given(given, file, str(recognised(given)))
    config = yaml.safe_load(as_yaml(found))
    model, data = config["model"]["init_args"], config["data"]["init_args"]
    accepted = {key: value for key, value in model.items() if key not in ("optimizer", "lora_from")}
    DiffusionLoRA(**accepted)  # a file to begin with may lie on another machine
    ImageCaptionData(**data)
    return model, data, found


def line_of(found: Imported, key: str) -> str:
    """The one line of a key."""
    (line,) = [line for line in found.lines if line.startswith(f"{key}:")]
    return line


def write(folder: Path, name: str, content: Any) -> str:
    (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return name


# Folders and repeats


@pytest.mark.parametrize("key", ["is_regularisation_data", "is_regularization_data"])
def test_simple_tuners_regularisation_images_are_class_images_wherever_they_stand(key: str, tmp_path: Path) -> None:
    backends = [
        {"id": "reg", "type": "local", "instance_data_dir": "people", key: True, "resolution": 256},
        {"id": "own", "type": "local", "instance_data_dir": "zorp", "repeats": 2, "resolution": 512},
    ]
    given = SIMPLE_TUNER | {"data_backend_config": write(tmp_path, "backends.json", backends)}
    _, data, found = values(given, tmp_path)
    assert (data["train_data_dir"], data["class_data_dir"], data["resolution"]) == ("zorp", "people", 512)
    assert data["num_repeats"] == 3 and line_of(found, "data_backend.repeats").endswith("num_repeats: 3")


def test_every_key_of_simple_tuners_backend_has_a_line(tmp_path: Path) -> None:
    backend = {
        "id": "own", "type": "local", "instance_data_dir": "zorp", "crop": True, "crop_style": "random",
        "crop_aspect": "square", "caption_strategy": "textfile", "cache_dir_vae": "cache", "probability": 0.5,
        "minimum_image_size": 256, "repeats": 0, "resolution": 512, "resolution_type": "pixel",
    }  # fmt: skip
    found = values(SIMPLE_TUNER | {"data_backend_config": write(tmp_path, "b.json", [backend])}, tmp_path)[2]
    for key in backend.keys() - {"instance_data_dir", "type", "repeats"}:
        assert line_of(found, f"data_backend.{key}"), key
    assert not [line for line in found.lines if "no key of" in line]
    assert "has no counterpart" in line_of(found, "data_backend.crop_style")


@pytest.mark.parametrize(
    ("folder", "repeats", "ours", "remark"),
    [
        ("train/zorp", 3, 3, "num_repeats: 3"),
        ("train/4_zorp", 12, 3, "times the 4 of the folder's name"),
        ("C:\\train\\4_zorp", 4, 1, "times the 4 of the folder's name"),
        ("train/4_zorp/", 3, 1, "4_zorp repeats 4 times here instead of 3: rename it to 3_zorp"),
        ("train/4_zorp", 1, 1, "4_zorp repeats 4 times here instead of 1: rename it to zorp"),
        ("train/2024_zorp", 3, 3, "num_repeats: 3"),
    ],
)
@pytest.mark.parametrize("program", ["sd-scripts", "OneTrainer", "SimpleTuner", "ai-toolkit"])
def test_a_number_in_the_folders_name_does_not_multiply_the_repeats(
    program: str, folder: str, repeats: int, ours: int, remark: str, tmp_path: Path
) -> None:
    """The data module repeats the images of 4_zorp four times; the programs do so below sd-scripts' train_data_dir."""
    if program == "sd-scripts":
        subset = {"image_dir": folder, "num_repeats": repeats}
        dataset = {"datasets": [{"resolution": 512, "subsets": [subset]}]}
        given, key = KOHYA | {"dataset_config": write(tmp_path, "d.json", dataset)}, "datasets.subsets.num_repeats"
    elif program == "OneTrainer":
        given, key = ONE_TRAINER | {"concepts": [{"path": folder, "balancing": repeats}]}, "concepts.balancing"
    elif program == "SimpleTuner":
        backend = {"id": "own", "type": "local", "instance_data_dir": folder, "repeats": repeats - 1}
        given = SIMPLE_TUNER | {"data_backend_config": write(tmp_path, "b.json", [backend])}
        key = "data_backend.repeats"
    else:
        given, key = ai_toolkit(datasets=[{"folder_path": folder, "num_repeats": repeats}]), "datasets.num_repeats"
    _, data, found = values(given, tmp_path)
    assert data.get("num_repeats", 1) == ours
    assert remark in line_of(found, key)


def test_several_folders_are_named_with_their_repeats(tmp_path: Path) -> None:
    subsets = [{"image_dir": "a/zorp"}, {"image_dir": "b/4_cup", "num_repeats": 10}, {"image_dir": "c/zorp"}]
    dataset = {"general": {"num_repeats": 2}, "datasets": [{"resolution": 512, "subsets": subsets}]}
    found = values(KOHYA | {"dataset_config": write(tmp_path, "d.json", dataset)}, tmp_path)[2]
    line = line_of(found, "datasets.subsets.image_dir")
    assert line.endswith("a/zorp, the first of 3; put all into one folder, named 2_a_zorp, 10_cup, 2_zorp")


def test_a_number_of_samples_is_no_number_of_repeats(tmp_path: Path) -> None:
    concept = {"path": "zorp", "balancing": 100, "balancing_strategy": "SAMPLES"}
    _, data, found = values(ONE_TRAINER | {"concepts": [concept]}, tmp_path)
    assert data.get("num_repeats", 1) == 1
    assert "has no counterpart: 100 images an epoch" in line_of(found, "concepts.balancing")


# Rates and warm-up


@pytest.mark.parametrize(
    ("given", "rate", "of_text"),
    [
        ({"learning_rate": 3e-4, "unet": {"learning_rate": 1e-4}, "text_encoder": {"train": False}}, 1e-4, None),
        ({"unet": {"learning_rate": 1e-4}, "learning_rate": 3e-4}, 1e-4, 3e-4),
        ({"unet": {"learning_rate": 1e-4}, "learning_rate": 3e-4, "text_encoder": {"learning_rate": 5e-5}}, 1e-4, 5e-5),
        ({"learning_rate": 3e-4, "unet": {"learning_rate": None}}, 3e-4, None),
        ({"learning_rate": 3e-4, "transformer": {"learning_rate": 1e-4}}, 3e-4, None),
    ],
)
def test_a_parts_own_rate_takes_precedence_in_one_trainer(
    given: dict[str, Any], rate: float, of_text: float | None, tmp_path: Path
) -> None:
    model, _, found = values(ONE_TRAINER | given, tmp_path)
    assert model["learning_rate"] == rate and model.get("text_encoder_lr") == of_text
    line_of(found, "learning_rate")


def test_a_transformers_own_rate_takes_precedence_in_one_trainer(tmp_path: Path) -> None:
    given = {"training_method": "LORA", "model_type": "FLUX_DEV_1", "base_model_name": "black-forest-labs/FLUX.1-dev"}
    rates = {"learning_rate": 3e-4, "transformer": {"learning_rate": 1e-4}, "prior": {"learning_rate": 1e-5}}
    model, _, found = values(given | rates, tmp_path)
    assert model["learning_rate"] == 1e-4
    assert line_of(found, "learning_rate") == "learning_rate: not needed: transformer.learning_rate takes precedence"
    assert "has no counterpart" in line_of(found, "prior.learning_rate")


def test_one_trainer_trains_a_u_nets_text_encoder_unless_it_says_otherwise(tmp_path: Path) -> None:
    assert values(ONE_TRAINER, tmp_path)[0]["train_text_encoder"] is True
    assert not values(ONE_TRAINER | {"text_encoder": {"train": False}}, tmp_path)[0].get("train_text_encoder")
    assert not values(ONE_TRAINER | {"text_encoder": {"learning_rate": 0}}, tmp_path)[0].get("train_text_encoder")


@pytest.mark.parametrize("order", [("unet_lr", "learning_rate"), ("learning_rate", "unet_lr")])
def test_unet_lr_is_the_rate_of_the_denoiser_in_any_order(order: tuple[str, str], tmp_path: Path) -> None:
    rates = {"unet_lr": 1e-4, "learning_rate": 3e-4}
    model, _, _ = values(KOHYA | {key: rates[key] for key in order}, tmp_path)
    assert (model["learning_rate"], model["text_encoder_lr"]) == (1e-4, 3e-4)


def test_ai_toolkit_reads_one_rate(tmp_path: Path) -> None:
    train = {"lr": 1e-4, "unet_lr": 3e-4, "text_encoder_lr": 1e-5}
    model, _, found = values(ai_toolkit(train=train), tmp_path)
    assert model["learning_rate"] == 1e-4 and model.get("text_encoder_lr") is None
    assert "not needed" in line_of(found, "train.unet_lr") and "not needed" in line_of(found, "train.text_encoder_lr")


@pytest.mark.parametrize("rate", [0, 0.0, [0, 0], [0.0, 1e-5]])
def test_text_encoders_of_rate_0_are_not_trained(rate: Any, tmp_path: Path) -> None:
    """networks.lora reads the first rate of a list, and leaves a part of rate 0 out."""
    model, _, found = values(KOHYA | {"text_encoder_lr": rate}, tmp_path)
    assert model["train_text_encoder"] is False and model.get("text_encoder_lr") is None
    assert "train_text_encoder: false, a rate of 0 trains no text encoder" in line_of(found, "text_encoder_lr")


def test_a_second_rate_of_text_encoders_is_said(tmp_path: Path) -> None:
    model, _, found = values(KOHYA | {"text_encoder_lr": [1e-5, 2e-5]}, tmp_path)
    assert model["text_encoder_lr"] == 1e-5 and "the first of 1e-05, 2e-05" in line_of(found, "text_encoder_lr")


@pytest.mark.parametrize(
    ("number", "batches", "ours"), [(0.1, 1, 0), (1.0, 1, 0), (50.0, 1, 50), (50.0, 4, 12), (0, 1, 0), (-5, 1, 0)]
)
def test_one_trainers_warm_up_counts_batches_or_a_share(number: float, batches: int, ours: int, tmp_path: Path) -> None:
    more = {"learning_rate_warmup_steps": number, "gradient_accumulation_steps": batches}
    model, _, found = values(ONE_TRAINER | more, tmp_path)
    assert model["lr_warmup_steps"] == ours
    assert ("has no counterpart" in line_of(found, "learning_rate_warmup_steps")) == (0 < number <= 1)
    assert not [line for line in found.notes if "lr_warmup_steps" in line]


def test_a_share_of_unknown_steps_is_said_once(tmp_path: Path) -> None:
    model, _, found = values(KOHYA | {"max_train_epochs": 3, "lr_warmup_steps": 0.1}, tmp_path)
    assert model["lr_warmup_steps"] == 0 and "0.1 of the steps" in line_of(found, "lr_warmup_steps")


def test_numbers_that_are_written_as_text_are_numbers(tmp_path: Path) -> None:
    more = {"max_train_steps": "0", "num_train_epochs": "3", "lr_warmup_steps": "0", "learning_rate": "1e-4"}
    given = SIMPLE_TUNER | more | {"revision": "2"}
    found = import_given(given, tmp_path / "x.json", "simple_tuner")
    config = yaml.safe_load(as_yaml(found))
    assert config["trainer"]["max_epochs"] == 3 and config["model"]["init_args"]["max_train_steps"] is None
    assert config["model"]["init_args"]["learning_rate"] == 1e-4 and config["model"]["init_args"]["revision"] == "2"


# Concepts of OneTrainer


def test_files_that_were_read_are_not_without_a_counterpart(tmp_path: Path) -> None:
    files = {
        "concept_file_name": write(tmp_path, "c.json", [{"path": "zorp"}]),
        "sample_definition_file_name": write(tmp_path, "s.json", [{"prompt": "a zorp"}]),
    }
    model, data, found = values(ONE_TRAINER | files, tmp_path)
    assert data["train_data_dir"] == "zorp" and model["validation_prompts"] == ["a zorp"]
    for key, name in files.items():
        assert line_of(found, key) == f"{key}: read: {name}"


@pytest.mark.parametrize("validates", [True, False])
def test_every_key_of_a_concept_has_a_line(validates: bool, tmp_path: Path) -> None:
    concepts = [
        {"name": "v", "path": "held_out", "type": "VALIDATION"},
        {
            "name": "zorp", "path": "zorp", "type": "STANDARD", "enabled": True, "balancing": 1.0, "loss_weight": 0.5,
            "balancing_strategy": "REPEATS", "seed": 5, "image_variations": 2, "image": {"enable_random_hue": True},
            "text": {"prompt_source": "concept", "prompt_path": "prompts.txt", "keep_tags_count": 2},
        },
        {"name": "p", "path": "people", "type": "PRIOR_PREDICTION", "loss_weight": 0.25},
        {"name": "off", "path": "off", "enabled": False},
    ]  # fmt: skip
    model, data, found = values(ONE_TRAINER | {"concepts": concepts, "validation": validates}, tmp_path)
    assert (data["train_data_dir"], data["class_data_dir"]) == ("zorp", "people")
    assert data.get("validation_data_dir") == ("held_out" if validates else None)
    assert model["prior_loss_weight"] == 0.25
    assert "has no counterpart: concept: write the lines of prompts.txt" in line_of(
        found, "concepts.text.prompt_source"
    )
    for key in ("name", "path", "balancing_strategy", "seed", "image_variations", "image.enable_random_hue"):
        assert line_of(found, f"concepts.{key}"), key
    assert [line for line in found.lines if line.startswith("concepts.type:") and "VALIDATION" in line]
    assert "has no counterpart: images have one weight" in line_of(found, "concepts.loss_weight")
    assert not [line for line in found.lines if "no key of" in line]


# Sizes and crops


@pytest.mark.parametrize(
    ("text", "side"), [("768,512", 624), ("64,96", 80), ("500", 496), ("512", 512), ([512, 768], 624), (770, 768)]
)
def test_a_resolution_is_rounded_to_what_the_data_takes(text: Any, side: int, tmp_path: Path) -> None:
    _, data, found = values(KOHYA | {"resolution": text}, tmp_path)
    assert data["resolution"] == side
    assert ("the nearest multiple of 8" in line_of(found, "resolution")) == (side != text and str(side) != text)


def test_every_programs_resolution_is_rounded(tmp_path: Path) -> None:
    backends = write(tmp_path, "b.json", [{"id": "a", "type": "local", "instance_data_dir": "zorp", "resolution": 500}])
    files = [
        ONE_TRAINER | {"resolution": "500"},
        SIMPLE_TUNER | {"resolution": 500, "validation_resolution": "500x500"},
        SIMPLE_TUNER | {"data_backend_config": backends},
        ai_toolkit(datasets=[{"folder_path": "zorp", "resolution": [256, 500]}]),
    ]
    for given in files:
        assert values(given, tmp_path)[1]["resolution"] == 496, given
    flux = {"name_or_path": "black-forest-labs/FLUX.1-dev", "arch": "flux"}
    datasets = [{"folder_path": "zorp", "resolution": 600}]
    assert values(ai_toolkit(model=flux, datasets=datasets), tmp_path)[1]["resolution"] == 608  # 16 x 38


def test_sd_scripts_buckets_have_its_own_defaults(tmp_path: Path) -> None:
    given = KOHYA | {"pretrained_model_name_or_path": SDXL, "resolution": "1024,1024"}
    _, data, _ = values(given, tmp_path)
    assert (data["enable_bucket"], data["max_bucket_reso"]) == (False, 1024)
    dataset = {"datasets": [{"enable_bucket": True, "max_bucket_reso": 1500, "subsets": [{"image_dir": "zorp"}]}]}
    _, data, found = values(given | {"dataset_config": write(tmp_path, "d.json", dataset)}, tmp_path)
    assert (data["enable_bucket"], data["max_bucket_reso"]) == (True, 1504)
    assert not [line for line in found.notes if "bucket" in line]


def test_random_crops_are_random_here_unless_they_are_cached(tmp_path: Path) -> None:
    crops = [
        KOHYA | {"random_crop": True},
        ai_toolkit(datasets=[{"folder_path": "zorp", "random_crop": True}]),
        ONE_TRAINER | {"latent_caching": False, "concepts": [{"path": "z", "image": {"enable_crop_jitter": True}}]},
    ]
    for given in crops:
        _, data, _ = values(given, tmp_path)
        assert data["center_crop"] is False and data["cache_latents"] is False
    _, data, found = values(KOHYA | {"random_crop": True, "cache_latents": True}, tmp_path)
    assert data.get("center_crop", True) and "has no counterpart: a cached image" in line_of(found, "random_crop")


# Adapters


@pytest.mark.parametrize(
    ("arguments", "dim", "ours"),
    [
        (["algo=lokr", "factor=4"], 10000, {"rank": 10000, "lora_alpha": None, "lokr_factor": 4}),
        (["algo=lokr", "full_matrix=True"], 16, {"rank": 10000, "lora_alpha": None, "lokr_factor": 8}),
        (["algo=lokr", "factor=-1", "preset=attn-mlp"], 16, {"rank": 16, "lora_alpha": 2.0, "lokr_factor": 8}),
    ],
)
def test_lycoris_lokr_of_sd_scripts_is_a_lokr(
    arguments: list[str], dim: int, ours: dict[str, Any], tmp_path: Path
) -> None:
    network = {"network_module": "lycoris.kohya", "network_dim": dim, "network_alpha": 2, "network_args": arguments}
    model, _, found = values(KOHYA | network, tmp_path)
    assert model["lora_type"] == "lokr" and {key: model[key] for key in ours} == ours
    assert not model.get("train_text_encoder")
    wanted = ["attention", "feed_forward", *([] if "preset=attn-mlp" in arguments else ["convolutions"])]
    assert model["lora_targets"] == wanted
    assert not [line for line in found.lines if "has no counterpart" in line]


@pytest.mark.parametrize(
    ("algorithm", "rank", "is_said"), [("loha", 8, True), ("locon", 8, False), ("full", 10000, True)]
)
def test_other_kinds_of_lycoris_are_loras(algorithm: str, rank: int, is_said: bool, tmp_path: Path) -> None:
    arguments = [f"algo={algorithm}", "dropout=0.1"]
    network = {"network_module": "lycoris.kohya", "network_dim": rank, "network_args": arguments}
    model, _, found = values(KOHYA | network, tmp_path)
    assert model.get("lora_type", "lora") == "lora" and model["rank"] == min(rank, 64)
    assert model["lora_dropout"] == 0.1
    assert ("has no counterpart" in line_of(found, "network_args.algo")) == is_said


def test_lokrs_of_the_other_programs_are_lokrs(tmp_path: Path) -> None:
    lokr = {"algo": "lokr", "linear_dim": 16, "linear_alpha": 8, "factor": 4,
            "apply_preset": {"target_module": ["Attention"]}}  # fmt: skip
    lycoris = {"lora_type": "lycoris", "lycoris_config": write(tmp_path, "lycoris.json", lokr)}
    for given, ours in (
        (ONE_TRAINER | {"peft_type": "LOKR", "lokr_dim": 16, "lora_alpha": 8, "lokr_decompose_factor": 4}, (16, 8.0)),
        (ONE_TRAINER | {"peft_type": "LOKR", "lokr_full_matrix": True, "lokr_decompose_factor": 4}, (10000, None)),
        (ai_toolkit(network={"type": "lokr", "lokr_factor": 4, "linear": 16}), (10000, None)),
        (
            ai_toolkit(
                network={"type": "lokr", "lokr_factor": 4, "lokr_full_rank": False, "linear": 16, "linear_alpha": 8}
            ),
            (16, 8.0),
        ),
        (SIMPLE_TUNER | lycoris, (16, 8.0)),
    ):
        model, _, found = values(given, tmp_path)
        assert (model["lora_type"], model["lokr_factor"]) == ("lokr", 4), given
        assert (model["rank"], model["lora_alpha"]) == ours, given
        assert not [line for line in found.lines if "has no counterpart" in line]


def test_a_file_to_begin_with_is_lora_from(tmp_path: Path) -> None:
    (tmp_path / "first.safetensors").write_bytes(b"")
    for given, key in (
        (KOHYA | {"network_weights": "first.safetensors", "dim_from_weights": True}, "network_weights"),
        (ONE_TRAINER | {"lora_model_name": "C:\\loras\\first.safetensors"}, "lora_model_name"),
        (SIMPLE_TUNER | {"init_lora": "loras/first.safetensors"}, "init_lora"),
        (ai_toolkit(network={"type": "lora", "pretrained_lora_path": "first.safetensors"}),
         "network.pretrained_lora_path"),
    ):  # fmt: skip
        model, _, found = values(given, tmp_path)
        assert model["lora_from"] == str(tmp_path / "first.safetensors"), key
        assert not [line for line in found.lines if "has no counterpart" in line]
    model, _, found = values(KOHYA | {"network_weights": "elsewhere.safetensors"}, tmp_path)
    assert model["lora_from"] == "elsewhere.safetensors"
    assert "there is no such file here" in line_of(found, "network_weights")


@pytest.mark.parametrize(
    ("train", "ours"),
    [
        (
            {"diff_output_preservation": True, "diff_output_preservation_class": "mug"},
            {"preserve": "class", "class_word": "mug", "preserve_weight": 1.0},
        ),
        (
            {"diff_output_preservation": True, "diff_output_preservation_multiplier": 0.3},
            {"preserve": "class", "class_word": "", "preserve_weight": 0.3},
        ),
        ({"blank_prompt_preservation": True}, {"preserve": "blank", "preserve_weight": 1.0}),
        ({"inverted_mask_prior": True}, {"preserve": "own", "preserve_weight": 0.5}),
    ],
)
def test_ai_toolkits_preservation_is_preserve(train: dict[str, Any], ours: dict[str, Any], tmp_path: Path) -> None:
    datasets = [{"folder_path": "zorp", "mask_path": "masks", "caption_dropout_rate": 0.1}]
    model, data, found = values(ai_toolkit(train=train, trigger_word="zorp", datasets=datasets), tmp_path)
    assert {key: model[key] for key in ours} == ours
    assert data["caption_dropout_rate"] == (0.0 if ours["preserve"] == "blank" else 0.1)
    assert not [line for line in found.lines if "has no counterpart" in line]


def test_preservation_that_cannot_be_is_said(tmp_path: Path) -> None:
    train = {"diff_output_preservation": True, "diff_output_preservation_class": "mug"}
    model, _, found = values(ai_toolkit(train=train), tmp_path)
    assert model.get("preserve") is None
    assert "preserve: class needs a trigger_word" in line_of(found, "train.diff_output_preservation")
    edit = {"name_or_path": "Qwen/Qwen-Image-Edit", "arch": "qwen_image_edit"}
    datasets = [{"folder_path": "after", "control_path": "before"}]
    model, _, found = values(ai_toolkit(train=train, trigger_word="zorp", model=edit, datasets=datasets), tmp_path)
    assert model.get("preserve") is None
    assert "it is for images from text alone" in line_of(found, "train.diff_output_preservation")


def test_a_training_adapter_goes_with_its_few_step_base(tmp_path: Path) -> None:
    schnell = {"name_or_path": "black-forest-labs/FLUX.1-schnell", "is_flux": True}
    adapter = "ostris/FLUX.1-schnell-training-adapter"
    given = ai_toolkit(model=schnell | {"assistant_lora_path": adapter})
    model, _, _ = values(given, tmp_path)
    assert model["pretrained_model_name_or_path"] == "black-forest-labs/FLUX.1-schnell"
    assert model["training_adapter"] == f"{adapter}/pytorch_lora_weights.safetensors"
    turbo = {"model_family": "z-image", "model_flavour": "turbo", "model_type": "lora"}
    adapter = "ostris/zimage_turbo_training_adapter"
    model, _, _ = values(turbo | {"assistant_lora_path": adapter}, tmp_path)
    assert model["pretrained_model_name_or_path"] == "Tongyi-MAI/Z-Image-Turbo"
    assert model["training_adapter"] == f"{adapter}/zimage_turbo_training_adapter_v1.safetensors"
    own = import_given(given, tmp_path / "x.json", "ai_toolkit", base="black-forest-labs/FLUX.1-dev")
    assert "training_adapter" not in yaml.safe_load(as_yaml(own))["model"]["init_args"]


@pytest.mark.parametrize("given", [KOHYA, SIMPLE_TUNER, ONE_TRAINER], ids=["sd-scripts", "SimpleTuner", "OneTrainer"])
def test_a_full_fine_tuning_has_no_adapter(given: dict[str, Any], tmp_path: Path) -> None:
    whole = {key: value for key, value in given.items() if not key.startswith("network_")}
    names = {"network_weights": "a", "init_lora": "a", "lora_model_name": "a", "lycoris_config": "a"}
    more = {"training_method": "FINE_TUNE"} if given is ONE_TRAINER else {}
    more |= {"model_type": "full"} if given is SIMPLE_TUNER else {}
    more |= {"optimizer_type": "AdamW"} if given is KOHYA else {}
    full = whole | more | {key: value for key, value in names.items() if given is not KOHYA or key == "network_weights"}
    found = import_given(full, tmp_path / "x.json", str(recognised(full)))
    assert found.is_full and "lora_from" not in yaml.safe_load(as_yaml(found))["model"]["init_args"]


def test_network_args_have_reasons_of_their_own(tmp_path: Path) -> None:
    arguments = ["dropout=0.1", "loraplus_lr_ratio=16", "block_dims=4,4", "rank_dropout=0.1", "train_blocks=single"]
    model, _, found = values(KOHYA | {"network_args": arguments}, tmp_path)
    assert "both matrices of a LoRA have one rate" in line_of(found, "network_args.loraplus_lr_ratio")
    assert "rank and lora_alpha are those of all layers" in line_of(found, "network_args.block_dims")
    assert "lora_targets chooses layers" in line_of(found, "network_args.train_blocks")
    assert not model.get("lora_dropout")  # networks.lora reads network_dropout
    assert "network_dropout sets lora_dropout" in line_of(found, "network_args.dropout")


# Prompts


def test_options_of_prompts_are_left_out(tmp_path: Path) -> None:
    prompts = ["a [trigger] cup --width 512 --seed 3", "a [trigger]--n bad", "plain - dash"]
    for sample in ({"prompts": prompts}, {"samples": [{"prompt": prompt} for prompt in prompts]}):
        model, _, found = values(ai_toolkit(trigger_word="zorp", sample=sample), tmp_path)
        assert model["validation_prompts"] == ["a zorp cup", "a zorp", "plain - dash"]
        assert "without the options after --" in line_of(found, f"sample.{next(iter(sample))}")


# The programs' files through the command


@pytest.mark.parametrize("program", ["sd-scripts", "OneTrainer", "SimpleTuner", "ai-toolkit"])
def test_fit_takes_an_imported_lokr(
    program: str, tmp_path: Path, command: Command, quick_config: dict[str, Any]
) -> None:
    base, photos = (quick_config[block]["init_args"][key] for block, key in
                    (("model", "pretrained_model_name_or_path"), ("data", "train_data_dir")))  # fmt: skip
    lokr = {"algo": "lokr", "full_matrix": True, "linear_alpha": 1, "factor": 4}
    backend = {"id": "own", "type": "local", "instance_data_dir": str(photos), "resolution": 32}
    network = {"network_module": "lycoris.kohya", "network_dim": 10000, "network_args": ["algo=lokr", "factor=4"]}
    given = {
        "sd-scripts": KOHYA | network | {
            "text_encoder_lr": 0, "pretrained_model_name_or_path": str(base), "resolution": "24,42",
            "train_data_dir": str(photos), "caption_extension": ".txt", "train_batch_size": 2,
        },
        "OneTrainer": ONE_TRAINER | {
            "base_model_name": str(base), "peft_type": "LOKR", "lokr_decompose_factor": 4, "train_dtype": "FLOAT_32",
            "resolution": "32", "concepts": [{"path": str(photos)}],
        },
        "SimpleTuner": SIMPLE_TUNER | {
            "pretrained_model_name_or_path": str(base), "max_train_steps": "2", "num_train_epochs": "0",
            "lora_type": "lycoris", "lycoris_config": write(tmp_path, "lycoris.json", lokr), "train_batch_size": "2",
            "data_backend_config": write(tmp_path, "backends.json", [backend]), "mixed_precision": "no",
        },
        "ai-toolkit": ai_toolkit(
            network={"type": "lokr", "lokr_factor": 4}, model={"name_or_path": str(base), "arch": "sd1"},
            datasets=[{"folder_path": str(photos), "resolution": 32, "random_crop": True}], train={"batch_size": 2},
        ),
    }[program]  # fmt: skip
    file, mine, more = tmp_path / write(tmp_path, "theirs.json", given), tmp_path / "mine.yaml", tmp_path / "more.yaml"
    assert command("import-config", file, "-o", mine).code == 0
    own = {
        "threads": 1,
        "trainer": {"accelerator": "cpu", "devices": 1, "callbacks": []},
        "data": {"init_args": {"cache_dir": quick_config["data"]["init_args"]["cache_dir"], "num_workers": 0}},
    }
    more.write_text(yaml.safe_dump(own), encoding="utf-8")
    assert read_file(mine)["model"]["init_args"]["lora_type"] == "lokr"
    said = command("fit", "-c", mine, "-c", more, "--dry_run")
    assert said.code == 0, said.err

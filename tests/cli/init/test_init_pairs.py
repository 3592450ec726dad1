"""`lightning init pairs/`: pairs of an edit are recognised, trained, drawn and shown, or refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from fakes.models.edit_pipelines import make_flux_kontext_pipeline, make_image
from fakes.models.transformer_pipelines import make_flux2_pipeline
from lightning_aigc.diffusion.families import SHORT
from tools.embedded import edits

pytestmark = pytest.mark.filterwarnings("ignore")  # what Lightning says about loaders and precisions


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Six pairs whose targets are their sources in green."""
    folder = tmp_path / "pairs"
    for name in ("before", "after"):
        (folder / name).mkdir(parents=True)
    for number in range(6):
        image = make_image(number, 64, 64)
        image.save(folder / "before" / f"{number}.png")
        green = np.array(image) // 2
        green[..., 1] = 200
        Image.fromarray(green).save(folder / "after" / f"{number}.png")
        (folder / "after" / f"{number}.txt").write_text(f"make it green, {number % 2}")
    return folder


def quick(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    config["threads"] = 1
    config["trainer"] |= {"accelerator": "cpu", "default_root_dir": str(folder), "accumulate_grad_batches": 1}
    kept = ("RunReport", "CLIPConvergenceGuard")
    config["trainer"]["callbacks"] = [c for c in config["trainer"]["callbacks"] if c["class_path"] in kept]
    config["model"]["init_args"] |= {"max_train_steps": 2, "num_inference_steps": 2, "num_validation_images": 1}
    config["data"]["init_args"] |= {"cache_dir": str(folder / "cache"), "num_workers": 0}
    return config


def test_pairs_are_trained_drawn_and_shown_with_their_sources(command: Any, tmp_path: Path, pairs: Path) -> None:
    said = command("init", pairs, "-o", tmp_path / "my.yaml", "--base", "embedded:sd3", "--card", "8gb")
    assert said.code == 0 and "6 pairs of an edit, 6 with an instruction" in said.out, said.err
    config = yaml.safe_load((tmp_path / "my.yaml").read_text())
    assert config["data"]["init_args"]["source_data_dir"] == str(pairs / "before")
    assert config["data"]["init_args"]["train_data_dir"] == str(pairs / "after")
    assert config["model"]["init_args"]["validation_prompts"] == ["make it green, 0", "make it green, 1"]
    named = [callback["class_path"] for callback in config["trainer"]["callbacks"]]
    assert {"RunReport", "CLIPConvergenceGuard"} <= set(named) and "FineTuneCheck" not in named
    (tmp_path / "quick.yaml").write_text(yaml.safe_dump(quick(config, tmp_path / "run")))
    said = command("fit", "-c", tmp_path / "quick.yaml")
    assert said.code == 0, said.err
    record = json.loads((tmp_path / "run" / "report.json").read_text())
    assert record["guard"]["metric"] == "edit" and record["scores"].keys() == {"direction", "kept"}
    assert [check["step"] for check in record["guard"]["checks"]] == [0, 2]
    assert "Edit: direction of the target" in (tmp_path / "run" / "report.html").read_text()
    pictures = record["pictures"]
    assert all(p["source"] and p["source"] != p["before"] != p["after"] for p in pictures) and len(pictures) >= 2
    assert (tmp_path / "run" / "report.html").read_text().count('<span class="when">source</span>') == 2
    sources = [str(pairs / "before" / f"{number}.png") for number in (0, 1)]
    drawn = command(
        "sample", "-c", tmp_path / "run" / "config.yaml", "--prompts", "make it green", "--source", *sources,
        "--weight", "0", "1", "-o", tmp_path / "grid.png",
    )  # fmt: skip
    assert drawn.code == 0 and "editing 2 images with" in drawn.out, drawn.err
    assert Image.open(tmp_path / "grid.png").width >= 3 * 64  # source, weight 0, weight 1
    given = ("sample", "-c", tmp_path / "run" / "config.yaml", "--prompts", "a", "-o", tmp_path / "other.png")
    alone = command(*given)
    assert alone.code == 0 and "this run learned edits, and without images to edit" in alone.out
    small = command(*given, "--source", sources[0], "--resolution", 4)
    assert small.code == 1 and "--resolution must be a multiple of" in small.errors[0]


def test_pairs_that_a_table_lists_are_recognised(command: Any, tmp_path: Path, pairs: Path) -> None:
    (pairs / "before").rename(pairs / "after" / "old")
    rows = [
        json.dumps({"file_name": f"{number}.png", "text": "make it green", "source": f"old/{number}.png"})
        for number in range(6)
    ]
    (pairs / "after" / "metadata.jsonl").write_text("\n".join(rows))
    said = command("init", pairs / "after", "-o", tmp_path / "my.yaml", "--base", "embedded:sd3", "--card", "8gb")
    assert said.code == 0 and "6 pairs of an edit" in said.out, said.err
    assert yaml.safe_load((tmp_path / "my.yaml").read_text())["data"]["init_args"]["source_data_dir"] is None


def test_pairs_without_instructions_are_one_sentence(command: Any, tmp_path: Path, pairs: Path) -> None:
    for path in (pairs / "after").glob("*.txt"):
        path.rename(pairs / "before" / path.name)
    said = command("init", pairs, "-o", tmp_path / "my.yaml", "--base", "flux2", "--card", "24gb")
    assert said.code != 0 and not (tmp_path / "my.yaml").exists()
    wanted = "6 of 6 pairs have no instruction; write it into a .txt of the image's name in "
    assert f"{wanted}{pairs / 'after'}, not into {pairs / 'before'}" in said.err


@pytest.mark.parametrize("base", ["qwen_image_edit", "qwen_image_edit_plus", "flux_kontext"])
def test_sources_have_the_size_that_the_familys_pipeline_gives_them(
    command: Any, tmp_path: Path, pairs: Path, base: str
) -> None:
    said = command("init", pairs, "-o", tmp_path / "my.yaml", "--base", base, "--card", "24gb")
    assert said.code == 0, said.err
    data = yaml.safe_load((tmp_path / "my.yaml").read_text())["data"]["init_args"]
    found = (data.get("source_fit", "crop"), data.get("source_resolution"))
    assert found == (("own", 1024) if base.startswith("qwen") else ("crop", None))


def test_pairs_for_a_base_that_takes_none_name_those_that_do(command: Any, tmp_path: Path, pairs: Path) -> None:
    said = command("init", pairs, "-o", tmp_path / "my.yaml", "--base", "sd15", "--card", "8gb")
    assert said.code != 0 and "draws from text alone; use --base flux2, flux2_dev, flux_kontext, qwen_i" in said.err
    assert {"flux2", "flux_kontext", "sd3"} <= set(SHORT)


@pytest.mark.parametrize(
    ("base", "changes", "wanted"),
    [
        ("embedded:sd", {}, "draws from text alone; set model.init_args.pretrained_model_name_or_path to a model"),
        ("embedded:sd3", {"class": "FullFineTuning"}, None),
        ("kontext", {"source_data_dir": None}, "edits images, and there are none to start from; set data.init_args"),
        (
            "embedded:sd3",
            {"class": "DiffusionControlNet"},
            "a ControlNet does not read; set data.init_args.source_d",
        ),
        (
            "flux2",
            {"resolution": 48},
            "sources are cut to 48 x 48 pixels, and FLUX.2 klein's pipeline draws from sides",
        ),
        ("embedded:sd3", {"guard": {}}, "metric=clip_t, and this run draws edits, whose prompts describe no image"),
        ("embedded:sd3", {"guard": {"metric": "edit"}, "validation_sources": "own"}, "validation_sources have none"),
        ("embedded:sd3", {"source_data_dir": None, "guard": {"metric": "edit"}}, "this run draws images without sour"),
        ("embedded:sd3", {"check": True}, "FineTuneCheck compares images with their prompts"),
        ("embedded:sd3", {"verb": ("encode", "-o", "shards")}, "the data has source images of edits, which encoded"),
        ("embedded:sd3", {"validation_sources": ["nowhere.png"]}, "validation_sources: nowhere.png cannot be ed"),
    ],
)
def test_what_does_not_fit_is_one_sentence_before_the_first_step(
    command: Any, tmp_path: Path, pairs: Path, base: str, changes: dict[str, Any], wanted: str | None
) -> None:
    kind = {"FullFineTuning": "DiffusionFineTuning"}.get(changes.get("class", ""), changes.get("class"))
    make = {"kontext": make_flux_kontext_pipeline, "flux2": make_flux2_pipeline}.get(base)
    path = base if make is None else str(make(tmp_path / "base"))
    model: dict[str, Any] = {
        "pretrained_model_name_or_path": path, "max_train_steps": 2, "num_inference_steps": 2,
        "validation_prompts": ["make it green"], "num_validation_images": 1,
        "validation_sources": changes.get("validation_sources", []), "sample_resolution": 64,
    }  # fmt: skip
    data = {
        "train_data_dir": str(pairs / "after"), "resolution": changes.get("resolution", 64), "num_workers": 0,
        "enable_bucket": False,
        "source_data_dir": changes.get("source_data_dir", str(pairs / "before")), "cache_dir": str(tmp_path / "cache"),
    }  # fmt: skip
    if model["validation_sources"] == "own":
        model["validation_sources"] = [str(pairs / "before" / "0.png")]
    callbacks: list[dict[str, Any]] = [{"class_path": "RunReport", "init_args": {"clip_model": None, "num_images": 1}}]
    for name, key in (("CLIPConvergenceGuard", "guard"), ("FineTuneCheck", "check")):
        if key in changes:
            given = changes[key] if key == "guard" else {}
            callbacks.append({"class_path": name, "init_args": {"clip_model": "embedded:clip"} | given})
    config = {
        "threads": 1,
        "trainer": {"accelerator": "cpu", "default_root_dir": str(tmp_path / "run"), "callbacks": callbacks},
        "model": {"class_path": kind or "DiffusionLoRA", "init_args": model},
        "data": {"class_path": "ImageCaptionData", "init_args": data},
    }
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))
    verb, *more = changes.get("verb", ("fit",))
    said = command(verb, "-c", tmp_path / "my.yaml", *more)
    if wanted is None:
        assert said.code == 0, said.err
    else:
        assert said.code != 0 and wanted in said.err and "Traceback" not in said.err, said.err


@pytest.mark.parametrize(
    ("source", "more", "wanted"),
    [
        ("nowhere.png", (), "--source: nowhere.png cannot be edited, there is no such file"),
        ("small.png", (), "small.png is 60 x 60 pixels, a side must have at least 64"),
        (None, ("--references",), "--references says how --source is read"),
    ],
)
def test_a_bad_source_of_a_sample_is_one_sentence(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None, more: Any, wanted: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make_image(0, 60, 60).save("small.png")
    Path("my.yaml").write_text(
        yaml.safe_dump(
            {"model": {"class_path": "DiffusionLoRA", "init_args": {"pretrained_model_name_or_path": "x/y"}}}
        ),
        encoding="utf-8",
    )
    given = () if source is None else ("--source", source)
    said = command("sample", "-c", "my.yaml", "--prompts", "a", "--lora", "none", *given, *more)
    assert said.code != 0 and wanted in said.err


def test_a_base_that_edits_asks_for_an_image(command: Any, tmp_path: Path) -> None:
    base = str(make_flux_kontext_pipeline(tmp_path / "kontext"))
    config = {"model": {"class_path": "DiffusionLoRA", "init_args": {"pretrained_model_name_or_path": base}}}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config | {"trainer": {"accelerator": "cpu"}}))
    said = command("sample", "-c", tmp_path / "my.yaml", "--prompts", "a", "--lora", "none", "-o", tmp_path / "x.png")
    assert said.code != 0 and "FLUX.1 Kontext edits images; give those to start from: --source before.png" in said.err


def test_a_dry_run_says_whether_the_sides_are_swapped(command: Any, tmp_path: Path) -> None:
    for number, pair in enumerate(edits.held_out(edits.ORANGE, 8)):
        for side, pixels in (("first", pair.source), ("second", pair.target)):
            (tmp_path / side).mkdir(exist_ok=True)
            Image.fromarray(pixels).save(tmp_path / side / f"{number}.png")
            (tmp_path / side / f"{number}.txt").write_text(edits.ORANGE)
    config = {
        "threads": 1,
        "trainer": {
            "accelerator": "cpu", "default_root_dir": str(tmp_path / "run"),
            "callbacks": [{"class_path": "RunReport", "init_args": {"clip_model": "embedded:clip"}}],
        },
        "model": {"class_path": "DiffusionLoRA", "init_args": {"pretrained_model_name_or_path": "embedded:sd3"}},
        "data": {"class_path": "ImageCaptionData", "init_args": {"resolution": 64, "num_workers": 0}},
    }  # fmt: skip
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))

    def dry_run(source: str, target: str) -> str:
        folders = (("--data.source_data_dir", source), ("--data.train_data_dir", target))
        given = [f"{key}={tmp_path / side}" for key, side in folders]
        said = command("fit", "-c", tmp_path / "my.yaml", "--dry_run", *given)
        assert said.code == 0, said.err
        return str(said.out)

    assert "pairs: the targets fit their instructions" in dry_run("first", "second")
    assert "the sources fit their instructions better than the targets do (CLIP-T +0." in dry_run("second", "first")

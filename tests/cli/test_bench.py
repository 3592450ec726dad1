"""`lightning bench`: published rows and their sources, small runs of each on a CPU, cards that are too small."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.processes.commands import run_modules
from fakes.processes.ranks import run_ranks, run_script
from lightning_aigc.cli.bench import measure as measuring
from lightning_aigc.cli.bench.architectures import ARCHITECTURES, Architecture
from lightning_aigc.cli.bench.measure import Machine, check_memory, measure
from lightning_aigc.cli.bench.published import ROWS, PublishedRow
from lightning_aigc.cli.bench.training import TimedTraining, make_batch
from lightning_aigc.diffusion.families import FAMILIES, Components
from lightning_aigc.errors import ConfigError

Command = Callable[..., Any]
pytestmark = pytest.mark.filterwarnings("ignore")  # what Lightning says about loaders and folders
BY_NAME = {row.name: row for row in ROWS}
CPU = Machine("cpu", 1, small=True)
ON_NPU = """
import json, sys
import lightning_aigc
import diffusers, peft, torchvision, transformers  # before torch's functions are replaced
from fakes.npu import fake_npu
fake_npu.install()
from lightning_aigc.cli.bench.measure import Machine, measure
from lightning_aigc.cli.bench.published import ROWS
machine = Machine.of("auto", 1, small=True)
chosen = [row for row in ROWS if row.name in ("sdxl-full", "sd35-lora")]
rows = [measure(row, machine, steps=2, warm_up=1, memory=None) for row in chosen]
with open(sys.argv[1], "w") as file:
    json.dump(rows, file)
"""
"""A U-Net's and a transformer's row; torch.arange of FLUX.2's positions has no size on the fake npu."""
SHALLOW: dict[str, Any] = {"num_layers": 1, "num_single_layers": 1, "transformer_layers_per_block": 1}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_each_row_trains_in_small(row: PublishedRow) -> None:
    found = measure(row, CPU, steps=2, warm_up=1, memory=None)
    assert found["in_small"] and found["ratio_a_card"] is None and found["steps"] == 2
    assert found["samples_s"] == pytest.approx(found["batch"] / found["step_s"], rel=1e-3)
    assert found["step_spread_s"][0] <= found["step_s"] <= found["step_spread_s"][1]
    assert found["precision"] == row.precision and found["memory"] == row.memory
    assert 0 < found["trained"] <= found["parameters"]
    assert (found["trained"] == found["parameters"]) == (row.method == "full")
    assert found["published"]["samples_s"] == row.samples_s and row.source.commit in found["published"]["address"]
    assert {"torch", "diffusers", "peft", "python", "lightning_aigc"} <= found["versions"].keys()
    json.dumps(found)


def test_the_command_labels_a_small_run_and_keeps_its_row(command: Command, tmp_path: Path) -> None:
    kept = tmp_path / "new" / "rows.jsonl"
    words = ["--rows", "flux2-edit-lora", "--steps", 2, "--warm_up", 1, "--device", "cpu", "-o", kept]
    for count in (1, 2):
        said = command("bench", "--as", "mindspeed-mm", *words)
        assert said.code == 0, said.err
        rows = [json.loads(line) for line in kept.read_text().splitlines()]
        assert len(rows) == count
    assert said.out.count("in small") == 3, "before it starts, in the table, and below it"
    assert "| flux2-edit-lora |" in said.out and "0.0762 (8 x Atlas 900 A2 PODc)" in said.out
    assert rows[0]["row"] == "flux2-edit-lora" and rows[0]["in_small"] and rows[0]["sources"] == 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", rows[0]["date"])


def test_the_list_has_each_row_with_its_source(command: Command) -> None:
    said = command("bench", "--list")
    assert said.code == 0
    for row in ROWS:
        assert f"| {row.name} |" in said.out and f"{row.name}: {row.source.address}; {row.differs}" in said.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rows", "sdxl"], "there is no row sdxl; known are sdxl-full, "),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--warm_up", "0"], "--warm_up must be at least 1, got 0"),
        (["--device", "npu"], "--device npu is no"),
        (["--device", "cpu", "--devices", "9999"], "--devices 9999 is more than the "),
    ],
)
def test_a_wrong_argument_is_one_sentence(command: Command, arguments: list[str], words: str) -> None:
    said = command("bench", *arguments)
    assert said.code == 1 and len(said.errors) == 1 and words in said.errors[0]


def test_ranks_of_torchrun_are_refused(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    said = command("bench")
    assert said.code == 1 and "run it without torchrun: lightning bench --devices 8" in said.errors[0]


# Memory ---------------------------------------------------------------------------------------------------------------


def machine_of(gib: float, cards: int, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(Machine, "gib", gib)
    monkeypatch.setattr(Machine, "name", "a card")
    return Machine("npu", cards, small=False)


def test_a_card_that_is_too_small_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    row = BY_NAME["flux2-lora"]
    with pytest.raises(ConfigError, match=r"flux2-lora needs about 6\d GiB on each of 1 npu, and a card has 32; on 8"):
        measure(row, machine_of(32, 1, monkeypatch), steps=1, warm_up=1, memory=None)
    check_memory(row, machine_of(32, 8, monkeypatch))
    with pytest.raises(ConfigError, match=r"sd35-lora needs about .* leave it out by naming others with --rows"):
        check_memory(BY_NAME["sd35-lora"], machine_of(8, 8, monkeypatch))


def test_rows_that_do_not_fit_leave_the_others_running(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not on a card: `measure` is the real one for the row that fits, in small."""
    real = measuring.measure

    def measured(row: PublishedRow, args: Any) -> dict[str, Any]:
        if row.name != "sdxl-full":
            raise ConfigError(f"{row.name} needs more")
        return real(row, CPU, steps=1, warm_up=1, memory=None)

    monkeypatch.setattr("lightning_aigc.cli.bench.command._in_a_process", measured)
    kept = tmp_path / "rows.jsonl"
    said = command("bench", "--device", "cpu", "-o", kept)
    assert said.code == 0 and said.err.count("left out: ") == len(ROWS) - 1
    assert len(kept.read_text().splitlines()) == 1
    assert command("bench", "--device", "cpu", "--rows", "sdxl-full", "sd35-lora").code == 1, "a named row is missing"


def test_sharded_rows_need_less_on_more_cards() -> None:
    for row in ROWS:
        less = row.needed_gib(8) < row.needed_gib(1)
        assert less == (row.strategy != "npu_sparse"), row.name
        assert row.needed_gib(8) < 64, "the published runs had cards of 64 GB"


# Real sizes -----------------------------------------------------------------------------------------------------------


def components_of(architecture: Architecture, **depth: Any) -> Components:
    """Networks without memory."""
    import diffusers

    with torch.device("meta"):
        denoiser = getattr(diffusers, architecture.denoiser)(**(architecture.config | depth))
        vae = getattr(diffusers, architecture.autoencoder)(**architecture.autoencoder_config)
    family = FAMILIES[architecture.family]
    return Components(family, denoiser, vae, (), (), dict(architecture.scheduler), family.base)


@pytest.mark.parametrize("model", ARCHITECTURES)
def test_a_real_model_has_its_published_number_of_parameters(model: str) -> None:
    architecture = ARCHITECTURES[model]
    counted = sum(p.numel() for p in components_of(architecture).denoiser.parameters())
    assert counted == pytest.approx(architecture.parameters, rel=1e-3)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_real_model_takes_the_batch_of_its_row(row: PublishedRow) -> None:
    architecture = row.architecture
    shallow = {name: value for name, value in SHALLOW.items() if name in signature_of(architecture)}
    components = components_of(architecture, **shallow)
    batch = make_batch(dataclasses.replace(row, encodes_images=False), architecture, row.pixels, row.batch)
    meta = {name: value.to("meta") for name, value in batch.items() if isinstance(value, torch.Tensor)}
    family = components.family
    latents = family.latents(components.vae, meta["latent_moments"], torch.empty_like)
    condition = {name: meta[name] for name in ("prompt_embeds", "pooled_prompt_embeds") if name in meta}
    for number, source in enumerate(batch.get("source_latents", ()), start=1):
        condition[f"source_{number}"] = family.scale(components.vae, source.to("meta"))
    timesteps = torch.empty(row.batch, device="meta")
    assert family.predict(components, latents, timesteps, condition, meta, 1.0).shape == latents.shape


def signature_of(architecture: Architecture) -> set[str]:
    import inspect

    import diffusers

    return set(inspect.signature(getattr(diffusers, architecture.denoiser).__init__).parameters)


# Ranks ----------------------------------------------------------------------------------------------------------------


def rows_of_a_rank(rank: int) -> list[dict[str, Any]]:
    machine = Machine("cpu", 2, small=True)
    names = ("mindone-sdxl-lora", "sdxl-full", "flux2-lora")
    return [measure(BY_NAME[name], machine, steps=2, warm_up=1, memory=None) for name in names]


def test_two_ranks_train_with_the_strategy_of_the_row(tmp_path: Path) -> None:
    for first, second in zip(*run_ranks(rows_of_a_rank, 2, tmp_path, gloo=False), strict=True):
        assert first["devices"] == 2 and first["strategy"] == BY_NAME[first["row"]].strategy
        assert first["samples_s"] == pytest.approx(2 * first["samples_s_a_card"], rel=1e-3)
        assert first["trained"] > 0 and second["row"] == first["row"]


def test_rows_train_on_a_fake_npu(tmp_path: Path) -> None:
    script, kept = tmp_path / "on_npu.py", tmp_path / "rows.json"
    script.write_text(ON_NPU)
    run_script(script, 1, tmp_path / "ranks", kept)
    full, lora = json.loads(kept.read_text())
    assert full["row"] == "sdxl-full" and lora["row"] == "sd35-lora"
    for row in (full, lora):
        assert row["device"] == "FakeAscend910B" and row["devices"] == 1 and row["in_small"]
        assert row["samples_s"] > 0 and row["step_s"] > 0


@pytest.mark.long
def test_the_command_starts_the_ranks_itself(tmp_path: Path) -> None:
    """Three interpreters: the command, and the two ranks that Lightning starts in the process of the row."""
    folder = tmp_path / "here"
    folder.mkdir()
    words = ["bench", "--device", "cpu", "--devices", 2, "--rows", "sdxl-full", "--steps", 2, "-o", "rows.jsonl"]
    (ended,) = run_modules("lightning_aigc", [words], folder, {"CUDA_VISIBLE_DEVICES": ""})
    assert ended.code == 0, ended.err
    (row,) = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert row["devices"] == 2 and row["strategy"] == "zero_2"


def test_the_module_leaves_no_files_and_downloads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    row = BY_NAME["sd35-lora"]
    assert row.architecture.small is not None
    assert TimedTraining(row, row.architecture.small).configure_callbacks() == []
    measure(row, CPU, steps=1, warm_up=1, memory="max")
    assert list(tmp_path.iterdir()) == []

"""`lightning plan` from its command line to its table."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fakes.processes.commands import run_modules
from lightning_aigc.cli.plan import model as plan_model

Command = Callable[..., Any]
GIVEN = ("--step_time", "1.2", "--trainable", "859.5M", "--protected", "34.9M")
FORTY_EIGHT = ("--nodes", "48", "--devices", "8", "--link", "25Gb")
DEMO = Path(__file__).parents[2] / "configs" / "sd_lora_demo.yaml"


def test_every_mode_is_a_row_and_all_of_it_is_called_modelled(command: Command) -> None:
    said = command("plan", *FORTY_EIGHT, *GIVEN)
    assert said.code == 0, said.err
    assert "48 x 8 = 384 ranks" in said.out and "All of this is modelled" in said.out
    assert "and the residuals of gradient sync." in said.out
    lines = said.out.splitlines()
    table = lines[lines.index("") + 2 : -1]
    assert lines[-1].startswith("Latency and launches count once a bucket: ")
    rows = {line.split()[0] for line in table}
    assert rows == {
        "dense", "bf16", "int8", "int4", "int3", "ternary", "sparse", "sparse_int8", "sparse_int4", "two_four", "local"
    }  # fmt: skip


def test_json_holds_the_same_with_its_constants(command: Command) -> None:
    plan = json.loads(command("plan", *FORTY_EIGHT, *GIVEN, "--json", "--target", "0.927").out)
    assert plan["modelled"] is True and plan["constants"]["overlap_share"] == 0.9
    assert plan["constants"]["launch_s"] == 5e-6
    dense = next(row for row in plan["modes"] if row["mode"] == "dense")
    assert dense["between_bytes"] == pytest.approx(2 * 383 / 384 / 8 * 4 * 859.5e6)
    assert dense["link_for_efficiency_Bps"] > 25e9 / 8 > 0  # 25 Gb/s is not enough for 92.7 % here
    assert dense["efficiency"] < 0.927


def test_an_efficiency_asks_for_the_link_and_the_step(command: Command) -> None:
    said = command("plan", *FORTY_EIGHT, *GIVEN, "--target", "0.927")
    assert "link for 92.7%" in said.out and "step for 92.7%" in said.out


@pytest.fixture
def tiny_config(quick_config: dict[str, Any], tmp_path: Path) -> Path:
    """A model of random weights that is on this machine."""
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(quick_config))
    return path


def test_a_config_at_hand_is_counted(command: Command, tiny_config: Path) -> None:
    plan = json.loads(command("plan", "-c", tiny_config, "--nodes", 1, "--devices", 2, "--step_time", 1, "--json").out)
    job = plan["plan"]["job"]
    assert plan["plan"]["trainable_from"] == "counted"
    assert 0 < job["trainable"] < job["frozen"] and job["protected"] + job["small"] <= job["trainable"]


def test_counting_agrees_with_the_model_itself(command: Command, tiny_config: Path) -> None:
    from lightning_aigc.diffusion import StableDiffusionLoRA

    arguments = yaml.safe_load(tiny_config.read_text(encoding="utf-8"))["model"]["init_args"]
    keep = ("pretrained_model_name_or_path", "rank", "lora_targets")
    model = StableDiffusionLoRA(**{name: arguments[name] for name in keep if name in arguments})
    model.configure_model()
    plan = json.loads(command("plan", "-c", tiny_config, "--nodes", 1, "--devices", 2, "--step_time", 1, "--json").out)
    assert plan["plan"]["job"]["trainable"] == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_the_strategy_of_a_config_is_what_is_planned(command: Command, tmp_path: Path) -> None:
    strategy = {"class_path": "NPUSparseStrategy", "init_args": {"mode": "sparse", "sparsity": 0.9, "local_steps": 4}}
    path = tmp_path / "sync.yaml"
    path.write_text(yaml.safe_dump({"trainer": {"accelerator": "gpu", "strategy": strategy}}))
    said = command("plan", "-c", path, *FORTY_EIGHT, *GIVEN)
    assert "sparse *" in said.out and "* the mode of the config's strategy" in said.out
    plan = json.loads(command("plan", "-c", path, *FORTY_EIGHT, *GIVEN, "--json").out)["plan"]
    assert (plan["job"]["sparsity"], plan["job"]["local_steps"], plan["job"]["device"]) == (0.9, 4, "cuda")
    assert plan["chosen_mode"] == "sparse"


def test_the_averages_of_a_config_are_planned_with_their_bytes(command: Command, tmp_path: Path) -> None:
    sent = {}
    formats = {"float32": {}, "int3": {}, "top_k": {}, "top_k 1712": {"average": "top_k", "top_k": 1712}}
    for average, given in formats.items():
        options = {"mode": "local", "local_steps": 15, "average": average} | given
        strategy = {"class_path": "NPUSparseStrategy", "init_args": options}
        path = tmp_path / f"{average}.yaml"
        path.write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
        plan = json.loads(command("plan", "-c", path, *FORTY_EIGHT, *GIVEN, "--json").out)
        dense, local = (next(row for row in plan["modes"] if row["mode"] == mode) for mode in ("dense", "local"))
        sent[average] = local["between_bytes"] / dense["between_bytes"]
    assert sent == pytest.approx(
        {
            "float32": 1 / 15,
            "int3": 3.5 / 32 / 15,
            "top_k": 116 / 4096 / 4 / 15,
            "top_k 1712": (2 + 4096 / 8 + 1712 / 8) / 4096 / 4 / 15,
        }
    )


def test_later_configs_win_key_by_key(tmp_path: Path) -> None:
    for name, config in {"a": {"trainer": {"x": 1, "y": 1}, "model": {}}, "b": {"trainer": {"y": 2}}}.items():
        (tmp_path / name).write_text(yaml.safe_dump(config))
    assert plan_model.read_configs([tmp_path / "a", tmp_path / "b"]) == {"trainer": {"x": 1, "y": 2}, "model": {}}


def fork(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of `python -m MODULE WORDS`, without the imports of a new interpreter."""
    _, _, module, *words = command
    (done,) = run_modules(module, [words], Path.cwd(), {"HF_HUB_OFFLINE": "1"})
    return subprocess.CompletedProcess(command, done.code, done.out, done.err)


def test_a_dry_run_step_times_a_small_model_or_says_what_to_pass(
    tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(plan_model.subprocess, "run", fork)
    assert 0.01 <= plan_model.time_one_step([tiny_config]) < 60
    path = tmp_path / "broken.yaml"
    path.write_text(yaml.safe_dump({"model": {"class_path": "NoSuchModel"}}))
    with pytest.raises(plan_model.ConfigError, match=r"dry run .* failed: .*NoSuchModel.*--step_time"):
        plan_model.time_one_step([path])


def test_a_large_model_wants_its_step_time(
    command: Command, tiny_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_aigc.cli.plan.command.DRY_RUN_LIMIT", 10)
    said = command("plan", "-c", tiny_config, "--nodes", 1, "--devices", 2)
    assert said.code == 1
    assert said.errors == [
        "error: --step_time is missing, and this model is too large for a quick dry run; pass the seconds of one step"
        " on one card: --step_time 1.2"
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--nodes", "2", "--devices", "2", *GIVEN), "--link is missing"),
        (("--nodes", "1", "--devices", "2"), "neither --trainable nor a config"),
        (("--nodes", "1", "--devices", "2", "--trainable", "1M"), "--step_time is missing, and nothing was built"),
        (("--nodes", "0", "--devices", "2", *GIVEN), "nodes and devices must be at least 1"),
        ((*FORTY_EIGHT, *GIVEN, "--target", "92.7"), "efficiency must be between 0 and 1"),
        ((*FORTY_EIGHT, *GIVEN, "--sparsity", "1"), r"sparsity must be in [0, 1), got 1.0"),
        ((*FORTY_EIGHT, *GIVEN, "-c", "nowhere.yaml"), "nowhere.yaml cannot be read"),
        ((*FORTY_EIGHT, "--step_time", "0", "--trainable", "1M"), "--step_time must be above 0"),
        (
            (*FORTY_EIGHT, "--trainable", "1M", "--measured", "1x8:64:0.5", "--batch", "0"),
            "--batch must be above 0, got 0; leave it out for the measured run's",
        ),
        ((*FORTY_EIGHT, *GIVEN, "--bucket_mb", "nan"), "a bucket must hold more than 0 MB, got nan"),
    ],
)
def test_what_is_missing_or_wrong_is_one_line(command: Command, arguments: tuple[str, ...], said: str) -> None:
    result = command("plan", *arguments)
    assert result.code == 1 and len(result.errors) == 1 and said in result.errors[0]


def test_a_model_that_is_elsewhere_says_what_to_pass(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "hub.yaml"
    model = {"class_path": "StableDiffusionLoRA", "init_args": {"pretrained_model_name_or_path": "someone/model"}}
    path.write_text(yaml.safe_dump({"model": model}))
    result = command("plan", "-c", path, *FORTY_EIGHT)
    assert result.code == 1
    assert "someone/model is neither on this machine nor in the hub's cache" in result.errors[0]
    assert "--trainable" in result.errors[0]


def test_a_hub_id_is_opened_from_the_hubs_cache(
    command: Command, tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = yaml.safe_load(tiny_config.read_text(encoding="utf-8"))
    folder = config["model"]["init_args"]["pretrained_model_name_or_path"]
    repository = tmp_path / "hub" / "models--someone--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / "abc").symlink_to(folder, target_is_directory=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    arguments = ("--nodes", 1, "--devices", 2, "--step_time", 1, "--json")
    at_home = json.loads(command("plan", "-c", tiny_config, *arguments).out)["plan"]["job"]
    config["model"]["init_args"]["pretrained_model_name_or_path"] = "someone/model"
    tiny_config.write_text(yaml.safe_dump(config), encoding="utf-8")
    assert json.loads(command("plan", "-c", tiny_config, *arguments).out)["plan"]["job"] == at_home
    config["model"]["init_args"]["pretrained_model_name_or_path"] = "someone/other"
    tiny_config.write_text(yaml.safe_dump(config), encoding="utf-8")
    assert "someone/other is neither on this machine nor" in command("plan", "-c", tiny_config, *arguments).errors[0]


@pytest.mark.parametrize(("link", "chosen"), [("1600Gb", "dense"), ("25Gb", "int3"), ("1Gb", "int4")])
def test_auto_marks_what_it_would_choose_by_the_modelled_times(
    link: str, chosen: str, command: Command, tmp_path: Path
) -> None:
    path = tmp_path / "auto.yaml"
    strategy = {"class_path": "NPUSparseStrategy", "init_args": {"mode": "auto"}}
    path.write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    said = command("plan", "-c", path, "--nodes", 48, "--devices", 8, "--link", link, *GIVEN)
    (marked,) = [line for line in said.out.splitlines() if " * " in line]
    assert marked.startswith(f"{chosen} * ")
    assert "* what the config's mode auto would choose by these times; it measures the real link" in said.out


def test_larger_buckets_are_named_where_latency_and_launches_count(command: Command) -> None:
    said = command("plan", *FORTY_EIGHT, *GIVEN)
    assert "with bucket_mb: 50, int3 is modelled at 92.5% instead of 87.7%." in said.out
    again = command("plan", *FORTY_EIGHT, *GIVEN, "--bucket_mb", 100)
    assert "Latency and launches" not in again.out and "buckets hold 100 MB" in again.out
    (row,) = [line for line in again.out.splitlines() if line.startswith("int3 ")]
    assert float(row.split("%")[0].split()[-1]) > 91


def test_a_target_is_answered_by_what_would_reach_it(command: Command) -> None:
    lines = command("plan", *FORTY_EIGHT, *GIVEN, "--target", "0.927").out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("92.7% is not reached in int3: "))
    (mode, link, step) = lines[at + 1 :]
    assert mode.strip().startswith("mode: sparse_int8 (92.8%)") and step.startswith("  accumulate_grad_batches: 2, ")
    found = re.fullmatch(r"  a link of ([\d.]+) Gb/s a node", link)
    assert found is not None
    faster = ("--nodes", 48, "--devices", 8, "--link", f"{float(found[1]) + 0.1:.1f}Gb")
    said = command("plan", *faster, *GIVEN, "--target", "0.927").out
    assert re.search(r"^92\.7% is reached by int3 \(92\.\d%\), ", said, re.MULTILINE)


def test_a_target_that_stragglers_forbid_asks_for_a_smaller_spread(command: Command) -> None:
    said = command("plan", *FORTY_EIGHT, *GIVEN, "--target", "0.95").out
    assert "95.0% is out of reach on 384 cards whose steps spread by 2.5%" in said
    assert "First bring the spread to 1.8% or less" in said
    fast = ("--nodes", "48", "--devices", "8", "--link", "1600Gb", "--spread", "0.015")
    assert "95.0% is reached by" in command("plan", *fast, *GIVEN, "--target", "0.95").out


def test_a_measured_run_gives_the_step_of_another_size(command: Command) -> None:
    run = ("--trainable", "866M", "--device", "cuda", "--measured", "1x8:64:0.508", "--local_link", "450GB", "--json")
    same = json.loads(command("plan", "--nodes", 1, "--devices", 8, *run).out)
    dense = next(row for row in same["modes"] if row["mode"] == "dense")
    assert dense["step_s"] == pytest.approx(0.508)
    fewer = json.loads(command("plan", "--nodes", 1, "--devices", 8, *run, "--batch", 16, "--fixed", "8ms").out)
    (step,) = (row["step_s"] for row in fewer["modes"] if row["mode"] == "dense")
    assert 0.508 / 4 < step < 0.508 / 4 + 0.02


def test_a_wrong_key_of_the_model_is_named(command: Command, tiny_config: Path) -> None:
    config = yaml.safe_load(tiny_config.read_text(encoding="utf-8"))
    config["model"]["init_args"]["network_dim"] = 4
    tiny_config.write_text(yaml.safe_dump(config), encoding="utf-8")
    result = command("plan", "-c", tiny_config, *FORTY_EIGHT)
    assert result.code == 2 and "network_dim" in result.errors[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--devices", "8"), "--nodes"),
        ((*FORTY_EIGHT[:4], "--link", "25"), "wanted a bandwidth"),
        (("--nod",), "--nod"),
    ],
)
def test_a_wrong_command_line_is_one_line_with_the_help(
    command: Command, arguments: tuple[str, ...], said: str
) -> None:
    result = command("plan", *arguments)
    assert result.code == 2 and len(result.err.splitlines()) == 1
    assert "lightning plan --help" in result.err and said in result.err


def test_the_worked_example_in_the_docs_is_what_the_command_says(command: Command) -> None:
    text = (DEMO.parents[1] / "docs" / "scaling.md").read_text(encoding="utf-8")
    shown = text[text.index("$ lightning plan") :].partition("```")[0]
    line, _, table = shown.partition("\n")
    assert command(*line.split()[2:]).out.strip() == table.strip()


def test_the_shipped_demo_config_can_be_planned(command: Command) -> None:
    result = command("plan", "-c", DEMO, *FORTY_EIGHT, "--step_time", "1.2")
    assert result.code == 0 and "parameters trained (counted)" in result.out


def test_a_shared_out_model_says_what_a_rank_stores_and_sends(command: Command) -> None:
    asked = ("plan", "--nodes", 1, "--devices", 8, "--trainable", "859.5M", "--step_time", 1, "--strategy", "zero_3")
    said = command(*asked)
    assert said.code == 0, said.err
    stored, sent = said.out.splitlines()[-2:]
    assert stored.startswith("zero_3 on 8 ranks stores ") and "87% less than ddp's" in stored
    assert sent == (
        "zero_3 sends 9.02 GB a rank and step at most (as rings): weights 6.02 GB, half of that under bf16-mixed, "
        "gradients 3.01 GB; ddp sends 6.02 GB."
    )
    found = json.loads(command(*asked, "--json").out)
    assert found["stored_bytes"]["total"] == pytest.approx(16 * 859.5e6 / 8, rel=1e-6)
    assert found["sent_bytes"]["weights"] == pytest.approx(2 * 7 / 8 * 4 * 859.5e6, rel=1e-6)


def test_a_model_that_was_not_counted_is_divided_over_the_ranks(command: Command) -> None:
    # Taken for one tensor, all of it was one rank's: 1.32 TB a step.
    asked = ("plan", "--nodes", 48, "--devices", 8, "--link", "200Gb", "--trainable", "859.5M", "--step_time", 1.2)
    said = command(*asked, "--strategy", "zero_1")
    assert "zero_1 sends 10.3 GB a rank and step at most" in said.out and "50% less than ddp's" in said.out

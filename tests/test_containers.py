"""containers/: Dockerfiles copy what exists and end as another user, and jobs give commands that the CLI accepts."""

from __future__ import annotations

import fnmatch
import os
import re
import shlex
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_aigc.cli import main

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "containers"
FILES = sorted(FOLDER.glob("*.Dockerfile"))
PAGE = (ROOT / "docs" / "multi_node.md").read_text(encoding="utf-8")
NODE_VARIABLES = {"MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"}
ECHO = 'printf "%s\\n" "${0##*/} $*" >> "$LOG"; env | grep -E "^(MASTER_|OMP_)" >> "$LOG"'


def instructions(path: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile with their arguments, continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", path.read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_base_is_named_by_its_digest_and_the_process_is_not_root(path: Path) -> None:
    found = instructions(path)
    assert [name for name, _ in found[:2]] == ["ARG", "FROM"]
    base = found[1][1]
    assert base.endswith("@${BASE_DIGEST}") or base == "${BASE_IMAGE}"
    assert f"--build-arg {base.partition('{')[2].rstrip('}')}=" in (FOLDER / "README.md").read_text(encoding="utf-8")
    (user,) = [argument for name, argument in found if name == "USER"]
    assert user.isdigit() and int(user) > 0
    after = [name for name, _ in found[found.index(("USER", user)) :]]
    assert "RUN" not in after and "COPY" not in after
    assert ("VOLUME", '["/cache"]') in found
    environment = dict(re.findall(r"(\w+)=(\S+)", " ".join(argument for name, argument in found if name == "ENV")))
    assert environment["XDG_CACHE_HOME"] == environment["HOME"] == "/cache"


def kept() -> list[str]:
    """The patterns of .dockerignore that keep a path."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in lines
    return [line[1:] for line in lines if line.startswith("!")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_copied_exists_and_is_not_ignored(path: Path) -> None:
    copied = [word for name, argument in instructions(path) if name == "COPY" for word in argument.split()[:-1]]
    assert {"pyproject.toml", "lightning_aigc", "kernels/lightning_aigc_kernels", "configs"} <= set(copied)
    for source in copied:
        assert (ROOT / source).exists() and any(fnmatch.fnmatch(source, pattern) for pattern in kept()), source
    named = re.findall(r"-c (\S+)", " ".join(argument for name, argument in instructions(path) if name == "RUN"))
    assert named and set(named) <= set(copied)


def write_stub(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def run_job(script: str, folder: Path, environment: dict[str, str], *arguments: str) -> tuple[int, list[str]]:
    """Run a job with stand-ins of its programs. Returns: its exit code, and the lines that they logged."""
    commands, log = folder / "bin", folder / "log"
    commands.mkdir()
    for name in ("lightning", "torchrun"):
        write_stub(commands, name, ECHO)
    write_stub(commands, "apptainer", 'while [[ $1 != *.sif ]]; do shift; done; shift; exec "$@"')
    ends = '"$@"; [[ $* == *" fit "* ]] && exit "$FIT_CODE"; exit 0'
    write_stub(commands, "srun", f"while [[ $1 == --* ]]; do shift; done; {ends}")
    write_stub(commands, "scontrol", f"[[ $1 == show ]] && echo node0 && exit; {ECHO}")
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"
    given = {name: value for name, value in os.environ.items() if name not in NODE_VARIABLES}
    done = subprocess.run(
        ["bash", "-c", script, "job", *arguments],
        capture_output=True, text=True, cwd=folder, env=given | environment | {"PATH": path, "LOG": str(log)},
        timeout=60,
    )  # fmt: skip
    assert "command not found" not in done.stderr, done.stderr
    return done.returncode, log.read_text(encoding="utf-8").splitlines()


def fit_of(lines: list[str]) -> list[str]:
    """The arguments of the one command that trains, without its launcher."""
    (line,) = [line for line in lines if " fit " in line]
    words = shlex.split(line)
    return words[words.index("fit") :]


def parsed(arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The config that `lightning` makes of the arguments."""
    text = (ROOT / "configs" / "sd_lora.yaml").read_text(encoding="utf-8")
    (folder / "my.yaml").write_text(text, encoding="utf-8")
    words = [str(folder / "my.yaml") if word == "my.yaml" else word for word in arguments]
    with pytest.raises(SystemExit) as stop:
        main([*words, "--print_config"])
    said = capsys.readouterr()
    assert stop.value.code == 0, said.err
    config: dict[str, Any] = yaml.safe_load(said.out)
    return config


def check_config(config: dict[str, Any], run: str) -> None:
    trainer = config["trainer"]
    assert trainer["strategy"] == "npu_sparse"
    assert (trainer["num_nodes"], int(trainer["devices"])) == (2, 8)
    assert trainer["default_root_dir"] == run
    assert config["data"]["init_args"]["train_data_dir"] == "photos"


SLURM = {"SLURM_JOB_ID": "71", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "8"}


@pytest.mark.parametrize("code", [0, 1, 138])
def test_the_slurm_job_trains_in_a_container_and_requeues_what_a_signal_ended(
    code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = (FOLDER / "slurm.sbatch").read_text(encoding="utf-8")
    environment = SLURM | {"SLURM_SUBMIT_DIR": str(tmp_path), "FIT_CODE": str(code)}
    ended, lines = run_job(script, tmp_path, environment)
    assert ended == code
    assert ("scontrol requeue 71" in lines) == (code == 138)
    assert "lightning doctor" in lines and {"MASTER_ADDR=node0", "MASTER_PORT=15071", "OMP_NUM_THREADS=1"} <= set(lines)
    check_config(parsed(fit_of(lines), tmp_path, capsys), "runs/sd_lora-71")


def test_the_slurm_job_asks_for_what_the_one_without_containers_does() -> None:
    jobs = (FOLDER / "slurm.sbatch", ROOT / "configs" / "slurm" / "sd_lora.sbatch")
    mine, plain = (re.findall(r"^#SBATCH (--\S+)", job.read_text(encoding="utf-8"), re.MULTILINE) for job in jobs)
    assert mine == plain


def test_the_skypilot_task_starts_torchrun_as_the_page_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text(encoding="utf-8"))
    assert task["num_nodes"] == 2 and "/runs" in task["volumes"]
    node = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    node |= {"SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    ended, lines = run_job(task["run"], tmp_path, task["envs"] | node)
    assert ended == 0 and "lightning doctor" in lines
    (line,) = [line for line in lines if line.startswith("torchrun ")]
    of_page = re.findall(r"^torchrun (.*) -m lightning_aigc fit", PAGE, re.MULTILINE)[1]
    assert line.startswith(f"torchrun {of_page} -m lightning_aigc fit ")
    assert {"MASTER_ADDR=10.0.0.1", "MASTER_PORT=29500"} <= set(lines)
    check_config(parsed(fit_of(lines), tmp_path, capsys), "/runs/sd_lora")


@pytest.mark.parametrize("name", ["slurm.sbatch", "skypilot.yaml"])
def test_the_variables_of_a_job_are_those_that_the_page_explains(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    named = {word for line in re.findall(r"export (.*)", text) for word in re.findall(r"\b([A-Z][A-Z_]+)\b(?!_)", line)}
    ours = {word for word in named if not word.startswith(("SLURM_", "SKYPILOT_"))}
    assert ours >= NODE_VARIABLES
    assert [word for word in sorted(ours) if word not in PAGE and word != "HF_HUB_OFFLINE"] == []

"""docs/multi_node.md: its commands start two ranks, its SLURM job runs under Lightning, its recipe makes two hosts."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.fabric.plugins.environments import SLURMEnvironment

from fakes.processes.commands import run_modules

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "multi_node.md").read_text(encoding="utf-8")
SBATCH = ROOT / "configs" / "slurm" / "sd_lora.sbatch"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}


def free_port() -> int:
    """A port that SLURM's job ids can stand for: the sbatch file counts from 15000."""
    for port in range(15000 + os.getpid() % 15000, 35000):
        with socket.socket() as found:
            if found.connect_ex(("127.0.0.1", port)):
                return port
    raise AssertionError("no port is free")


def environment(folder: Path) -> dict[str, str]:
    """Ours, with `lightning` and `torchrun` as the package's own commands whatever is installed."""
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    for name, module in (("lightning", "lightning_aigc"), ("torchrun", "torch.distributed.run")):
        write_command(commands / name, f'exec "{sys.executable}" -m {module} "$@"')
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    return os.environ | ENVIRONMENT | {"PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": path}


def write_command(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def write_config(config: dict[str, Any], folder: Path) -> Path:
    config["trainer"] |= {"accelerator": "cpu", "default_root_dir": str(folder / "run")}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_the_two_torchrun_commands_train_together(quick_config: dict[str, Any], tmp_path: Path) -> None:
    commands = re.findall(r"^torchrun .*$", PAGE, re.MULTILINE)
    assert [re.search(r"--node_rank (\d)", command).group(1) for command in commands] == ["0", "1"]  # type: ignore[union-attr]
    config, port = write_config(quick_config, tmp_path), free_port()
    changes = {"10.0.0.1": "127.0.0.1", "29500": str(port), "my.yaml": str(config), "8": "1"}
    words = [[changes.get(word, word) for word in shlex.split(command)[1:]] for command in commands]
    ended = run_modules("torch.distributed.run", words, tmp_path, environment(tmp_path))
    said = [end.out + end.err for end in ended]
    assert [end.code for end in ended] == [0, 0], "\n".join(said)[-4000:]
    assert "2 processes, joined by gloo" in said[0]
    assert "npu_sparse: mode int3, 2 ranks on" in said[0]
    assert (tmp_path / "run" / "summary.json").exists()


# SLURM ---------------------------------------------------------------------------------------------------------------


def options() -> dict[str, str]:
    """The `#SBATCH` options by name."""
    lines = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?", SBATCH.read_text(), re.MULTILINE)
    return dict(lines)


def test_the_slurm_job_is_bash_and_fits_lightnings_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert subprocess.run(["bash", "-n", SBATCH], check=False).returncode == 0
    given = options()
    job = {"SLURM_JOB_ID": "71", "SLURM_JOB_NAME": given["job-name"], "SLURM_NTASKS": "16"}
    job |= {"SLURM_NTASKS_PER_NODE": given["ntasks-per-node"], "SLURM_NNODES": given["nodes"]}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    assert SLURMEnvironment.detect()
    SLURMEnvironment().validate_settings(int(given["ntasks-per-node"]), int(given["nodes"]))
    with pytest.raises(ValueError, match="ntasks-per-node"):
        SLURMEnvironment().validate_settings(4, 2)
    assert given["gpus-per-node"] == given["ntasks-per-node"]
    assert "requeue" in given and given["signal"].startswith(f"{signal.SIGUSR1.name}@")
    own = {"SLURM_SUBMIT_DIR", "SLURM_JOB_NODELIST", "SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE"}
    assert set(re.findall(r"SLURM_[A-Z_]+", SBATCH.read_text())) == own  # all of them are in every job


@pytest.mark.long
def test_the_slurm_job_trains_two_tasks(quick_config: dict[str, Any], photos: Path, tmp_path: Path) -> None:
    """srun and scontrol are stand-ins that start the tasks as SLURM does; the job itself is the shipped file."""
    config, port = write_config(quick_config, tmp_path), free_port()
    env = environment(tmp_path)
    write_command(tmp_path / "bin" / "scontrol", 'echo "$@" >> "$SLURM_SUBMIT_DIR/scontrol.log"; echo 127.0.0.1')
    write_command(
        tmp_path / "bin" / "srun",
        """tasks=$SLURM_NTASKS_PER_NODE
while [[ $1 == --* ]]; do [[ $1 == --ntasks-per-node=* ]] && tasks=${1#*=}; shift; done
status=0; pids=()
for ((rank = 0; rank < tasks; rank++)); do
  SLURM_NTASKS=$tasks SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NODEID=0 "$@" & pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit $status""",
    )
    env |= {"SLURM_JOB_ID": str(port - 15000), "SLURM_JOB_NAME": "sd_lora", "SLURM_NNODES": "1"}
    env |= {"SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NODELIST": "localhost", "SLURM_SUBMIT_DIR": str(tmp_path)}
    done = subprocess.run(
        ["bash", SBATCH, str(config), str(photos)], capture_output=True, text=True, env=env, timeout=400
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "0 problems" in done.stdout  # doctor ran first
    assert "2 processes, joined by gloo" in done.stderr
    assert (tmp_path / "runs" / f"sd_lora-{port - 15000}" / "summary.json").exists()
    assert (tmp_path / "scontrol.log").read_text().startswith("show hostnames")


# Two hosts on one machine --------------------------------------------------------------------------------------------


def run_recipe(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "benchmarks" / "gradient_sync" / "two_hosts.sh", "100mbit", *command],
        capture_output=True, text=True, cwd=folder, env=environment(folder), timeout=500,
    )  # fmt: skip


def namespaces() -> set[str]:
    return set(subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.usefixtures("needs_namespaces")
def test_the_recipe_removes_its_hosts_also_when_a_command_fails(tmp_path: Path) -> None:
    before = namespaces()
    done = run_recipe("bash", "-c", "echo rank $NODE_RANK of $MASTER_ADDR; exit $NODE_RANK", folder=tmp_path)
    assert done.returncode == 1
    assert "host 0 | rank 0 of 10.211.8.1" in done.stdout and "host 1 | rank 1 of" in done.stdout
    assert not {name for name in namespaces() - before if name.startswith("try")}


@pytest.mark.usefixtures("needs_namespaces")
def test_the_recipe_ends_what_it_started_also_where_that_ignores_a_signal(tmp_path: Path) -> None:
    stubborn = "trap '' TERM; echo $$ > $NODE_RANK.pid; exec sleep 300"
    run_recipe("bash", "-c", f'setsid bash -c "{stubborn.replace("$", chr(92) + "$")}" & sleep 1', folder=tmp_path)
    pids = [int((tmp_path / f"{rank}.pid").read_text()) for rank in range(2)]
    deadline = time.monotonic() + 20
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie, which only waits for its parent."""
    try:
        return Path("/proc", str(pid), "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.usefixtures("needs_namespaces")
@pytest.mark.long
def test_the_documented_recipe_trains_over_its_link(quick_config: dict[str, Any], tmp_path: Path) -> None:
    config = write_config(quick_config, tmp_path)
    (line,) = re.findall(r"^sudo .*two_hosts\.sh \S+ (.*)$", PAGE, re.MULTILINE)
    words = shlex.split(line.replace("configs/sd_lora_demo.yaml", str(config)))
    done = run_recipe(*words, folder=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "npu_sparse: mode int3, 2 ranks on 2 node(s)" in done.stdout
    sent = [int(number) for number in re.findall(r"host \d sent (\d+) bytes", done.stdout)]
    assert len(sent) == 2 and min(sent) > 10_000

"""`lightning doctor` on whole, broken and missing parts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakes.processes.doctor import fake_package, run_doctor
from lightning_aigc.cli.doctor import checks as doctor_checks
from lightning_aigc.cli.doctor import versions as doctor_versions
from lightning_aigc.cli.doctor.checks import CHECKS
from lightning_aigc.cli.doctor.host import Host, run_check
from lightning_aigc.cluster.topology import Reading, parse_topology

Command = Callable[..., Any]
NO_CANN = "libhccl.so: cannot open shared object file: No such file or directory"
KERNELS = {"geglu": None, "feed_forward": "it has none", "keep_largest": "Triton cannot be imported (no module)"}


class Answers(Host):
    """A host whose probe said this."""

    def __init__(self, environ: dict[str, str] | None = None, **answers: Any) -> None:
        super().__init__(environ or {})
        whole = {"torch": {"version": "2.13.0", "cuda": None}, "torch_npu": None, "npu": [], "cuda": []}
        whole |= {"sync_mode": "int3", "kernels": KERNELS}
        self.__dict__["probe"] = {
            name: {"error": str(value)} if isinstance(value, Exception) else {"value": value}
            for name, value in (whole | answers).items()
        }


def texts(check: str, host: Host) -> list[str]:
    return [f"{finding.mark} {finding.text}" for finding in run_check(check, CHECKS[check], host)]


def test_a_whole_host_has_every_subject_and_no_problem() -> None:
    done = run_doctor("--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert {finding["check"] for finding in report["findings"]} == set(CHECKS)
    assert report["problems"] == 0


def test_torch_npu_without_cann_is_named_with_its_missing_library(tmp_path: Path) -> None:
    autoload = "[torch.backends]\ntorch_npu = torch_npu:_autoload\n"
    fake_package(
        tmp_path, "torch_npu", doctor_versions.installed("torch") or "", f"raise ImportError({NO_CANN!r})", autoload
    )
    plain = subprocess.run(
        [sys.executable, "-c", "import torch"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert plain.returncode != 0  # on this host torch does not even start
    done = run_doctor(path=tmp_path)
    assert done.returncode == 1
    assert "problem  torch_npu cannot be imported: the library libhccl.so is missing; install CANN" in done.stdout
    assert "ok       torch can be imported" in done.stdout
    assert "the check failed" not in done.stdout and done.stderr == ""


def test_without_any_torch_the_rest_is_still_said(tmp_path: Path) -> None:
    fake_package(tmp_path, "torch", "2.13.0", "raise ImportError('libtorch_cpu.so: cannot open shared object file')")
    done = run_doctor(path=tmp_path)
    assert done.returncode == 1
    assert "problem  torch cannot be imported: the library libtorch_cpu.so is missing; reinstall torch" in done.stdout
    assert "\ntopology\n" in done.stdout and "OMP_NUM_THREADS=1" in done.stdout and "\ncommand\n" in done.stdout
    assert "unknown  the check failed: ImportError: libtorch_cpu.so" in done.stdout


def test_fit_on_such_a_host_points_here(tmp_path: Path) -> None:
    fake_package(tmp_path, "torch", "2.13.0", "raise ImportError('libtorch_cpu.so: cannot open shared object file')")
    done = subprocess.run(
        [sys.executable, "-m", "lightning_aigc", "fit"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    assert done.returncode == 1
    assert done.stderr == (
        "error: torch does not start (libtorch_cpu.so: cannot open shared object file); ask `lightning doctor`\n"
    )


def test_a_probe_that_is_killed_leaves_what_it_said_before(tmp_path: Path) -> None:
    fake_package(tmp_path, "torch_npu", "2.13.0", "import os; os._exit(11)")
    host = Host({**os.environ, "PYTHONPATH": str(tmp_path)})
    assert host.ask("torch")["version"]
    with pytest.raises(RuntimeError, match="did not get there: it ended with status 11"):
        host.ask("kernels")


def test_a_check_that_raises_is_one_line() -> None:
    def breaks(host: Host) -> list[tuple[str, str]]:
        raise OSError("disk on fire")

    (finding,) = run_check("topology", breaks, Host())
    assert (finding.mark, finding.text) == ("unknown", "the check failed: OSError: disk on fire")


@pytest.mark.parametrize(
    ("version", "mark", "said"),
    [
        ("2.6.6", "ok", "lightning 2.6.6"), ("2.6.9", "ok", "2.6.9"), ("2.6.3", "problem", "malicious"),
        ("2.6.2", "problem", "malicious"), ("2.6.5", "problem", "not supported"), ("2.7.0", "problem", "<2.7"),
        (None, "problem", "not installed"),
    ],
)  # fmt: skip
def test_lightning_versions_are_judged(version: str | None, mark: str, said: str) -> None:
    judged = doctor_versions.judge_lightning(version)
    assert judged[0] == mark and said in judged[1]


@pytest.mark.parametrize(
    ("file", "text", "version"),
    [
        ("version.cfg", "# version: 1.0\nruntime_running_version=[7.5.0.1.129:CANN-8.0.RC3]\n", "8.0.RC3"),
        ("aarch64-linux/ascend_toolkit_install.info", "package_name=Ascend-cann-toolkit\nversion=8.3.RC1\n", "8.3.RC1"),
    ],
)
def test_cann_is_found_where_its_variables_point(tmp_path: Path, file: str, text: str, version: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    assert doctor_versions.cann_version({"ASCEND_HOME_PATH": str(tmp_path)}, roots=()) == version
    assert doctor_versions.cann_version({}, roots=()) is None


def test_two_tritons_are_a_problem_and_one_is_none() -> None:
    judged = doctor_versions.judge_tritons({"triton", "triton-ascend", "torch"})
    assert judged is not None and judged[0] == "problem" and "Uninstall both" in judged[1]
    assert doctor_versions.judge_tritons({"triton-ascend", "torch"}) is None


def test_two_tritons_are_found_among_what_is_installed(tmp_path: Path) -> None:
    fake_package(tmp_path, "triton", "3.9.0", "")
    fake_package(tmp_path / "other", "triton_ascend", "3.2.1", "")
    done = run_doctor(path=Path(f"{tmp_path}{os.pathsep}{tmp_path / 'other'}"))
    assert done.returncode == 1 and "triton and triton-ascend are both installed" in done.stdout


def test_cards_are_counted_by_kind() -> None:
    assert texts("devices", Answers(npu=["Ascend910B3"] * 8)) == ["ok 8 npu cards: Ascend910B3"]
    assert Answers(npu=["Ascend910B3"]).backend == "hccl"
    assert Answers(cuda=["H200"]).backend == "nccl" and Answers().backend == "gloo"


def test_a_card_that_torch_does_not_see_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia-smi", "npu-smi"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    ascend, nvidia, _ = texts("devices", Answers())
    assert ascend.startswith("warn an Ascend card seems to be here") and "torch_npu is not installed" in ascend
    assert nvidia.startswith("warn nvidia-smi is on PATH") and "install a CUDA build" in nvidia


def test_kernels_are_grouped_by_why_they_do_not_run() -> None:
    assert texts("kernels", Answers(cuda=["H200"])) == [
        "ok Triton kernels on cuda: geglu",
        "note torch reference on cuda: feed_forward; they have no kernel",
        "warn torch reference on cuda: keep_largest; Triton cannot be imported (no module)",
    ]
    assert texts("kernels", Answers()) == [
        "note on the CPU every op runs its torch reference: feed_forward, geglu, keep_largest"
    ]


def test_a_topology_says_the_order_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    table = parse_topology(
        "\tGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity\n"
        "GPU0\t X \tSYS\tPIX\t0-3,8\t0\nGPU1\tSYS\t X \tSYS\t4-7\t1\nGPU2\tPIX\tSYS\t X \t0-3,8\t0\n"
    )
    monkeypatch.setattr(doctor_checks.topology, "read_topology", lambda: Reading(table, "`nvidia-smi topo -m`"))
    assert texts("topology", Answers()) == [
        "ok `nvidia-smi topo -m`: 3 cards, links PIX, SYS; rank order 0 2 1",
        "note cores near each card: GPU0 0-3,8; GPU1 4-7; GPU2 0-3,8",
    ]


@pytest.mark.parametrize(
    ("status", "cards", "said"),
    [
        ("completed", "01", "ok RANK_TABLE_FILE={} gives 2 ranks their cards, as a launcher counts them"),
        ("completed", "10", "warn RANK_TABLE_FILE={} puts rank 0 on card 1 of here, and launchers count "),
        ("initializing", "01", "problem the ranktable {} has status 'initializing', wanted 'completed'"),
    ],
)
def test_a_ranktable_is_followed_and_compared_with_the_launchers_order(
    status: str, cards: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hccl.json"
    devices = [{"device_id": card, "rank_id": str(rank)} for rank, card in enumerate(cards)]
    servers = [{"server_id": "here", "device": devices}]
    path.write_text(json.dumps({"version": "1.0", "status": status, "server_list": servers}))
    monkeypatch.setattr(doctor_checks.topology, "read_topology", lambda: Reading(None, "no tool"))
    lines = texts("topology", Answers({"RANK_TABLE_FILE": str(path)}))
    assert lines[0].startswith(said.format(path)) and lines[1:] == ["note unknown: no tool; ranks keep their order"]


def test_variables_that_are_set_and_that_would_be_set_are_listed() -> None:
    said = texts("environment", Answers({"HCCL_CONNECT_TIMEOUT": "300", "HOME": "/root"}, npu=["Ascend910B3"]))
    assert "note set: HCCL_CONNECT_TIMEOUT=300" in said and not any("HOME" in line for line in said)
    assert any(line.startswith("note would be set: TASK_QUEUE_ENABLE=2 (") for line in said)
    assert not any("would be set: HCCL_CONNECT_TIMEOUT" in line for line in said)


def test_threads_beyond_the_cores_are_a_warning() -> None:
    assert texts("threads", Answers({"OMP_NUM_THREADS": "100000"}))[0].startswith("warn OMP_NUM_THREADS=100000 on ")
    assert texts("threads", Answers({"OMP_NUM_THREADS": "1"}))[0].startswith("ok ")
    assert "OMP_NUM_THREADS is unset" in texts("threads", Answers())[0]


def script(folder: Path, module: str) -> dict[str, str]:
    path = folder / "lightning"
    path.write_text(f"#!/usr/bin/python\nfrom {module} import main_cli\nmain_cli()\n")
    path.chmod(0o755)
    return {"PATH": str(folder)}


def test_the_owner_of_the_lightning_script_is_said(tmp_path: Path) -> None:
    (ours,) = texts("command", Answers(script(tmp_path, "lightning_aigc.cli")))[:1]
    assert ours == f"ok {tmp_path / 'lightning'} is ours"
    (theirs,) = texts("command", Answers(script(tmp_path, "lightning_sdk.cli.entrypoint")))
    assert theirs.startswith("warn ") and "`python -m lightning_aigc`" in theirs
    (nobody,) = texts("command", Answers({"PATH": str(tmp_path / "empty")}))
    assert nobody.startswith("warn no `lightning` is on PATH")


def test_a_log_is_explained_without_any_check(command: Command, tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    log.write_text("EI0006: Getting socket times out\nerror code is 507046\n")
    said = command("doctor", "--explain-log", log)
    assert said.code == 0 and [line.split(":")[0] for line in said.out.splitlines()] == ["EI0006", "507046"]
    log.write_text("all is well")
    assert "holds no HCCL or CANN error code" in command("doctor", "--explain-log", log).out
    assert json.loads(command("doctor", "--json", "--explain-log", log).out) == {"codes": []}


def test_a_log_that_cannot_be_read_is_one_line(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "gone.log"
    said = command("doctor", "--explain-log", path)
    assert said.code == 1
    assert said.errors == [
        f"error: --explain-log: {path} cannot be read: No such file or directory; give the path of a log"
    ]


def test_a_log_is_explained_where_torch_does_not_start(tmp_path: Path) -> None:
    fake_package(tmp_path, "torch", "2.13.0", "raise ImportError('broken')")
    (tmp_path / "log").write_text("EJ0001")
    done = run_doctor("--explain-log", str(tmp_path / "log"), path=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("EJ0001: the card's communication process")


def test_a_wrong_option_names_the_nearest(command: Command) -> None:
    said = command("doctor", "--jsn")
    assert said.code == 2 and "did you mean --json? (lightning doctor --help" in said.err


def test_a_reader_that_stops_early_gets_no_traceback() -> None:
    command = f"{sys.executable} -m lightning_aigc doctor | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("versions\n", "")

"""The checks of `lightning doctor`, one function per subject. Only the probe imports torch.

An exception in a check becomes a finding too, so that one failing check does not hide the others.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import socket
from collections import defaultdict
from pathlib import Path

from lightning_aigc.cli.doctor import ascend_releases, versions
from lightning_aigc.cli.doctor.host import Check, Findings, Host
from lightning_aigc.cli.doctor.network import check_network
from lightning_aigc.cluster import env_settings, ranktable, topology

VARIABLES = re.compile(
    r"(?:TORCH_)?(?:HCCL|NCCL)_\w+|GLOO_\w+|ASCEND_\w+|CPU_AFFINITY_CONF|TASK_QUEUE_ENABLE|INF_NAN_MODE_\w+"
    r"|PYTORCH_(?:NPU_|CUDA_)?ALLOC_CONF|RANK_TABLE_FILE|TORCH_DEVICE_BACKEND_AUTOLOAD|(?:CUDA|NVIDIA)_VISIBLE_DEVICES"
)
_MISSING_LIBRARY = re.compile(r"(\S+\.so[\w.]*): cannot open shared object file")


def check_versions(host: Host) -> Findings:
    torch, torch_npu = versions.installed("torch"), versions.installed("torch_npu")
    found: Findings = [("ok", f"python {platform.python_version()} on {platform.machine()}")]
    found += [versions.judge_torch(torch), versions.judge_lightning(versions.installed("lightning"))]
    if torch_npu is not None:
        cann = versions.cann_version(host.environ)
        found.append(ascend_releases.judge_torch_npu(torch, torch_npu))
        found.append(ascend_releases.judge_cann(torch_npu, cann))
        found.append(ascend_releases.judge_triton_ascend(versions.installed("triton-ascend"), cann))
    names = {(dist.metadata["Name"] or "").lower().replace("_", "-") for dist in importlib.metadata.distributions()}
    tritons = versions.judge_tritons(names)
    return [*found, tritons] if tritons else found


def check_imports(host: Host) -> Findings:
    """Whether torch and torch_npu can be imported, and which library is missing."""
    found: Findings = []
    for package, remedy in (
        ("torch", "reinstall torch"),
        (
            "torch_npu",
            f"install CANN and `{ascend_releases.SET_ENV}`; until then TORCH_DEVICE_BACKEND_AUTOLOAD=0 starts torch",
        ),
    ):
        error = host.probe[package].get("error")
        if error is None:
            if host.probe[package]["value"] is not None:
                found.append(("ok", f"{package} can be imported"))
            continue
        library = _MISSING_LIBRARY.search(error)
        reason = f"the library {library[1]} is missing" if library else error
        found.append(("problem", f"{package} cannot be imported: {reason}; {remedy}"))
        if package == "torch":
            break
    return found


def check_devices(host: Host) -> Findings:
    found: Findings = []
    for kind in ("npu", "cuda"):
        names = host.probe[kind].get("value") or []
        if names:
            found.append(("ok", f"{len(names)} {kind} card{'s' * (len(names) > 1)}: {', '.join(sorted(set(names)))}"))
    if found:
        return found
    if any(Path("/dev").glob("davinci[0-9]*")) or shutil.which("npu-smi"):
        missing = "" if versions.installed("torch_npu") else "; torch_npu is not installed: pip install '.[npu]'"
        found.append(("warn", f"an Ascend card seems to be here, and torch sees no npu{missing}"))
    if shutil.which("nvidia-smi"):
        build = host.probe["torch"].get("value") or {}
        why = "; this torch is built without CUDA: install a CUDA build" if build and not build["cuda"] else ""
        found.append(("warn", f"nvidia-smi is on PATH, and torch sees no cuda card{why}"))
    return [*found, ("note", "no accelerator: training runs on the CPU")]


def check_topology(host: Host) -> Findings:
    found = _ranktable(host)
    reading = topology.read_topology()
    if reading.topology is None:
        return [*found, ("note", f"unknown: {reading.said}; ranks keep their order")]
    table = reading.topology
    count = len(table.devices)
    links = sorted({link for row in table.links for link in row} - {"X"}, key=topology.distance)
    order = topology.device_order(table, count)
    keeps_order = found or order == list(range(count))
    ranks = "ranks keep their order" if keeps_order else f"rank order {' '.join(map(str, order))}"
    found.append(("ok", f"{reading.said}: {count} cards, links {', '.join(links) or 'none'}; {ranks}"))
    if all(table.cpus):
        near = "; ".join(f"{name} {_ranges(cores)}" for name, cores in zip(table.devices, table.cpus, strict=True))
        found.append(("note", f"cores near each card: {near}"))
    return found


def _ranktable(host: Host) -> Findings:
    """Whether the ranktable, which HCCL follows, assigns each rank the same card as the launcher does."""
    path = host.environ.get("RANK_TABLE_FILE")
    if path is None:
        return []
    try:
        places = ranktable.read_ranktable(path)
    except topology.TopologyError as error:
        return [("problem", str(error))]
    stray = ranktable.misplaced(places)
    if stray is None:
        return [("ok", f"RANK_TABLE_FILE={path} gives {len(places)} ranks their cards, as a launcher counts them")]
    text = (
        f"RANK_TABLE_FILE={path} puts rank {stray.rank} on card {stray.device} of {stray.server}, and launchers count "
        "servers one after another, their cards ascending; order its rank_ids so, or unset it"
    )
    return [("warn", text)]


def check_kernels(host: Host) -> Findings:
    """List the fused ops with a kernel that runs on this device."""
    reasons: dict[str | None, list[str]] = defaultdict(list)
    for op, reason in host.ask("kernels").items():
        reasons[reason].append(op)
    device = {"hccl": "npu", "nccl": "cuda"}.get(host.backend, "cpu")
    if device == "cpu":
        ops = sorted(op for group in reasons.values() for op in group)
        return [("note", f"on the CPU every op runs its torch reference: {', '.join(ops)}")]
    found: Findings = []
    for reason, ops in reasons.items():
        if reason is None:
            found.append(("ok", f"Triton kernels on {device}: {', '.join(ops)}"))
        else:
            mark = "note" if reason == "it has none" else "warn"
            why = "they have no kernel" if mark == "note" else reason
            found.append((mark, f"torch reference on {device}: {', '.join(ops)}; {why}"))
    return found


def check_gradient_sync(host: Host) -> Findings:
    mode = host.ask("sync_mode")
    return [("note", f"strategy npu_sparse would by default send gradients as {mode} over {host.backend}")]


def check_environment(host: Host) -> Findings:
    """The variables that control communication: those that are set, and those that the strategy would set."""
    given = {name: value for name, value in sorted(host.environ.items()) if VARIABLES.fullmatch(name)}
    found: Findings = [("note", f"set: {name}={value}") for name, value in given.items()]
    planned = env_settings.planned(host.backend, 1, False, host.environ)
    found += [("note", f"would be set: {setting.name}={setting.value} ({setting.why})") for setting in planned]
    if host.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0" and versions.installed("torch_npu"):
        found.append(("warn", "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading torch_npu: unset it to train"))
    if host.backend == "gloo" and _own_address().startswith("127."):
        found.append(
            (
                "note",
                f"this host's own name means {_own_address()}: over several nodes, set GLOO_SOCKET_IFNAME for gloo",
            )
        )
    return found or [("ok", f"nothing set, and nothing that {host.backend} would need")]


def check_threads(host: Host) -> Findings:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = host.environ.get("OMP_NUM_THREADS")
    if threads is None:
        return [
            ("note", f"{cores} cores; OMP_NUM_THREADS is unset: each rank would take them all, so set cores / ranks")
        ]
    if threads.isdigit() and int(threads) > cores:
        return [
            ("warn", f"OMP_NUM_THREADS={threads} on {cores} cores: threads wait for one another; set at most {cores}")
        ]
    return [("ok", f"{cores} cores, OMP_NUM_THREADS={threads}")]


def check_command(host: Host) -> Findings:
    """Name the package that owns the `lightning` script; lightning-sdk installs a script of the same name."""
    path = shutil.which("lightning", path=host.environ.get("PATH"))
    claims = {
        entry.dist.metadata["Name"]: entry.value
        for entry in importlib.metadata.entry_points(group="console_scripts", name="lightning")
        if entry.dist is not None
    }
    others = sorted(name for name in claims if name.replace("-", "_") != "lightning_aigc")
    use = "use `lightning-aigc` or `python -m lightning_aigc`"
    if path is None:
        return [("warn", f"no `lightning` is on PATH; {use}")]
    script = Path(path).read_text(encoding="utf-8", errors="replace")
    if "lightning_aigc" not in script:
        owner = next((name for name in others if claims[name].partition(":")[0] in script), "another program")
        return [("warn", f"{path} belongs to {owner}, which has no fit; {use}, or install lightning_aigc again")]
    found: Findings = [("ok", f"{path} is ours")]
    if others:
        found.append(("note", f"{', '.join(others)} installs a `lightning` too; whichever is installed last owns it"))
    return found


def check_sharding(host: Host) -> Findings:
    """List the stages of ZeRO that this machine can run, and their backend."""
    if "error" in host.probe["torch"]:
        return [("unknown", "torch does not answer, so no stage of ZeRO is known to run")]
    npu_version = host.probe["torch_npu"].get("value")
    cards = {kind: host.probe[kind].get("value") or [] for kind in ("npu", "cuda")}
    kind = next((kind for kind, found in cards.items() if found), "cpu")
    if kind == "npu" and npu_version and _version(npu_version) < (2, 6):
        return [("warn", "zero_1 can run; zero_2 and zero_3 want torch_npu 2.6 or later: its fully_shard came then")]
    count = (os.cpu_count() or 1) if kind == "cpu" else len(cards[kind])
    if kind != "cpu" and count < 2:
        return [("note", "one card here: zero_1, zero_2 and zero_3 want two ranks or more, on other nodes too")]
    backend = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}[kind]
    counted = f"{count} {'cores' if kind == 'cpu' else kind}"
    return [("ok", f"zero_1, zero_2 and zero_3 can run here over {backend} ({counted})")]


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


CHECKS: dict[str, Check] = {
    "versions": check_versions,
    "imports": check_imports,
    "devices": check_devices,
    "topology": check_topology,
    "kernels": check_kernels,
    "gradient sync": check_gradient_sync,
    "sharding": check_sharding,
    "environment": check_environment,
    "network": check_network,
    "threads": check_threads,
    "command": check_command,
}


def _ranges(cores: tuple[int, ...]) -> str:
    """(0, 1, 2, 8) -> 0-2,8."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""

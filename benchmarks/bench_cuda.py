"""Every row that waits for a CUDA card, in two calls of at most ten minutes each: `make bench-cuda PART=1`, then 2.

    python benchmarks/bench_cuda.py --part 1 [--minutes 9.5] [--output FILE.jsonl] [--logs DIR] [--only NAME ...]
    python benchmarks/bench_cuda.py --short --device cpu --minutes 8      # what CI runs, so that this file cannot rot

Each command is a process of its own. A section that fails, or takes longer than its share, is noted and the next one
runs. Rows are appended to `--output` as soon as a section ends, each with the section's name; all that it printed is in
`--logs`. Last comes the list of bars, those that were missed first. Needs no network; a machine that lacks packages
gets them from benchmarks/offline_wheels.py. Exit status 1 says that a section failed, not that a bar was missed:
figures of another machine are for reading.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
Row = dict[str, Any]
LEVELS = {"balanced": (0.60, 1.00), "lean": (0.25, 1.08), "max": (0.12, 1.40)}
"""What a memory level may keep of native's activations, and take of its step time, on SD 1.5; SDXL has 0.03 more."""
COPY_SHARE, SCRIPT_MEMORY, SCRIPT_TIME, BLOCKED_SHARE, MONITOR_MS = 0.80, 0.35, 1.00, 0.05, 1.0


@dataclass(frozen=True)
class Bar:
    """One figure beside what is wanted of it."""

    what: str
    got: float
    wanted: float
    at_least: bool = False

    @property
    def held(self) -> bool:
        return self.got >= self.wanted if self.at_least else self.got <= self.wanted

    def __str__(self) -> str:
        mark = "held  " if self.held else "MISSED"
        return f"{mark} {self.what}: {self.got:g}, wanted {'at least' if self.at_least else 'at most'} {self.wanted:g}"


@dataclass(frozen=True)
class Section:
    """A name, the commands that print JSON rows (or make files that `read` turns into rows), and the bars on them."""

    name: str
    part: int
    limit_s: float
    commands: Sequence[Sequence[str]]
    short: Sequence[Sequence[str]]
    """The same on a CPU in seconds; none: this section needs a card."""
    bars: Callable[[list[Row]], list[Bar]] = lambda rows: []
    read: Callable[[Path], list[Row]] = field(default=lambda folder: [])


def script(path: str, *arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / path), *arguments]


def tests(*arguments: str) -> list[str]:
    parallel = ["-n", "8"] if importlib.util.find_spec("xdist") else []
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "--junit-xml={work}/tests-{n}.xml", *parallel]
    return [sys.executable, "-m", "pytest", *options, *arguments]


def level_bars(rows: list[Row]) -> list[Bar]:
    found = []
    for row in rows:
        if row.get("variant") in LEVELS:
            more = 0.03 if row["model"] == "sdxl" else 0.0
            name = f"{row['model']} batch {row['batch']} {row['variant']}"
            kept, step_time = LEVELS[row["variant"]]
            found.append(Bar(f"{name}, kept / native", row["kept_ratio"], round(kept + more, 3)))
            for key in ("step_time_ratio", "device_time_ratio"):
                if key in row:
                    found.append(Bar(f"{name}, {key}", row[key], round(step_time + more, 3)))
    return found


def bandwidth_bars(rows: list[Row]) -> list[Bar]:
    return [
        Bar(
            f"{row['shape']}{' trained' * row['trained']} {way}, of a copy",
            row[f"ours_{way}_of_copy"],
            COPY_SHARE,
            True,
        )
        for row in rows
        for way in ("forward", "backward")
    ]


def script_bars(rows: list[Row]) -> list[Bar]:
    found = []
    for row in rows:
        name = f"batch {row['batch']} {row['variant']}"
        if row["variant"] in ("lean", "max"):
            found.append(Bar(f"{name}, peak / diffusers' script in bf16", row["ratio"], SCRIPT_MEMORY))
        if "step_ratio" in row and not row["variant"].startswith("diffusers"):
            found.append(Bar(f"{name}, step time / diffusers' script", row["step_ratio"], SCRIPT_TIME))
    return found


def tests_of(folder: Path) -> list[Row]:
    """One row a pytest run, from its junit file."""
    import xml.etree.ElementTree as ET

    rows = []
    for path in sorted(folder.glob("tests-*.xml")):
        suite = next(ET.parse(path).getroot().iter("testsuite"))
        count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
        failed = [
            f"{case.get('classname')}::{case.get('name')}"
            for case in suite.iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        ]
        rows.append({"benchmark": "tests", **count, "seconds": float(suite.get("time", 0)), "failed": failed[:40]})
    return rows


def tests_bars(rows: list[Row]) -> list[Bar]:
    ran = sum(row["tests"] - row["skipped"] for row in rows)
    return [
        Bar("tests that failed", sum(row["failures"] + row["errors"] for row in rows), 0),
        Bar("tests that ran", ran, 1, at_least=True),
    ]


def demo_of(folder: Path) -> list[Row]:
    path = folder / "demo" / "summary.json"
    return [{"benchmark": "demo", **json.loads(path.read_text())}] if path.is_file() else []


def demo_bars(rows: list[Row]) -> list[Bar]:
    return [
        bar
        for row in rows
        for bar in (
            Bar("demo, CLIP-T rose by", round(row["clip_t_after"] - row["clip_t_before"], 3), 0.4, True),
            Bar(
                "demo, other prompts kept", round(row["prior_clip_t_after"] / row["prior_clip_t_before"], 3), 0.9, True
            ),
        )
    ]


def snapshot_bars(rows: list[Row]) -> list[Bar]:
    names = ("callback_ratio", "blocked_late_ratio")
    return [Bar(f"snapshots, {name}", row[name], BLOCKED_SHARE) for row in rows for name in names if name in row]


def monitor_bars(rows: list[Row]) -> list[Bar]:
    return [
        Bar(f"monitor, CPU ms between looks ({row['kind']})", row["cpu_between_looks_ms"], MONITOR_MS) for row in rows
    ]


def sections() -> list[Section]:
    unet, bandwidth = "benchmarks/unet_step.py", "kernels/benchmarks/bandwidth.py"
    memory, health = "benchmarks/step_memory.py", "benchmarks/health_cost.py"
    levels = ["--variants", "native", "balanced", "lean", "max", "checkpointing"]
    few = ["--rounds", "5", "--steps", "3"]
    compiled = ["--variants", "native", "compile"]
    tiny = ["--width", "0.1", "--pixels", "64", "--rounds", "1"]
    cost = ["--size", "512", "--steps", "41", "--results", "{work}/rows"]
    to = ["--device", "{device}"]
    fit = [sys.executable, "-m", "lightning_aigc", "fit", "-c", str(ROOT / "configs" / "sd_lora_demo.yaml")]
    fit += ["--trainer.accelerator", "{device}", "--trainer.default_root_dir", "{work}/demo"]
    fit += ["--data.init_args.cache_dir", "{work}/demo-cache"]
    small_demo = ["--model.init_args.max_train_steps", "2", "--model.init_args.validation_steps", "2"]
    small_demo += ["--model.init_args.num_inference_steps", "2", "--trainer.callbacks.init_args.num_images", "2"]
    return [
        Section(
            "tests", 1, 260,
            [
                tests("tests/cuda", "tests/checkpoint/test_snapshots_of_devices.py"),
                tests("tests/kernels/triton"),
                tests("tests/kernels/ops", "--device", "cuda"),
            ],
            [tests("tests/kernels/ops/test_geglu.py", "--device", "cpu"), tests("tests/cuda")],
            lambda rows: tests_bars(rows), tests_of,
        ),
        Section(
            "bandwidth", 1, 60,
            [script(bandwidth, *to), script(bandwidth, *to, "--trained", "--shapes", "2")],
            [script(bandwidth, *to, "--dtype", "float32", "--shapes", "1", "--repeats", "1")],
            bandwidth_bars,
        ),
        Section(
            "unet_step sd15", 1, 150,
            [script(unet, *to, *levels, *few), script(unet, *to, *levels, *few, "--batch", "4")],
            [script(unet, *to, *levels, *tiny)],
            level_bars,
        ),
        Section(
            "diffusers' script", 1, 240,
            [
                script(
                    memory, "{work}", *to, "--batch", "4", "--timed_steps", "20", "--variants", "diffusers",
                    "lean", "lean-uncached", "max", "max-uncached", "off", "diffusers-float32", "off-uncached",
                ),
            ],
            [],  # Stable Diffusion 1.5 at its real size: not for a CPU in minutes
            script_bars,
        ),
        Section(
            "unet_step sdxl", 2, 140,
            [script(unet, *to, *levels, *few, "--model", "sdxl", "--pixels", "1024")],
            [script(unet, *to, *levels, *tiny, "--model", "sdxl")],
            level_bars,
        ),
        Section(
            "demo", 2, 150, [[*fit]], [[*fit, *small_demo]], lambda rows: demo_bars(rows), demo_of,
        ),
        Section(
            "snapshots", 2, 90,
            [script("benchmarks/snapshot_cost.py", *to, "--results", "{work}/rows")],
            [
                script(
                    "benchmarks/snapshot_cost.py", *to, "--what", "callback", "--repeats", "1", "--warm-up", "1",
                    "--results", "{work}/rows",
                )
            ],
            snapshot_bars,
        ),
        Section(
            "monitor", 2, 90,
            [
                script(health, *to, *cost, "--precision", "bf16-mixed"),
                script(health, *to, *cost, "--kind", "full"),
            ],
            [],  # a U-Net of SD 1.5's size; health_cost.py has CPU rows of its own
            monitor_bars,
        ),
        Section(
            "compile sd15", 2, 200,
            [
                script(unet, *to, *compiled, *few),
                script(unet, *to, *compiled, *few, "--batch", "4"),
            ],
            [],  # minutes of a C++ compiler on a CPU
        ),
        Section(
            "unet_step sdxl batch 4", 2, 150,
            [script(unet, *to, *levels, *few, "--model", "sdxl", "--pixels", "1024", "--batch", "4")],
            [],  # the same code as batch 1
            level_bars,
        ),
        Section(
            "compile sdxl", 2, 240,
            [script(unet, *to, *compiled, *few, "--model", "sdxl", "--pixels", "1024")],
            [],
        ),
    ]  # fmt: skip


def environment(device: str) -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    given = {
        "PYTHONPATH": os.pathsep.join(p for p in paths if p),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        given["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    return {**os.environ, **given}


def run(section: Section, given: argparse.Namespace, work: Path, until: float) -> tuple[list[Row], str]:
    """The section's rows, and what went wrong in one line; its output goes to a log of its own."""
    rows: list[Row] = []
    wrong = ""
    section_end = min(until, time.monotonic() + section.limit_s)
    log = given.logs / f"{section.name.replace(' ', '_').replace(chr(39), '')}.log"
    for number, command in enumerate(section.short if given.short else section.commands):
        filled = [part.format(work=work, device=given.device, n=number) for part in command]
        left = section_end - time.monotonic()
        if left < 5:
            return rows, wrong or "no time was left"
        with log.open("a") as file:
            file.write(f"$ {' '.join(filled)}\n")
            file.flush()
            process = subprocess.Popen(
                filled,
                cwd=ROOT,
                env=environment(given.device),
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,  # what it started in turn ends with it
            )
            try:
                printed, _ = process.communicate(timeout=left)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                printed, _ = process.communicate()
                wrong = f"command {number + 1} was ended after {left:.0f} s"
            else:
                if process.returncode:
                    wrong = f"command {number + 1} ended with {process.returncode}"
            file.write(printed)
        rows += [json.loads(line) for line in printed.splitlines() if line.startswith("{") and line.endswith("}")]
    return rows + section.read(work), wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=(1, 2), help="unset: both")
    parser.add_argument("--minutes", type=float, default=9.5, help="no section is running after so many")
    parser.add_argument("--short", action="store_true", help="small sizes, to see that everything still runs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", help="names of sections")
    parser.add_argument("--output", type=Path, help="unset: benchmarks/results/DATE-cuda.jsonl, or none with --short")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "bench-cuda")
    given = parser.parse_args()
    until = time.monotonic() + 60 * given.minutes
    output = given.output or (
        None if given.short else ROOT / "benchmarks" / "results" / f"{time.strftime('%Y-%m-%d')}-cuda.jsonl"
    )
    given.logs.mkdir(parents=True, exist_ok=True)
    bars: list[Bar] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="bench-cuda-") as folder:
        for section in sections():
            chosen = section.name in given.only if given.only else given.part in (None, section.part)
            if not chosen or (given.short and not section.short):
                continue
            started = time.monotonic()
            rows, wrong = run(section, given, Path(folder), until)
            header = {"section": section.name, "date": time.strftime("%Y-%m-%d"), **versions(given.device)}
            if output:
                with output.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(header | row) + "\n" for row in rows)
            bars += section.bars(rows)
            seconds = time.monotonic() - started
            print(f"{section.name}: {len(rows)} rows in {seconds:.0f} s{': ' + wrong if wrong else ''}", flush=True)
            if wrong or not rows:
                failed.append(f"{section.name}: {wrong or 'no rows'}; see {given.logs}")
    if not given.short:  # a toy's ratios on a CPU say nothing
        print("\n".join(map(str, sorted(bars, key=lambda bar: bar.held))))
    print("\n".join(f"FAILED {line}" for line in failed) or "every section ran")
    raise SystemExit(bool(failed))


def versions(device: str) -> Row:
    """The machine and what runs on it."""
    import torch

    row: Row = {"torch": torch.__version__, "python": platform.python_version()}
    if device == "cuda" and torch.cuda.is_available():
        row |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return row


if __name__ == "__main__":
    main()

"""The sections of bench_cuda.py: commands, smaller versions for a CPU, and the bars on their rows."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import ROOT
from benchmarks.cuda.bars import (
    Bar,
    Row,
    bandwidth_bars,
    demo_bars,
    demo_of,
    graph_bars,
    level_bars,
    monitor_bars,
    script_bars,
    snapshot_bars,
    streamed_bars,
    tests_bars,
    tests_of,
)

UNET = "precision.unet_step"
GRAPHS, STREAMED = "precision.graph_step", "precision.streamed_step"
BANDWIDTH, ATTENTION = "kernels.bandwidth", "kernels.attention"
MEMORY, HEALTH, SNAPSHOTS = "precision.step_memory", "health.cost", "checkpoint.snapshot_cost"
LEVELS = ["--variants", "native", "balanced", "lean", "max", "checkpointing"]
FEW = ["--rounds", "5", "--steps", "3"]
TWO = ["--levels", "native", "lean"]
COMPILED = ["--variants", "native", "compile"]
SHALLOW = ["--blocks", "2", "--pixels", "64", "--text", "16", "--rounds", "1"]
TINY = ["--width", "0.1", "--pixels", "64", "--rounds", "1"]
COST = ["--size", "512", "--steps", "41", "--output", "{work}/rows.jsonl"]
TO = ["--device", "{device}"]
FIT = [sys.executable, "-m", "lightning_aigc", "fit", "-c", str(ROOT / "configs" / "sd_lora_demo.yaml")]
FIT += ["--trainer.accelerator", "{device}", "--trainer.default_root_dir", "{work}/demo"]
FIT += ["--data.init_args.cache_dir", "{work}/demo-cache"]
SMALL_DEMO = ["--model.init_args.max_train_steps", "2", "--model.init_args.validation_steps", "2"]
SMALL_DEMO += ["--model.init_args.num_inference_steps", "2", "--trainer.callbacks.init_args.num_images", "2"]


@dataclass(frozen=True)
class Section:
    """A name, the commands that print JSON rows (or make files that `read` turns into rows), and the bars on them."""

    name: str
    part: int
    limit_s: float
    commands: Sequence[Sequence[str]]
    short: Sequence[Sequence[str]]
    """Smaller commands for a CPU, seconds long; empty if the section needs a card."""
    bars: Callable[[list[Row]], list[Bar]] = lambda rows: []
    read: Callable[[Path], list[Row]] = field(default=lambda folder: [])


def script(name: str, *arguments: str) -> list[str]:
    """Command that runs a benchmark, named `room.name`."""
    return [sys.executable, "-m", f"benchmarks.{name}", *arguments]


def tests(*arguments: str) -> list[str]:
    parallel = ["-n", "8"] if importlib.util.find_spec("xdist") else []
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "--junit-xml={work}/tests-{n}.xml", *parallel]
    return [sys.executable, "-m", "pytest", *options, *arguments]


def sections() -> list[Section]:
    """All sections, in the order in which they run."""
    return part_one() + part_two()


def part_one() -> list[Section]:
    """Tests, kernels, and Stable Diffusion 1.5."""
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
            [script(BANDWIDTH, *TO), script(BANDWIDTH, *TO, "--trained", "--shapes", "2")],
            [script(BANDWIDTH, *TO, "--dtype", "float32", "--shapes", "1", "--repeats", "1")],
            bandwidth_bars,
        ),
        Section(
            "attention", 1, 40,
            [script(ATTENTION, *TO)],
            [script(ATTENTION, *TO, "--shapes", "2", "--pixels", "64", "--repeats", "1")],
        ),
        Section(
            "unet_step sd15", 1, 150,
            [script(UNET, *TO, *LEVELS, *FEW), script(UNET, *TO, *LEVELS, *FEW, "--batch", "4")],
            [script(UNET, *TO, *LEVELS, *TINY)],
            level_bars,
        ),
        Section(
            "graphs sd15", 1, 110,
            [
                script(GRAPHS, *TO),
                script(GRAPHS, *TO, "--batch", "4", "16", "--rounds", "3", "--steps", "3", *TWO),
                script(GRAPHS, *TO, "--shapes", "5", "--rounds", "3", "--steps", "2", *TWO),
            ],
            [script(GRAPHS, *TO, "--width", "0.1", "--pixels", "64", "--rounds", "1", "--steps", "1")],
            graph_bars,
        ),
        Section(
            "graphs transformers", 1, 150,
            [
                script(GRAPHS, *TO, "--model", "sd35", "--rounds", "3", "--levels", "native", "lean", "max"),
                script(GRAPHS, *TO, "--model", "z_image", "--rounds", "3", *TWO),
                script(GRAPHS, *TO, "--model", "flux", "--rounds", "3", *TWO),
                script(GRAPHS, *TO, "--model", "flux", "--rounds", "3", "--levels", "lean", "--base", "nf4"),
            ],
            [script(GRAPHS, *TO, *SHALLOW, "--model", "sd35", "--steps", "1", "--base", "int8")],
            graph_bars,
        ),
        Section(
            "streamed", 1, 120,
            [
                script(STREAMED, *TO, "--share", "0.5"),
                script(STREAMED, *TO, "--share", "0.0", "--base", "int8"),
                script(STREAMED, *TO, "--share", "0.0", "--base", "int8", "--pixels", "512"),
            ],
            [script(STREAMED, *TO, *SHALLOW, "--model", "z_image")],
            streamed_bars,
        ),
        Section(
            "diffusers' script", 1, 240,
            [
                script(
                    MEMORY, "{work}", *TO, "--batch", "4", "--timed_steps", "20", "--variants", "diffusers",
                    "off-graph", "lean-graph", "max-graph", "off", "lean", "max", "lean-uncached", "max-uncached",
                ),
            ],
            [],  # Stable Diffusion 1.5 at its real size takes too long on a CPU
            script_bars,
        ),
    ]  # fmt: skip


def part_two() -> list[Section]:
    """SDXL, the demo, snapshots, the monitor and torch.compile."""
    return [
        Section(
            "unet_step sdxl", 2, 140,
            [script(UNET, *TO, *LEVELS, *FEW, "--model", "sdxl", "--pixels", "1024")],
            [script(UNET, *TO, *LEVELS, *TINY, "--model", "sdxl")],
            level_bars,
        ),
        Section(
            "graphs sdxl", 2, 90,
            [script(GRAPHS, *TO, "--model", "sdxl", "--pixels", "1024", "--rounds", "3", "--steps", "3")],
            [],  # the same code as SD 1.5
            graph_bars,
        ),
        Section(
            "demo", 2, 150, [[*FIT]], [[*FIT, *SMALL_DEMO]], lambda rows: demo_bars(rows), demo_of,
        ),
        Section(
            "snapshots", 2, 90,
            [script(SNAPSHOTS, *TO, "--output", "{work}/rows.jsonl")],
            [
                script(
                    SNAPSHOTS, *TO, "--what", "callback", "--repeats", "1", "--warm-up", "1",
                    "--output", "{work}/rows.jsonl",
                )
            ],
            snapshot_bars,
        ),
        Section(
            "monitor", 2, 90,
            [
                script(HEALTH, *TO, *COST, "--precision", "bf16-mixed"),
                script(HEALTH, *TO, *COST, "--kind", "full"),
            ],
            [],  # a U-Net of SD 1.5's size; health/cost.jsonl has CPU rows
            monitor_bars,
        ),
        Section(
            "compile sd15", 2, 200,
            [
                script(UNET, *TO, *COMPILED, *FEW),
                script(UNET, *TO, *COMPILED, *FEW, "--batch", "4"),
            ],
            [],  # minutes of a C++ compiler on a CPU
        ),
        Section(
            "unet_step sdxl batch 4", 2, 150,
            [script(UNET, *TO, *LEVELS, *FEW, "--model", "sdxl", "--pixels", "1024", "--batch", "4")],
            [],  # the same code as batch 1
            level_bars,
        ),
        Section(
            "compile sdxl", 2, 240,
            [script(UNET, *TO, *COMPILED, *FEW, "--model", "sdxl", "--pixels", "1024")],
            [],
        ),
    ]  # fmt: skip

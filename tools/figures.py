"""Draw the figures of docs/ from the rows in benchmarks/results: `python -m tools.figures`.

Each image contains a checksum of its rows, so that a test can tell when it is out of date.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

from benchmarks import RESULTS, ROOT

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

IMAGES = ROOT / "docs" / "images"
Row = dict[str, Any]
ORANGE, TEAL, GREY = "#d6582a", "#1f8a8a", "#8a8f98"
LEVELS = {"native": GREY, "balanced": "#7fb7b7", "lean": TEAL, "max": "#0b4f4f", "checkpointing": ORANGE}
BELOW = (-4, -13)
LABEL_OFFSETS = {"sparse_int8 0.75": BELOW, "int4": BELOW, "int8": BELOW, "bf16": BELOW, "dense": BELOW}
LABEL_OFFSETS["sparse 0.5"] = (7, -6)
CHECKSUM = "Rows"
"""The PNG text chunk that holds the checksum."""


def rows_of(name: str, **wanted: Any) -> list[Row]:
    """Rows of `benchmarks/results/<name>.jsonl` whose fields have these values."""
    lines = (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def memory_rows() -> list[Row]:
    """Rows of runs that timed all five variants: SD 1.5 at 512 px, and half its width at 256 px."""
    runs: list[list[Row]] = []
    for row in rows_of("precision/unet_step", model="sd15"):
        if row["variant"] == "native":  # the first row of a run
            runs.append([])
        runs[-1].append(row)
    return [row for run in runs if {row["variant"] for row in run} == set(LEVELS) for row in run if row["rounds"]]


def draw_memory(rows: Sequence[Row], figure: Figure) -> None:
    ax = figure.subplots()
    for row in rows:
        is_wide = row["pixels"] == 512
        kept, time = row["kept_ratio"], row["step_time_ratio"]
        ax.plot(kept, time, "o" if is_wide else "s", color=LEVELS[row["variant"]], markersize=8 if is_wide else 6)
        if is_wide:
            ax.annotate(row["variant"], (kept, time), textcoords="offset points", xytext=(8, -4))
    ax.plot([], [], "o", color=GREY, label="SD 1.5, 512 px")
    ax.plot([], [], "s", color=GREY, label="half its width, 256 px")
    ax.set(xlabel="kept for backward / native", ylabel="CPU step time / native", xlim=(0, 1.12))
    ax.legend(loc="upper right")


def budget_rows() -> list[Row]:
    return rows_of("precision/memory_budget", batch=1, lora=64, model="sd15")


def draw_budget(rows: Sequence[Row], figure: Figure) -> None:
    axes: Sequence[Axes] = figure.subplots(1, 2, sharey=True)
    sides = {"budget": (TEAL, "o-", "memory: {kept: ...}"), "torch": (GREY, "s-", "torch: activation_memory_budget")}
    for ax, (pixels, title) in zip(axes, ((512, "SD 1.5, 512 px"), (256, "half its width, 256 px")), strict=True):
        here = [row for row in rows if row["pixels"] == pixels]
        for variant, (colour, style, label) in sides.items():
            points = sorted((row["kept_ratio"], row["flops_ratio"]) for row in here if row["variant"] == variant)
            if points:
                ax.plot(*zip(*points, strict=True), style, color=colour, markersize=4, label=label)
        for row in here:
            if row["variant"] in ("balanced", "lean", "max", "checkpointing"):
                ax.plot(row["kept_ratio"], row["flops_ratio"], "D", color=LEVELS[row["variant"]], markersize=6)
                place = (row["kept_ratio"], row["flops_ratio"])
                ax.annotate(row["variant"], place, textcoords="offset points", xytext=(7, 3), fontsize=8)
        ax.set(title=title, xlabel="kept for backward / native")
        ax.legend(loc="upper right", fontsize=8)
    axes[0].set_ylabel("FLOPs / native")


def bytes_rows() -> list[Row]:
    return [
        row for row in rows_of("gradient_sync/gradient_quality", learning_rate=0.001) if ", " not in row["mode"]
    ]  # no variants


def draw_bytes(rows: Sequence[Row], figure: Figure) -> None:
    ax = figure.subplots()
    dense = next(row["mean_loss"] for row in rows if row["mode"] == "dense")
    points = {row["mode"]: (row["sent_ratio"], row["mean_loss"] / dense) for row in rows}
    for mode, (sent, loss) in points.items():
        is_beaten = any(s <= sent and q <= loss and (s, q) != (sent, loss) for s, q in points.values())
        ax.plot(sent, loss, "o", color=GREY if is_beaten else TEAL)
        offset = LABEL_OFFSETS.get(mode, (5, 4))
        ax.annotate(mode, (sent, loss), textcoords="offset points", xytext=offset, fontsize=8)
    best = sorted((sent, loss) for sent, loss in points.values())
    edge = [(s, q) for s, q in best if not any(s2 <= s and q2 < q for s2, q2 in best)]
    ax.step(*zip(*edge, strict=True), where="post", color=TEAL, linewidth=1, alpha=0.6)
    ax.set(xscale="log", xlabel="bytes sent / dense float32 ring, protected tensors included", ylabel="loss / dense")
    ax.set(ylim=(0.96, 1.4), xlim=(0.024, 1.25))
    ax.set_xticks([0.025, 0.05, 0.1, 0.2, 0.5, 1], ["0.025", "0.05", "0.1", "0.2", "0.5", "1"])


def adaptive_rows() -> list[Row]:
    return rows_of("learning_rate/adaptive_lr", setting="lora-4") + rows_of(
        "learning_rate/adaptive_lr", setting="lora-16"
    )


def draw_adaptive(rows: Sequence[Row], figure: Figure) -> None:
    axes: Sequence[Axes] = figure.subplots(1, 2, sharey=True)
    for ax, setting in zip(axes, ("lora-4", "lora-16"), strict=True):
        for variant, colour in (("fixed", GREY), ("adaptive", TEAL)):
            rates = sorted({row["times"] for row in rows})
            chosen = [r for r in rows if (r["setting"], r["variant"]) == (setting, variant)]
            ax.plot([r["times"] for r in chosen], [r["final"] for r in chosen], ".", color=colour, alpha=0.5)
            means = [mean(r["final"] for r in chosen if r["times"] == times) for times in rates]
            label = "AdaptiveLR" if variant == "adaptive" else "fixed schedule"
            ax.plot(rates, means, "-", color=colour, label=label)
        ax.set(title=f"batch {setting.removeprefix('lora-')}", xscale="log", xlabel="configured rate / the config's")
        ax.set_xticks([1, 3, 10, 30], ["1", "3", "10", "30"])
    axes[0].set_ylabel("CLIP-T at the end")
    axes[0].legend(loc="lower left")


def two_hosts_rows() -> list[Row]:
    return [row for row in rows_of("gradient_sync/two_hosts", rate="1gbit", date="2026-11-22") if "network" not in row]


def draw_two_hosts(rows: Sequence[Row], figure: Figure) -> None:
    names = {
        "plain": "DDP, float32",
        "bf16_hook": "DDP, bf16 hook",
        "powersgd_hook": "DDP, PowerSGD",
        "default": "npu_sparse, default",
        "int3": "npu_sparse, protect: []",
        "sparse_int8": "npu_sparse, sparse_int8 0.95",
    }
    times = {label: mean(r["step_time_ratio"] for r in rows if r["variant"] == v) for v, label in names.items()}
    ax = figure.subplots()
    labels = list(times)[::-1]
    bars = ax.barh(labels, [times[k] for k in labels], color=[GREY if k.startswith("DDP") else TEAL for k in labels])
    ax.bar_label(bars, fmt="%.2f", padding=3)
    ax.set(xlabel="step time / DDP's", xlim=(0, 1.12))


FIGURES: dict[str, tuple[str, Callable[[], list[Row]], Callable[[Sequence[Row], Figure], None]]] = {
    "memory": ("Memory against time, FusedBackwardPrecision", memory_rows, draw_memory),
    "memory_budget": ("Repeated FLOPs against kept activations", budget_rows, draw_budget),
    "loss_bytes": ("Loss against bytes, a toy denoiser on four ranks", bytes_rows, draw_bytes),
    "adaptive_lr": ("LoRA of the tiny Stable Diffusion, five seeds", adaptive_rows, draw_adaptive),
    "two_hosts": ("Two hosts at 1 Gbit/s, a 58 M U-Net", two_hosts_rows, draw_two_hosts),
}


def checksum(rows: Sequence[Row]) -> str:
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]


def draw(name: str, folder: Path) -> Path:
    """Draw one figure as `<folder>/<name>.png`."""
    title, find_rows, draw_rows = FIGURES[name]
    rows = find_rows()
    figure = plt.figure(figsize=(8, 3.8), layout="constrained", dpi=110)
    draw_rows(rows, figure)
    figure.suptitle(title, fontsize=11)
    for ax in figure.axes:
        ax.spines[["top", "right"]].set_visible(False)
    path = folder / f"{name}.png"
    figure.savefig(path, metadata={CHECKSUM: checksum(rows), "Software": None})
    plt.close(figure)
    return path


def is_current(name: str, folder: Path = IMAGES) -> bool:
    """Whether the image in `folder` shows the current rows."""
    with Image.open(folder / f"{name}.png") as picture:
        return picture.info.get(CHECKSUM) == checksum(FIGURES[name][1]())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=IMAGES, help="the folder for the images")
    for figure_name in FIGURES:
        print(draw(figure_name, parser.parse_args().output))

"""AdaptiveLR beside the fixed schedule on ground that no constant of it was chosen on: a grid of paired trainings.

The embedded tiny Stable Diffusion learns its brand as in configs/sd_lora_demo.yaml (300 steps, cosine, 10 steps of
warm-up, the same data). Settings: the demo's LoRA with batches of 1, 4 and 16, and a full fine-tuning of the U-Net with
batches of 4. The setting's rate (1e-3 for the LoRA, 1e-4 for the full fine-tuning) is taken 1, 3, 10 and 30 times. The
score is CLIP-T of 48 pictures of three things that no brand picture shows, drawn with the averaged weights after the
last step. A run whose score has fallen below that of the untrained model by a check is ended there: it has diverged.

    python benchmarks/adaptive_lr.py --jobs 16 --time_limit_s 420 --output rows.jsonl    # again to go on
    python benchmarks/adaptive_lr.py --settings lora-1 --times 1 --seeds 100 101 --jobs 1 --output rows.jsonl
    python benchmarks/adaptive_lr.py --variants fixed adaptive prodigy schedule_free --every 20 --settings lora-4 ...
    python benchmarks/adaptive_lr.py --table benchmarks/results/adaptive_lr_grid.jsonl   # what the rows say, Markdown

Each run is a process of its own with one thread; its JSON row is appended to the output as soon as it ends, and runs
that are in the output already are left out. Needs no network; the output keeps what each run cost.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # else looking for a device before a fork spoils it

import lightning_aigc  # noqa: F401 - first: it mends torchvision's import

# isort: split
import argparse
import contextlib
import json
import logging
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import date
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import lightning
import torch
from diffusers.training_utils import EMAModel
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from lightning_aigc.callbacks import AdaptiveLR
from lightning_aigc.data import ImageCaptionData
from lightning_aigc.diffusion import StableDiffusionLoRA
from lightning_aigc.evaluation_mode import undisturbed
from lightning_aigc.metrics import CLIPSimilarity

RESULTS = Path(__file__).parent / "results" / "adaptive_lr_grid.jsonl"
PROMPTS = ["a zorp umbrella", "a zorp teapot", "a zorp guitar"]  # things that no picture of the brand shows
STEPS = 300
CHECKS = (60, 150)
"""Steps at which a run that has diverged is ended."""


@dataclass(frozen=True)
class Setting:
    """What is trained, with which batches, at which rate where `times` is 1."""

    batch: int
    rate: float
    is_full: bool = False


SETTINGS = {
    "lora-16": Setting(16, 1e-3),
    "full-4": Setting(4, 1e-4, is_full=True),
    "lora-4": Setting(4, 1e-3),
    "lora-1": Setting(1, 1e-3),
}
"""The longest runs first, so that the last of a seed are short."""
TIMES = (1.0, 3.0, 10.0, 30.0)
SEEDS = (100, 101, 102, 103, 104)
VARIANTS = ("fixed", "adaptive", "prodigy", "schedule_free")
ONLY_AT = {"prodigy": (1.0,), "schedule_free": (1.0, 3.0)}
"""Rates at which a variant means something, where not all of them."""


@dataclass(frozen=True)
class Cell:
    """One training."""

    setting: str
    times: float
    seed: int
    variant: str

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> Cell:
        return cls(row["setting"], float(row["times"]), int(row["seed"]), row["variant"])


class Brand(StableDiffusionLoRA):
    def configure_callbacks(self) -> list[Callback]:
        return []


class FullBrand(Brand):
    """Every weight of the U-Net is trained, and there is no LoRA."""

    def configure_model(self) -> None:
        if self.unet is not None:
            return
        ema, self.args.use_ema = self.args.use_ema, False
        super().configure_model()
        self.args.use_ema = ema
        assert self.unet is not None
        self.unet.delete_adapters("default")
        self.unet.requires_grad_(True)
        if ema:
            self.ema = EMAModel(
                self.trainable_parameters(), decay=self.args.ema_decay, use_ema_warmup=True, power=3 / 4
            )


class Score(Callback):
    """CLIP-T of the same pictures: at the end, at the checks, and every `every` steps, without a trace in the run."""

    def __init__(self, judge: CLIPSimilarity, untrained: float, every: int) -> None:
        self.judge, self.untrained, self.every = judge, untrained, every
        self.curve: list[tuple[int, float]] = []
        self.losses: list[float] = []
        self.final = math.nan
        self.ended_at: int | None = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        step = trainer.global_step
        if step in CHECKS or (self.every and step % self.every == 0):
            self.curve.append((step, round(self.score(pl_module, 6 if self.every else 3), 4)))
            if step in CHECKS and not self.curve[-1][1] >= self.untrained:
                self.ended_at = step
                trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.final = self.score(pl_module, 16)

    def score(self, module: LightningModule, each: int) -> float:
        """The mean over `each` pictures a prompt."""
        prompts = [prompt for prompt in PROMPTS for _ in range(each)]
        seeds = [5000 + i for _ in PROMPTS for i in range(each)]
        with undisturbed(module, module.device), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a diverged run's pictures are black
            images = module.sample(prompts, seeds, num_inference_steps=8, batch_size=24)  # type: ignore[operator]
            return float(self.judge.scores(images.nan_to_num(0.0), prompts)["clip_t"].mean())


def train(
    cell: Cell,
    judge: CLIPSimilarity,
    folder: str,
    device: str = "cpu",
    untrained: float = -math.inf,
    every: int = 0,
    steps: int = STEPS,
) -> dict[str, Any]:
    """One run's row."""
    seed_everything(cell.seed, verbose=False)
    setting = SETTINGS[cell.setting]
    arguments: dict[str, Any] = {"lr_scheduler": "cosine", "lr_warmup_steps": 10}
    arguments["learning_rate"] = setting.rate * cell.times
    callbacks: list[Callback] = []
    adaptive: AdaptiveLR | None = None
    if cell.variant == "adaptive":
        adaptive = AdaptiveLR()
        callbacks.append(adaptive)
    if cell.variant == "prodigy":
        from prodigyopt import Prodigy

        arguments |= {"optimizer": lambda p: Prodigy(p, lr=1.0, safeguard_warmup=True, use_bias_correction=True)}
        arguments |= {"learning_rate": 1.0, "lr_warmup_steps": 0}
    if cell.variant == "schedule_free":
        from schedulefree import AdamWScheduleFree

        arguments |= {"optimizer": lambda p: AdamWScheduleFree(p, warmup_steps=10), "lr_warmup_steps": 0}
        arguments |= {"lr_scheduler": "constant"}
    module = (FullBrand if setting.is_full else Brand)(
        "embedded:sd",
        rank=16,
        lora_targets=["attention", "feed_forward", "convolutions"],
        max_train_steps=STEPS,
        snr_gamma=5.0,
        use_ema=cell.variant != "schedule_free",  # that one has an average of its own
        ema_decay=0.98,
        guidance_scale=3.0,
        **arguments,
    )
    data = ImageCaptionData(
        "embedded:brand",
        class_data_dir="embedded:prior" if setting.batch > 1 else None,  # a batch of one has no room for both
        prior_ratio=0.5,
        resolution=64,
        train_batch_size=setting.batch,
        trigger_word="zorp",
        caption_dropout_rate=0.05,
        cache_latents=True,
        cache_text_embeddings=True,
        cache_dir=folder,
        num_workers=0,
        seed=cell.seed,
    )
    score = Score(judge, untrained, every)
    trainer = Trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
        callbacks=[*callbacks, score],
        default_root_dir=folder,
    )
    started = time.perf_counter()
    trainer.fit(module, data)
    row = {"setting": cell.setting, "times": cell.times, "seed": cell.seed, "variant": cell.variant}
    row |= {"rate": setting.rate * cell.times, "final": round(score.final, 4), "ended_at": score.ended_at}
    row |= {"last_loss": round(statistics.mean(score.losses[-50:]), 4), "curve": score.curve}
    if adaptive is not None:
        row["changes"] = [[c.step, round(c.factor, 4), c.reason] for c in adaptive.changes]
    row |= {"seconds": round(time.perf_counter() - started, 1), "date": str(date.today()), "device": device}
    return row | {"torch": torch.__version__, "lightning": lightning.__version__}


# Many runs ------------------------------------------------------------------------------------------------------------


def _quiet() -> None:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)


def _untrained(judge: CLIPSimilarity, folder: str, device: str) -> float:
    """The score before the first step; fills the cache of latents and captions on the way."""
    first = Cell("lora-4", 1.0, 0, "fixed")
    found: list[float] = []

    class Before(Score):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            found.append(self.score(pl_module, 3))

    original, globals()["Score"] = Score, Before
    try:
        train(first, judge, folder, device, steps=1)
    finally:
        globals()["Score"] = original
    return found[0]


def _in_child(connection: Connection, work: Any, arguments: tuple[Any, ...]) -> None:
    _quiet()
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        connection.send((True, work(*arguments)))
    except BaseException:
        connection.send((False, traceback.format_exc()))
    finally:
        connection.close()


class Child:
    """A forked process, so that what was imported and loaded once is there; its result comes through a pipe."""

    def __init__(self, work: Any, *arguments: Any) -> None:
        self.started = time.monotonic()
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_in_child, args=(theirs, work, arguments))
        self.process.start()
        theirs.close()

    def result(self) -> Any:
        """Raises: RuntimeError with the child's own words."""
        try:
            is_fine, found = self.connection.recv()
        except EOFError:
            is_fine, found = False, "the process ended without a word"
        self.process.join()
        if not is_fine:
            raise RuntimeError(found)
        return found

    def end(self) -> None:
        self.process.terminate()
        self.process.join()


def cells_to_run(options: argparse.Namespace, done: set[Cell]) -> list[Cell]:
    """Seed by seed, and both variants of a pair beside each other: a grid that is cut short is still balanced."""
    return [
        cell
        for seed in options.seeds
        for setting in SETTINGS
        for times in options.times
        for variant in options.variants
        if setting in options.settings and times in ONLY_AT.get(variant, (times,))
        if (cell := Cell(setting, times, seed, variant)) not in done
    ]


def run_all(options: argparse.Namespace) -> int:
    """Run what is missing in the output. Returns: how many runs failed."""
    began = time.monotonic()
    until = began + options.time_limit_s
    _quiet()
    done = {Cell.of_row(row) for row in read_rows(options.output)}
    todo = cells_to_run(options, done)
    print(f"{len(todo)} runs to make, {len(done)} rows in {options.output}", flush=True)
    if not todo:
        return 0
    judge = CLIPSimilarity("embedded:clip")
    judge.check()
    failed = 0
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, options.output.open("a") as file:
        untrained = Child(_untrained, judge, folder, options.device).result()
        print(f"the untrained model scores {untrained:.3f}; ready after {time.monotonic() - began:.0f} s", flush=True)
        running: dict[Connection, tuple[Cell, Child]] = {}
        while (todo and time.monotonic() < until) or running:
            while todo and len(running) < options.jobs and time.monotonic() < until:
                cell = todo.pop(0)
                child = Child(train, cell, judge, folder, options.device, untrained, options.every)
                running[child.connection] = cell, child
            for connection in wait(list(running), timeout=min(60.0, max(0.0, until - time.monotonic()))):
                cell, child = running.pop(connection)  # type: ignore[arg-type]
                try:
                    row = child.result()
                except RuntimeError as error:
                    failed += 1
                    print(f"{cell} failed: {error}", file=sys.stderr, flush=True)
                    continue
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(
                    f"{time.monotonic() - began:5.0f} s  {cell.setting} x{cell.times:g} seed {cell.seed} "
                    f"{cell.variant}: {row['final']:.3f} in {row['seconds']} s",
                    flush=True,
                )
            if time.monotonic() >= until and running:
                print(f"time is up: {len(running)} runs ended, {len(todo)} not begun", flush=True)
                for _, child in running.values():
                    child.end()
                running.clear()
    return failed


# What the rows say ----------------------------------------------------------------------------------------------------


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines() if line.strip()] if file.exists() else []


def _listed(rows: list[dict[str, Any]]) -> str:
    """Every seed's score; those of runs that were ended in brackets."""
    said = [f"({row['final']:.3f})" if row["ended_at"] else f"{row['final']:.3f}" for row in rows]
    return " ".join(said) + f" | {statistics.mean(row['final'] for row in rows):.3f}"


def _judged(differences: list[float]) -> str:
    """The mean of paired differences, its standard error, and what a two-sided 95 % t interval makes of it."""
    mean = statistics.mean(differences)
    if len(differences) < 2:
        return f"{mean:+.3f} | "
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    quantile = {2: 12.7, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}.get(len(differences), 2.0)
    verdict = "alike" if abs(mean) <= quantile * error else "better" if mean > 0 else "**worse**"
    return f"{mean:+.3f} ± {error:.3f} | {verdict}"


def table(rows: list[dict[str, Any]], seeds: list[int] | None = None) -> str:
    """All pairs as Markdown, and below it every other variant's rows."""
    by = {Cell.of_row(row): row for row in rows if seeds is None or row["seed"] in seeds}
    lines = [
        "| setting | rate | fixed, each seed | mean | AdaptiveLR, each seed | mean | difference | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    others = []
    every_seed = sorted({cell.seed for cell in by})
    for setting in reversed(SETTINGS):
        for times in sorted({cell.times for cell in by}):
            found = {
                variant: [by.get(Cell(setting, times, seed, variant)) for seed in every_seed] for variant in VARIANTS
            }
            rate = f"{SETTINGS[setting].rate:g} x {times:g}"
            pairs = [(a, b) for a, b in zip(found["fixed"], found["adaptive"], strict=True) if a and b]
            if pairs:
                differences = [b["final"] - a["final"] for a, b in pairs]
                lines.append(
                    f"| {setting} | {rate} | {_listed([a for a, _ in pairs])} | {_listed([b for _, b in pairs])} "
                    f"| {_judged(differences)} |"
                )
            for variant in VARIANTS[2:]:
                if there := [row for row in found[variant] if row]:
                    others.append(f"| {setting} | {variant} x {times:g} | {_listed(there)} |")
    if others:
        lines += ["", "| setting | variant | each seed | mean |", "|---|---|---|---|", *others]
    return "\n".join(lines)


def goals(rows: list[dict[str, Any]]) -> str:
    """Steps to the best score that the fixed schedule reached at the config's rate; of runs with --every."""
    by = {Cell.of_row(row): row for row in rows if len(row["curve"]) > len(CHECKS)}
    lines = ["| setting | variant | steps to the goal, each seed | median |", "|---|---|---|---|"]
    for setting, variant, times in sorted({(c.setting, c.variant, c.times) for c in by}):
        steps = []
        for seed in sorted({cell.seed for cell in by}):
            row, fixed = by.get(Cell(setting, times, seed, variant)), by.get(Cell(setting, 1.0, seed, "fixed"))
            if row and fixed:
                goal = max(score for _, score in fixed["curve"])
                steps.append(next((step for step, score in row["curve"] if score >= goal), math.inf))
        if steps:
            said = " ".join("-" if math.isinf(step) else str(step) for step in steps)
            lines.append(f"| {setting} | {variant} x {times:g} | {said} | {statistics.median(steps):g} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--times", nargs="+", type=float, default=list(TIMES), help="multiples of the setting's rate")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS[:2]))
    parser.add_argument("--every", type=int, default=0, help="score every so many steps too, for the steps to a goal")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time, one thread each")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--time_limit_s", type=float, default=math.inf, help="begin no run after it, and end those on")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--table", type=Path, metavar="FILE", help="print what the rows of a file say and run nothing")
    options = parser.parse_args()
    if options.table:
        rows = read_rows(options.table)
        print("\n\n".join(part for part in (table(rows), goals(rows)) if part))
        return
    with contextlib.suppress(ValueError):
        options.output = options.output.resolve()
    failed = run_all(options)
    rows = read_rows(options.output)
    print("\n\n".join(part for part in (table(rows), goals(rows)) if part))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

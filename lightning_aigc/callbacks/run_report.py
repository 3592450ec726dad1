"""RunReport: what a fit did, as a table in the terminal, `summary.json`, and one `report.html`.

It samples the same pictures before the first step and after the last, and scores them.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_aigc.atomic_file import write_text
from lightning_aigc.callbacks.loss_curve import LossCurve
from lightning_aigc.callbacks.report_page import curve, picture_grid, render_page, smooth, thumbnail
from lightning_aigc.callbacks.report_summary import before_and_after, final_loss, finite_or_none, summary_table
from lightning_aigc.callbacks.run_progress import RunProgress
from lightning_aigc.callbacks.sampling.pairs import Pair, find_prompts, sample_on_all_ranks, set_references
from lightning_aigc.callbacks.save_lora import SaveLoRA
from lightning_aigc.devices import peak_memory_mib, reset_peak_memory
from lightning_aigc.errors import SamplingTooSlow, UserError
from lightning_aigc.metrics import CLIPSimilarity
from lightning_aigc.protocols import SupportsSampling

SUMMARY_FILE, REPORT_FILE = "summary.json", "report.html"
REFERENCE_IMAGES = 64
"""Training pictures that CLIP-I compares with."""


class RunReport(Callback):
    """Leaves `summary.json` and `report.html` in the run's `default_root_dir`.

    Works with any LightningModule; pictures and scores need `sample(prompts, seeds)`, without which they are left out.
    Each picture is drawn on one of the ranks. A resumed run reports on the whole run: what was measured before it, and
    all its losses, are in its checkpoints.

    Args:
        clip_model: The model that scores: an open_clip name, a folder with open_clip_config.json, or `embedded:clip`;
            unset means no score.
        clip_pretrained: Weights of that model: an open_clip tag or a file.
        prompts: Prompts to score; unset means the module's `validation_prompts`.
        prior_prompts: Prompts unrelated to the training pictures, whose score shows what the model forgot.
        num_images: Pictures sampled for each set of prompts, in equal numbers for each prompt.
        seed: Seed of the first picture.
        images_shown: Pictures of each prompt in the report.
    """

    def __init__(
        self,
        clip_model: str | None = None,
        clip_pretrained: str | None = None,
        prompts: Sequence[str] | None = None,
        prior_prompts: Sequence[str] = (),
        num_images: int = 8,
        seed: int = 1000,
        images_shown: int = 4,
    ) -> None:
        if num_images < 1:
            raise UserError(f"RunReport.num_images must be at least 1, got {num_images}")
        self.clip_model, self.clip_pretrained = clip_model, clip_pretrained
        self.prompts, self.prior_prompts = prompts, list(prior_prompts)
        self.num_images, self.seed, self.images_shown = num_images, seed, images_shown
        self.summary: dict[str, Any] = {}
        self._judge: CLIPSimilarity | None = None
        self._notes: list[str] = []
        self._is_off = False
        self._resumed: dict[str, Any] | None = None
        self._reset()

    def _reset(self) -> None:
        self._losses = LossCurve()
        self._scores: list[tuple[int, float, float]] = []
        self._before: dict[str, Tensor] = {}
        self._measured: dict[str, float | None] = {}
        self._started_at: float | None = None
        self._earlier_s = self._earlier_peak_mib = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._is_off = stage != "fit" or bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
        if self._is_off:
            return
        if self.prompts is None:
            self.prompts = find_prompts(pl_module, None)
        if self.clip_model is not None and isinstance(pl_module, SupportsSampling) and self.prompts:
            judge = self._load_judge()
            # Scores are gathered from all ranks, so all of them need the model, or none.
            self._judge = judge if trainer.strategy.reduce_boolean_decision(judge is not None, all=True) else None
            if self._judge is not judge:
                self._note("no CLIP score: another rank could not load the CLIP model, its log says why")

    def _load_judge(self) -> CLIPSimilarity | None:
        assert self.clip_model is not None
        judge = CLIPSimilarity(self.clip_model, self.clip_pretrained)
        try:
            judge.check()
        except UserError as error:
            # A model that cannot be loaded must not cost a training run; the summary says why it has no score.
            self._note(f"no CLIP score: {error}")
            return None
        return judge

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)
            rank_zero_warn(text)

    # Measuring -------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_off:
            return
        self._reset()  # a report may serve two fits
        if self._judge is not None:
            self._judge.to(pl_module.device)
            set_references(self._judge, trainer, REFERENCE_IMAGES, pl_module.device)
        if not self._restore(trainer):
            self._measure(trainer, pl_module, "before")
        reset_peak_memory(pl_module.device)
        self._device, self._started_at = pl_module.device, time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = None if self._is_off else trainer.callback_metrics.get("loss")
        if loss is not None:
            self._losses.add(trainer.global_step, loss)

    def on_sample_images(
        self, trainer: Trainer, pl_module: LightningModule, images_N3HW: Tensor, prompts: Sequence[str], step: int
    ) -> None:
        """Score the pictures of a SampleGrid, for the logger and the progress bar."""
        if self._judge is None:
            return
        # `scores`, not `compute`: this runs on rank zero alone, where no collective may start.
        scores = {
            k: float(v.mean()) for k, v in self._judge.scores(images_N3HW.to(self._judge.device), list(prompts)).items()
        }
        self._scores.append((step, scores["clip_t"], scores["clip_i"]))
        known = {name: value for name, value in scores.items() if math.isfinite(value)}
        for logger in trainer.loggers:
            logger.log_metrics(known, step=step)
        if isinstance(trainer.progress_bar_callback, RunProgress):
            trainer.progress_bar_callback.show(known)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_off:
            return
        seconds, peak = self._seconds(), self._peak_mib(pl_module.device)
        if isinstance(trainer.progress_bar_callback, RunProgress):
            trainer.progress_bar_callback.finish()
        after = self._measure(trainer, pl_module, "after")
        if not trainer.is_global_zero:
            return
        root = Path(trainer.default_root_dir)
        savers = [c for c in trainer.callbacks if isinstance(c, SaveLoRA)]  # type: ignore[attr-defined]
        lora_file = savers[0].file_path(trainer, pl_module) if savers else None
        self.summary = {
            "steps": trainer.global_step,
            "seconds": round(seconds, 2),
            "peak_memory_mib": round(peak, 1),
            **before_and_after(self._measured, bool(self.prior_prompts)),
            "final_loss": final_loss(self._losses.packed()),
            "lora_file": str(lora_file) if lora_file else None,
            "report": str(root / REPORT_FILE),
            "notes": self._notes,
        }
        write_text(root / REPORT_FILE, self._page(trainer, after))
        write_text(root / SUMMARY_FILE, json.dumps(self.summary, indent=2) + "\n")
        print("\n" + summary_table(self.summary, bool(self.prior_prompts)))

    def final_files(self, trainer: Trainer, pl_module: LightningModule) -> list[Path]:
        """The files that a finished run must have, for ExactSnapshot."""
        root = Path(trainer.default_root_dir)
        return [] if self._is_off else [root / REPORT_FILE, root / SUMMARY_FILE]

    def _measure(self, trainer: Trainer, pl_module: LightningModule, when: str) -> dict[str, Tensor]:
        """Sample and score each set of prompts. Collective.

        Returns: the pictures that the page shows, as it shows them.
        """
        images: dict[str, Tensor] = {}
        if not isinstance(pl_module, SupportsSampling) or (when == "after" and not self._before):
            return images
        for name, prompts in (("", self.prompts or []), ("prior_", self.prior_prompts)):
            if not prompts:
                continue
            try:
                sampled = sample_on_all_ranks(trainer, pl_module, self._pairs(prompts), self._judge)
            except SamplingTooSlow as slow:
                self._note(str(slow))
                return images
            images[name] = torch.stack([thumbnail(sampled.images[i]) for i in self._shown(prompts)])
            for metric, scores_N in (("clip_t", sampled.clip_t), ("clip_i", sampled.clip_i)):
                if scores_N is not None:
                    mean = float(scores_N.sum() / len(scores_N))
                    self._measured[f"{name}{metric}_{when}"] = finite_or_none(mean)
        if when == "before":
            self._before = images
        return images

    def _pairs(self, prompts: Sequence[str]) -> list[Pair]:
        """`num_images` pairs, rounded up so that each prompt has as many."""
        per_prompt = max(1, math.ceil(self.num_images / len(prompts)))
        repeated = [prompt for prompt in prompts for _ in range(per_prompt)]
        return [(prompt, self.seed + i) for i, prompt in enumerate(repeated)]

    def _shown(self, prompts: Sequence[str]) -> list[int]:
        """Which pairs the page shows."""
        count = len(self._pairs(prompts))
        per_prompt = count // len(prompts)
        return [i for i in range(count) if i % per_prompt < self.images_shown]

    # Resuming --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if self._is_off or self._started_at is None:
            return {}
        return {
            "asked": self._asked(),
            "before": self._before,
            "measured": self._measured,
            "losses": self._losses.state_dict(),
            "scores": [list(score) for score in self._scores],
            "notes": list(self._notes),
            "seconds": self._seconds(),
            "peak_memory_mib": self._peak_mib(self._device),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = state_dict or None

    def _asked(self) -> dict[str, Any]:
        """What the pictures before training depend on."""
        return {
            "prompts": [list(self.prompts or ()), list(self.prior_prompts)],
            "pictures": [self.num_images, self.images_shown, self.seed],
            "judge": [self.clip_model, self.clip_pretrained],
        }

    def _restore(self, trainer: Trainer) -> bool:
        """Restore the report of the run that this one resumes; whether it has the measurements before training."""
        state, self._resumed = self._resumed, None
        if state is None:
            return False
        self._losses.load_state_dict(state["losses"])
        self._scores = [(int(step), t, i) for step, t, i in state["scores"]]
        self._earlier_s, self._earlier_peak_mib = state["seconds"], state["peak_memory_mib"]
        self._notes += [note for note in state["notes"] if note not in self._notes]
        if state["asked"] != self._asked():
            self._note(f"before was measured at step {trainer.global_step}: other pictures were asked for until there")
            return False
        self._before, self._measured = state["before"], dict(state["measured"])
        return True

    def _seconds(self) -> float:
        assert self._started_at is not None
        return self._earlier_s + time.perf_counter() - self._started_at

    def _peak_mib(self, device: torch.device) -> float:
        return max(self._earlier_peak_mib, peak_memory_mib(device))

    # The page --------------------------------------------------------------------------------------------------------

    def _page(self, trainer: Trainer, after: dict[str, Tensor]) -> str:
        grids = []
        for name, title in (("", "prompts"), ("prior_", "other prompts")):
            prompts = self.prompts if not name else self.prior_prompts
            for when, images in (("before", self._before), ("after", after)):
                if name in images and prompts:
                    pairs = self._pairs(prompts)
                    shown = [pairs[i][0] for i in self._shown(prompts)]
                    columns = len(shown) // len(prompts)
                    grids.append(picture_grid(list(images[name]), shown, columns, f"{title}, {when}"))
        curves = [curve(smooth(self._losses.points()), "loss, mean of 20 steps")]
        curves.append(curve([(s, t) for s, t, _ in self._scores], "CLIP-T of the sample grids"))
        curves.append(curve([(s, i) for s, _, i in self._scores], "CLIP-I of the sample grids"))
        config_file = Path(trainer.default_root_dir) / "config.yaml"
        config = config_file.read_text(encoding="utf-8") if config_file.is_file() else ""
        rows = {k: v for k, v in self.summary.items() if k != "notes" and v is not None}
        return render_page(Path(trainer.default_root_dir).name, rows, self._notes, grids, curves, config)

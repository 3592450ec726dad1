"""RunReport: what a fit did, as a table in the terminal, `summary.json`, `report.json`, and one `report.html`.

It samples the same images before the first step and after the last, and scores them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_aigc._lightning import Callback, LightningModule, Trainer, rank_zero_warn
from lightning_aigc.atomic_file import warns_if_unwritten, write_text
from lightning_aigc.callbacks.exact_snapshot import ExactSnapshot
from lightning_aigc.callbacks.order import LATE, order_callbacks
from lightning_aigc.callbacks.run_progress import RunProgress
from lightning_aigc.callbacks.run_report.before_after import BeforeAfter
from lightning_aigc.callbacks.run_report.run_curves import RunCurves
from lightning_aigc.callbacks.run_report.run_facts import (
    announce_hyperparameters,
    in_ms,
    log_results,
    record_of,
    result_file,
)
from lightning_aigc.callbacks.sampling.judges import Judge, Pair, make_judge
from lightning_aigc.callbacks.sampling.pairs import find_prompts
from lightning_aigc.devices import peak_memory_mib, reset_peak_memory
from lightning_aigc.errors import SnapshotError, UserError
from lightning_aigc.gradient_sync.transport.process_groups import errors_as_warnings, reason_of
from lightning_aigc.protocols import SupportsSampling
from lightning_aigc.report.paired_scores import Check
from lightning_aigc.report.record import RECORD_FILE, SUMMARY_FILE, RunRecord
from lightning_aigc.report.run_page import render_run_page
from lightning_aigc.report.summary import summary_of, summary_table
from lightning_aigc.report.units import UNKNOWN
from lightning_aigc.secrets import redact_text
from lightning_aigc.setting_checks import check_types

REPORT_FILE = "report.html"
RENEWED_EVERY_S = 20.0
"""Seconds after which an open page of an unfinished run is loaded again."""
MOST_OF_REASON = 200
"""Characters of an error that the page shows."""
REFERENCE_IMAGES = 64
"""Training images that CLIP-I compares with."""


class RunReport(Callback):
    """Leaves `summary.json`, `report.json` and `report.html` in the run's `default_root_dir`; the page from its start.

    Works with any LightningModule; images and scores need `sample(prompts, seeds)`, without which they are left out.
    Each image is drawn on one of the ranks. A resumed run reports on the whole run: what was measured before it, and
    all its curves, are in its checkpoints. Callbacks and strategies with `report_entries()` add to the page.

    Args:
        clip_model: The model that scores: an open_clip name, a folder with open_clip_config.json, or `embedded:clip`;
            unset means no score.
        clip_pretrained: Weights of that model: an open_clip tag or a file.
        prompts: Prompts to score; unset means the module's `validation_prompts`.
        prior_prompts: Prompts unrelated to the training images, whose score shows what the model forgot.
        num_images: Images sampled for each set of prompts, in equal numbers for each prompt.
        seed: Seed of the first image.
        images_shown: Images of each prompt in the report.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_aigc.callbacks import RunReport
        >>> trainer = Trainer(callbacks=[RunReport(clip_model="embedded:clip", num_images=8)])
    """

    callback_order = LATE  # reads rates after AdaptiveLR set them, and the end after the guard's last check

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
        check_types(RunReport.__init__, locals())
        if num_images < 1:
            raise UserError(f"RunReport.num_images must be at least 1, got {num_images}")
        self.clip_model, self.clip_pretrained = clip_model, clip_pretrained
        self.prompts, self.prior_prompts = prompts, list(prior_prompts)
        self._are_prompts_given = prompts is not None
        self.num_images, self.seed, self.images_shown = num_images, seed, images_shown
        self.summary: dict[str, Any] = {}
        self._is_off = False
        self._reset()

    def _reset(self) -> None:
        self._judge: Judge | None = None
        self._notes: list[str] = []
        self._resumed: dict[str, Any] | None = None
        self._curves = RunCurves()
        self._grids: list[Check] = []
        prompts = {"": self.prompts or (), "prior_": self.prior_prompts}
        self._pictures = BeforeAfter(prompts, self.num_images, self.seed, self.images_shown)
        self._started_at: float | None = None
        self._page_written_at = -math.inf
        self._earlier_s = self._earlier_peak_mib = 0.0
        self._earlier_blocked_ms: list[float] = []
        self._snapshots: ExactSnapshot | None = None

    def prompts_drawn(self, trainer: Trainer) -> list[str]:
        """The prompts of the images."""
        return [*find_prompts(trainer.lightning_module, self.prompts), *self.prior_prompts]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._is_off = stage != "fit" or bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
        if self._is_off:
            return
        order_callbacks(trainer)
        if not self._are_prompts_given:
            self.prompts = find_prompts(pl_module, None)
        self._reset()  # a report may serve two fits; a checkpoint is loaded after this
        if self.clip_model is not None and isinstance(pl_module, SupportsSampling) and self.prompts:
            judge = self._load_judge(trainer, pl_module)
            # Scores are gathered from all ranks, so all of them need the model, or none.
            self._judge = judge if trainer.strategy.reduce_boolean_decision(judge is not None, all=True) else None
            if self._judge is not judge:
                self._note("no CLIP score: another rank could not load the CLIP model, its log says why")
        announce_hyperparameters(trainer, pl_module)

    def _load_judge(self, trainer: Trainer, pl_module: LightningModule) -> Judge | None:
        assert self.clip_model is not None
        try:
            judge = make_judge(trainer, pl_module, self.clip_model, self.clip_pretrained, "RunReport")
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

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare for the images of step 0, which a SampleGrid may draw before this callback's `on_train_start`."""
        if self._is_off:
            return
        found: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self._snapshots = next((callback for callback in found if isinstance(callback, ExactSnapshot)), None)
        if self._judge is not None:
            self._judge.begin(trainer, REFERENCE_IMAGES, pl_module.device)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_off:
            return
        if not self._restore(trainer):
            self._pictures.measure(trainer, pl_module, "before", self._judge, self._note)
        reset_peak_memory(pl_module.device)
        self._device, self._started_at = pl_module.device, time.perf_counter()
        if trainer.is_global_zero:
            self._write_so_far(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if not self._is_off:
            self._curves.before_step(trainer, optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._is_off:
            return
        self._curves.after_batch(trainer, outputs)
        if trainer.is_global_zero and time.perf_counter() - self._page_written_at >= RENEWED_EVERY_S:
            self._write_so_far(trainer, pl_module)  # a run that is killed leaves what it has measured

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_off:
            return
        self._curves.after_validation(trainer)
        if trainer.is_global_zero:
            self._write_so_far(trainer, pl_module)

    def on_sample_images(
        self, trainer: Trainer, pl_module: LightningModule, images_N3HW: Tensor, pairs: Sequence[Pair], step: int
    ) -> None:
        """Score the images of a SampleGrid, for the logger and the progress bar, and keep report.json up to date."""
        if self._is_off:
            return
        if self._judge is not None:
            # `scores`, not `compute`: this runs on rank zero alone, where no collective may start.
            scores = self._judge.scores(images_N3HW, pairs)
            self._grids = [grid for grid in self._grids if grid.step != step]
            self._grids.append(Check(step, {name: found.tolist() for name, found in scores.items()}))
            known = {k: float(v.mean()) for k, v in scores.items() if math.isfinite(float(v.mean()))}
            for logger in trainer.loggers:
                logger.log_metrics(known, step=step)
            if isinstance(trainer.progress_bar_callback, RunProgress):
                trainer.progress_bar_callback.show(known)
        self._write_so_far(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave a page that says what ended the run, and does not renew itself, because nobody writes it any more."""
        if not self._is_off and trainer.is_global_zero:
            is_told = isinstance(exception, (KeyboardInterrupt, SystemExit))
            error = f"{type(exception).__name__}: {redact_text(reason_of(exception))[:MOST_OF_REASON]}"
            with errors_as_warnings():
                self._write_so_far(trainer, pl_module, None, "a signal" if is_told else error)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_off:
            return
        seconds = self._seconds()
        if isinstance(trainer.progress_bar_callback, RunProgress):
            trainer.progress_bar_callback.finish()
        peak = self._peak_mib(pl_module.device)
        self._pictures.measure(trainer, pl_module, "after", self._judge, self._note)
        if self._judge is not None:
            self._pictures.measure_full_base(trainer, pl_module, self._judge, self._note)
        if self._snapshots is not None and self._snapshots.blocked_s:
            with contextlib.suppress(SnapshotError):  # ExactSnapshot says it
                self._snapshots.wait()
        if not trainer.is_global_zero:
            return
        record = self._record(trainer, pl_module)
        record.is_finished, record.seconds, record.peak_memory_mib = True, seconds, peak
        root = Path(trainer.default_root_dir)
        self.summary = {**summary_of(record, bool(self.prior_prompts)), "report": str(root / REPORT_FILE)}
        with warns_if_unwritten("RunReport", root / RECORD_FILE):
            record.write(root)
        texts = {REPORT_FILE: render_run_page(record), SUMMARY_FILE: json.dumps(self.summary, indent=2) + "\n"}
        written = []
        for name, text in texts.items():
            with warns_if_unwritten("RunReport", root / name):
                write_text(root / name, text)
                written.append(name)
        log_results(trainer, self.summary)
        print("\n" + summary_table(record, str(root / REPORT_FILE) if REPORT_FILE in written else UNKNOWN))

    def final_files(self, trainer: Trainer, pl_module: LightningModule) -> list[Path]:
        """The files that a finished run must have, for ExactSnapshot."""
        root = Path(trainer.default_root_dir)
        return [] if self._is_off else [root / name for name in (REPORT_FILE, SUMMARY_FILE, RECORD_FILE)]

    def _write_so_far(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        renewed_every_s: float | None = RENEWED_EVERY_S,
        stopped_by: str = "",
    ) -> None:
        """Write report.json, and the page where it is older than an open one would notice, once training has begun."""
        if self._started_at is None:
            return
        record, root = self._record(trainer, pl_module), Path(trainer.default_root_dir)
        record.stopped_by = stopped_by
        with contextlib.suppress(OSError):  # a full disk is reported by what must be written
            record.write(root)
            if renewed_every_s is None or time.perf_counter() - self._page_written_at >= renewed_every_s:
                self._page_written_at = time.perf_counter()
                write_text(root / REPORT_FILE, render_run_page(record, renewed_every_s))

    # Resuming --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if self._is_off or self._started_at is None:
            return {}
        return {
            "asked": self._asked(),
            "before": self._pictures.images_before(),
            "measured": self._pictures.scores,
            "looks": self._pictures.looks_before(),
            "losses": self._curves.loss_state(),
            "curves": self._curves.state_dict(),
            "scores": [[grid.step, grid.named] for grid in self._grids],
            "notes": list(self._notes),
            "seconds": self._seconds(),
            "peak_memory_mib": self._peak_mib(self._device),
            "blocked_ms": self._blocked_ms(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = state_dict or None

    def _asked(self) -> dict[str, Any]:
        """The settings that the images before training depend on."""
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
        self._curves.load_state_dict(state["losses"], state.get("curves", {}))
        self._grids = [Check(int(step), dict(named)) for step, named in state["scores"]]
        self._earlier_s, self._earlier_peak_mib = state["seconds"], state["peak_memory_mib"]
        self._earlier_blocked_ms = list(state.get("blocked_ms", []))
        self._notes += [note for note in state["notes"] if note not in self._notes]
        if state["asked"] != self._asked():
            self._note(f"before was measured at step {trainer.global_step}: other images were asked for until there")
            return False
        self._pictures.load(state["before"], state["measured"], state.get("looks"))
        return True

    def _seconds(self) -> float:
        assert self._started_at is not None
        return self._earlier_s + time.perf_counter() - self._started_at

    def _peak_mib(self, device: torch.device) -> float:
        return max(self._earlier_peak_mib, peak_memory_mib(device))

    def _blocked_ms(self) -> list[float]:
        return self._earlier_blocked_ms + (in_ms(self._snapshots.blocked_s) if self._snapshots is not None else [])

    # The record ------------------------------------------------------------------------------------------------------

    def _record(self, trainer: Trainer, pl_module: LightningModule) -> RunRecord:
        """The record of all measurements up to now. Starts no collective."""
        record = record_of(trainer, pl_module)
        record.seconds, record.peak_memory_mib = self._seconds(), self._peak_mib(pl_module.device)
        record.curves, record.grids, record.notes = self._curves.record(), list(self._grids), list(self._notes)
        record.scores, record.pictures = self._pictures.paired_scores(), self._pictures.pictures()
        record.looks = self._pictures.looks() if record.pictures else None
        record.lora = result_file(trainer, pl_module)
        if record.snapshots is not None and self._snapshots is not None and self._snapshots.resumed_step >= 0:
            taken = len(self._blocked_ms()) + 1  # and the one that this fit continues from
            record.snapshots = dataclasses.replace(record.snapshots, taken=taken, blocked_ms=self._blocked_ms())
        return record

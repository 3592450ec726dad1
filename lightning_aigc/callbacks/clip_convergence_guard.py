"""CLIPConvergenceGuard: score sample images while training, keep the best weights, stop when none are better."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_aigc._lightning import Callback, LightningModule, Trainer, rank_zero_info, rank_zero_warn
from lightning_aigc.atomic_file import atomic_file, warns_if_unwritten
from lightning_aigc.callbacks.sampling.checks import check_images
from lightning_aigc.callbacks.sampling.gathered import written_weights
from lightning_aigc.callbacks.sampling.judges import Judge, Pair, draws_edits, make_judge
from lightning_aigc.callbacks.sampling.pairs import (
    SampledPairs,
    begins_anew,
    find_prompts,
    make_pairs,
    require_sampling,
    sample_on_all_ranks,
)
from lightning_aigc.callbacks.sampling.sheet import as_shown, draw_sheet, log_picture, write_png
from lightning_aigc.callbacks.saving.save_result import best_path, set_aside_best, set_aside_earlier_run
from lightning_aigc.errors import ConfigError, ModelError, SamplingTooSlow
from lightning_aigc.protocols import HasReferenceImages, SavesLoRA, SavesModel
from lightning_aigc.report.paired_scores import MEMORISING_CHECKS, Check, improvement, memorising
from lightning_aigc.report.record import GuardResult
from lightning_aigc.setting_checks import check_types

Metric = Literal["clip_t", "clip_i", "mean", "edit", "direction", "kept"]
OF_PROMPTS, OF_EDITS = ("clip_t", "clip_i", "mean"), ("edit", "direction", "kept")
"""Metrics of images that are drawn from prompts, and of edits; the first is what a message proposes."""


class CLIPConvergenceGuard(Callback):
    """Samples the same prompts and seeds every `every_n_steps` optimizer steps, scores them with CLIP, and decides.

    It writes the best weights to `<default_root_dir>/<output_name>_best.safetensors` as soon as it finds them. When no
    check has beaten the best for `patience` steps, it stops the training and says so. Each rank draws a share of the
    images; the training is not disturbed. Works with any LightningModule that has
    `sample(prompts, seeds) -> [N, 3, H, W] in 0..1`. The module's `save_lora(path)` writes the best weights; without it
    the file has the trainable parameters.

    Args:
        prompts: what to draw; the module's `validation_prompts` where None.
        every_n_steps: optimizer steps between two checks.
        num_images: images of each prompt, with the seeds `seed`, `seed + 1`, ...
        seed: the first seed.
        metric: the score to compare: clip_t (image to its prompt), clip_i (to the reference images), or mean of
            both. For a model that edits: direction (as the edit changes the true target), kept (what the edit leaves
            alone), or edit, the mean of both; see `metrics.EditSimilarity`.
        patience: optimizer steps without a better score after which training stops.
        min_delta: how much better a score must be; None means more than the standard error of the paired difference,
            which each check measures.
        save_best: whether the best weights are written.
        stop: whether training stops; without it the guard only scores and keeps.
        clip_model: an open_clip name, a local folder, or `embedded:clip`.
        clip_pretrained: weights of that model: an open_clip tag or a local file.
        reference_images: how many training images clip_i compares with, from the data module's `reference_images`.
        directory: where the grids go; `<default_root_dir>/guard` where None.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_aigc.callbacks import CLIPConvergenceGuard
        >>> guard = CLIPConvergenceGuard(every_n_steps=250, patience=750, clip_model="embedded:clip")
        >>> trainer = Trainer(callbacks=[guard])
    """

    def __init__(
        self,
        prompts: list[str] | None = None,
        every_n_steps: int = 100,
        num_images: int = 4,
        seed: int = 2000,
        metric: Metric = "clip_t",
        patience: int = 200,
        min_delta: float | None = None,
        save_best: bool = True,
        stop: bool = True,
        clip_model: str = "ViT-B-32",
        clip_pretrained: str | None = None,
        reference_images: int = 64,
        directory: str | None = None,
    ) -> None:
        check_types(CLIPConvergenceGuard.__init__, locals())
        if prompts is not None and not prompts:
            raise ConfigError("got CLIPConvergenceGuard prompts=[]; wanted a list of prompts, or None")
        if metric not in (*OF_PROMPTS, *OF_EDITS):
            wanted = ", ".join((*OF_PROMPTS, *OF_EDITS))
            raise ConfigError(f"got CLIPConvergenceGuard metric={metric!r}; wanted one of {wanted}")
        counts = {"every_n_steps": every_n_steps, "num_images": num_images, "patience": patience}
        for name, value in (counts | {"reference_images": reference_images}).items():
            if value < 1:
                raise ConfigError(f"CLIPConvergenceGuard {name} must be at least 1, got {value}")
        if min_delta is not None and not 0 <= min_delta <= 1:
            raise ConfigError(
                f"CLIPConvergenceGuard min_delta must be 0 to 1, as scores are, or None for the noise; got {min_delta}"
            )
        self.prompts, self.every_n_steps, self.num_images, self.seed = prompts, every_n_steps, num_images, seed
        self.metric, self.patience, self.min_delta = metric, patience, min_delta
        self.save_best, self.stop = save_best, stop
        self.clip_model, self.clip_pretrained = clip_model, clip_pretrained
        self.reference_images, self.directory = reference_images, directory
        self._judge: Judge | None = None
        self._prompts: list[str] = []
        self._reset()

    def _reset(self) -> None:
        self.checks: list[Check] = []
        self.best_step: int | None = None
        self.best_file: str | None = None
        self._first_images: Tensor | None = None
        self._last_images: Tensor | None = None
        self._last_step = -1
        self._last_step_sampled = -1
        self._too_slow = False
        self._memorising: str | None = None

    # State -----------------------------------------------------------------------------------------------------------

    @property
    def best_metric(self) -> float | None:
        """The best score so far; None before the first check."""
        best = self._best()
        return None if best is None else best.mean(self.metric)

    def should_stop_early(self) -> bool:
        """Whether no check has beaten the best for `patience` steps."""
        return (
            bool(self.checks) and self.best_step is not None and self.checks[-1].step - self.best_step >= self.patience
        )

    def report_entries(self) -> dict[str, Any]:
        """The checks and the best of them, for RunReport's page."""
        if not self.checks:
            return {}
        checks, stopped = list(self.checks), self.stop and self.should_stop_early()
        return {"guard": GuardResult(self.metric, checks, self.best_step, self.best_file, stopped, self._memorising)}

    def state_dict(self) -> dict[str, Any]:
        return {
            "asked": self._asked(),
            "checks": [[c.step, c.named] for c in self.checks],
            "best_step": self.best_step,
            "best_file": self.best_file,
            "first_images": self._first_images,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._prompts and state_dict.get("asked", self._asked()) != self._asked():  # without prompts it is no fit
            rank_zero_warn(
                "CLIPConvergenceGuard begins anew from this step: until here prompts, num_images, seed or CLIP model"
                " were others, so that the scores cannot be compared"
            )
            return
        self.checks = [Check(int(step), dict(named)) for step, named in state_dict["checks"]]
        self.best_step, self.best_file = state_dict["best_step"], state_dict["best_file"]
        self._first_images = state_dict["first_images"]

    def _asked(self) -> list[Any]:
        """Everything that the images and their scores depend on."""
        return [self._prompts, self.num_images, self.seed, self.clip_model, self.clip_pretrained]

    # When to check ---------------------------------------------------------------------------------------------------

    def prompts_drawn(self, trainer: Trainer) -> list[str]:
        """The prompts of the images."""
        return find_prompts(trainer.lightning_module, self.prompts)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raises: ModelError without `sample` or a CLIP model, ConfigError without prompts or references."""
        if stage != "fit":
            return
        self._judge = None
        if begins_anew(trainer):
            self._reset()
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        require_sampling(pl_module, "CLIPConvergenceGuard")
        fitting = OF_EDITS if draws_edits(trainer) else OF_PROMPTS
        if self.metric not in fitting:
            kind = "edits, whose prompts describe no image" if fitting is OF_EDITS else "images without sources"
            raise ConfigError(
                f"CLIPConvergenceGuard got metric={self.metric}, and this run draws {kind}; wanted one of"
                f" {', '.join(fitting)}: set its metric: {fitting[0]}"
            )
        self._prompts = find_prompts(pl_module, self.prompts)
        if not self._prompts:
            raise ConfigError(
                "CLIPConvergenceGuard got no prompts; set its `prompts`, or model.init_args.validation_prompts"
            )
        if self.metric in ("clip_i", "mean") and not isinstance(trainer.datamodule, HasReferenceImages):  # type: ignore[attr-defined]
            raise ConfigError(
                f"CLIPConvergenceGuard metric={self.metric} compares with training images, and the data module has "
                "no `reference_images(count) -> Tensor [N, 3, H, W]`; use metric: clip_t"
            )
        if twice := next((prompt for prompt in self._prompts if self._prompts.count(prompt) > 1), None):
            raise ConfigError(
                f"CLIPConvergenceGuard got the prompt {twice!r} twice; its images would be the same and count as more"
                " evidence: write each prompt once, and set num_images for more images of each"
            )
        self._judge = make_judge(trainer, pl_module, self.clip_model, self.clip_pretrained, "CLIPConvergenceGuard")
        try:
            self._judge.check()
        except ModelError as error:
            raise ModelError(
                f"CLIPConvergenceGuard: {error}, or take it out of trainer.callbacks to train without it"
            ) from error

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._judge is None:
            return
        self._warn_of_few_checks(trainer.max_steps)
        self._judge.begin(trainer, self.reference_images, pl_module.device)
        self._last_step = trainer.global_step
        set_aside_earlier_run(trainer, pl_module)
        if not self.checks:
            set_aside_best(trainer, pl_module, "lora")
            self._check(trainer, pl_module)

    def _warn_of_few_checks(self, steps: int) -> None:
        if 1 < steps <= self.every_n_steps:
            rank_zero_info(
                f"CLIPConvergenceGuard checks only the start and the end of these {steps} steps, because it has"
                f" every_n_steps={self.every_n_steps}; set its every_n_steps: {max(1, steps // 5)} to find the best"
                " step"
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, last = trainer.global_step, self._last_step
        if self._judge is not None and step // self.every_n_steps > last // self.every_n_steps:
            self._check(trainer, pl_module)
            if self.stop and self.should_stop_early():
                trainer.should_stop = True
        self._last_step = step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._judge is None or not self.checks:
            return
        if self.checks[-1].step != trainer.global_step:
            self._check(trainer, pl_module)
        elif self._last_step_sampled != trainer.global_step:  # by a run that was killed before its last sheet
            sampled = self._sample(trainer, pl_module)
            if sampled is not None and trainer.is_global_zero:
                self._last_images = as_shown(sampled.images)
        if self._first_images is not None and self._last_images is not None:
            rows = [
                torch.unflatten(images, 0, (-1, self.num_images)) for images in (self._first_images, self._last_images)
            ]
            pictures = torch.cat(rows, 1).flatten(0, 1)  # a row a prompt: its images before, then after
            whens = ["before"] * self.num_images + ["after"] * self.num_images
            captions = [f"{when}\n{prompt}" for prompt in self._prompts for when in whens]
            self._show(trainer, draw_sheet(pictures, captions, 2 * self.num_images), "before_after")
        score, kept = self.best_metric, f", kept in {self.best_file}: use that file" if self.best_file else ""
        if self.best_file and self.best_step != trainer.global_step:
            kept += f", the one without _best holds the last weights, of step {trainer.global_step}"
        elif self.best_step == 0:
            kept = ", the untrained model: no check was better beyond the noise"
        is_stopped = trainer.should_stop and self.stop and self.should_stop_early()
        ended = f"stopped at step {trainer.global_step}" if is_stopped else "training ended"
        rank_zero_info(f"CLIPConvergenceGuard: {ended}; best {self.metric} {score:.4f} at step {self.best_step}{kept}")

    # One check -------------------------------------------------------------------------------------------------------

    def _check(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sample, score, decide. Every rank comes here and has all scores, so that all decide alike."""
        sampled = self._sample(trainer, pl_module)
        if sampled is None:
            return
        check = Check(trainer.global_step, {name: found.tolist() for name, found in sampled.scores.items()})
        self.checks.append(check)
        self._last_step_sampled = check.step
        self._decide(trainer, pl_module, check)
        if trainer.is_global_zero:
            images = sampled.images
            self._last_images = as_shown(images)
            if self._first_images is None:
                self._first_images = self._last_images
            pairs = self._pairs()
            check_images(images, [f"step {check.step}, seed {seed}, {prompt!r}" for prompt, seed in pairs], pl_module)
            shown = check.scores("edit" if self.metric in OF_EDITS else "clip_t")
            captions = [f"{score:.3f}\n{prompt}" for (prompt, _), score in zip(pairs, shown, strict=True)]
            self._show(trainer, draw_sheet(images, captions, self.num_images), f"step_{check.step:06d}")
            numbers = {f"guard/{name}": check.mean(name) for name in check.named}
            numbers["guard/best"] = self.best_metric if self.best_metric is not None else math.nan
            for logger in trainer.loggers:
                known = {name: value for name, value in numbers.items() if math.isfinite(value)}
                logger.log_metrics(known, step=check.step)

    def _sample(self, trainer: Trainer, pl_module: LightningModule) -> SampledPairs | None:
        """The images and scores of all ranks; None once sampling takes too long."""
        if self._too_slow:
            return None
        try:  # check_images names broken images, once
            return sample_on_all_ranks(trainer, pl_module, self._pairs(), self._judge, warn_of_broken=False)
        except SamplingTooSlow as error:
            self._too_slow = True
            warnings.warn(f"CLIPConvergenceGuard checks no more: {error}", stacklevel=2)
            return None

    def _pairs(self) -> list[Pair]:
        return make_pairs(self._prompts, range(self.seed, self.seed + self.num_images))

    def _decide(self, trainer: Trainer, pl_module: LightningModule, check: Check) -> None:
        best = self._best()
        now = check.scores(self.metric)
        if not all(math.isfinite(score) for score in now):
            if any(not math.isfinite(before.mean(self.metric)) for before in self.checks[:-1]):
                return
            warnings.warn(
                f"CLIPConvergenceGuard: {self.metric} of step {check.step} is not finite; the training has most likely "
                "diverged: lower model.init_args.learning_rate. The best weights so far stay the best",
                stacklevel=2,
            )
            return
        if best is not None:
            better, noise = improvement(now, best.scores(self.metric))
            if better <= (noise if self.min_delta is None else self.min_delta):
                self._watch_memorising(best, check)
                return
        self.best_step = check.step
        if self.save_best and check.step > 0:
            self.best_file = self._write_best(trainer, pl_module)
        self._watch_memorising(best, check)

    def _best(self) -> Check | None:
        return next((check for check in self.checks if check.step == self.best_step), None)

    def _watch_memorising(self, best: Check | None, check: Check) -> None:
        if self._memorising is not None or len(self.checks) <= MEMORISING_CHECKS:
            return
        self._memorising = memorising(self.checks[-1 - MEMORISING_CHECKS], check)
        if self._memorising is not None:
            warnings.warn(f"CLIPConvergenceGuard: {self._memorising}", stacklevel=2)

    # Files -----------------------------------------------------------------------------------------------------------

    def _write_best(self, trainer: Trainer, pl_module: LightningModule) -> str:
        path = best_path(trainer, pl_module, "lora")
        with written_weights(pl_module) as writes:
            if writes:
                try:
                    self._write_weights(trainer, pl_module, path)
                except OSError as error:
                    raise ModelError(
                        f"CLIPConvergenceGuard cannot keep the best weights in {path}: {error.strerror or error}; "
                        "free some space or choose another folder"
                    ) from error
        return str(path)

    def _write_weights(self, trainer: Trainer, pl_module: LightningModule, path: Path) -> None:
        if isinstance(pl_module, SavesLoRA):
            pl_module.save_lora(path, output_name=path.stem, steps=trainer.global_step)
        elif isinstance(pl_module, SavesModel):
            pl_module.save_model(path)
        else:
            from safetensors.torch import save

            trained = {n: p.detach().cpu().contiguous() for n, p in pl_module.named_parameters() if p.requires_grad}
            with atomic_file(path, durable=False) as file:
                file.write(save(trained, {"step": str(trainer.global_step)}))

    def _show(self, trainer: Trainer, sheet: Any, name: str) -> None:
        path = Path(self.directory or Path(trainer.default_root_dir) / "guard").expanduser() / f"{name}.png"
        with warns_if_unwritten("CLIPConvergenceGuard", path):
            write_png(path, sheet, {"step": trainer.global_step, "prompts": self._prompts})
        log_picture(trainer, f"guard_{name}" if name == "before_after" else "guard", sheet, trainer.global_step)

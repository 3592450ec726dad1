"""EdgeReport: draw held-out images from their conditions, and score how well the edges are kept."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_aigc._lightning import Callback, LightningModule, Trainer, rank_zero_info
from lightning_aigc.atomic_file import warns_if_unwritten
from lightning_aigc.callbacks.sampling.pairs import begins_anew
from lightning_aigc.callbacks.sampling.sheet import draw_sheet, write_png
from lightning_aigc.errors import ConfigError
from lightning_aigc.evaluation_mode import evaluating
from lightning_aigc.metrics import EdgeFidelity, canny
from lightning_aigc.protocols import HasHeldOutBatches
from lightning_aigc.rng import isolate_rng
from lightning_aigc.setting_checks import check_types

TITLE = "Edges: condition, result, its edges, original"
SHEETS = "edge_report"
"""The folder of the sheets, below the run's."""


@runtime_checkable
class SamplesWithConditions(Protocol):
    """Draws images from conditions, for EdgeReport."""

    def conditioning(self, batch: dict[str, Any]) -> Tensor:
        """Return the batch's conditions, [B, C, H, W] in 0..1."""
        ...

    def round_trip(self, pixels_B3HW: Tensor) -> Tensor:
        """Return pixels in -1..1 as the autoencoder gives them back, [B, 3, H, W] in 0..1 on the CPU."""
        ...


class EdgeReport(Callback):
    """Scores edges with `EdgeFidelity` at the end of a run and every `every_n_steps` steps, on held-out images.

    Each image is drawn from its own caption and condition. Its round trip through the autoencoder gives the ceiling,
    another image's edges the floor. Writes `edge_report/step_000560.png`: condition, result,
    the result's edges, original.
    Logs `edge_f1` and the others; the last ones are in summary.json.

    Args:
        num_images: Images to draw.
        every_n_steps: Optimizer steps between scores; 0 scores at the end only.
        shown: Images on the sheet.
        tolerance: Pixels by which an edge may be moved.
        seed: Seed of the first image.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_aigc.callbacks import EdgeReport
        >>> trainer = Trainer(callbacks=[EdgeReport(num_images=8)])
    """

    def __init__(
        self, num_images: int = 32, every_n_steps: int = 0, shown: int = 8, tolerance: int = 1, seed: int = 1000
    ) -> None:
        check_types(EdgeReport.__init__, locals())
        if num_images < 2 or every_n_steps < 0 or shown < 0:
            raise ConfigError(
                "EdgeReport wants num_images >= 2, every_n_steps >= 0 and shown >= 0, got"
                f" {num_images}, {every_n_steps} and {shown}"
            )
        self.num_images, self.every_n_steps, self.shown = num_images, every_n_steps, shown
        self.tolerance, self.seed = tolerance, seed
        self._reset()

    def _reset(self) -> None:
        self.scores: list[tuple[int, dict[str, float]]] = []
        """Step and what EdgeFidelity computed."""
        self.sheet: Path | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if stage == "fit" and begins_anew(trainer):
            self._reset()
        if stage == "fit" and not (
            isinstance(pl_module, SamplesWithConditions) and isinstance(data, HasHeldOutBatches)
        ):
            raise ConfigError(
                f"EdgeReport needs a model that samples from conditions and data with held_out_loader, got"
                f" {type(pl_module).__name__} and {type(data).__name__}; remove the callback"
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        is_due = self.every_n_steps and step % self.every_n_steps == 0 and step != trainer.max_steps
        if is_due and not trainer.fast_dev_run and (not self.scores or self.scores[-1][0] < step):  # type: ignore[attr-defined]
            self._score(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._score(trainer, pl_module)

    def report_entries(self) -> dict[str, Any]:
        """The last scores and the sheet, for the summary and the page."""
        if not self.scores:
            return {}
        entries: dict[str, Any] = {"figures": dict(self.scores[-1][1])}
        if self.sheet is not None and self.sheet.is_file():
            uri = f"data:image/png;base64,{base64.b64encode(self.sheet.read_bytes()).decode()}"
            entries |= {"result_files": {"edge_sheet": str(self.sheet)}, "sheets": {TITLE: uri}}
        return entries

    def state_dict(self) -> dict[str, Any]:
        return {"scores": [[step, values] for step, values in self.scores]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scores = [(int(step), dict(values)) for step, values in state_dict["scores"]]

    @torch.no_grad()
    def _score(self, trainer: Trainer, pl_module: Any) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        metric = EdgeFidelity(self.tolerance).to(pl_module.device)
        left, step, first = self.num_images, trainer.global_step, None
        context = trainer.precision_plugin.forward_context()
        with isolate_rng(pl_module.device), evaluating(pl_module), context:
            for number, batch in enumerate(data.held_out_loader(self.num_images)):
                if left <= 0:
                    break
                seeds = [self.seed + self.num_images - left + place for place in range(len(batch["captions"]))]
                left -= len(seeds)
                if number % trainer.world_size != trainer.global_rank:
                    continue
                conditions = pl_module.conditioning(batch)
                images = pl_module.sample(batch["captions"], seeds, conditions=conditions.cpu())
                originals = batch["pixel_values"] / 2 + 0.5
                round_trips = pl_module.round_trip(batch["pixel_values"])
                metric.update(*(each.to(pl_module.device) for each in (images, originals, round_trips)))
                first = first or (conditions.cpu(), images, originals, batch["captions"])
            values = {name: float(value) for name, value in metric.compute().items()}
        self.scores.append((step, values))
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)
        rank_zero_info(
            f"EdgeReport: step {step}: edge_f1 {values['edge_f1']:.3f} between the floor {values['edge_f1_floor']:.3f}"
            f" and the ceiling {values['edge_f1_ceiling']:.3f}"
        )
        if trainer.is_global_zero and first is not None and self.shown:
            self.sheet = Path(trainer.default_root_dir) / SHEETS / f"step_{step:06d}.png"
            self._draw(self.sheet, *first)

    def _draw(self, path: Path, conditions: Tensor, images: Tensor, originals: Tensor, captions: list[str]) -> None:
        shown = conditions[: self.shown].clamp(0, 1)
        rows = [shown.expand(-1, 3, -1, -1), images, canny(images).expand(-1, 3, -1, -1), originals]
        pictures = torch.stack([row[: self.shown] for row in rows], 1).flatten(0, 1)
        names = ("condition", "result", "its edges", "original")
        titles = [f"{name}\n{caption}" for caption in captions[: self.shown] for name in names]
        with warns_if_unwritten("EdgeReport", path):
            write_png(path, draw_sheet(pictures, titles, len(rows)), {"captions": captions[: self.shown]})

"""SampleGrid: draw the same prompts and seeds again and again, so that one can watch a run learn."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from PIL import Image
from torch import Tensor

from lightning_aigc._lightning import Callback, LightningModule, Trainer, rank_zero_warn
from lightning_aigc.callbacks.sampling.checks import check_images
from lightning_aigc.callbacks.sampling.gathered import gathered_weights
from lightning_aigc.callbacks.sampling.judges import Pair
from lightning_aigc.callbacks.sampling.pairs import (
    begins_anew,
    find_prompts,
    make_pairs,
    require_sampling,
    sample_pairs,
)
from lightning_aigc.callbacks.sampling.sheet import draw_sheet, log_picture, write_png
from lightning_aigc.callbacks.saving.save_result import set_aside_earlier_run
from lightning_aigc.errors import ConfigError, SamplingTooSlow
from lightning_aigc.evaluation_mode import evaluating
from lightning_aigc.gradient_sync.transport.process_groups import errors_of_all_ranks
from lightning_aigc.rng import isolate_rng
from lightning_aigc.setting_checks import check_types


@runtime_checkable
class SeesSampleImages(Protocol):
    """Receives SampleGrid's images, on rank zero only, so it must not start a collective."""

    def on_sample_images(
        self, trainer: Any, pl_module: Any, images_N3HW: Tensor, pairs: Sequence[Pair], step: int
    ) -> None:
        """Receive the images of one step, and the prompt and seed of each."""
        ...


class SampleGrid(Callback):
    """Draw a grid before the first step, every `every_n_steps` optimizer steps, and after the last.

    Each prompt has a row and each seed a column; both stand under the image. The grid goes to
    `<default_root_dir>/samples/step_000100.png` and to every logger that takes images. Works with any
    LightningModule that has `sample(prompts, seeds) -> [N, 3, H, W] in 0..1`; the training is not disturbed.
    Other callbacks can see the same images: on rank zero it calls their method
    `on_sample_images(trainer, pl_module, images, pairs, step)`, in which no collective may start.

    Args:
        prompts: what to draw; the module's `validation_prompts` where None.
        every_n_steps: optimizer steps between two grids.
        seeds: a column each; `seed`, `seed + 1`, ... for `num_images` columns where None.
        num_images: images of each prompt, where `seeds` is None.
        seed: the first seed, where `seeds` is None.
        columns: images in a row; as many as there are seeds where None.
        directory: where the PNGs go; `<default_root_dir>/samples` where None.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_aigc.callbacks import SampleGrid
        >>> trainer = Trainer(callbacks=[SampleGrid(prompts=["a zorp mug"], every_n_steps=100)])
    """

    def __init__(
        self,
        prompts: list[str] | None = None,
        every_n_steps: int = 100,
        seeds: list[int] | None = None,
        num_images: int = 4,
        seed: int = 0,
        columns: int | None = None,
        directory: str | None = None,
    ) -> None:
        check_types(SampleGrid.__init__, locals())
        if prompts is not None and not prompts:
            raise ConfigError("got SampleGrid prompts=[]; wanted a list of at least one prompt, or None")
        for name, value in (("every_n_steps", every_n_steps), ("num_images", num_images), ("columns", columns)):
            if value is not None and value < 1:
                raise ConfigError(
                    f"got SampleGrid {name}={value}; wanted at least 1 (leave the callback out to draw none)"
                )
        if seeds is not None and not seeds:
            raise ConfigError("got SampleGrid seeds=[]; wanted at least one seed, or None")
        self.prompts = prompts
        self.every_n_steps = every_n_steps
        self._has_unread = seeds is not None and (num_images, seed) != (4, 0)
        self.seeds = list(seeds) if seeds is not None else list(range(seed, seed + num_images))
        self.columns = columns or len(self.seeds)
        self.directory = directory
        self._prompts: list[str] = []
        self._folder: Path | None = None
        self._reset()

    def _reset(self) -> None:
        self.history: list[tuple[int, str]] = []
        """(step, path) of every grid of this run, in order."""
        self._cannot_write = False
        self._too_slow = False
        self._last_step = -1

    @property
    def state_key(self) -> str:
        return self._generate_state_key(prompts=self.prompts, seeds=self.seeds, directory=self.directory)

    def state_dict(self) -> dict[str, Any]:
        return {"history": [[step, path] for step, path in self.history]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = [(int(step), str(path)) for step, path in state_dict["history"]]

    def prompts_drawn(self, trainer: Trainer) -> list[str]:
        """The prompts of the images."""
        return find_prompts(trainer.lightning_module, self.prompts)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raises: ModelError without a `sample` method, ConfigError without prompts or a folder to write to."""
        if stage != "fit":
            return
        if begins_anew(trainer):
            self._reset()
        require_sampling(pl_module, "SampleGrid")
        self._prompts = find_prompts(pl_module, self.prompts)
        if not self._prompts:
            raise ConfigError(
                "SampleGrid got no prompts; set its `prompts`, or model.init_args.validation_prompts, or leave it out"
            )
        if self._has_unread:
            rank_zero_warn("SampleGrid: num_images and seed change nothing while seeds is set; remove one or the other")
        self._folder = Path(self.directory or Path(trainer.default_root_dir) / "samples").expanduser()
        found: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if any(isinstance(c, SampleGrid) and c is not self and c._folder == self._folder for c in found):
            raise ConfigError(
                f"two SampleGrids write to {self._folder} and would replace each other's files; set the `directory` of"
                " one of them"
            )
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            probe = self._folder / f".{os.getpid()}.part"
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                probe.touch()
                probe.unlink()
            except OSError as error:
                raise ConfigError(
                    f"SampleGrid cannot write to {self._folder}: {error.strerror or error}; "
                    "set its `directory` or trainer.default_root_dir to another folder"
                ) from error

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_step = trainer.global_step
        if trainer.global_step == 0:
            if not trainer.fast_dev_run:  # type: ignore[attr-defined]
                set_aside_earlier_run(trainer, pl_module)
            self._draw(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # global_step moves only with the optimizer, and by more than one where there are several.
        step, last = trainer.global_step, self._last_step
        if step // self.every_n_steps > last // self.every_n_steps:
            self._draw(trainer, pl_module)
        self._last_step = step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step % self.every_n_steps:
            self._draw(trainer, pl_module)

    def _draw(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw on rank zero alone, once weights are gathered; all ranks meet afterwards, and raise its error."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        with errors_of_all_ranks():
            try:
                with gathered_weights(pl_module):
                    if trainer.is_global_zero and not self._too_slow:
                        with isolate_rng(pl_module.device), evaluating(pl_module):
                            self._draw_on_rank_zero(trainer, pl_module)
            except SamplingTooSlow as error:
                self._too_slow = True  # on rank zero alone, hence every rank comes to the barrier below
                warnings.warn(f"SampleGrid draws no more: {error}", stacklevel=2)
            finally:
                trainer.strategy.barrier("SampleGrid")

    def _draw_on_rank_zero(self, trainer: Trainer, pl_module: LightningModule) -> None:
        step = trainer.global_step
        pairs = make_pairs(self._prompts, self.seeds)
        images_N3HW = sample_pairs(pl_module, pairs).cpu()
        check_images(images_N3HW, [f"step {step}, seed {seed}, {prompt!r}" for prompt, seed in pairs], pl_module)
        sheet = draw_sheet(images_N3HW, [f"seed {seed}\n{prompt}" for prompt, seed in pairs], self.columns)
        self._write(sheet, step)
        log_picture(trainer, "samples", sheet, step)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, SeesSampleImages):
                callback.on_sample_images(trainer, pl_module, images_N3HW, pairs, step)

    def _write(self, sheet: Image.Image, step: int) -> None:
        assert self._folder is not None
        path = self._folder / f"step_{step:06d}.png"
        try:
            write_png(path, sheet, {"step": step, "prompts": self._prompts, "seeds": self.seeds})
        except OSError as error:
            if not self._cannot_write:
                reason = error.strerror or error
                warnings.warn(f"SampleGrid cannot write {path}: {reason}; training continues without it", stacklevel=2)
            self._cannot_write = True
            return
        self._cannot_write = False
        self.history = [entry for entry in self.history if entry[0] != step] + [(step, str(path))]

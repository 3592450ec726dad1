"""`lightning fit … --dry_run`: report parameters and memory, and run one real step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import nn

from lightning_aigc._lightning import Callback, LightningModule, Trainer
from lightning_aigc.callbacks.sampling.judges import EditJudge, draws_edits, swapped_sides
from lightning_aigc.cli.fit.start_lines import unwanted_settings
from lightning_aigc.cli.quantities import with_scale
from lightning_aigc.devices import peak_memory_mib, reset_peak_memory
from lightning_aigc.diffusion.objectives.flow import Flow
from lightning_aigc.diffusion.pipeline.vae_checks import describe_vae
from lightning_aigc.errors import ModelError
from lightning_aigc.precision import FusedBackwardPrecision
from lightning_aigc.protocols import (
    HasExampleBatch,
    HasPackedBase,
    HasReferenceImages,
)
from lightning_aigc.quantization.frozen import stored_bytes

PICTURES_ROUND_TRIPPED = 4


@runtime_checkable
class CountsWrittenFiles(Protocol):
    """Counts the files that it writes, for the dry run."""

    def files_written(self) -> tuple[int, int, str]:
        """Return the files that this process wrote, their bytes, and the folder that holds them."""
        ...


@runtime_checkable
class HasComponents(Protocol):
    """Keeps the parts of its pipeline, frozen ones among them, out of the module tree."""

    components: Any
    """With `vae` and `text_encoders`; None before they are loaded."""


def dry_run_trainer_arguments(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Trainer arguments that replace the config's: one batch, and no files except the caches.

    callbacks: Those of the config, which do not run; pairs of an edit are checked by the CLIP model of one of them.
    """
    judges = ((each.clip_model, each.clip_pretrained) for each in callbacks if getattr(each, "clip_model", None))
    return {
        "fast_dev_run": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "callbacks": [DryRun(next(judges, None))],
    }


class DryRun(Callback):
    """Prints trainable parameters and a memory estimate, times one step, and measures its peak memory.

    clip: Name and weights of the CLIP model that says which side of a pair fits its instruction.
    """

    def __init__(self, clip: tuple[str, str | None] | None = None) -> None:
        self.clip = clip

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        print("\n".join([memory_table(pl_module), *unwanted_settings(trainer, pl_module)]))
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        parts: Any = pl_module.components if isinstance(pl_module, HasComponents) else None
        if parts is not None and isinstance(data, HasReferenceImages):
            print("\n".join(describe_vae(parts.vae, data.reference_images(PICTURES_ROUND_TRIPPED), parts.family)))
        objective = getattr(pl_module, "objective", None)
        if isinstance(objective, Flow) and isinstance(data, HasExampleBatch):
            module: Any = pl_module
            print(objective.density(module.encoders.latents(data.example_batch(1))))
        if self.clip is not None and draws_edits(trainer):
            try:
                print(swapped_sides(EditJudge(*self.clip, data)) or "pairs: the targets fit their instructions")
            except ModelError as error:
                print(f"pairs: not compared with their instructions: {error}")
        reset_peak_memory(pl_module.device)
        self._started_at = time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seconds = time.perf_counter() - self._started_at
        peak = peak_memory_mib(pl_module.device)
        print(f"one step: {seconds:.2f} s with its warm-up, peak memory {peak:.0f} MiB on {pl_module.device}")
        plan = trainer.precision_plugin.plan if isinstance(trainer.precision_plugin, FusedBackwardPrecision) else ""
        if plan:
            print(f"{plan}; the step above counted this and saved the least")
        loss = trainer.callback_metrics.get("loss")
        if loss is not None:
            print(f"loss: {float(loss):.4f}")
        loss = trainer.callback_metrics.get("val_loss")
        if loss is not None:
            print(f"val_loss: {float(loss):.4f} (of the first batch of held-out images)")
        print(f"dry run: {files_written(trainer)}; leave out --dry_run to train")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        print(f"dry run: stopped; {files_written(trainer)}")


def files_written(trainer: Trainer) -> str:
    """Files that this process has written; only the data module writes in a dry run."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    files, size_bytes, folder = data.files_written() if isinstance(data, CountsWrittenFiles) else (0, 0, "")
    if not files:
        return "nothing was written"
    return f"wrote {files} files ({with_scale(size_bytes, 'B')}) to the cache in {folder}, and nothing else"


def memory_table(module: LightningModule) -> str:
    """Parameter counts and the memory that does not depend on the batch, in MiB as text; assumes AdamW."""
    frozen = [p for p in all_parameters(module) if not p.requires_grad]
    trained = [p for p in module.parameters() if p.requires_grad]
    frozen_mib = sum(map(stored_bytes, frozen)) / 2**20
    trained_mib = sum(p.numel() * p.element_size() for p in trained) / 2**20
    count = sum(p.numel() for p in trained)
    total = count + sum(p.numel() for p in frozen)
    packed: Any = module.packed_base if isinstance(module, HasPackedBase) else None
    return "\n".join(
        [
            *([f"base_quantization: {packed.summary()}"] if packed is not None else []),
            f"trainable parameters: {count:,} of {total:,} ({100 * count / max(total, 1):.2f} %)",
            f"memory estimate: frozen weights {frozen_mib:.0f} MiB; trained weights, gradients and AdamW state"
            f" {4 * trained_mib:.0f} MiB; activations come on top, see the peak below",
        ]
    )


def all_parameters(module: nn.Module) -> list[nn.Parameter]:
    """A module's parameters, with those of frozen parts that it keeps out of its module tree, each once."""
    parts: Any = module.components if isinstance(module, HasComponents) else None
    outside: list[nn.Module] = [parts.vae, *parts.text_encoders] if parts is not None else []
    return list({id(p): p for m in (module, *outside) for p in m.parameters()}.values())

"""What the parts expect of a LightningModule, a data module, a callback or a strategy that is not ours.

Each Protocol is checked with `isinstance`, which asks for the names alone; an object need not inherit from any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

# What a LightningModule may offer ----------------------------------------------------------------------------------


@runtime_checkable
class SupportsSampling(Protocol):
    """Generates pictures: what SampleGrid, CLIPConvergenceGuard and RunReport draw with."""

    def sample(self, prompts: list[str], seeds: list[int]) -> Tensor:
        """Return one picture for each pair of prompt and seed, [N, 3, H, W] in 0..1."""
        ...


@runtime_checkable
class HasValidationPrompts(Protocol):
    """Knows which prompts to sample where a callback was given none."""

    validation_prompts: Sequence[str]


@runtime_checkable
class HasImageRemedies(Protocol):
    """Says what to change when its pictures are broken, in its own config keys."""

    image_remedies: Mapping[Any, str]
    """By problem: `not finite`, `black`, `constant`."""


@runtime_checkable
class HasPipelineParts(Protocol):
    """Keeps the parts of its pipeline, frozen ones among them, out of the module tree."""

    components: Any
    """With `vae` and `text_encoders`; None before they are loaded."""


@runtime_checkable
class SavesLoRA(Protocol):
    """Writes its LoRA as one file."""

    def save_lora(self, path: str | Path, **metadata: Any) -> Any:
        """Write the file; `metadata` has strings and numbers for its header."""
        ...


@runtime_checkable
class HasOutputName(Protocol):
    """Names the files that its training writes."""

    output_name: str


@runtime_checkable
class ReportsExampleLosses(Protocol):
    """Keeps the losses of the last batch's examples and the timesteps they were drawn at, both [B]."""

    last_example_losses: Tensor | None
    last_timesteps: Tensor | None


@runtime_checkable
class HasNoiseSchedule(Protocol):
    """Knows how many timesteps its noise schedule has."""

    num_train_timesteps: int


@runtime_checkable
class DeclaresSnapshotArguments(Protocol):
    """Says which of its hyperparameters do not change the bits of a training, such as where previews go.

    ExactSnapshot compares the configuration of a resumed run with that of the snapshot, and passes over these.
    """

    snapshot_ignored_arguments: frozenset[str]


@runtime_checkable
class BringsSnapshots(Protocol):
    """Adds its own ExactSnapshot in `configure_callbacks`, so that the command line need not."""

    def brings_snapshots(self, trainer: Any) -> bool:
        """Whether it will, for this Trainer."""
        ...


@runtime_checkable
class HasDeferredSnapshotKeys(Protocol):
    """Names keys of its checkpoint whose tensors change in `optimizer_step` or later, never in forward or backward.

    A snapshot copies them beside the next batch, where it would otherwise copy them before.
    """

    deferred_snapshot_keys: Sequence[str]


# What a data module may offer --------------------------------------------------------------------------------------


@runtime_checkable
class HasReferenceImages(Protocol):
    """Hands out training pictures to compare generated ones with."""

    def reference_images(self, count: int) -> Tensor:
        """Return up to `count` pictures, [N, 3, H, W] in 0..1."""
        ...


@runtime_checkable
class DescribesTrainingData(Protocol):
    """Describes the data for the header of a LoRA file."""

    def lora_metadata(self) -> Mapping[str, Any]:
        """Return sd-scripts' `ss_` entries."""
        ...


@runtime_checkable
class HasTrainBatchSize(Protocol):
    """Knows how many examples a rank's batch has."""

    train_batch_size: int


# What a callback may offer -----------------------------------------------------------------------------------------


@runtime_checkable
class SeesSampleImages(Protocol):
    """Is shown the pictures that SampleGrid drew, on rank zero, where no collective may start."""

    def on_sample_images(
        self, trainer: Any, pl_module: Any, images_N3HW: Tensor, prompts: Sequence[str], step: int
    ) -> None:
        """Look at the pictures of one step."""
        ...


@runtime_checkable
class WritesFinalFiles(Protocol):
    """Writes files at the end of a run, without which ExactSnapshot does not take the run for finished."""

    def final_files(self, trainer: Any, pl_module: Any) -> Sequence[Path]:
        """Return their paths."""
        ...


# What a strategy may offer -----------------------------------------------------------------------------------------


@runtime_checkable
class HasSnapshotState(Protocol):
    """Has state of its own on each rank that a snapshot must hold, such as residuals of error feedback."""

    ranks_differ: bool
    """Whether the ranks' weights differ between two optimizer steps, as in local SGD."""

    def snapshot_state(self) -> dict[str, Any]:
        """Return this rank's state."""
        ...

    def load_snapshot_state(self, read: Any, world_size: int) -> None:
        """Load it; `read(rank)` returns the state of one rank of the snapshot's `world_size`."""
        ...

    def without_averaging(self) -> AbstractContextManager[object]:
        """Read the parameters in a block without averaging them over the ranks first."""
        ...

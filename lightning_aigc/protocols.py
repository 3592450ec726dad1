"""Protocols for optional features of LightningModules, data modules, callbacks and strategies.

Each is checked with `isinstance`, by attribute names only; a class need not inherit from the Protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

# LightningModules ---------------------------------------------------------------------------------------------------


@runtime_checkable
class SupportsSampling(Protocol):
    """Generates images, for SampleGrid, CLIPConvergenceGuard and RunReport."""

    def sample(self, prompts: list[str], seeds: list[int]) -> Tensor:
        """Return one image for each pair of prompt and seed, [N, 3, H, W] in 0..1."""
        ...


@runtime_checkable
class HasValidationPrompts(Protocol):
    """Has default prompts for callbacks that were given none."""

    validation_prompts: Sequence[str]


@runtime_checkable
class HasImageRemedies(Protocol):
    """Says what to change when its images are broken, in its own config keys."""

    image_remedies: Mapping[Any, str]
    """By problem: `not finite`, `black`, `constant`."""


@runtime_checkable
class EncodesCaptions(Protocol):
    """Encodes captions, for FineTuneCheck."""

    def encode_captions(self, captions: Sequence[str]) -> Mapping[str, Tensor]:
        """Return embeddings by batch key, among them `prompt_embeds` [B, T, D]."""
        ...


@runtime_checkable
class CountsTokens(Protocol):
    """Counts captions' tokens before weights are loaded."""

    def count_tokens(self, captions: Sequence[str]) -> tuple[Sequence[int], int] | None:
        """Return each caption's tokens, and how many the text encoder keeps; None if no tokenizer is on this machine.

        A caption that cannot have more may count as 0.
        """
        ...


@runtime_checkable
class CachesCaptions(Protocol):
    """A data module whose batches have captions' embeddings."""

    @property
    def caches_captions(self) -> bool:
        """Whether they have them in this run."""
        ...

    def cache_captions(self, encoder: Any, trainer: Any) -> Callable[[str], Mapping[str, Tensor] | None]:
        """Encode all captions with a `data.Encoder`, before there is a model. Collective.

        Returns: what finds a caption's embeddings; None for one that is not cached.
        """
        ...


@runtime_checkable
class HasPictureSizes(Protocol):
    """A data module that knows its images' sizes before the first batch."""

    def picture_sizes(self) -> Sequence[tuple[int, int]]:
        """Return each (width, height) of training and held-out images in pixels."""
        ...

    def size_remedy(self, step: int) -> str:
        """Return what to set so that all sides are multiples of `step`, for an error message."""
        ...


@runtime_checkable
class DrawsPrompts(Protocol):
    """A callback that draws images."""

    def prompts_drawn(self, trainer: Any) -> Sequence[str]:
        """Return the prompts that it will draw, which are encoded while the text encoders are in memory."""
        ...


@runtime_checkable
class HasPipelineParts(Protocol):
    """Keeps the parts of its pipeline, frozen ones among them, out of the module tree."""

    components: Any
    """With `vae` and `text_encoders`; None before they are loaded."""


@runtime_checkable
class HasPackedBase(Protocol):
    """Keeps its frozen weights in few bits."""

    packed_base: Any
    """The packed weights, with `summary()`; None if nothing was packed."""

    def full_precision_base(self) -> AbstractContextManager[object]:
        """Compute with the whole weights until the block ends."""
        ...


@runtime_checkable
class HasAveragedWeights(Protocol):
    """Has an average of its weights, to be sampled and saved in their place."""

    def averaged_weights(self) -> AbstractContextManager[object]:
        """Swap in the average until the block ends."""
        ...


@runtime_checkable
class SavesLoRA(Protocol):
    """Saves its LoRA as one file."""

    def save_lora(self, path: str | Path, **metadata: Any) -> Any:
        """Write the file; `metadata` has strings and numbers for its header."""
        ...


@runtime_checkable
class SavesModel(Protocol):
    """Saves its trained model whole."""

    saved_kind: str
    """Kind of the saved model, for the summary: pipeline or controlnet."""

    def save_model(self, path: str | Path) -> Sequence[Path]:
        """Write `path`, a single `.safetensors` file, and next to it a folder; return what was written."""
        ...


@runtime_checkable
class ProtectsGradients(Protocol):
    """Names modules whose gradients stay dense and in full precision through every lossy path.

    FusedBackwardPrecision, the npu_sparse strategy, ZeROStrategy between nodes and `base_quantization` add them to
    their own lists.
    """

    protected_gradients: Sequence[str]
    """Name patterns, as in FusedBackwardPrecision's `protect`."""


@runtime_checkable
class SupportsControlCheck(Protocol):
    """Compares the loss with right conditions to that with another image's, for ControlGuard."""

    def control_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch with all that frozen parts compute, so that checks of it take two forwards."""
        ...

    def control_losses(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the losses [B] with the right and with another image's condition, at fixed noise."""
        ...


@runtime_checkable
class SamplesWithConditions(Protocol):
    """Draws images from conditions, for EdgeReport."""

    def conditioning(self, batch: dict[str, Any]) -> Tensor:
        """Return the batch's conditions, [B, C, H, W] in 0..1."""
        ...

    def round_trip(self, pixels_B3HW: Tensor) -> Tensor:
        """Return pixels in -1..1 as the autoencoder gives them back, [B, 3, H, W] in 0..1 on the CPU."""
        ...


@runtime_checkable
class HasHeldOutBatches(Protocol):
    """Is a data module that gives batches of images that are not trained on."""

    def held_out_loader(self, batch_size: int) -> Any:
        """Return a loader of them in order, of training images where none is held out."""
        ...


@runtime_checkable
class HasOutputName(Protocol):
    """Has a name for the files that its training writes."""

    output_name: str


@runtime_checkable
class ReportsExampleLosses(Protocol):
    """Has the per-example losses and timesteps of the last batch, both [B]."""

    last_example_losses: Tensor | None
    last_timesteps: Tensor | None


@runtime_checkable
class HasNoiseSchedule(Protocol):
    """Has a noise schedule with a number of timesteps."""

    num_train_timesteps: int


@runtime_checkable
class DeclaresSnapshotArguments(Protocol):
    """Lists the hyperparameters that do not change the bits of a training, such as the folder of previews.

    ExactSnapshot ignores these when it compares the configuration of a resumed run with the snapshot's.
    """

    snapshot_ignored_arguments: frozenset[str]


@runtime_checkable
class BringsSnapshots(Protocol):
    """Adds ExactSnapshot in `configure_callbacks`, so that the command line does not."""

    def brings_snapshots(self, trainer: Any) -> bool:
        """Whether it adds ExactSnapshot for this Trainer."""
        ...


@runtime_checkable
class HasDeferredSnapshotKeys(Protocol):
    """Lists checkpoint keys whose tensors change only in `optimizer_step` or later, not in forward or backward.

    A snapshot copies these during the next batch instead of before it.
    """

    deferred_snapshot_keys: Sequence[str]


# Data modules -------------------------------------------------------------------------------------------------------


@runtime_checkable
class HasReferenceImages(Protocol):
    """Provides training images as references for generated images."""

    def reference_images(self, count: int) -> Tensor:
        """Return up to `count` images, [N, 3, H, W] in 0..1."""
        ...


@runtime_checkable
class ScoresImages(Protocol):
    """Scores images while training; AdaptiveLR lowers a raised rate where they get worse."""

    checks: list[Any]
    """Scores of each check, `report.paired_scores.Check`."""
    metric: str


@runtime_checkable
class HasExampleBatch(Protocol):
    """Provides a few training examples, on which a base's bits are chosen."""

    def example_batch(self, count: int) -> dict[str, Any]:
        """Return up to `count` examples of one size as a batch, the same at each call."""
        ...


@runtime_checkable
class DescribesTrainingData(Protocol):
    """Describes the data for the header of a LoRA file."""

    def lora_metadata(self) -> Mapping[str, Any]:
        """Return sd-scripts' `ss_` entries."""
        ...


@runtime_checkable
class CountsWrittenFiles(Protocol):
    """Counts the files that it writes, for the dry run."""

    def files_written(self) -> tuple[int, int, str]:
        """Return the files that this process wrote, their bytes, and the folder that holds them."""
        ...


@runtime_checkable
class HasTrainBatchSize(Protocol):
    """Has a batch size per rank."""

    train_batch_size: int


# Callbacks ----------------------------------------------------------------------------------------------------------


@runtime_checkable
class SeesSampleImages(Protocol):
    """Receives SampleGrid's images, on rank zero only, so it must not start a collective."""

    def on_sample_images(
        self, trainer: Any, pl_module: Any, images_N3HW: Tensor, prompts: Sequence[str], step: int
    ) -> None:
        """Receive the images of one step."""
        ...


@runtime_checkable
class WritesFinalFiles(Protocol):
    """Writes files at the end of a run; until they exist, ExactSnapshot does not count the run as finished."""

    def final_files(self, trainer: Any, pl_module: Any) -> Sequence[Path]:
        """Return their paths."""
        ...


@runtime_checkable
class AddsToReport(Protocol):
    """Has results for RunReport's page: callbacks, and strategies."""

    def report_entries(self) -> Mapping[str, Any]:
        """Return fields of `report.record.RunRecord` by name, such as `guard`. Starts no collective."""
        ...


# Strategies ---------------------------------------------------------------------------------------------------------


@runtime_checkable
class HasSnapshotState(Protocol):
    """Has per-rank state for snapshots, such as error-feedback residuals."""

    snapshot_kind: str
    """Kind of split over the ranks: with an equal kind a rank reads its own file, else the whole state."""
    ranks_differ: bool
    """Whether the ranks' weights differ between two optimizer steps, as in local SGD."""

    def snapshot_state(self) -> dict[str, Any]:
        """Return this rank's state; `states` in it are its share of the optimizers' states, by parameters' places."""
        ...

    def load_snapshot_state(self, read: Any, world_size: int) -> None:
        """Load this rank's state; `read(rank)` returns the state of a rank of the snapshot's `world_size`.

        Its `kind` is another one where the snapshot is of another strategy.
        """
        ...

    def without_averaging(self) -> AbstractContextManager[object]:
        """Read the parameters in a block without triggering an average over ranks."""
        ...


@runtime_checkable
class HasShardedTensors(Protocol):
    """Cuts weights and optimizer states over the ranks, as DTensors."""

    def from_shards(self, tree: Any) -> Any:
        """Return a nested value with the sharded tensors in it that `sharding.shards.to_shards` made plain."""
        ...


@runtime_checkable
class MeasuresSync(Protocol):
    """Measures how gradients travel between the ranks, for RunReport's curves."""

    def sync_metrics(self) -> Mapping[str, float]:
        """Return the last step's numbers by the names that loggers get; empty where nothing was sent."""
        ...

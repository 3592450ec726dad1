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
class SamplesEdits(Protocol):
    """May generate edits of images."""

    def sources_of_samples(self, prompts: Sequence[str], seeds: Sequence[int]) -> Sequence[Sequence[Any]] | None:
        """Return the PIL images that each sample starts from; None where samples start from text alone."""
        ...

    @property
    def has_own_sources(self) -> bool:
        """Whether samples start from other files than the data's sources."""
        ...

    @property
    def base_pipeline(self) -> str:
        """diffusers' class that draws with this model from text."""
        ...

    @property
    def edit_pipeline(self) -> str | None:
        """diffusers' class that edits with this model; None where there is none."""
        ...


@runtime_checkable
class HasValidationPrompts(Protocol):
    """Has default prompts for callbacks that were given none."""

    validation_prompts: Sequence[str]


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
class PreservesCaptions(Protocol):
    """A module whose loss holds what its base predicts for other captions than the batch's."""

    def caption_maker(self, trigger_word: str | None, drops_captions: bool) -> Callable[[str], str] | None:
        """Return the picklable function from a training caption to the one that is held; None where none is."""
        ...


@runtime_checkable
class HasEditSources(Protocol):
    """A data module whose images may be edits, which start from source images."""

    @property
    def sources_per_image(self) -> int:
        """Source images of each image; 0 where they are no edits."""
        ...

    def edit_sources(self, prompt: str, seed: int) -> tuple[Sequence[Any], tuple[int, int]]:
        """Return the sources of a sample, as PIL images, and the sample's (width, height)."""
        ...

    def edit_target(self, prompt: str, seed: int) -> Any:
        """Return the true target of that sample, as a PIL image."""
        ...

    def edit_description(self, prompt: str, seed: int) -> str | None:
        """Return what the target of that sample shows, in words; None where nothing says it."""
        ...

    def edit_examples(self, count: int) -> Sequence[tuple[str, Any, Any]]:
        """Return up to `count` pairs: the instruction, its first source and its target, as PIL images."""
        ...

    def check_source_sides(self, smallest: int, title: str) -> None:
        """Raise where a source, as it is cut, has a side below what the pipeline of `title` takes."""
        ...

    def check_seen_sources(self, title: str) -> None:
        """Raise where batches would not show their sources to the text encoder of `title`, which sees them."""
        ...


@runtime_checkable
class HasPackedBase(Protocol):
    """Keeps its frozen weights in few bits."""

    packed_base: Any
    """The packed weights, with `summary()`; None if nothing was packed."""

    def full_precision_base(self) -> AbstractContextManager[object]:
        """Compute with the whole weights until the block ends."""
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
class HasHeldOutBatches(Protocol):
    """Is a data module that gives batches of images that are not trained on."""

    def held_out_loader(self, batch_size: int) -> Any:
        """Return a loader of them in order, of training images where none is held out."""
        ...


@runtime_checkable
class HasOutputName(Protocol):
    """Has a name for the files that its training writes."""

    output_name: str


# Data modules -------------------------------------------------------------------------------------------------------


@runtime_checkable
class HasReferenceImages(Protocol):
    """Provides training images as references for generated images."""

    def reference_images(self, count: int) -> Tensor:
        """Return up to `count` images, [N, 3, H, W] in 0..1."""
        ...


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
class ComparesTrainingData(Protocol):
    """Tells its files from others of the same names and number."""

    def contents(self) -> Mapping[str, list[int]]:
        """Return the number and a checksum of each kind of file."""
        ...


# Callbacks ----------------------------------------------------------------------------------------------------------


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

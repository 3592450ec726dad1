"""EncodedCaches: the latent and text caches of a run, filled by all ranks and held in memory if small."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_aigc._lightning import Trainer
from lightning_aigc.data.cache.cache import Entry, FillResult
from lightning_aigc.data.cache.encoded import EmbeddingCache, InstructionCache, LatentCache, SourceCache
from lightning_aigc.data.cache.encoder import SEEN_BY, Encoder, can_cache_captions, frozen_text_setting, require_encoder
from lightning_aigc.data.cache.resources import memory_bytes
from lightning_aigc.data.images.crop import Sample
from lightning_aigc.data.index.filenames import print_anywhere
from lightning_aigc.data.report.report import DataReport
from lightning_aigc.errors import DataError
from lightning_aigc.gradient_sync.transport.process_groups import errors_of_all_ranks

TextCache = EmbeddingCache | InstructionCache
Cache = LatentCache | SourceCache | TextCache
_MEMORY_SHARE = 0.25  # of the machine's memory; caches up to this size are held in memory


@dataclass
class EncodedCaches:
    """The caches that the configuration asks for; `folder` holds both."""

    folder: Path
    wants_latents: bool
    wants_text: bool
    batch_size: int
    flips: bool = False
    """Whether latents of the mirrored images are wanted too."""
    drops_captions: bool = False
    """Whether the empty caption is wanted too."""
    preserved: Callable[[str], str] | None = None
    """Function from a caption to another one that is wanted too, for preservation."""
    latents: LatentCache | None = None
    embeddings: TextCache | None = None
    sources: SourceCache | None = None

    @property
    def wanted(self) -> list[str]:
        return [name for name, on in (("latents", self.wants_latents), ("text", self.wants_text)) if on]

    @property
    def are_missing(self) -> bool:
        """Whether a configured cache is not filled yet."""
        return (self.wants_latents and self.latents is None) or (self.wants_text and self.embeddings is None)

    @property
    def hold_all_in_memory(self) -> bool:
        return self.latents is not None and all(cache.in_memory for cache in self._both())

    def fill(
        self, encoder: Encoder, samples: Sequence[Sample], report: DataReport, rank: int = 0, world_size: int = 1
    ) -> list[str]:
        """Encode this rank's share of the missing entries, and count in `report` what was written.

        Returns: a line per cache.
        """
        identity = encoder.encoder_identity()
        lines: list[str] = []
        if self.wants_latents:
            self.latents = LatentCache(self.folder, samples, self.flips, identity)
            lines.append(f"latents {self._fill(self.latents, encoder, rank, world_size, report)}")
        if self.wants_latents and samples and samples[0].sources:
            self.sources = SourceCache(self.folder, samples, self.flips, identity)
            lines.append(f"sources {self._fill(self.sources, encoder, rank, world_size, report)}")
        if self.wants_text:
            self.embeddings = self._texts(samples, identity)
            lines.append(f"text {self._fill(self.embeddings, encoder, rank, world_size, report)}")
        return [*lines, f"in {self.folder}"]

    def fill_texts_together(self, trainer: Trainer, encoder: Encoder, samples: Sequence[Sample]) -> EmbeddingCache:
        """Fill the text cache alone, each rank a share, then what other nodes have on their own disks. Collective."""
        cache = self._embeddings(samples, encoder.encoder_identity())
        rows = _rows_once(cache)
        is_first = trainer.is_global_zero
        with errors_of_all_ranks():
            cache.fill(encoder, rows[trainer.global_rank :: trainer.world_size], self.batch_size, progress=is_first)
        cache.fill(encoder, rows, self.batch_size, progress=False)
        return cache

    def _texts(self, samples: Sequence[Sample], identity: dict[str, str]) -> TextCache:
        if SEEN_BY not in identity or not samples:
            return self._embeddings(samples, identity)
        return InstructionCache(self.folder, samples, self.flips, self.drops_captions, identity)

    def _embeddings(self, samples: Sequence[Sample], identity: dict[str, str]) -> EmbeddingCache:
        captions = [sample.caption for sample in samples] + ([""] if self.drops_captions else [])
        if self.preserved is not None:
            captions += [self.preserved(sample.caption) for sample in samples if not sample.is_prior]
        return EmbeddingCache(self.folder, captions, identity)

    def fill_together(self, trainer: Trainer, samples: Sequence[Sample], report: DataReport, title: str) -> list[str]:
        """Fill and open the wanted caches with the Trainer's model, each rank a share. Collective.

        Raises: DataError if the model cannot encode, or changes the embeddings as it trains.
        """
        encoder = require_encoder(trainer.lightning_module)
        if self.wants_text and not can_cache_captions(encoder):
            raise DataError(
                "this model trains its text encoder, which changes the embeddings at every step, so they cannot be"
                f" cached; set data.init_args.cache_text_embeddings: false, or {frozen_text_setting(encoder)}"
            )
        with errors_of_all_ranks():
            lines = self.fill(encoder, samples, report, trainer.global_rank, trainer.world_size)
            if trainer.is_global_zero:
                print_anywhere(f"{title}: " + "; ".join(lines))
        self.open(encoder, trainer.num_devices)
        return lines

    def open(self, encoder: Encoder, processes: int) -> None:
        """Read small caches into memory, after encoding the entries that other nodes wrote to their local disks."""
        caches = self._both()
        for cache in caches:
            rows = [row for row, key in enumerate(cache.keys) if not cache.cache.path(key).exists()]
            if rows:
                cache.fill(encoder, rows, self.batch_size, progress=False)
        budget = memory_bytes() * _MEMORY_SHARE / max(1, processes)
        if sum(cache.size_bytes for cache in caches) <= budget:
            for cache in caches:
                cache.keep_in_memory()

    def _both(self) -> list[Cache]:
        return [cache for cache in (self.latents, self.sources, self.embeddings) if cache is not None]

    def _fill(self, cache: Cache, encoder: Encoder, rank: int, world_size: int, report: DataReport) -> FillResult:
        mine = _rows_once(cache)[rank::world_size]
        result = cache.fill(encoder, mine, self.batch_size, progress=rank == 0)
        report.count_written(result.encoded, result.written_bytes)
        return result


def _rows_once(cache: Cache) -> list[int]:
    """A row for each key, the first."""
    first_row_of = {key: row for row, key in reversed(list(enumerate(cache.keys)))}
    return sorted(first_row_of.values())


def finder(caches: Sequence[EmbeddingCache]) -> Callable[[str], Entry | None]:
    """A function that returns a caption's entry from any of these caches; None for a caption that is in none."""

    def find(caption: str) -> Entry | None:
        return next((entry for cache in caches if (entry := cache.entry(caption)) is not None), None)

    return find

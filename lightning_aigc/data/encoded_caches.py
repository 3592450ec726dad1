"""EncodedCaches: the latent and text caches of a run, filled by all ranks and held in memory if small."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lightning_aigc.data.cache import FillResult
from lightning_aigc.data.dataset import ItemOptions
from lightning_aigc.data.encoded import EmbeddingCache, LatentCache
from lightning_aigc.data.encoder import Encoder
from lightning_aigc.data.index import TrainingIndex
from lightning_aigc.data.machine import memory_bytes

_MEMORY_SHARE = 0.25  # of the machine's memory; caches up to this size are held in memory


@dataclass
class EncodedCaches:
    """The caches that the configuration asks for; `folder` holds both."""

    folder: Path
    wants_latents: bool
    wants_text: bool
    batch_size: int
    latents: LatentCache | None = None
    embeddings: EmbeddingCache | None = None

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
        self, encoder: Encoder, index: TrainingIndex, options: ItemOptions, rank: int, world_size: int
    ) -> list[str]:
        """Encode this rank's share of the missing entries. Returns: a line per cache for the report."""
        identity = encoder.encoder_identity()
        lines: list[str] = []
        if self.wants_latents:
            self.latents = LatentCache(self.folder, index.samples, options.random_flip, identity)
            lines.append(f"latents {self._fill(self.latents, encoder, rank, world_size)}")
        if self.wants_text:
            captions = [sample.caption for sample in index.samples]
            captions += [""] if options.caption_dropout_rate > 0 else []
            self.embeddings = EmbeddingCache(self.folder, captions, identity)
            lines.append(f"text {self._fill(self.embeddings, encoder, rank, world_size)}")
        return [*lines, f"in {self.folder}"]

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

    def _both(self) -> list[LatentCache | EmbeddingCache]:
        return [cache for cache in (self.latents, self.embeddings) if cache is not None]

    def _fill(self, cache: LatentCache | EmbeddingCache, encoder: Encoder, rank: int, world_size: int) -> FillResult:
        first_row_of = {key: row for row, key in reversed(list(enumerate(cache.keys)))}
        mine = sorted(first_row_of.values())[rank::world_size]
        return cache.fill(encoder, mine, self.batch_size, progress=rank == 0)

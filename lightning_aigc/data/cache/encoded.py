"""LatentCache and EmbeddingCache: encoded images and captions, on disk and, if small, in memory.

Shapes: N entries, F flips (1 or 2), C latent channels, h w latent pixels, B batch.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from PIL.Image import Image, fromarray
from torch import Tensor, nn, stack

from lightning_aigc.data.cache.cache import (
    CorruptEntryError,
    Entry,
    FillResult,
    TensorCache,
    cache_key,
    require_finite,
)
from lightning_aigc.data.cache.encoder import SEEN_BY, Encoder, EncodesInstructions, MakesConditions, autoencoder_remedy
from lightning_aigc.data.images.crop import Sample, crop_offset, load_pixels, load_source_pixels
from lightning_aigc.data.loader.buckets import Placement
from lightning_aigc.errors import DataError

_DIFFUSERS = ".".join(version("diffusers").split(".")[:2])


class EncodedTensors:
    """Cached entries by row number, read from disk or, after `keep_in_memory`, from one tensor per group and name."""

    def __init__(self, cache: TensorCache, keys: list[str], groups: Sequence[Hashable]) -> None:
        self.cache = cache
        self.keys = keys
        self.groups = groups
        self._memory: dict[Hashable, Entry] = {}
        self._texts: dict[Hashable, list[Tensor]] = {}
        self._memory_rows = torch.zeros(len(keys), dtype=torch.long)

    @property
    def size_bytes(self) -> int:
        """Bytes of all entries on disk, about as many as in memory."""
        return self.cache.size_bytes(sorted(set(self.keys)))

    @property
    def in_memory(self) -> bool:
        """Whether batches are read from memory."""
        return bool(self._memory)

    def keep_in_memory(self) -> None:
        """Read all entries into one contiguous tensor per group and tensor name."""
        rows_of: dict[Hashable, list[int]] = {}
        for row, group in enumerate(self.groups):
            rows_of.setdefault(group, []).append(row)
        for group, rows in rows_of.items():
            memory_rows: dict[str, int] = {}
            for row in rows:
                self._memory_rows[row] = memory_rows.setdefault(self.keys[row], len(memory_rows))
            stacked: Entry = {}
            unequal: list[Tensor] = []
            unique = list(memory_rows)
            for start in range(0, len(unique), 512):
                for offset, entry in enumerate(self.cache.read_many(unique[start : start + 512])):
                    if entry is None:
                        raise self._missing_entry(unique[start + offset])
                    for name, tensor in entry.items():
                        if LENGTHS in entry and name == PADDED:
                            unequal.append(tensor)
                            continue
                        if name not in stacked:
                            stacked[name] = torch.empty((len(unique), *tensor.shape), dtype=tensor.dtype)
                        stacked[name][start + offset] = tensor
            self._memory[group] = stacked
            if unequal:
                self._texts[group] = unequal

    def batch(self, rows: Sequence[int]) -> Entry:
        """Stack entries of one group: every value is [B, ...]; texts of unequal length are padded to the longest."""
        if self._memory:
            memory_rows, group = self._memory_rows[torch.as_tensor(rows)], self.groups[rows[0]]
            batch = {name: tensor[memory_rows] for name, tensor in self._memory[group].items()}
            if group in self._texts:
                batch[PADDED] = stack_padded([self._texts[group][row] for row in memory_rows.tolist()])
            return batch
        entries = []
        for row in rows:
            try:
                entry = self.cache.read(self.keys[row])
            except CorruptEntryError:
                entry = None
            if entry is None:
                raise self._missing_entry(self.keys[row])
            entries.append(entry)
        return {name: stack_padded([entry[name] for entry in entries]) for name in entries[0]}

    def _missing_entry(self, key: str) -> DataError:
        path = self.cache.path(key)
        return DataError(f"the cache file {path} was lost or damaged after the check; start again to rebuild it")


def _encoding(placement: Placement, flip: bool, identity: Mapping[str, str]) -> dict[str, object]:
    """Parts of a key: what the latents of an image depend on, apart from its content."""
    return {
        "vae": identity.get("vae", ""),
        "dtype": "float32",
        "size": [placement.width, placement.height],
        "scaled": [placement.scaled_width, placement.scaled_height],
        "crop": "center",
        "flip": flip,
        "diffusers": _DIFFUSERS,
    }


class LatentCache(EncodedTensors):
    """Latent moments of every sample, with conditions that the encoder makes; of flips, row = sample + count * flip."""

    def __init__(self, folder: Path, samples: Sequence[Sample], flips: bool, identity: dict[str, str]) -> None:
        self.samples = samples
        rows = [(sample, flip) for flip in ((False, True) if flips else (False,)) for sample in samples]
        keys = [
            cache_key(
                content=sample.content_sha256,
                **_encoding(sample.placement, flip, identity),
                **({"condition": identity["condition"]} if "condition" in identity else {}),
            )
            for sample, flip in rows
        ]
        groups = [(sample.placement.width, sample.placement.height) for sample, _ in rows]
        super().__init__(TensorCache(folder / "latents"), keys, groups)

    def fill(self, encoder: Encoder, rows: list[int], batch_size: int, progress: bool) -> FillResult:
        """Encode the given rows that are not on disk yet. Raises: DataError naming an image with NaN latents."""
        remedy = autoencoder_remedy(encoder)

        def encode(positions: list[int]) -> list[Entry]:
            chosen = [rows[position] for position in positions]
            pixels = [self._pixels(row) for row in chosen]
            moments_B2Chw = encoder.encode_pixels(_on_device(torch.stack(pixels), encoder)).float().cpu()
            if moments_B2Chw.ndim != 4 or moments_B2Chw.shape[0] != len(chosen) or moments_B2Chw.shape[1] % 2:
                raise DataError(
                    f"{type(encoder).__name__}.encode_pixels must return moments [B, 2C, h, w] for B={len(chosen)}, "
                    f"got shape {list(moments_B2Chw.shape)}"
                )
            for row, moments in zip(chosen, moments_B2Chw, strict=True):
                require_finite(moments, f"the image {self.samples[row % len(self.samples)].path}", remedy)
            entries = [{"latent_moments": moments} for moments in moments_B2Chw]
            made = encoder.make_conditions(torch.stack(pixels)) if isinstance(encoder, MakesConditions) else None
            if made is not None:
                entries = [e | {"conditioning": one} for e, one in zip(entries, made.cpu(), strict=True)]
            return entries

        title = "encoding images" if progress else None
        with torch.no_grad():
            keys = [self.keys[row] for row in rows]
            return self.cache.fill(keys, [self.groups[row] for row in rows], encode, batch_size, title)

    def _pixels(self, row: int) -> Tensor:
        sample = self.samples[row % len(self.samples)]
        pixels_HW3, _ = load_pixels(sample, crop_offset(sample.placement))
        pixels_3HW = to_minus_one_to_one(torch.from_numpy(np.array(pixels_HW3))[None])[0]
        return pixels_3HW.flip(-1) if row >= len(self.samples) else pixels_3HW


class SourceCache(EncodedTensors):
    """Means of the latents of every sample's sources, unscaled; a source that serves many images is one entry.

    Row = (sample + count * flip) * sources + number.
    """

    def __init__(self, folder: Path, samples: Sequence[Sample], flips: bool, identity: dict[str, str]) -> None:
        self.samples = samples
        self.per_sample = len(samples[0].sources) if samples else 0
        rows = [
            (source, flip)
            for flip in ((False, True) if flips else (False,))
            for sample in samples
            for source in sample.sources
        ]
        keys = [
            cache_key(source=source.content_sha256, **_encoding(source.placement, flip, identity))
            for source, flip in rows
        ]
        groups = [(source.placement.width, source.placement.height) for source, _ in rows]
        super().__init__(TensorCache(folder / "sources"), keys, groups)

    def of(self, samples: Sequence[int], flips: Sequence[bool], number: int) -> Tensor:
        """The means [B, C, h, w] of one source of each sample."""
        count = len(self.samples)
        rows = [(s + count * flip) * self.per_sample + number for s, flip in zip(samples, flips, strict=True)]
        return self.batch(rows)["source_latents"]

    def fill(self, encoder: Encoder, rows: list[int], batch_size: int, progress: bool) -> FillResult:
        """Encode the given rows that are not on disk yet. Raises: DataError naming a source with NaN latents."""
        remedy = autoencoder_remedy(encoder)

        def encode(positions: list[int]) -> list[Entry]:
            chosen = [rows[position] for position in positions]
            pixels = torch.stack([self._pixels(row) for row in chosen])
            mean_BChw = encoder.encode_pixels(_on_device(pixels, encoder)).float().cpu().chunk(2, dim=1)[0]
            for row, mean in zip(chosen, mean_BChw, strict=True):
                sample, number = self._place(row)
                require_finite(mean, f"the source {sample.sources[number].path}", remedy)
            return [{"source_latents": mean.clone()} for mean in mean_BChw]

        title = "encoding sources" if progress else None
        with torch.no_grad():
            keys = [self.keys[row] for row in rows]
            return self.cache.fill(keys, [self.groups[row] for row in rows], encode, batch_size, title)

    def _place(self, row: int) -> tuple[Sample, int]:
        return self.samples[row // self.per_sample % len(self.samples)], row % self.per_sample

    def _pixels(self, row: int) -> Tensor:
        sample, number = self._place(row)
        pixels_HW3 = load_source_pixels(sample, number, crop_offset(sample.placement))
        pixels_3HW = to_minus_one_to_one(torch.from_numpy(np.array(pixels_HW3))[None])[0]
        return pixels_3HW.flip(-1) if row >= self.per_sample * len(self.samples) else pixels_3HW


class EmbeddingCache(EncodedTensors):
    """Embeddings of every caption that training may use, including the empty caption under caption dropout."""

    def __init__(self, folder: Path, captions: Sequence[str], identity: dict[str, str]) -> None:
        self.captions = sorted(set(captions))
        self.row_of = {caption: row for row, caption in enumerate(self.captions)}
        text = identity.get("text", "")
        keys = [cache_key(caption=caption, text=text, diffusers=_DIFFUSERS) for caption in self.captions]
        super().__init__(TensorCache(folder / "text"), keys, [0] * len(keys))

    def fill(self, encoder: Encoder, rows: list[int], batch_size: int, progress: bool) -> FillResult:
        """Encode the given rows that are not on disk yet."""

        def encode(positions: list[int]) -> list[Entry]:
            captions = [self.captions[rows[position]] for position in positions]
            encoded = {name: tensor.cpu() for name, tensor in encoder.encode_captions(captions).items()}
            for name, tensor in encoded.items():
                if tensor.shape[0] != len(captions):
                    raise DataError(
                        f"{type(encoder).__name__}.encode_captions must return B={len(captions)} first, "
                        f"got {name} of shape {list(tensor.shape)}"
                    )
                for caption, row in zip(captions, tensor, strict=True):
                    require_finite(row, f"the caption {caption[:80]!r}", "check the text encoder's dtype")
            return [without_padding({name: t[at] for name, t in encoded.items()}) for at in range(len(captions))]

        title = "encoding captions" if progress else None
        with torch.no_grad():
            keys = [self.keys[row] for row in rows]
            return self.cache.fill(keys, [0] * len(rows), encode, batch_size, title)

    def rows(self, captions: Sequence[str], samples: Sequence[int], flips: Sequence[bool]) -> list[int]:
        """The rows of a batch's captions."""
        return [self.row_of[caption] for caption in captions]

    def entry(self, caption: str) -> Entry | None:
        """A caption's embeddings without their padding; None for one that is not here."""
        row = self.row_of.get(caption)
        return None if row is None else self.cache.read(self.keys[row])


class InstructionCache(EncodedTensors):
    """Embeddings of every instruction with the sources that its text encoder sees, mirrored ones among them."""

    def __init__(
        self, folder: Path, samples: Sequence[Sample], flips: bool, drops_captions: bool, identity: dict[str, str]
    ) -> None:
        self.samples = samples
        self.instructions = [
            (caption, number, flip)
            for flip in ((False, True) if flips else (False,))
            for number, sample in enumerate(samples)
            for caption in dict.fromkeys((sample.caption, *([""] if drops_captions else [])))
        ]
        self.row_of = {instruction: row for row, instruction in enumerate(self.instructions)}
        placed = {"vae": ""}  # the text encoder sees pixels
        keys = [
            cache_key(
                caption=caption,
                text=identity.get("text", ""),
                seen_by=identity[SEEN_BY],
                sources=[
                    [source.content_sha256, _encoding(source.placement, flip, placed)]
                    for source in samples[number].sources
                ],
            )
            for caption, number, flip in self.instructions
        ]
        super().__init__(TensorCache(folder / "instructions"), keys, [0] * len(keys))

    def rows(self, captions: Sequence[str], samples: Sequence[int], flips: Sequence[bool]) -> list[int]:
        """The rows of a batch's captions, with the sources of these samples."""
        return [self.row_of[instruction] for instruction in zip(captions, samples, flips, strict=True)]

    def fill(self, encoder: Encoder, rows: list[int], batch_size: int, progress: bool) -> FillResult:
        """Encode the given rows that are not on disk yet. Raises: DataError for a model that cannot."""
        if not isinstance(encoder, EncodesInstructions):
            raise DataError(f"{type(encoder).__name__} lacks encode_instructions; add it, as in data.cache.encoder")

        def encode(positions: list[int]) -> list[Entry]:
            chosen = [self.instructions[rows[position]] for position in positions]
            sources = [self._sources(number, flip) for _, number, flip in chosen]
            captions = [caption for caption, _, _ in chosen]
            encoded = {name: t.cpu() for name, t in encoder.encode_instructions(captions, sources).items()}
            for tensor in encoded.values():
                for caption, row in zip(captions, tensor, strict=True):
                    require_finite(row, f"the instruction {caption[:80]!r}", "check the text encoder's dtype")
            return [without_padding({name: t[at] for name, t in encoded.items()}) for at in range(len(captions))]

        title = "encoding instructions" if progress else None
        with torch.no_grad():
            keys = [self.keys[row] for row in rows]
            return self.cache.fill(keys, [0] * len(rows), encode, batch_size, title)

    def _sources(self, number: int, flip: bool) -> list[Image]:
        sample = self.samples[number]
        offset = crop_offset(sample.placement)
        pixels = [load_source_pixels(sample, at, offset) for at in range(len(sample.sources))]
        return [fromarray(np.ascontiguousarray(each[:, ::-1] if flip else each)) for each in pixels]


def to_minus_one_to_one(pixels_BHW3: Tensor) -> Tensor:
    """Convert bytes [B, H, W, 3] to float32 [B, 3, H, W] in -1..1."""
    return pixels_BHW3.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format).div_(127.5).sub_(1)


def _on_device(tensor: Tensor, encoder: object) -> Tensor:
    return tensor.to(getattr(encoder, "device", "cpu"))


LENGTHS, PADDED = "prompt_lengths", "prompt_embeds"


def without_padding(entry: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One caption's entry with `prompt_embeds` [T, D] of its own length."""
    if LENGTHS not in entry:
        return dict(entry)
    return {**entry, PADDED: entry[PADDED][: int(entry[LENGTHS])]}


def stack_padded(tensors: Sequence[Tensor]) -> Tensor:
    """[B, ...], with zeros behind the shorter ones."""
    if all(tensor.shape == tensors[0].shape for tensor in tensors):
        return stack(list(tensors))
    return nn.utils.rnn.pad_sequence(list(tensors), batch_first=True)

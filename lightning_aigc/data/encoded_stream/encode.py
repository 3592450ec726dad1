"""encode_shards: write images' latents and captions' embeddings as shards, each rank its own, resumable.

Which entry goes into which shard follows from the images alone, so any number of ranks writes the same files, and no
rank waits for another but the one that writes the index. A file's name says what it was made of: one that is there is
not made again, unless an image, a caption, the model or an option has changed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import safetensors.torch
import torch
from torch import Tensor
from tqdm import tqdm

from lightning_aigc.atomic_file import atomic_file, write_text
from lightning_aigc.data.cache.cache import require_finite
from lightning_aigc.data.cache.encoded import to_minus_one_to_one, without_padding
from lightning_aigc.data.cache.encoder import Encoder, autoencoder_remedy
from lightning_aigc.data.encoded_stream.manifest import COMMON, FILE, FORMAT, REFERENCES, Manifest, Shard
from lightning_aigc.data.images.crop import Sample, crop_offset, load_pixels
from lightning_aigc.data.index.index import TrainingIndex
from lightning_aigc.errors import DataError

WAIT_S = 5.0


@dataclass(frozen=True)
class EncodeOptions:
    """Options of the writer of entries."""

    folder: Path
    entries_per_shard: int = 1024
    batch_size: int = 8
    flips: bool = False
    """Write the mirrored image's latents too."""
    has_masks: bool = False
    use_alpha_mask: bool = False
    latents_dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class PlannedShard:
    """The images of a shard."""

    width: int
    height: int
    number: int
    samples: Sequence[Sample]
    shared: list[Any]
    """Inputs that decide the bytes of every shard."""

    @cached_property
    def made_of(self) -> str:
        """A digest of all that decides its bytes; it reads the masks, so a rank asks its own shards alone."""
        own = [
            [s.content_sha256, s.name, s.caption, s.original_size, dataclasses.astuple(s.placement), _mask_sha256(s)]
            for s in self.samples
        ]
        return hashlib.sha256(json.dumps([self.shared, own], sort_keys=True).encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        """Prefix of its file's name."""
        return f"{self.width}x{self.height}-{self.number:06d}"

    def among(self, written: Written) -> Shard | None:
        """Its file, if an earlier run wrote it of the same images, captions, weights and options."""
        return next((shard for shard in written.get(self.name, ()) if shard.made_of == self.made_of), None)


Written = dict[str, list[Shard]]
"""Shards in a folder by how their files' names begin."""


def written_in(folder: Path) -> Written:
    """The shards that are in a folder."""
    found: Written = {}
    for path in sorted(folder.glob("*.tar")):
        shard = Shard.from_name(path.name)
        if shard is not None:
            found.setdefault(f"{shard.width}x{shard.height}-{shard.number:06d}", []).append(shard)
    return found


def samples_of(index: TrainingIndex) -> list[Sample]:
    """The user's images, each as often as it repeats. Raises: DataError for class images, which shards lack."""
    if any(index.class_buckets):
        raise DataError("shards hold no class images; take data.init_args.class_data_dir out, or train without shards")
    return [index.samples[row] for bucket in index.buckets for row in bucket]


def plan_shards(encoder: Encoder, samples: Sequence[Sample], options: EncodeOptions) -> list[PlannedShard]:
    """Cut the images of each bucket into shards, mixed in an order that their content decides."""
    size, shared = options.entries_per_shard, _shared_inputs(encoder, options)
    by_bucket: dict[tuple[int, int], list[Sample]] = {}
    for sample in samples:
        by_bucket.setdefault((sample.placement.width, sample.placement.height), []).append(sample)
    planned = []
    for (width, height), found in sorted(by_bucket.items()):
        found.sort(key=lambda sample: (sample.content_sha256, sample.name))
        for number, start in enumerate(range(0, len(found), size)):
            planned.append(PlannedShard(width, height, number, found[start : start + size], shared))
    return planned


def _shared_inputs(encoder: Encoder, options: EncodeOptions) -> list[Any]:
    """All that decides the bytes of every entry."""
    flags = [options.flips, options.has_masks, options.use_alpha_mask, str(options.latents_dtype)]
    return [FORMAT, encoder.encoder_identity(), flags]


def _mask_sha256(sample: Sample) -> str | None:
    if sample.mask is None:
        return None
    try:
        with sample.mask.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"the mask {sample.mask} cannot be read: {error.strerror or error}; restore it") from error


def encode_shards(
    encoder: Encoder,
    samples: Sequence[Sample],
    options: EncodeOptions,
    rank: int = 0,
    world_size: int = 1,
) -> tuple[int, int]:
    """Write this rank's shards that are not there yet; returns how many were written, and how many were there.

    Raises: DataError for an image that cannot be read, or latents that are not finite.
    """
    options.folder.mkdir(parents=True, exist_ok=True)
    mine = plan_shards(encoder, samples, options)[rank::world_size]
    written = written_in(options.folder)
    todo = [shard for shard in mine if shard.among(written) is None]
    entries = sum(len(shard.samples) for shard in todo)
    with tqdm(total=entries, desc=f"rank {rank}: encoding", unit="img", disable=rank != 0) as bar, torch.no_grad():
        for shard in todo:
            for stale in written.get(shard.name, ()):
                (options.folder / stale.file).unlink()  # of other images, weights or options
            _write_shard(shard, encoder, options, bar.update)
    return len(todo), len(mine) - len(todo)


def write_common(encoder: Encoder, references: Tensor, folder: Path) -> None:
    """Write what all entries share: the empty caption's embeddings, and images that CLIP-I compares with."""
    empty = without_padding({name: t[0].cpu().contiguous() for name, t in encoder.encode_captions([""]).items()})
    for file, tensors in (
        (COMMON, empty),
        (REFERENCES, {"images": (references * 255).round().to(torch.uint8).contiguous()}),
    ):
        with atomic_file(folder / file, durable=False) as stream:
            stream.write(safetensors.torch.save(tensors))


def finish(
    encoder: Encoder, samples: Sequence[Sample], options: EncodeOptions, facts: dict[str, Any], wait_s: float
) -> Manifest:
    """Wait until all ranks' shards are there, and write the index. Raises: DataError naming a shard that is missing."""
    planned = plan_shards(encoder, samples, options)
    until = time.monotonic() + wait_s
    while True:
        written = written_in(options.folder)
        found = {shard.name: shard.among(written) for shard in planned}
        missing = [name for name, shard in found.items() if shard is None]
        if not missing:
            break
        if time.monotonic() > until:
            raise DataError(
                f"{len(missing)} of {len(planned)} shards are not in {options.folder}, such as {missing[0]}.tar:"
                " another rank has stopped; run the same command again, it continues where it was"
            )
        time.sleep(min(WAIT_S, wait_s))
    shards = [shard for shard in found.values() if shard is not None]
    for stray in {p.name for p in options.folder.glob("*.tar")} - {shard.file for shard in shards}:
        (options.folder / stray).unlink()  # of images that are gone
    manifest = Manifest(shards, encoder.encoder_identity(), options.flips, facts)
    write_text(options.folder / FILE, manifest.to_json(), durable=True)
    return manifest


def _write_shard(shard: PlannedShard, encoder: Encoder, options: EncodeOptions, done: Callable[[int], object]) -> None:
    """Write a shard under a name that says its digest, whole or not at all."""
    temporary = options.folder / f".{shard.name}.part"
    try:
        with temporary.open("wb") as file:
            hashed = _Hashing(file)
            with tarfile.open(fileobj=hashed, mode="w|", format=tarfile.USTAR_FORMAT) as tar:  # type: ignore[call-overload]
                for number, data in enumerate(_entries(shard.samples, encoder, options)):
                    member = tarfile.TarInfo(f"{shard.name}-{number:06d}.safetensors")  # a key of its own in all shards
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
                    done(1)
        temporary.replace(options.folder / f"{shard.name}.{shard.made_of}.{len(shard.samples)}.{hashed.digest}.tar")
    finally:
        temporary.unlink(missing_ok=True)


class _Hashing:
    """A file that is written front to back, and hashed on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self._hash = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        return self.file.write(data)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()[:16]


def _entries(samples: Sequence[Sample], encoder: Encoder, options: EncodeOptions) -> Iterator[bytes]:
    """Each image's entry as a safetensors file, with its texts and sizes in the header."""
    device, remedy = getattr(encoder, "device", "cpu"), autoencoder_remedy(encoder)
    for start in range(0, len(samples), options.batch_size):
        some = samples[start : start + options.batch_size]
        loaded = [load_pixels(sample, crop_offset(sample.placement), options.use_alpha_mask) for sample in some]
        pixels = to_minus_one_to_one(torch.from_numpy(np.stack([pixels for pixels, _ in loaded])))
        encoded = {"latent_moments": encoder.encode_pixels(pixels.to(device))}
        if options.flips:
            encoded["latent_moments_flipped"] = encoder.encode_pixels(pixels.flip(-1).to(device))
        for sample, moments in zip(some, encoded["latent_moments"], strict=True):
            require_finite(moments, f"the image {sample.path}", remedy)
        encoded = {name: moments.to("cpu", options.latents_dtype) for name, moments in encoded.items()}
        encoded |= {n: t.cpu() for n, t in encoder.encode_captions([sample.caption for sample in some]).items()}
        for at, (sample, (_, mask)) in enumerate(zip(some, loaded, strict=True)):
            entry = without_padding({name: tensor[at] for name, tensor in encoded.items()})
            entry = {name: tensor.contiguous().clone() for name, tensor in entry.items()}
            if options.has_masks:
                shape = (sample.placement.height, sample.placement.width)
                entry["mask"] = (
                    torch.from_numpy(np.array(mask)) if mask is not None else torch.full(shape, 255, dtype=torch.uint8)
                )
            left, top = crop_offset(sample.placement)
            height, width = sample.original_size
            spare = sample.placement.spare[0]
            sizes = torch.tensor([height, width, top, left, sample.placement.height, sample.placement.width, spare])
            entry["sizes"] = sizes.to(torch.int32)
            texts = {"caption": sample.caption, "name": sample.name, "content": sample.content_sha256}
            # One key: safetensors writes several in an order that changes from run to run.
            yield safetensors.torch.save(entry, {"texts": json.dumps(texts, ensure_ascii=False)})

"""Shards of a million small entries: start-up, memory, files and entries per second, compared with two libraries.

    python -m benchmarks.data.stream [--entries 1000000] [--folder /tmp/stream]
        [--output benchmarks/results/data/stream.jsonl]
    python -m benchmarks.data.stream --others    # 50,000 entries, also with litdata and webdataset if installed
    python -m benchmarks.data.stream --consumed  # entries of Stable Diffusion 1.5's size, compared with training steps

An entry is a float16 latent of 4 x 2 x 2 and an embedding of 2 x 4, so that disk speed does not matter; the shards are
written as `lightning encode` writes them. Each part runs in a separate process. Start-up: from building
EncodedImageData to its first batch, without imports. Memory: growth of the resident set until 5,000 entries were read,
per entry of the dataset. Entries per second: one process without workers, batches of 8.

--consumed: 2,048 entries with 512 pixels' latents and CLIP's embeddings, 184 KB each; reading them alternates with
training steps of the embedded model on one thread. The row also has the rate of an H100 from the step_memory rows of
2026-11-22 (Stable Diffusion 1.5, LoRA, 512 pixels), which is a different run.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import multiprocessing
import platform
import resource
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from benchmarks import RESULTS
from benchmarks.common.rows import keep_row, read_rows
from lightning_aigc.atomic_file import write_text
from lightning_aigc.data import EncodedImageData
from lightning_aigc.data.encoded_stream.manifest import COMMON, FILE, Manifest, Shard

ENTRIES_PER_SHARD, BATCH = 1024, 8
READ = 5000
CARD_ROWS = RESULTS / "cuda" / "bench_cuda.jsonl"


def entry(number: int, is_large: bool = False) -> bytes:
    """One encoded entry, with the shapes of Stable Diffusion 1.5 at 512 pixels or tiny shapes."""
    latent, text = ((8, 64, 64), (77, 768)) if is_large else ((8, 2, 2), (2, 4))
    tensors = {
        "latent_moments": torch.full(latent, number % 1000, dtype=torch.float16),
        "prompt_embeds": torch.full(text, number % 7, dtype=torch.float16),
        "sizes": torch.tensor([16, 16, 0, 0, 16, 16, 0], dtype=torch.int32),
    }
    texts = {"caption": f"caption {number}", "name": f"{number}.png", "content": f"{number:064x}"}
    return safetensors.torch.save(tensors, {"texts": json.dumps(texts)})


def write(folder: Path, entries: int, is_large: bool = False) -> None:
    """Write the shards of one bucket."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = []
    for shard, start in enumerate(range(0, entries, ENTRIES_PER_SHARD)):
        count = min(ENTRIES_PER_SHARD, entries - start)
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for number in range(count):
                data = entry(start + number, is_large)
                member = tarfile.TarInfo(f"{number:06d}.safetensors")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        digest = hashlib.sha256(stream.getbuffer()).hexdigest()[:16]
        name = f"16x16-{shard:06d}.{digest}.{count}.{digest}.tar"
        (folder / name).write_bytes(stream.getbuffer())
        shards.append(Shard(name, 16, 16, shard, digest, count, digest))
    empty = torch.zeros((77, 768) if is_large else (2, 4))
    (folder / COMMON).write_bytes(safetensors.torch.save({"prompt_embeds": empty}))
    write_text(folder / FILE, Manifest(shards).to_json())


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def measured(batches: Callable[[], Iterator[Any]], entries: int) -> dict[str, Any]:
    """Measure start-up, memory and speed of an iterator over batches."""
    torch.zeros(8).sum()
    before, started = resident(), time.perf_counter()
    iterator = batches()
    next(iterator)
    start_s = time.perf_counter() - started
    started, read = time.perf_counter(), 0
    while read < READ:
        next(iterator)
        read += BATCH
    return {
        "start_s": round(start_s, 3),
        "bytes_an_entry": round((resident() - before) / entries, 1),
        "entries_a_second": round(read / (time.perf_counter() - started)),
    }


def ours(folder: str, entries: int) -> dict[str, Any]:
    def batches() -> Iterator[Any]:
        data = EncodedImageData(folder, train_batch_size=BATCH, num_workers=0, pin_memory=False)
        data.setup("fit")
        return iter(data.loader())

    return measured(batches, entries)


def beside_training(folder: str, entries: int) -> dict[str, Any]:
    """Measure entries per second of reading and of training the tiny model, alternating."""
    from diffusers import UNet2DConditionModel

    from lightning_aigc.embedded import resolve

    torch.set_num_threads(1)
    data = EncodedImageData(folder, train_batch_size=BATCH, num_workers=0, pin_memory=False)
    data.setup("fit")
    batches = iter(data.loader())
    unet: Any = UNet2DConditionModel.from_pretrained(resolve("embedded:sd") / "unet").train()
    optimizer = torch.optim.AdamW(unet.parameters())
    side, width = unet.config.sample_size, unet.config.cross_attention_dim
    x, text = torch.randn(BATCH, 4, side, side), torch.randn(BATCH, 77, width)

    def step() -> None:
        unet(x, torch.full((BATCH,), 500), text).sample.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def rate(call: Callable[[], object], times: int) -> float:
        started = time.perf_counter()
        for _ in range(times):
            call()
        return times * BATCH / (time.perf_counter() - started)

    next(batches)
    step()
    read, taken = zip(*((rate(lambda: next(batches), 50), rate(step, 5)) for _ in range(5)), strict=True)
    ratios = sorted(r / t for r, t in zip(read, taken, strict=True))
    rows = [row for row in read_rows(CARD_ROWS) if row.get("benchmark") == "step_memory" and "step_ms" in row]
    card = max(1e3 * row["batch"] / row["step_ms"] for row in rows)
    return {
        "entries_a_second": round(statistics.median(read)),
        "taken_by_tiny_model_a_second": round(statistics.median(taken), 1),
        "read_to_taken": round(ratios[2], 1), "read_to_taken_spread": [round(ratios[0], 1), round(ratios[-1], 1)],
        "taken_by_h100_a_second_in_another_run": round(card, 1),
        "read_to_h100": round(statistics.median(read) / card, 1),
    }  # fmt: skip


def of_webdataset(folder: str, entries: int) -> dict[str, Any]:
    """webdataset's reader: complete shards in sequence, through a shuffle buffer."""
    import webdataset

    def batches() -> Iterator[Any]:
        urls = sorted(str(path) for path in Path(folder).glob("*.tar"))
        read = webdataset.WebDataset(urls, shardshuffle=100, seed=0, empty_check=False).shuffle(8192)
        decoded = read.map(lambda sample: safetensors.torch.load(sample["safetensors"])["latent_moments"])
        return iter(decoded.batched(BATCH, collation_fn=torch.stack))

    return measured(batches, entries)


def of_litdata(folder: str, entries: int) -> dict[str, Any]:
    """litdata: write its chunks, then read them in its shuffled order and at random positions of 8 chunks."""
    import numpy
    from litdata import StreamingDataset
    from litdata.streaming.cache import Cache

    chunks = Path(folder + "_litdata")
    if not chunks.exists():
        chunks.mkdir()
        cache = Cache(str(chunks), chunk_size=ENTRIES_PER_SHARD)
        for number in range(entries):
            loaded = safetensors.torch.load(entry(number))
            cache[number] = {**loaded, "caption": f"caption {number}", "name": f"{number}.png"}
        cache.done()
        cache.merge()

    def batches(is_random: bool) -> Iterator[Any]:
        dataset = StreamingDataset(str(chunks), shuffle=not is_random)
        order = numpy.random.default_rng(0).permutation(8192)
        entries_ = (dataset[int(place)] for place in order) if is_random else iter(dataset)
        while True:
            yield torch.stack([next(entries_)["latent_moments"] for _ in range(BATCH)])

    found = measured(lambda: batches(is_random=False), entries)
    at_random = measured(lambda: batches(is_random=True), entries)["entries_a_second"]
    return found | {"entries_a_second_at_random_places": at_random}


def in_process(part: Callable[[str, int], dict[str, Any]], folder: str, entries: int) -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(part, (folder, entries))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=None)
    parser.add_argument("--others", action="store_true", help="also run webdataset and litdata on the same entries")
    parser.add_argument("--consumed", action="store_true", help="large entries, compared with training steps")
    parser.add_argument("--folder", type=Path, help="folder for the shards; unset: a temporary one")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    entries = given.entries or (50_000 if given.others else 2048 if given.consumed else 1_000_000)
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary) / "shards"
        if not (folder / FILE).exists():
            write(folder, entries, is_large=given.consumed)
        parts: dict[str, Any] = {"ours": beside_training if given.consumed else ours}
        if given.others:
            parts |= {"webdataset": of_webdataset, "litdata": of_litdata}
        for name, part in parts.items():
            try:
                found = in_process(part, str(folder), entries)
            except ImportError as error:
                print(f"{name}: {error}")
                continue
            if name == "ours":
                found["files_per_1000_entries"] = round(1000 * len(list(folder.iterdir())) / entries, 3)
            row = {
                "benchmark": "stream", "reader": name, "entries": entries,
                "device": f"cpu ({platform.machine()})", "torch": torch.__version__, **found,
            }  # fmt: skip
            keep_row(row, given.output)


if __name__ == "__main__":
    main()

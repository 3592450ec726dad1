"""Folders made at random: training can start with what the report says, or a DataError says why not."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from lightning_aigc.data import ImageCaptionData
from lightning_aigc.errors import DataError

STEMS = ["a", "b", "shoe 1", "Schuh ä", "写真", "x.y", "metadata", "10_z", os.fsdecode(b"\xff\xfe")]
FOLDERS = ["", "", "sub", "3_zorp", ".hidden", "sub/deep", "0_x"]
SUFFIXES = [".png", ".jpg", ".PNG", ".gif", ".webp", ".tiff", ".bmp", "", ".dat"]


def mostly(usual: st.SearchStrategy, rare: st.SearchStrategy) -> st.SearchStrategy:
    """Seven in eight from the first; one_of would take both alike, however often one is named."""
    return st.sampled_from([usual] * 7 + [rare]).flatmap(lambda chosen: chosen)


def encoded_picture(kind: str, width: int, height: int) -> bytes:
    values = np.random.default_rng(width * height).integers(0, 255, (height, width, 4), dtype=np.uint8)
    image = Image.fromarray(values)
    buffer = io.BytesIO()
    if kind == "jpeg":
        image.convert("RGB").save(buffer, "JPEG", quality=20)
    elif kind == "cmyk":
        image.convert("RGB").convert("CMYK").save(buffer, "JPEG")
    elif kind == "turned":
        exif = Image.Exif()
        exif[0x0112] = 1 + width % 9
        image.convert("RGB").save(buffer, "JPEG", exif=exif)
    elif kind == "rgba":
        image.save(buffer, "PNG")
    elif kind == "palette":
        image.convert("RGB").quantize(16).save(buffer, "PNG", transparency=3)
    elif kind == "deep":
        Image.fromarray(values[..., 0].astype(np.uint16) * 257).save(buffer, "PNG")
    elif kind == "float":
        Image.fromarray(values[..., 0].astype(np.float32) - 100).save(buffer, "TIFF")
    elif kind == "animated":
        image.save(buffer, "GIF", save_all=True, append_images=[image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)])
    else:
        image.convert("1").save(buffer, "BMP")
    return buffer.getvalue()


KINDS = ["jpeg", "cmyk", "turned", "rgba", "palette", "deep", "float", "animated", "bilevel"]
sides = mostly(st.sampled_from([8, 9, 33, 64, 100]), st.sampled_from([1, 7]))
whole_pictures = st.builds(encoded_picture, st.sampled_from(KINDS), sides, sides)


@st.composite
def spoiled_pictures(draw: st.DrawFn) -> bytes:
    content = bytearray(draw(whole_pictures))
    if draw(st.booleans()):
        return bytes(content[: draw(st.integers(0, len(content)))])
    for _ in range(draw(st.integers(1, 20))):
        content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    return bytes(content)


pictures = mostly(whole_pictures, st.one_of(spoiled_pictures(), st.binary(max_size=40)))
texts = st.text(max_size=30)
caption_files = st.one_of(
    texts.map(lambda text: text.encode("utf-8", "replace")),
    texts.map(lambda text: text.encode("utf-16", "replace")),
    texts.map(lambda text: text.encode("latin-1", "replace")),
    st.sampled_from([b"", b"\xef\xbb\xbf", b"\xff\xfe\x00", b"a red shoe", b"word " * 10_000]),
    st.binary(max_size=20),
)
captions = mostly(st.just("a red shoe"), st.one_of(texts, st.none(), st.integers()))


@st.composite
def folders(draw: st.DrawFn) -> dict[str, bytes]:
    """File contents by path; about half of the images have a proper caption, so that many folders can train."""
    files: dict[str, bytes] = {}
    names = []
    for _ in range(draw(mostly(st.integers(1, 5), st.just(0)))):
        where, stem = draw(st.sampled_from(FOLDERS)), draw(st.sampled_from(STEMS))
        path = str(Path(where) / stem)
        names.append(path + draw(st.sampled_from(SUFFIXES)))
        files[names[-1]] = draw(pictures)
        if draw(mostly(st.just(True), st.just(False))):
            files[path + ".txt"] = draw(mostly(st.just(b"a red shoe"), caption_files))
    listed = [(name, draw(captions)) for name in names if draw(st.integers(0, 3)) == 0]
    if listed and draw(st.booleans()):
        rows = [json.dumps({"file_name": name, "text": caption}) for name, caption in listed]
        files["metadata.jsonl"] = "\n".join(rows).encode() + draw(mostly(st.just(b"\n\n"), st.just(b"\n{")))
    elif listed:
        buffer = io.StringIO()
        csv.writer(buffer).writerows([*([("file_name", "text")] if draw(st.booleans()) else []), *listed])
        files["captions.csv"] = buffer.getvalue().encode("utf-8", "surrogateescape")
    return files


any_options = st.fixed_dictionaries(
    {
        "missing_captions": st.sampled_from(["error", "filename", "empty", "trigger"]),
        "trigger_word": st.one_of(st.none(), st.sampled_from(["zorp", "(", "写"])),
        "resolution": mostly(st.sampled_from([64, 8]), st.just(100)),
        "train_batch_size": mostly(st.sampled_from([1, 2, 3]), st.just(0)),
        "enable_bucket": st.booleans(),
        "bucket_no_upscale": st.booleans(),
        "bucket_reso_steps": st.sampled_from([8, 16, 64]),
        "center_crop": st.booleans(),
        "random_flip": st.booleans(),
        "shuffle_caption": st.booleans(),
        "use_alpha_mask": st.booleans(),
        "caption_dropout_rate": mostly(st.sampled_from([0.0, 0.5]), st.just(2.0)),
        "cache_latents": st.booleans(),
        "cache_text_embeddings": st.booleans(),
    }
)


@st.composite
def options(draw: st.DrawFn) -> dict[str, object]:
    """Arguments; seven times in eight without those that exclude each other."""
    chosen = draw(any_options)
    if draw(mostly(st.just(True), st.just(False))):
        chosen["center_crop"] |= chosen["cache_latents"]
        chosen["shuffle_caption"] &= not chosen["cache_text_embeddings"]
        chosen["trigger_word"] = chosen["trigger_word"] or "zorp"
    return chosen


OUTCOMES: list[str | None] = []  # for each folder, None if it trained, else why not


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        if not path.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(files=folders(), arguments=options())
def test_any_folder_trains_as_reported_or_says_why_not(tools, files, arguments):
    root = Path(tempfile.mkdtemp())
    try:
        folder = root / "photos"
        folder.mkdir()
        write(folder, files)
        before, batches = tools.fingerprint(folder), None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow remarks on damaged files
                data = ImageCaptionData(
                    str(folder), num_workers=0, pin_memory=False, cache_dir=str(root / "cache"), **arguments
                )
                data.prepare(tools.FakeEncoder())
                batches = list(data.loader())
        except DataError as refused:
            text = str(refused)
        else:
            text = data.report()
        finally:
            assert tools.fingerprint(folder) == before
        text.encode("utf-8")
        OUTCOMES.append(None if batches else text)
        if batches is None:
            return
        report = data.data_report
        assert report.images_found == report.images_used + len(report.rejected)
        assert all(reason for _, reason in report.rejected)
        names = [name for batch in batches for name in batch["names"]]
        assert len(names) == report.items_per_epoch and len(set(names)) == report.images_used > 0
        for batch in batches:
            tensor = batch.get("pixel_values", batch.get("latent_moments"))
            assert torch.isfinite(tensor).all() and len(tensor) == len(batch["captions"])
            if arguments["missing_captions"] != "empty" and arguments["caption_dropout_rate"] == 0:
                assert all(batch["captions"])
    finally:
        shutil.rmtree(root)


def test_the_folders_above_were_both_trained_on_and_refused():
    trained = sum(outcome is None for outcome in OUTCOMES)
    assert not OUTCOMES or 50 <= trained <= len(OUTCOMES) - 50, f"{trained} of {len(OUTCOMES)}"

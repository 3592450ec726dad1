"""Images of every odd kind are used rightly or rejected with a reason."""

from __future__ import annotations

import contextlib
import io
import os
import struct
import subprocess
import sys
import tomllib
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_aigc.data.images.image_file import PictureRejectedError, inspect_picture, load_picture
from lightning_aigc.errors import DataError


def only_batch(data):
    data.prepare()
    (batch,) = list(data.loader())
    return batch


def rejected(data):
    return dict(data.data_report.rejected)


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds no pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 10)) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty file"),
        (b"this is text, not a picture", "not an image"),
        (b"\x89PNG\r\n\x1a\n", "not an image"),
        (png_header(100_000, 100_000), "max_image_pixels"),
        (png_header(64, 64), "truncated"),
    ],
)
def test_a_file_that_is_no_usable_picture_is_rejected_with_the_reason(tools, make, folder, content, reason):
    tools.save(folder / "good.png")
    (folder / "bad.jpg").write_bytes(content)
    (folder / "bad.txt").write_text("x")
    data = make()
    assert data.data_report.images_used == 1
    assert reason in rejected(data)["bad.jpg"]
    assert f"bad.jpg: {rejected(data)['bad.jpg']}" in data.report()


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "gif", "bmp", "tiff"])
@pytest.mark.parametrize("kept", [0.3, 0.9])
def test_a_truncated_picture_is_rejected(tools, make, folder, suffix, kept):
    tools.save(folder / "good.png")
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    path = tools.save(folder / f"cut.{suffix}", noise)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    data = make()
    assert list(rejected(data)) == [path.name]


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("suffix", ["png", "jpeg", "webp", "gif", "bmp", "tiff", "ppm"])
def test_a_picture_with_wrong_bytes_in_it_is_used_or_rejected_and_nothing_else(tools, tmp_path, suffix):
    path = tmp_path / "a"
    buffer = io.BytesIO()
    tools.picture(24, 24).save(buffer, suffix)
    random = np.random.default_rng(0)
    for _ in range(150):
        content = np.frombuffer(buffer.getvalue(), np.uint8).copy()
        places = random.integers(0, min(len(content), 200), 4)
        content[places] = random.integers(0, 256, 4)
        path.write_bytes(content.tobytes())
        with contextlib.suppress(PictureRejectedError):
            info = inspect_picture(path, 10_000)
            assert 8 <= info.width * info.height <= 10_000
            assert load_picture(path)[0].size == (info.width, info.height)


@pytest.mark.parametrize("size", [(1, 1), (1, 500), (7, 64)])
def test_a_picture_of_a_few_pixels_is_rejected(tools, make, folder, size):
    tools.save(folder / "good.png")
    tools.save(folder / "tiny.png", tools.picture(*size))
    assert "at least 8" in rejected(make())["tiny.png"]


def test_the_pixel_limit_is_checked_before_decoding_and_can_be_set(tools, make, folder):
    tools.save(folder / "good.png")
    tools.save(folder / "large.png", tools.picture(200, 200))
    assert "max_image_pixels=39999" in rejected(make(max_image_pixels=39_999))["large.png"]
    assert not rejected(make(max_image_pixels=40_000))


def test_pillows_own_limits_are_as_before_afterwards(tools, make, folder):
    tools.save(folder / "good.png")
    before = Image.MAX_IMAGE_PIXELS
    only_batch(make())
    assert before == Image.MAX_IMAGE_PIXELS


def test_a_jpeg_called_png_is_opened_by_its_content(tools, make, folder):
    image = tools.picture(seed=3)
    path = tools.save(folder / "photo.png")
    image.save(path, format="JPEG", quality=95)
    batch = only_batch(make())
    expected = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1) / 127.5 - 1
    assert (batch["pixel_values"][0] - expected).abs().mean() < 0.05


def test_a_picture_without_a_suffix_is_found_by_its_content(tools, make, folder):
    tools.picture().save(folder / "photo", format="PNG")
    (folder / "photo.txt").write_text("a thing")
    assert only_batch(make())["names"] == ["photo"]


GREY = np.linspace(0, 255, 64)[None].repeat(64, 0)


@pytest.mark.parametrize(
    ("suffix", "image"),
    [
        ("png", Image.fromarray(np.rint(GREY * 257).astype(np.uint16))),
        ("tiff", Image.fromarray(np.rint(GREY * 257).astype(np.uint16))),
        ("tiff", Image.fromarray(np.rint(GREY * 257).astype(np.int32))),
        ("tiff", Image.fromarray((GREY / 255).astype(np.float32))),
        ("png", Image.fromarray(np.rint(GREY).astype(np.uint8))),
        ("tiff", Image.fromarray(np.rint(GREY).astype(np.uint8)).convert("RGB").convert("CMYK")),
        ("png", Image.fromarray(np.rint(GREY).astype(np.uint8)).convert("LA")),
        ("png", Image.fromarray(np.rint(GREY).astype(np.uint8)).convert("P")),
    ],
    ids=["16-bit-png", "16-bit-tiff", "32-bit-int", "float", "grey", "cmyk", "grey-alpha", "palette"],
)
def test_every_mode_gives_the_same_grey_ramp(tools, make, folder, suffix, image):
    tools.save(folder / f"ramp.{suffix}", image)
    pixels = only_batch(make())["pixel_values"][0]
    expected = torch.from_numpy(GREY / 127.5 - 1).float().expand(3, 64, 64)
    assert (pixels - expected).abs().max() < 0.02


def test_big_endian_16_bit_is_scaled_like_little_endian(tools, make, folder):
    values = np.rint(GREY * 257).astype(">u2")
    Image.frombytes("I;16B", (64, 64), values.tobytes()).save(folder / "ramp.tiff")
    (folder / "ramp.txt").write_text("a")
    pixels = only_batch(make())["pixel_values"][0]
    assert (pixels[0, 0] - torch.linspace(-1, 1, 64)).abs().max() < 0.02


def test_a_cmyk_jpeg_is_used(tools, make, folder):
    tools.save(folder / "print.jpg", Image.new("RGB", (64, 64), (255, 0, 0)).convert("CMYK"))
    red, green, blue = only_batch(make())["pixel_values"][0].mean((1, 2))
    assert red > 0.9 and green < -0.9 and blue < -0.9


@pytest.mark.parametrize("mode", ["RGBA", "palette", "transparent-colour"])
def test_transparency_is_laid_on_white(tools, make, folder, mode):
    image = Image.new("RGBA", (64, 64), (200, 0, 0, 255))
    image.paste((0, 0, 0, 0), (0, 0, 32, 64))
    if mode == "RGBA":
        tools.save(folder / "a.png", image)
    elif mode == "palette":
        palette = image.quantize(4)
        tools.save(folder / "a.png", palette)
    else:
        tools.save(folder / "a.png", image.convert("RGB"), transparency=(0, 0, 0))
    pixels = only_batch(make())["pixel_values"][0]
    assert (pixels[:, :, :30] > 0.95).all()
    assert pixels[0, :, 34:].mean() > 0.5 and pixels[1, :, 34:].mean() < -0.95


@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_an_exif_rotation_is_applied(tools, make, folder, suffix):
    image = Image.new("RGB", (96, 48), "black")
    image.paste("white", (0, 0, 48, 48))
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned by a quarter to the right: the white half is on top
    tools.save(folder / f"phone.{suffix}", image, exif=exif)
    data = make()
    batch = only_batch(data)
    assert batch["original_size"].tolist() == [[96, 48]]
    height, width = batch["target_size"][0].tolist()
    assert height > width
    assert batch["pixel_values"][0, :, : height // 3].mean() > 0.9
    assert batch["pixel_values"][0, :, -height // 3 :].mean() < -0.9


def test_a_large_turned_jpeg_decoded_at_a_fraction_looks_the_same(tools, make, folder):
    image = tools.picture(1200, 800, seed=5)
    exif = Image.Exif()
    exif[0x0112] = 8
    tools.save(folder / "phone.jpg", image, exif=exif, quality=95)
    pixels = only_batch(make())["pixel_values"]
    (folder / "phone.jpg").unlink()
    image.transpose(Image.Transpose.ROTATE_90).save(folder / "phone.png")
    upright = only_batch(make())["pixel_values"]
    assert pixels.shape == upright.shape
    assert (pixels - upright).abs().mean() < 0.02


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_damaged_exif_does_not_matter(tools, make, folder):
    buffer = io.BytesIO()
    tools.picture().save(buffer, "JPEG", exif=b"Exif\x00\x00MM\x00*\x00\x00\x00\xff\xff\xff")
    (folder / "a.jpg").write_bytes(buffer.getvalue())
    (folder / "a.txt").write_text("a")
    assert len(only_batch(make())["names"]) == 1


def test_an_animation_gives_its_first_frame_and_a_note(tools, make, folder):
    frames = [Image.new("RGB", (64, 64), colour) for colour in ("red", "lime", "blue")]
    tools.save(folder / "moving.gif", frames[0], save_all=True, append_images=frames[1:])
    data = make()
    assert only_batch(data)["pixel_values"][0, 0].mean() > 0.95
    assert "moving.gif: animated" in data.report()


@pytest.mark.parametrize(
    "name", ["blauer Schuh, groß.png", "写真 1.png", "a'b\"c.png", "emoji 🦊.png", "x.y.z.png", "%s {0}.png"]
)
def test_any_file_name_is_fine(tools, make, folder, name):
    tools.save(folder / name)
    assert only_batch(make())["names"] == [name]


def test_a_name_of_undecodable_bytes_can_be_used_and_printed(tools, make, folder, capsys):
    tools.save(folder / os.fsdecode(b"caf\xe9.png"), caption="a cup")
    data = make()
    data.setup("fit")
    capsys.readouterr()[0].encode("utf-8")
    assert only_batch(data)["captions"] == ["a cup"]


def test_hidden_files_and_folders_are_ignored(tools, make, folder):
    tools.save(folder / "good.png")
    tools.save(folder / ".hidden.png")
    tools.save(folder / ".thumbnails" / "b.png")
    tools.save(folder / "__MACOSX" / "._c.png")
    assert make().data_report.images_found == 1


def test_links_in_a_circle_end_and_a_broken_link_is_rejected(tools, make, folder):
    tools.save(folder / "good.png")
    (folder / "again").symlink_to(folder, target_is_directory=True)
    (folder / "gone.png").symlink_to(folder / "nowhere.png")
    (folder / "gone.txt").write_text("x")
    data = make()
    assert data.data_report.images_used == 1
    assert "not there" in rejected(data)["gone.png"]


def test_a_named_pipe_does_not_hang_the_check(tools, make, folder):
    tools.save(folder / "good.png")
    os.mkfifo(folder / "pipe.png")
    assert rejected(make()) == {"pipe.png": "not a regular file"}


@pytest.mark.parametrize("state", ["missing", "empty", "only text", "a file", "all bad"])
def test_a_folder_without_usable_pictures_is_an_error_naming_it(make, folder, state):
    target = folder
    if state == "missing":
        target = folder / "nope"
    elif state == "only text":
        (folder / "a.txt").write_text("x")
    elif state == "a file":
        target = folder / "f"
        target.write_text("x")
    elif state == "all bad":
        (folder / "a.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"photos"):
        make(train_data_dir=str(target)).setup("fit")


def test_more_than_twenty_rejected_files_are_counted_and_shortened(tools, make, folder):
    tools.save(folder / "good.png")
    for number in range(25):
        (folder / f"bad{number:02}.png").write_bytes(b"")
    report = make().report()
    assert "25 rejected" in report and "and 5 more" in report


# Formats of phones ---------------------------------------------------------------------------------------------------

HEIC_HEAD = b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic" + bytes(64)
WITHOUT_HEIC = """
import sys
sys.modules["pillow_heif"] = None  # as where the extra is not installed
from lightning_aigc.cli import main
main(["init", sys.argv[1], "-o", sys.argv[2]])
"""


def photograph() -> Image.Image:
    ramp = np.linspace(0, 255, 64, dtype=np.uint8)
    return Image.fromarray(np.stack(np.broadcast_arrays(ramp[:, None], ramp[None], np.uint8(90)), -1))


@pytest.mark.parametrize("suffix", [".avif", ".heic", ""])
def test_a_picture_of_a_phone_is_read(tools, make, folder, suffix):
    if suffix == ".avif":
        kind = "AVIF"
    else:
        pytest.importorskip("pillow_heif", reason="pip install 'lightning_aigc[heic]'")
        kind = "HEIF"
    photograph().save(folder / f"mug{suffix}", kind, quality=90)
    (folder / "mug.txt").write_text("a mug")
    assert make().data_report.images_used == 1
    found, alpha = load_picture(folder / f"mug{suffix}")
    assert alpha is None and found.size == (64, 64)
    assert np.abs(np.asarray(found).astype(int) - np.asarray(photograph())).mean() < 8


def test_without_the_extra_a_heic_picture_names_it(folder, tmp_path):
    (folder / "mug.heic").write_bytes(HEIC_HEAD)
    (folder / "mug.txt").write_text("a mug")
    words = [sys.executable, "-c", WITHOUT_HEIC, str(folder), str(tmp_path / "my.yaml")]
    done = subprocess.run(words, capture_output=True, text=True)
    (line,) = done.stderr.strip().splitlines()
    assert done.returncode == 1 and line.startswith("error: ")
    assert "a HEIC image, which needs an extra: pip install 'lightning_aigc[heic]'" in line
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert any(package.startswith("pillow-heif") for package in project["optional-dependencies"]["heic"])

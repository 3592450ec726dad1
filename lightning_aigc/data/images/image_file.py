"""Decode an image of any mode, depth or orientation, or give the reason why it is rejected."""

from __future__ import annotations

import io
import stat
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import PIL
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError, features

MIN_SIDE_PIXELS = 8
THUMBNAIL_SIDE = 8
FAINT_LEVELS = 32
"""Contrast, of 255, below which a transparent condition shows nothing on its ground."""
PICTURE_SUFFIXES = frozenset(
    f".{suffix}"
    for suffix in (
        *("jpg", "jpeg", "jpe", "jfif", "png", "apng", "webp", "bmp", "dib", "gif", "tif", "tiff"),
        *("ppm", "pgm", "pbm", "pnm", "avif", "heic", "heif", "jp2", "tga"),
    )
)
_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"II*\x00", b"MM\x00*", b"BM")

_AVIF_BRANDS = (b"avif", b"avis")
_HEIC_BRANDS = (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1")
"""Bytes 8 to 12 of a file of a phone, after `ftyp`."""

try:
    import pillow_heif

    pillow_heif.register_heif_opener()
    DECODERS = f"{PIL.__version__}+heif {pillow_heif.__version__}"
except ImportError:  # lightning_aigc[heic] brings it
    DECODERS = PIL.__version__
"""Versions of what decodes images: another may read a file that this one rejects."""

_limit_lock = threading.Lock()
_limit_users = 0
_limit_before: tuple[int | None, bool] = (None, False)


class PictureRejectedError(Exception):
    """An image cannot be used; the message is the reason, as printed in the report."""


@dataclass(frozen=True)
class PictureInfo:
    """Result of a full decode: upright size in pixels, the file's content hash, and notes for the report."""

    width: int
    height: int
    content_sha256: str
    notes: tuple[str, ...] = ()
    thumbnail: bytes = b""
    """The image shrunk to THUMBNAIL_SIDE pixels square, RGB, to find images that look the same."""


def inspect_picture(path: Path, max_image_pixels: int) -> PictureInfo:
    """Decode an image completely, so that a bad file is found before training.

    Raises: PictureRejectedError with the reason, and no other exception.
    """
    content = b""
    try:
        content = _read_regular_file(path)
        with pillow_limits_lifted(), Image.open(io.BytesIO(content)) as image:
            _check_size(image.size, max_image_pixels)
            notes: tuple[str, ...] = ()
            if getattr(image, "n_frames", 1) > 1 and image.format in {"GIF", "PNG", "WEBP", "AVIF"}:
                notes = ("animated: the first frame is used",)
            upright = _to_rgba_or_rgb(_upright(image))
            width, height = upright.size
            thumbnail = _thumbnail(upright)
    except PictureRejectedError:
        raise
    except Exception as error:  # a decoder may raise anything on bytes that it did not expect
        raise PictureRejectedError(_missing_decoder(content[:12]) or _reason(error)) from error
    return PictureInfo(width, height, sha256(content).hexdigest(), notes, thumbnail)


def load_picture(path: Path, shrink_to: tuple[int, int] | None = None) -> tuple[Image.Image, Image.Image | None]:
    """Load the first frame, upright, as RGB on white, and its alpha channel (mode L), None without alpha.

    shrink_to: upright (width, height) that the caller will scale to. A JPEG is then decoded at a fraction that
        is still at least twice as large, so its `size` may be smaller than in the file.
    """
    with pillow_limits_lifted(), Image.open(path) as image:
        if shrink_to is not None and image.format == "JPEG":
            width, height = 2 * shrink_to[0], 2 * shrink_to[1]
            image.draft("RGB", (height, width) if _is_turned(image) else (width, height))
        upright = _to_rgba_or_rgb(_upright(image))
    if upright.mode == "RGB":
        return upright, None
    return _laid_on("white", upright), upright.getchannel("A")


def has_alpha(path: Path) -> bool:
    """Whether the file's header has an alpha channel or a transparent colour."""
    with pillow_limits_lifted(), Image.open(path) as image:
        return image.has_transparency_data


def load_mask(path: Path) -> Image.Image:
    """Load a mask as mode L, white where the model learns; alpha is blended onto black."""
    with pillow_limits_lifted(), Image.open(path) as image:
        return _laid_on("black", _to_rgba_or_rgb(_upright(image))).convert("L")


def load_condition(path: Path) -> Image.Image:
    """Load a condition as RGB. A transparent one is laid on black, or on white where nothing is to be seen on black."""
    with pillow_limits_lifted(), Image.open(path) as image:
        upright = _to_rgba_or_rgb(_upright(image))
    on_black = _laid_on("black", upright)
    if upright.mode == "RGBA" and contrast(on_black) < FAINT_LEVELS:
        on_white = _laid_on("white", upright)
        return on_white if contrast(on_white) >= FAINT_LEVELS else on_black
    return on_black


def contrast(image: Image.Image) -> int:
    """The largest difference between two pixels in a channel, of 255."""
    bands = [band.getextrema() for band in image.split()]
    return max(int(high) - int(low) for low, high in bands)  # type: ignore[arg-type]


def looks_like_a_picture(path: Path) -> bool:
    """Whether a file is a candidate, by its suffix, or by its first bytes if the suffix is unknown."""
    if path.suffix.lower() in PICTURE_SUFFIXES:
        return True
    if path.suffix.lower() in {".txt", ".caption", ".json", ".jsonl", ".csv", ".md", ".npz", ".safetensors"}:
        return False
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return False
        with path.open("rb") as file:
            head = file.read(16)
    except OSError:
        return False
    is_of_phone = head[4:8] == b"ftyp" and head[8:12] in _AVIF_BRANDS + _HEIC_BRANDS
    return head.startswith(_SIGNATURES) or (head[:4] == b"RIFF" and head[8:12] == b"WEBP") or is_of_phone


@contextmanager
def pillow_limits_lifted() -> Iterator[None]:
    """Disable Pillow's process-wide pixel limit, which `max_image_pixels` replaces, and refuse truncated files."""
    global _limit_users, _limit_before
    with _limit_lock:
        if _limit_users == 0:
            _limit_before = (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)
            Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = None, False
        _limit_users += 1
    try:
        yield
    finally:
        with _limit_lock:
            _limit_users -= 1
            if _limit_users == 0:
                Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = _limit_before


def _read_regular_file(path: Path) -> bytes:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise PictureRejectedError("not a regular file")
    if status.st_size == 0:
        raise PictureRejectedError("empty file (0 bytes)")
    return path.read_bytes()


def _check_size(size: tuple[int, int], max_image_pixels: int) -> None:
    width, height = size
    if width * height > max_image_pixels:
        raise PictureRejectedError(f"{width} x {height} pixels, more than max_image_pixels={max_image_pixels}")
    if min(width, height) < MIN_SIDE_PIXELS:
        raise PictureRejectedError(f"{width} x {height} pixels, a side must have at least {MIN_SIDE_PIXELS}")


def _laid_on(colour: str, image: Image.Image) -> Image.Image:
    """RGB or RGBA as RGB, on a ground of one colour where it is transparent."""
    if image.mode == "RGB":
        return image
    ground = Image.new("RGB", image.size, colour)
    ground.paste(image.convert("RGB"), mask=image.getchannel("A"))
    return ground


def _thumbnail(image: Image.Image) -> bytes:
    side = THUMBNAIL_SIDE
    # Whole blocks are averaged first, which is fast and enough for a comparison.
    factors = (max(1, image.width // (4 * side)), max(1, image.height // (4 * side)))
    return _laid_on("white", image.reduce(factors)).resize((side, side), Image.Resampling.BOX).tobytes()


def _upright(image: Image.Image) -> Image.Image:
    image.load()
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # damaged EXIF says nothing about the pixels
        return image


def _is_turned(image: Image.Image) -> bool:
    try:
        return int(image.getexif().get(0x0112, 1)) >= 5
    except Exception:
        return False


def _to_rgba_or_rgb(image: Image.Image) -> Image.Image:
    if image.mode in {"RGB", "RGBA"} and "transparency" not in image.info:
        return image
    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(_eight_bits(np.asarray(image), image.mode)).convert("RGB")
    if image.mode in {"LA", "La", "PA", "RGBA", "RGBa"} or "transparency" in image.info:
        if image.mode in {"La", "RGBa"}:
            image = image.convert({"La": "LA", "RGBa": "RGBA"}[image.mode])
        return image.convert("RGBA")
    return image.convert("RGB")


def _eight_bits(values_HW: np.ndarray, mode: str) -> np.ndarray:
    """Scale 16-bit or floating-point grey values to 0..255 by the range of their format, not by their contrast."""
    values = values_HW.astype(np.float64)
    if not np.isfinite(values).all():
        raise PictureRejectedError("pixel values that are not finite")
    low, high = float(values.min()), float(values.max())
    if mode.startswith("I;16"):
        low, high = 0.0, 65535.0
    elif mode == "F" and low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    elif low >= 0 and high <= 255 and mode == "F":
        low, high = 0.0, 255.0
    elif low >= 0 and high <= 65535:
        low, high = 0.0, 65535.0
    return np.rint((values - low) * (255.0 / max(high - low, 1e-12))).astype(np.uint8)


def _missing_decoder(head: bytes) -> str | None:
    """The package that a file needs, by its first 12 bytes; None for one that Pillow reads here."""
    if head[4:8] != b"ftyp":
        return None
    if head[8:12] in _AVIF_BRANDS and not features.check("avif"):
        return "an AVIF image, which Pillow reads from version 11.3 on: pip install -U pillow"
    if head[8:12] in _HEIC_BRANDS and ".heic" not in Image.registered_extensions():
        return "a HEIC image, which needs an extra: pip install 'lightning_aigc[heic]'"
    return None


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "not an image that Pillow can open (convert it to PNG or JPEG)"
    if isinstance(error, FileNotFoundError):
        return "the file is not there (a broken link?)"
    if isinstance(error, PermissionError):
        return "no permission to read it"
    if isinstance(error, (EOFError, struct.error, zlib.error, IndexError)) or "truncated" in str(error):
        return f"truncated or damaged: {error}"
    return f"cannot be decoded: {type(error).__name__}: {error}"

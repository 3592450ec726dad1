"""`lightning caption`: write a caption next to each image that has none, by an image-to-text model."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_aigc.errors import ConfigError, DataError

if TYPE_CHECKING:
    from lightning_aigc.data.index.sources import FoundPictures, Picture

MODEL = "Salesforce/blip-image-captioning-large"
LISTED = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments to its parser."""
    parser.description = (
        "Write a caption in a text file next to each image that has none. Captions that are there stay."
    )
    parser.add_argument("folder", metavar="PHOTOS", help="a folder of images")
    parser.add_argument(
        "--model",
        default=MODEL,
        help=f"hub id or folder of an image-to-text model of transformers (default: {MODEL})",
    )
    parser.add_argument("--trigger_word", help="the word that stands for your product, put first in each new caption")
    parser.add_argument(
        "--prompt",
        help="the instruction of a chat model, the beginning of BLIP's captions, or Florence-2's task",
    )
    parser.add_argument("--batch_size", type=int, default=4, help="images at once (default: 4)")
    parser.add_argument("--max_new_tokens", type=int, default=75, help="longest caption in tokens (default: 75)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, npu ... (default: this machine's)")


def run(args: argparse.Namespace) -> int:
    """Caption the images and print each new caption; returns the exit status.

    Raises: UserError for a folder, model or device that cannot be used.
    """
    for name in ("batch_size", "max_new_tokens"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, got {getattr(args, name)}")

    from lightning_aigc.cli.init.folder import find_captioned
    from lightning_aigc.data.index.argument_checks import check_trigger_word
    from lightning_aigc.data.index.filenames import print_anywhere, printable

    check_trigger_word(args.trigger_word, "--trigger_word")
    found, ending = find_captioned(args.folder)
    wanted = [picture for picture in found.pictures if _has_no_caption(picture)]
    for line in _about(found, len(wanted)):
        print_anywhere(line)
    if not wanted:
        return 0

    from lightning_aigc.data.captions.caption_model import CaptionModel
    from lightning_aigc.devices import device_named

    model = CaptionModel(args.model, args.prompt, device_named(args.device), args.max_new_tokens)
    written, left_out = 0, list[tuple[str, str]]()
    stems = Counter(picture.path.with_suffix("") for picture in found.pictures)
    for picture, caption in _captions(model, wanted, args.batch_size, left_out):
        text = _with_trigger(caption, args.trigger_word)
        is_shared = stems[picture.path.with_suffix("")] > 1  # of a.png and a.jpg each gets a file of its own
        stem = picture.path.name if is_shared else picture.path.stem
        _write(picture.path.with_name(stem + ending), text)
        written += 1
        print_anywhere(f"  {printable(picture.name)}: {text}")
    for name, reason in left_out[:LISTED]:
        print_anywhere(f"  left out: {printable(name)}: {printable(reason)}")
    if len(left_out) > LISTED:
        print(f"  and {len(left_out) - LISTED} more are left out")
    if not written:
        raise DataError(f"--model {args.model} wrote no caption for {len(left_out)} images; give another model")
    print_anywhere(f"wrote {written} captions; read and correct them, then: lightning init {args.folder} -o my.yaml")
    return 0


def _has_no_caption(picture: Picture) -> bool:
    return picture.caption is None and picture.empty_caption is None and picture.other_caption is None


def _about(found: FoundPictures, wanted: int) -> Iterator[str]:
    """Sentences on what is there and what is left as it is."""
    captioned = sum(picture.caption is not None for picture in found.pictures)
    yield f"{len(found.pictures)} images, {captioned} with a caption, {wanted} to caption"
    empty = [picture for picture in found.pictures if picture.empty_caption is not None]
    if empty:
        yield f"  {len(empty)} have an empty caption, such as {empty[0].name}; delete the file to get one"
    other = sorted({str(picture.other_caption) for picture in found.pictures if picture.other_caption is not None})
    if other:
        yield f"  others have a caption in {' or '.join(other)} files, which are left as they are"
    yield from (f"  {note}" for note in found.notes)


def _captions(
    model: Any, pictures: Sequence[Picture], batch_size: int, left_out: list[tuple[str, str]]
) -> Iterator[tuple[Picture, str]]:
    """Each image with its new caption, batch by batch; `left_out` gets name and reason of those without one."""
    import torch

    from lightning_aigc.data.images.image_file import load_picture

    for start in range(0, len(pictures), batch_size):
        batch = []
        for picture in pictures[start : start + batch_size]:
            try:
                batch.append((picture, load_picture(picture.path)[0]))
            except Exception as error:  # a decoder may raise anything on bytes that it did not expect
                left_out.append((picture.name, str(error) or type(error).__name__))
        if not batch:
            continue
        try:
            texts = model.captions([image for _, image in batch])
        except torch.OutOfMemoryError as error:
            smaller = f"--batch_size {max(1, batch_size // 2)}" if batch_size > 1 else "a smaller --model"
            raise DataError(f"no memory for {len(batch)} images at once; give {smaller}") from error
        for (picture, _), text in zip(batch, texts, strict=True):
            if text:
                yield picture, text
            else:
                left_out.append((picture.name, "the model said nothing"))


def _with_trigger(caption: str, word: str | None) -> str:
    """The caption with the trigger word in front, also where the model wrote the word somewhere behind."""
    if not word or caption.casefold().startswith(word.casefold()):
        return caption
    return f"{word}, {caption}"


def _write(path: Path, text: str) -> None:
    """Write a new file. Raises: DataError for one that is there, or a folder that cannot be written."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text + "\n")
    except FileExistsError as error:
        raise DataError(f"{path} appeared meanwhile and is left as it is; give the same command again") from error
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}; make the folder writable") from error

"""`lightning init`: look at a folder of images and write a config for it."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from lightning_aigc.atomic_file import write_text
from lightning_aigc.cache_folder import cache_folder
from lightning_aigc.cli.class_source import class_values, source_of
from lightning_aigc.cli.init.card_sizes import CARDS
from lightning_aigc.errors import ConfigError

"""ImageCaptionData's default for cache_dir: training finds there what this verb has checked."""
LISTED = 5
SHOWN = (
    *("resolution", "trigger_word", "missing_captions", "caption_extension", "caption_encoding"),
    *("max_train_steps", "learning_rate", "memory"),
)
"""Choices that are printed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments to its parser."""
    parser.description = "Look at a folder of images and write a config for it that needs no editing."
    parser.add_argument("folder", metavar="PHOTOS", help="images, each with a .txt of its name, or metadata.jsonl")
    parser.add_argument("-o", "--output", type=Path, help="the file to write (default: FOLDER'S NAME.yaml)")
    parser.add_argument(
        "--base", default="sd15", help=f"{', '.join(short_names())}, a hub id, a folder or a checkpoint (default: sd15)"
    )
    parser.add_argument("--denoiser_file", help="the transformer's weights as one file, in float8 too, for the base")
    parser.add_argument("--card", choices=CARDS, help="the card to train on (default: this machine's)")
    parser.add_argument("--trigger_word", help="the word that stands for your product (default: from the captions)")
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")


def run(args: argparse.Namespace) -> int:
    """Write the config and print what was found and what to run next; returns the exit status.

    Raises: UserError with what to change.
    """
    output, name = _output(args)
    if args.trigger_word is not None and not re.fullmatch(r"\w[\w-]*", args.trigger_word):
        raise ConfigError(f"--trigger_word must be one word of letters and digits, got {args.trigger_word!r}")
    # Imported late: torch takes seconds, and a wrong path should not.
    from lightning_aigc.cli.init.base import find_base
    from lightning_aigc.cli.init.cards import find_card, values_for
    from lightning_aigc.cli.init.choices import CAPTION_CALLBACK, check_edits, choose
    from lightning_aigc.cli.init.config import read_shipped, render
    from lightning_aigc.cli.init.folder import inspect_folder
    from lightning_aigc.data.index.argument_checks import check_trigger_word
    from lightning_aigc.data.index.filenames import print_anywhere

    check_trigger_word(args.trigger_word, "--trigger_word")
    base = find_base(args.base, args.denoiser_file)
    card = find_card(args.card, base.family)
    values = values_for(base.family, card)
    look = inspect_folder(args.folder, cache_folder())
    check_edits(look, base)
    config = read_shipped(values.template)
    if look.sources:
        found = config["trainer"]["callbacks"]
        config["trainer"]["callbacks"] = [each for each in found if each["class_path"] != CAPTION_CALLBACK]
    pictures_a_step = config["data"]["init_args"]["train_batch_size"] * config["trainer"]["accumulate_grad_batches"]
    choices = choose(look, base, card, values, pictures_a_step, args.trigger_word, name)
    found = f"{len(look.sizes)} images, {len(look.written)} with a caption"
    if look.sources:
        found = f"{len(look.sizes)} pairs of an edit, {len(look.written)} with an instruction"
    lines = [f"lightning fit -c {output} --dry_run     # look before you train", f"lightning fit -c {output}"]
    head = "\n".join(
        [
            f"Written by `lightning init` from {values.template} for {args.folder}: {found}.",
            "Each choice has its reason on its line; nothing has to be edited.",
            *(f"  {line}" for line in lines),
        ]
    )
    text = render(config, choices, head)
    try:
        write_text(output, text)
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror or error}; name another file with -o") from error
    of = {choice.key.rpartition(".")[2]: choice for choice in choices}
    rows = [f"{args.folder}: {found}"]
    rows += [f"  left out: {name}: {reason}" for name, reason in look.rejected[:LISTED]]
    rows += [f"  and {len(look.rejected) - LISTED} more are left out"] if len(look.rejected) > LISTED else []
    rows += [f"  {note}" for note in look.notes[:LISTED]]
    rows += [f"  {key:17} {of[key].value!s:8} {of[key].reason}" for key in SHOWN if key in of]
    print_anywhere("\n".join([*rows, f"wrote {output}; next:", *(f"  {line}" for line in lines)]))
    return 0


def short_names() -> list[str]:
    """The names that `--base` takes for the families' default bases, read without importing the families."""
    folder = "lightning_aigc.diffusion.families"
    names: dict[str, str] = {}
    for path in sorted(source_of(folder).parent.glob("*.py")):
        values = class_values(f"{folder}.{path.stem}")
        for key, value in values.items():
            owner, _, attribute = key.rpartition(".")
            if attribute == "name":
                names[owner] = values.get(f"{owner}.short_name") or value
    return list(names.values())


def _output(args: argparse.Namespace) -> tuple[Path, str]:
    """The file to write, and the name of the run. Raises: ConfigError for a file that is there or cannot be."""
    output: Path = args.output or Path(f"{Path(args.folder).absolute().name}.yaml")
    if output.is_dir() or not output.absolute().parent.is_dir():
        what = "is a folder" if output.is_dir() else f"lies in a folder that does not exist, {output.parent}"
        raise ConfigError(f"-o {output} {what}; name a file such as my.yaml")
    if output.exists() and not args.force:
        raise ConfigError(f"{output} exists already; name another with -o, or add --force to overwrite it")
    return output, re.sub(r"[^\w.-]+", "_", output.stem).strip("._") or "lora"

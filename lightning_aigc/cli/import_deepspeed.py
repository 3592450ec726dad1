"""`lightning import-deepspeed`: a ds_config.json, or accelerate's config file, as a YAML for `lightning fit -c`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lightning_aigc.atomic_file import atomic_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments to its parser."""
    parser.description = "Write a config from DeepSpeed's or accelerate's, and say in a line what each key became."
    parser.add_argument("file", type=Path, help="ds_config.json, or accelerate's YAML file")
    parser.add_argument("-o", "--output", type=Path, help="the YAML to write (default: print it)")


def run(args: argparse.Namespace) -> int:
    """Write or print the YAML, and the lines to stderr; returns the exit status.

    Raises: ConfigError for a file that cannot be taken.
    """
    import yaml

    from lightning_aigc.strategies.deepspeed.config import import_file

    imported = import_file(args.file)
    for line in (*imported.lines, *imported.notes):
        print(line, file=sys.stderr)
    text = f"# From {args.file.name}: lightning fit -c <your config> -c <this file>\n"
    text += yaml.safe_dump(imported.as_config(), sort_keys=False)
    if args.output is None:
        print(text, end="")
    else:
        with atomic_file(args.output, durable=False) as file:
            file.write(text.encode())
    return 0

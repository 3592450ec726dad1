"""`lightning export`: convert a LoRA to another layout, or merge it into a pipeline folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_aigc.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments to its parser."""
    parser.description = "Convert a LoRA file between the kohya and diffusers layouts, or merge it into a pipeline."
    parser.add_argument("lora", type=Path, metavar="LORA", help="a LoRA .safetensors file")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument(
        "--to",
        choices=("kohya", "diffusers"),
        help="kohya: for ComfyUI, A1111 and diffusers, with DoRA for ComfyUI alone; diffusers: for diffusers",
    )
    target.add_argument("--merge_into", metavar="PIPELINE_DIR", help="a diffusers pipeline folder, or embedded:sd")
    parser.add_argument("--base_model", help="whose LoRA it is, such as flux or sdxl, where the file does not tell")
    parser.add_argument("--output", type=Path, required=True, help="file to write, or folder with --merge_into")
    parser.add_argument("--strength", type=float, default=1.0, help="share of the LoRA to merge (default: 1.0)")


def run(args: argparse.Namespace) -> int:
    """Convert or merge the LoRA and print the output path; returns the exit status.

    Raises: UserError with what to change.
    """
    from lightning_aigc.cli.fit.console import tidy_console
    from lightning_aigc.diffusion.lora.file import convert
    from lightning_aigc.diffusion.lora.merge import merge_into_pipeline

    tidy_console()
    if args.merge_into is not None:
        output = merge_into_pipeline(args.lora, args.merge_into, args.output, args.strength, args.base_model)
    elif args.strength != 1.0:
        raise ConfigError(f"got --strength {args.strength} with --to; it belongs to --merge_into")
    elif args.output.resolve() == args.lora.resolve():
        raise ConfigError(f"got --output {args.output}, the input itself; name another file")
    else:
        output = convert(args.lora, args.output, args.to, args.base_model)
    print(f"wrote {output}")
    return 0

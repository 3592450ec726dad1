"""`lightning export`: convert a LoRA to another layout, merge it into a pipeline folder, or publish a run's result."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import tempfile
from pathlib import Path

from lightning_aigc.errors import ConfigError

HUB = "hub"
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
REASONS = {
    401: "the token is not valid; log in again: hf auth login",
    403: "the token may not write there; make one with write access at {endpoint}/settings/tokens",
    404: "there is no such owner; give your own name or that of an organisation you belong to",
    409: "there is another repository of this name; give another name",
    413: "a file is too large for the hub",
    429: "too many requests; wait some minutes and give the same command",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments to its parser."""
    parser.description = (
        "Convert a LoRA file between the kohya and diffusers layouts, merge it into a pipeline, or write a folder with"
        " a model card for the Hugging Face Hub."
    )
    parser.add_argument(
        "lora", type=Path, metavar="LORA", help="a LoRA .safetensors file; with --to hub also a run's folder"
    )
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument(
        "--to",
        choices=("kohya", "diffusers", HUB),
        help="kohya: for ComfyUI, A1111 and diffusers, with DoRA and LoKr for ComfyUI alone; diffusers: for diffusers;"
        " hub: a folder with files, images, scores and a model card",
    )
    target.add_argument(
        "--merge_into", metavar="PIPELINE", help="a diffusers pipeline folder, a single-file checkpoint, or embedded:sd"
    )
    parser.add_argument("--base_model", help="whose LoRA it is, such as flux or sdxl, where the file does not tell")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        help="file to write; with --to hub a folder; with --merge_into a folder, or NAME.safetensors for a single file",
    )
    parser.add_argument("--strength", type=float, default=1.0, help="share of the LoRA to merge (default: 1.0)")
    hub = parser.add_argument_group("--to hub")
    hub.add_argument("--push", metavar="OWNER/NAME", help="send the folder to this repository, which is made private")
    hub.add_argument("--public", action="store_true", help="make the repository of --push public")
    hub.add_argument("--overwrite", action="store_true", help="replace an existing output folder")


def run(args: argparse.Namespace) -> int:
    """Convert, merge or publish, and print the output path; returns the exit status.

    Raises: UserError with what to change.
    """
    for option in ("push", "public", "overwrite"):
        if getattr(args, option) and args.to != HUB:
            raise ConfigError(f"--{option} belongs to --to hub; leave it out, or add --to hub")
    if args.public and not args.push:
        raise ConfigError("--public belongs to --push; add --push OWNER/NAME")
    if args.strength != 1.0 and args.merge_into is None:
        raise ConfigError(f"got --strength {args.strength} with --to; it belongs to --merge_into")
    if args.to == HUB:
        return publish(args)

    from lightning_aigc.cli.fit.console import tidy_console
    from lightning_aigc.diffusion.lora.file import convert
    from lightning_aigc.diffusion.lora.merge import merge_into_pipeline

    tidy_console()
    if args.merge_into is not None:
        output = merge_into_pipeline(args.lora, args.merge_into, args.output, args.strength, args.base_model)
    elif args.output.resolve() == args.lora.resolve():
        raise ConfigError(f"got --output {args.output}, the input itself; name another file")
    else:
        output = convert(args.lora, args.output, args.to, args.base_model)
    print(f"wrote {output}")
    return 0


def publish(args: argparse.Namespace) -> int:
    """Write the hub folder, and send it with --push; returns the exit status.

    Raises: UserError with what to change; an output folder is complete or absent.
    """
    output: Path = args.output
    if output.is_file():
        raise ConfigError(f"-o {output} is a file; name a folder")
    if output.is_dir() and any(output.iterdir()) and not args.overwrite:
        raise ConfigError(f"{output} is not empty; name another folder with -o, or add --overwrite to replace it")
    if output.resolve() in (args.lora.resolve(), *args.lora.resolve().parents):
        raise ConfigError(f"-o {output} holds the run itself; name another folder")

    if args.push:
        check_can_push(args.push)

    from lightning_aigc.cli.hub.card import TO_FILL_IN, write_card
    from lightning_aigc.cli.hub.contents import find_contents, write_config, write_files, write_images

    contents = find_contents(args.lora)
    try:
        output.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.absolute().parent, prefix=f".{output.name}.") as made:
            folder = Path(made)
            files, images = write_files(contents, folder), write_images(contents, folder)
            write_config(contents, folder)
            text = write_card(contents, files, images, args.push or f"OWNER/{contents.name}")
            (folder / "README.md").write_text(text, encoding="utf-8")
            if output.exists():
                shutil.rmtree(output)
            shutil.copytree(folder, output)
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror or error}; name another folder with -o") from error
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    print(f"wrote {output}: {contents.name}, {len(images)} images, {size / 2**20:.1f} MiB")
    if TO_FILL_IN in text:
        print(f"fill in what {output / 'README.md'} marks with {TO_FILL_IN}: the run does not know it")
    if args.push:
        print(f"sent to {push(output, args.push, is_public=args.public)}")
    else:
        print(f"look at README.md, then: hf upload OWNER/{contents.name} {shlex.quote(str(output))}")
    return 0


def check_can_push(repository: str) -> None:
    """Raise ConfigError for a repository that is no `owner/name`, without a token, or where the hub is forbidden."""
    from huggingface_hub import constants, get_token

    if not REPOSITORY.fullmatch(repository):
        raise ConfigError(f"--push must be owner/name, got {repository!r}; give for example --push anna/zorp-mug")
    if constants.HF_HUB_OFFLINE:
        raise ConfigError("HF_HUB_OFFLINE is set, which forbids the hub; unset it, or leave out --push")
    if get_token() is None:
        raise ConfigError("there is no token for the hub; log in with `hf auth login`, or leave out --push")


def push(folder: Path, repository: str, *, is_public: bool) -> str:
    """Create the repository, private unless `is_public`, and upload the folder; returns the address of the page.

    A repository that exists keeps its visibility. Raises: ConfigError in one sentence.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        address = api.create_repo(repository, private=not is_public, exist_ok=True)
        api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Files written by lightning export --to hub"
        )
    except HfHubHTTPError as error:
        status = error.response.status_code
        reason = REASONS.get(status, f"the hub answered {status}; try again later").format(endpoint=api.endpoint)
        raise ConfigError(f"{repository} could not be written: {reason}. {_kept(folder, repository)}") from error
    except Exception as error:  # of the HTTP library, whose package changes between versions of huggingface_hub
        kind = type(error).__name__
        reason = f"{api.endpoint} cannot be reached ({kind}); check the network and its proxy settings"
        raise ConfigError(f"{repository} could not be written: {reason}. {_kept(folder, repository)}") from error
    return str(address)


def _kept(folder: Path, repository: str) -> str:
    return f"The folder is complete; send it with: hf upload {repository} {shlex.quote(str(folder))}"

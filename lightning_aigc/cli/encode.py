"""`lightning encode`: write the images of a config as a stream of latents and embeddings, on one rank or many."""

from __future__ import annotations

import argparse
import os
import warnings
from pathlib import Path

from lightning_aigc.errors import ConfigError

DTYPES = ("float32", "float16", "bfloat16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments to its parser."""
    parser.description = (
        "Write what training needs of the images in a config's data section, encoded by its model, as shards that"
        " EncodedImageData streams. Run it under torchrun or srun to share the work; run it again to go on."
    )
    parser.add_argument(
        "-c", "--config", type=Path, required=True, help="a config with model and data (ImageCaptionData)"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder for the shards")
    parser.add_argument("--entries_per_shard", type=int, default=1024, help="images in a file (default: 1024)")
    parser.add_argument("--batch_size", type=int, default=8, help="images encoded at once (default: 8)")
    parser.add_argument("--flips", action="store_true", help="mirrored latents too, for random_flip")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the latents (default: float32)")
    parser.add_argument("--device", default=None, help="cpu, cuda, npu; default: the best that is here")
    parser.add_argument("--wait_s", type=float, default=3600, help="how long rank 0 waits for other ranks' shards")


def run(args: argparse.Namespace) -> int:
    """Encode this rank's shards; rank 0 writes the index when all are there. Raises: UserError."""
    if args.entries_per_shard < 1 or args.batch_size < 1:
        raise ConfigError("--entries_per_shard and --batch_size must be at least 1")
    rank, world_size = rank_of_launcher()

    from lightning_aigc.cli.fit.aigc_cli import AIGCCLI
    from lightning_aigc.data import ImageCaptionData
    from lightning_aigc.data.cache.encoder import require_encoder
    from lightning_aigc.data.encoded_stream.encode import EncodeOptions, encode_shards, finish, samples_of, write_common
    from lightning_aigc.data.encoded_stream.encoded_image_data import facts_of
    from lightning_aigc.data.index.filenames import print_anywhere
    from lightning_aigc.devices import device_named, dtype_named
    from lightning_aigc.diffusion import DiffusionControlNet
    from lightning_aigc.diffusion.pipeline.image_sizes import check_image_sizes

    device = device_named(args.device or _best_device(rank))
    if args.output.exists() and not args.output.is_dir():
        raise ConfigError(f"-o {args.output} is a file; name a folder for the shards")
    warnings.filterwarnings("ignore", ".*args parameter is intended to run from within Python.*")
    cli = AIGCCLI(args=["-c", str(args.config), "--trainer.logger=false"], run=False)
    data, model = cli.datamodule, require_encoder(cli.model)
    if not isinstance(data, ImageCaptionData):
        raise ConfigError(f"encode reads the images of an ImageCaptionData, got {type(data).__name__} in {args.config}")
    if data.sources_per_image:
        raise ConfigError(
            "the data has source images of edits, which encoded shards do not hold; train from the images, with"
            " data.init_args.cache_latents: true"
        )
    if isinstance(cli.model, DiffusionControlNet):
        raise ConfigError(
            "a ControlNet makes or reads a condition for each image, which encoded shards do not hold; train from the"
            " images, with data.init_args.cache_latents: true"
        )
    cli.model._trainer = cli.trainer  # the precision decides the dtype that the encoders are loaded in
    cli.model.configure_model()
    cli.model._trainer = None
    cli.model.to(device)
    check_image_sizes(cli.model.loaded(), data)
    index = data.index()
    if rank == 0:
        print_anywhere(data.report())
    samples = samples_of(index)
    options = EncodeOptions(
        args.output,
        args.entries_per_shard,
        args.batch_size,
        flips=args.flips,
        has_masks=index.has_masks,
        use_alpha_mask=data.options.use_alpha_mask,
        latents_dtype=dtype_named(args.dtype),
    )
    try:
        written, there = encode_shards(model, samples, options, rank, world_size)
        print(f"rank {rank} of {world_size}: {written} shards written, {there} were there")
        if rank == 0:
            write_common(model, data.reference_images(64), args.output)
            manifest = finish(model, samples, options, facts_of(data), args.wait_s if world_size > 1 else 0.0)
            print(
                f"{manifest.count} entries in {len(manifest.shards)} shards; train with data: EncodedImageData,"
                f" shards_dir: {args.output}"
            )
    except OSError as error:
        raise ConfigError(
            f"cannot write shards into {args.output}: {error.strerror or error}; free some space, or name another"
            " folder with -o, and run the command again: it continues where it was"
        ) from error
    return 0


def rank_of_launcher() -> tuple[int, int]:
    """This process's rank and the number of ranks, as torchrun or SLURM says; 0 and 1 without."""
    for rank, count in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if os.environ.get(rank, "").isdigit() and os.environ.get(count, "").isdigit():
            return int(os.environ[rank]), int(os.environ[count])
    return 0, 1


def _best_device(rank: int) -> str:
    import torch

    for kind in ("cuda", "npu"):
        backend = getattr(torch, kind, None)
        if backend is not None and backend.is_available():
            return f"{kind}:{int(os.environ.get('LOCAL_RANK', rank)) % backend.device_count()}"
    return "cpu"

"""Whether all ranks run the same training: equal versions, settings and images, compared before the first step.

Ranks that differ would hang at the first collective that only some of them reach, or train apart without a word.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch.distributed as dist

import lightning_aigc
from lightning_aigc._lightning import ParallelStrategy, SLURMEnvironment, TorchElasticEnvironment, Trainer
from lightning_aigc.errors import ConfigError
from lightning_aigc.protocols import ComparesTrainingData, DescribesTrainingData
from lightning_aigc.secrets import redact

PACKAGES = ("torch", "torch_npu", "lightning", "diffusers", "peft", "transformers")
PER_NODE = frozenset(
    (
        "train_data_dir", "class_data_dir", "mask_dir", "cache_dir", "pretrained_model_name_or_path", "num_workers",
        "prefetch_factor", "pin_memory",
    )
)  # fmt: skip
"""Settings that a node may have of its own: where things are, and how many processes load them."""
TRAINER = (
    "max_steps",
    "max_epochs",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "precision",
    "plugins",
    "strategy",
)
MOST_SHOWN = 3


def check_ranks_agree(trainer: Trainer, config: Mapping[str, Any]) -> None:
    """Compare this rank's training with the others'. Collective; does nothing with one rank.

    Args: config: the parsed configuration of the subcommand.
    Raises: ConfigError on every rank, with what differs and where.
    """
    if trainer.world_size == 1 or not dist.is_initialized():
        return
    own = (socket.gethostname(), dict(facts(trainer, config)))
    everybody: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(everybody, own)
    wrong = differences(everybody)
    if wrong:
        more = f", and {len(wrong) - MOST_SHOWN} more" if len(wrong) > MOST_SHOWN else ""
        raise ConfigError(
            f"the ranks do not run the same training: {'; '.join(wrong[:MOST_SHOWN])}{more}; give every node the same"
            " command, files and versions"
        )


def check_world(trainer: Trainer) -> None:
    """Compare the processes that torchrun or SLURM started with the Trainer's devices and nodes.

    Raises: ConfigError with the flags that fit, where Lightning raises a ValueError or trains each rank alone.
    """
    environment = trainer._accelerator_connector.cluster_environment
    devices, nodes = trainer.num_devices, trainer.num_nodes
    if isinstance(environment, TorchElasticEnvironment):
        started = environment.world_size()
        on_node = int(os.environ.get("LOCAL_WORLD_SIZE", started))
        if started == devices * nodes:
            return
        launcher, wanted_nodes = f"torchrun started {started} processes, {on_node} of them here", started // on_node
    elif isinstance(environment, SLURMEnvironment) and (
        isinstance(trainer.strategy, ParallelStrategy) or _is_of_srun()
    ):
        try:
            environment.validate_settings(devices, nodes)
            return
        except ValueError:
            wanted_nodes = int(os.environ.get("SLURM_NNODES", nodes))
            on_node = int(os.environ.get("SLURM_NTASKS_PER_NODE", devices))
            launcher = f"SLURM has {wanted_nodes} node(s) with {on_node} task(s) each"
    else:
        return
    raise ConfigError(
        f"{launcher}, and the Trainer wants {nodes} node(s) with {devices} device(s) each; add --trainer.devices"
        f" {on_node} --trainer.num_nodes {wanted_nodes}, or start as many processes"
    )


def _is_of_srun() -> bool:
    """Whether this is one of several tasks of srun, and no bare command in a job of several tasks."""
    return int(os.environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1 or os.environ.get("SLURM_PROCID", "0") != "0"


def facts(trainer: Trainer, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Values that must be equal on all ranks, by name."""
    yield "lightning_aigc", lightning_aigc.__version__
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            yield package, "missing"
    seed = config.get("seed_everything")
    if not isinstance(seed, bool):  # true draws a seed
        yield "seed_everything", repr(seed)
    for key in ("model", "data"):
        yield from _flat(redact(config.get(key)), key)
    trainer_config = config.get("trainer") or {}
    for key in TRAINER:
        yield from _flat(redact(trainer_config.get(key), key), f"trainer.{key}")
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    if isinstance(data, DescribesTrainingData):
        for name, value in data.lora_metadata().items():
            if isinstance(value, (tuple, list)):  # the captions, which may be a million
                digest = hashlib.sha256(repr(value).encode()).hexdigest()[:8]
                yield f"the images' {name}", f"{len(value)} with hash {digest}"
            else:
                yield f"the images' {name}", repr(value)
    if isinstance(data, ComparesTrainingData):
        for kind, (count, checksum) in data.contents().items():
            yield f"the checksum of the {kind}", f"{checksum:08x} ({count} files)"


def differences(everybody: Sequence[tuple[str, Mapping[str, str]]]) -> list[str]:
    """A sentence for each fact that is not the same on all ranks: its values, each with the ranks that have it."""
    found = []
    for name in dict.fromkeys(name for _, own in everybody for name in own):
        ranks_of: dict[str, list[int]] = {}
        for rank, (_, own) in enumerate(everybody):
            ranks_of.setdefault(own.get(name, "not set"), []).append(rank)
        if len(ranks_of) > 1:
            values = (f"{value} on {_ranks(ranks, everybody)}" for value, ranks in ranks_of.items())
            found.append(f"{name} is {' and '.join(values)}")
    return found


def _ranks(ranks: Sequence[int], everybody: Sequence[tuple[str, Any]]) -> str:
    first, more = ranks[0], f" and {len(ranks) - 1} more" * (len(ranks) > 1)
    return f"rank {first}{more} ({everybody[first][0]})"


def _flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Dotted keys with their values, without those that may differ from node to node."""
    if hasattr(value, "as_dict"):
        value = value.as_dict()
    if isinstance(value, Mapping):
        for key, part in value.items():
            if key not in PER_NODE:
                yield from _flat(part, f"{path}.{key}")
    else:
        yield path, repr(value)

"""Imported before any test: `lightning_aigc` first, because it fixes torchvision's import for everything after it."""

import lightning_aigc  # noqa: F401

# isort: split
import atexit
import gc
import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader

from fakes.processes.network import why_no_namespaces

gc.disable()  # until all tests are imported: what is imported is no garbage
MEETING = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE")


@pytest.fixture(autouse=True)
def leave_no_process_group() -> Iterator[None]:
    """Destroy the process group that a strategy of one rank leaves in this process, and forget where its ranks met."""
    before = {name: os.environ.get(name) for name in MEETING}
    yield
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(autouse=True)
def restore_loaders_that_lightning_records() -> Iterator[None]:
    """Undo Lightning's patch of loader classes, which it leaves in place where `train_dataloader` raises.

    Each later loader would be in a reference cycle with its workers, and be collected in 5 s a worker.
    """
    yield
    for kind in (DataLoader, BatchSampler):
        for name in ("__setattr__", "__delattr__", "__init__"):
            if f"__old{name}" in vars(kind):
                setattr(kind, name, getattr(kind, f"__old{name}"))
                delattr(kind, f"__old{name}")


@pytest.fixture(autouse=True, scope="module")
def keep_survivors_out_of_garbage_collection() -> Iterator[None]:
    """Freeze what outlives a module of tests, such as caches, so that later collections do not look at it."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def needs_namespaces() -> None:
    """Skip the test where this machine makes no network namespaces with a slow link between them, and say why."""
    reason = why_no_namespaces()
    if reason is not None:
        pytest.skip(reason)


def pytest_collection_finish() -> None:
    """Keep what is imported by now out of garbage collection: torch, diffusers and transformers are a million objects,
    and each `gc.collect()` would look at all of them. Between those of the modules, collections are rare: at Python's
    own thresholds they took 4 % of the suite's time."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    gc.enable()
    atexit.register(gc.freeze)


LONGEST = (
    "test_golden", "test_edit_families", "test_graphs", "test_exact_snapshot", "test_base_quantization",
    "test_families", "test_stable_diffusion_lora", "test_init_transformers", "test_validation", "test_stable_diffusion",
    "test_config_errors", "test_on_fake_npu", "test_faults", "test_fit", "test_half_precision", "test_ranks_agree",
    "test_sharded_results", "test_rank_errors", "test_hub", "test_joint_attention", "test_zero",
    "test_zero_between_nodes",
)  # fmt: skip
"""Modules of half a minute and more, which run first: a last one would keep one core and leave the others idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))  # stable: a module's tests stay in their order

"""DeviceProcessGroup: a strategy's process group on NPUs, CUDA GPUs and CPUs, with the reductions that HCCL lacks."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from lightning_aigc._lightning import (
    DDPStrategy,
    LightningEnvironment,
    ParallelStrategy,
    SLURMEnvironment,
    TorchElasticEnvironment,
    Trainer,
    _destroy_dist_connection,
    _init_dist_connection,
    rank_zero_info,
    reset_seed,
)
from lightning_aigc.cluster import env_settings
from lightning_aigc.strategies.rendezvous import agree_on_order, open_store, wait_for_ranks

BACKENDS = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}
SAY_AFTER_S = 30.0
"""Wait before a sentence is printed; the imports of ranks differ by seconds."""
POLL_S = 0.5
LAST_WORDS_S = 30.0
"""Time for an error to arrive, and for a last snapshot, which waits for its ranks as long."""
_watching: set[int] = set()


def watch_parent(rank: int, last_words_s: float = LAST_WORDS_S) -> None:
    """End this process `last_words_s` after its parent, in a thread; a second call does nothing.

    NCCL and HCCL do not notice that a process is gone: a rank that Lightning started and that waits in a collective
    would hold its device until the timeout of half an hour. Under torchrun and SLURM the launcher ends the ranks.
    """
    parent = os.getppid()
    if os.getpid() in _watching:
        return
    _watching.add(os.getpid())

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        print(
            f"rank {rank}: the process of rank 0 that started this one has ended; this one ends within "
            f"{last_words_s:g} s; look why in the log, and start again with --resume",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(last_words_s)
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


@contextlib.contextmanager
def say_while_waiting(sentence: str, after_s: float = SAY_AFTER_S) -> Iterator[None]:
    """Print the sentence to stderr once if the block takes longer than `after_s`; ranks may wait for half an hour."""
    timer = threading.Timer(after_s, lambda: print(sentence, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def still_waits(label: str, environment: Any) -> str:
    """Return the sentence to print while this rank waits for the others."""
    return (
        f"{label}: rank {environment.global_rank()} of {environment.world_size()} still waits for the others at "
        f"{environment.main_address}:{environment.main_port}. Did every node start, with this MASTER_ADDR and "
        f"MASTER_PORT, and with trainer.strategy {label}? May nodes open connections to one another on any port, and "
        "over which interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, HCCL_SOCKET_IFNAME)?"
    )


def meet_ranks(trainer: Trainer) -> None:
    """Meet the ranks of torchrun or SLURM under a strategy of Lightning's, as the strategies here do themselves.

    So a rank that stops, or a node with another strategy, ends all of them now and not at their timeout. Collective.

    Raises: as `wait_for_ranks`.
    """
    strategy: Any = trainer.strategy
    environment: Any = trainer._accelerator_connector.cluster_environment
    is_launched = isinstance(environment, (TorchElasticEnvironment, SLURMEnvironment))
    if not is_launched or trainer.world_size == 1 or isinstance(strategy, DeviceProcessGroup) or dist.is_initialized():
        return
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = environment.main_address, str(environment.main_port)
    rank, ranks, timeout = environment.global_rank(), environment.world_size(), getattr(strategy, "_timeout", None)
    label = type(strategy).__name__.removesuffix("Strategy").lower()
    with say_while_waiting(still_waits(label, environment)):
        # kept: rank 0's process group takes over its port, and the others are still connected
        strategy.meeting_place = store = open_store(rank, ranks, timeout)
        wait_for_ranks(store, rank, ranks, timeout, label)


if TYPE_CHECKING:  # a class with this mixin is a DDPStrategy or a ModelParallelStrategy of Lightning
    Parent = DDPStrategy
else:
    Parent = ParallelStrategy


class DeviceProcessGroup(Parent):
    """Mixin: a backend for each kind of device, and ranks on the devices in the order of their links."""

    _store: Store | None = None
    """Store for the agreement on the order of devices, until the process group takes it over."""

    @property
    def label(self) -> str:
        """The strategy in log lines."""
        return "npu_sparse"

    def setup_environment(self) -> None:
        assert self.parallel_devices is not None
        if self.root_device.type in ("cuda", "npu") and len(self.parallel_devices) > 2:  # two have one link
            self._order_devices()
        backend = self._get_process_group_backend()
        if backend in BACKENDS.values():
            deterministic = torch.are_deterministic_algorithms_enabled()
            for line in env_settings.apply(backend, self.num_nodes, deterministic, os.environ):
                rank_zero_info(f"{self.label} sets {line}")
        super().setup_environment()

    def _order_devices(self) -> None:
        """Put neighbouring ranks on devices with the best links between them, unless all links are equal."""
        assert self.parallel_devices is not None
        indices = [device.index for device in self.parallel_devices]
        order, news = agree_on_order(indices, self._links_store, self.node_rank, decides=self.local_rank == 0)
        self.parallel_devices = [torch.device(self.root_device.type, index) for index in order]
        if news:
            rank_zero_info(f"{self.label} {news}")

    def _open_store(self) -> Store:
        assert self.cluster_environment is not None
        self.set_world_ranks()
        # Lightning sets them before it makes the process group, which takes over this store: two cannot share a port.
        os.environ["MASTER_ADDR"] = self.cluster_environment.main_address
        os.environ["MASTER_PORT"] = str(self.cluster_environment.main_port)
        self._store = open_store(self.global_rank, self.world_size, self._timeout)
        return self._store

    def _links_store(self) -> Store:
        return PrefixStore("npu_sparse", self._open_store())

    def setup_distributed(self) -> None:
        # Lightning registers this for nccl alone. Gloo's threads abort a process that ends before its groups do
        # (pytorch#179291), and a group destroyed sooner, at teardown, lets a second fit hang.
        atexit.register(_destroy_dist_connection)
        # Equal to DDPStrategy, but on NPUs without device_id: not every torch_npu can connect at once.
        reset_seed()
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        assert self.cluster_environment is not None
        if isinstance(self.cluster_environment, LightningEnvironment) and self.local_rank > 0:
            watch_parent(self.global_rank)
        arguments: dict[str, Any] = {"timeout": self._timeout}
        if self.root_device.type == "cuda":
            arguments["device_id"] = self.root_device
        with say_while_waiting(still_waits(self.label, self.cluster_environment)):
            if not dist.is_initialized():  # else an earlier fit has made it
                self._store = self._store or self._open_store()
                wait_for_ranks(self._store, self.global_rank, self.world_size, self._timeout, self.label)
                arguments["store"], self._store = PrefixStore("default_pg", self._store), None
            _init_dist_connection(self.cluster_environment, self._process_group_backend, **arguments)

    def _get_process_group_backend(self) -> str:
        return (
            self._process_group_backend or BACKENDS.get(self.root_device.type) or super()._get_process_group_backend()
        )

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce like DDP. On NPUs a mean is a sum that is divided here, because HCCL has no mean."""
        if self.root_device.type != "npu" or not isinstance(tensor, Tensor) or reduce_op not in ("mean", "avg"):
            return super().reduce(tensor, group, reduce_op)
        total = super().reduce(tensor, group, "sum")
        return total.div_(self.world_size) if total.is_floating_point() else total.copy_(total / self.world_size)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  # as its parent
        votes = torch.tensor(int(decision), device=self.root_device, dtype=torch.int32)  # HCCL has not always had int64
        total = int(self.reduce(votes, reduce_op="sum"))
        return total == self.world_size if all else total > 0

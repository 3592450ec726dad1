"""MeetingPlace: the options of averages among runs that come and go, with their checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch import nn

from lightning_aigc.errors import ConfigError
from lightning_aigc.gradient_sync.elastic.groups import ElasticGroups
from lightning_aigc.gradient_sync.elastic.local_sgd import ElasticLocalSGD
from lightning_aigc.gradient_sync.elastic.quorum import Quorum, host_and_port
from lightning_aigc.gradient_sync.options import SyncOptions, refuse_complex

COMMON = ("average", "top_k", "outer_learning_rate", "outer_momentum")
"""Options that all runs must share, so that they read the same bytes and take the same step."""


@dataclass(frozen=True)
class MeetingPlace:
    """Address of the store at which runs meet, and the number of runs that an average waits for."""

    address: str
    min_ranks: int

    @classmethod
    def of(cls, address: str, min_ranks: int, options: SyncOptions) -> MeetingPlace:
        """Raises: ConfigError for an address that is none, and for options that need ranks that stay."""
        host_and_port(address)
        if min_ranks < 1:
            raise ConfigError(f"min_ranks must be at least 1, got {min_ranks}")
        if options.mode != "local":
            raise ConfigError(f"rendezvous wants mode: local, whose runs step on their own; got mode: {options.mode}")
        if options.overlap_average:
            raise ConfigError(
                "rendezvous and overlap_average exclude each other: a run that leaves would take an average that still "
                "travels with it; write overlap_average: false"
            )
        return cls(address, min_ranks)

    def refuse_ranks(self, ranks: int) -> None:
        """Raises: ConfigError for a run of several ranks."""
        if ranks > 1:
            raise ConfigError(
                f"rendezvous joins runs of one rank each, and this run has {ranks}; start each with devices: 1 and "
                "num_nodes: 1, outside torchrun"
            )

    def make_sync(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        options: SyncOptions,
        timeout: timedelta,
        is_stopped: Callable[[], bool],
    ) -> ElasticLocalSGD:
        """Return the sync of this run, connected to the store; `is_stopped` ends its waits."""
        trained = [(name, p) for name, p in parameters if p.requires_grad]
        refuse_complex(options.mode, trained)
        job = f"{sum(p.numel() for _, p in trained)} trained parameters"
        job += "".join(f", {name}={getattr(options, name)!r}" for name in COMMON)
        quorum = Quorum(self.address, self.min_ranks, timeout, job, is_stopped)
        return ElasticLocalSGD(trained, options, ElasticGroups(quorum, timeout))

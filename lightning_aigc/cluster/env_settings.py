"""Environment settings of HCCL and NCCL that are worth having, made only where the user made none. Needs no torch.

HCCL reads them before its first call, so `apply` comes before the process group. Sources: HCCL's user guide
(docs/en/user_guide/hccl_env of hicann/hccl), torch_npu's environment variables, and for NCCL
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_aigc.errors import ConfigError

Backend = Literal["hccl", "nccl", "gloo"]


@dataclass(frozen=True)
class Setting:
    """One variable, what it would be set to, and why."""

    name: str
    value: str
    why: str

    def __str__(self) -> str:
        return f"{self.name}={self.value} (unset before: {self.why})"


def apply(backend: str, nodes: int, deterministic: bool, environ: MutableMapping[str, str]) -> list[str]:
    """Make the settings that `planned` lists in `environ`; returns a line to print for each.

    Raises: ConfigError for a backend other than hccl, nccl and gloo.
    """
    settings = planned(backend, nodes, deterministic, environ)
    environ.update({setting.name: setting.value for setting in settings})
    return [str(setting) for setting in settings]


def planned(backend: str, nodes: int, deterministic: bool, environ: Mapping[str, str]) -> list[Setting]:
    """Return the settings that are worth having and that `environ` does not hold yet.

    Raises: ConfigError for a backend other than hccl, nccl and gloo.
    """
    if backend not in get_args(Backend):
        raise ConfigError(f"backend must be one of {', '.join(get_args(Backend))}; got {backend!r}")
    if backend != "hccl":
        # NVIDIA's page splits NCCL's variables into what describes a site, which only its owner knows, and what is for
        # debugging, which "should not be used in production". torch already tears a run down on an NCCL error. Gloo has
        # an interface to choose and nothing else.
        return []
    return [setting for setting in _hccl(nodes, deterministic, environ) if setting.name not in environ]


def _hccl(nodes: int, deterministic: bool, environ: Mapping[str, str]) -> list[Setting]:
    across = nodes > 1
    settings = [
        Setting(
            "HCCL_CONNECT_TIMEOUT",
            "1200" if across else "600",
            "seconds that ranks wait for one another at the start; 120 is shorter than loading a large model"
            + (", and nodes start apart" if across else ""),
        ),
        Setting(
            "PYTORCH_NPU_ALLOC_CONF",
            "expandable_segments:True",
            "less memory lost between tensors; a rank drives one card here, which it needs",
        ),
    ]
    if "HCCL_WHITELIST_FILE" not in environ:  # who names a list wants it read
        settings.insert(
            1, Setting("HCCL_WHITELIST_DISABLE", "1", "no list of peers to write; older CANN asked for one")
        )
    if environ.get("ASCEND_LAUNCH_BLOCKING") != "1":  # which turns the queue off
        settings.append(Setting("TASK_QUEUE_ENABLE", "2", "the host queues kernels in two stages, so cards wait less"))
    if deterministic:
        settings.append(
            Setting("HCCL_DETERMINISTIC", "true", "deterministic=True: the same sum in every run, and slower")
        )
    return settings

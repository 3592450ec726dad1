"""Settings are made where the user made none, and every one is said."""

from __future__ import annotations

import pytest

from lightning_aigc.cluster.env_settings import apply, planned
from lightning_aigc.errors import ConfigError


def test_hccl_gets_its_settings_and_says_each_with_its_reason() -> None:
    environ: dict[str, str] = {}
    lines = apply("hccl", 1, False, environ)
    assert environ == {
        "HCCL_CONNECT_TIMEOUT": "600",
        "HCCL_WHITELIST_DISABLE": "1",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
        "TASK_QUEUE_ENABLE": "2",
    }
    assert [line.partition(" (unset before: ")[0] for line in lines] == [f"{k}={v}" for k, v in environ.items()]
    assert all(len(line.partition("unset before: ")[2]) > 20 for line in lines)


def test_nodes_wait_longer_for_one_another() -> None:
    environ: dict[str, str] = {}
    apply("hccl", 2, False, environ)
    assert environ["HCCL_CONNECT_TIMEOUT"] == "1200"


def test_only_a_deterministic_run_pays_for_deterministic_sums() -> None:
    assert [s.value for s in planned("hccl", 1, True, {}) if s.name == "HCCL_DETERMINISTIC"] == ["true"]
    assert not [s for s in planned("hccl", 1, False, {}) if s.name == "HCCL_DETERMINISTIC"]


def test_what_the_user_set_stays_even_when_it_is_empty() -> None:
    environ = {"HCCL_CONNECT_TIMEOUT": "150", "PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:64", "TASK_QUEUE_ENABLE": ""}
    before = dict(environ)
    lines = apply("hccl", 4, False, environ)
    assert {name: environ[name] for name in before} == before
    assert [line.split("=")[0] for line in lines] == ["HCCL_WHITELIST_DISABLE"]


def test_a_list_of_peers_is_not_switched_off() -> None:
    environ = {"HCCL_WHITELIST_FILE": "/peers.json"}
    apply("hccl", 1, False, environ)
    assert "HCCL_WHITELIST_DISABLE" not in environ


def test_debugging_without_the_queue_is_left_alone() -> None:
    environ = {"ASCEND_LAUNCH_BLOCKING": "1"}
    apply("hccl", 1, False, environ)
    assert "TASK_QUEUE_ENABLE" not in environ


def test_a_second_call_has_nothing_to_say() -> None:
    environ: dict[str, str] = {}
    apply("hccl", 2, True, environ)
    assert apply("hccl", 2, True, environ) == []


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_the_others_are_left_as_they_are(backend: str) -> None:
    environ = {"PATH": "/bin"}
    assert apply(backend, 48, True, environ) == [] and environ == {"PATH": "/bin"}


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="one of hccl, nccl, gloo; got 'mpi'"):
        apply("mpi", 1, False, {})

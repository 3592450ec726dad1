"""Numbers of a job that no training has: each is refused by its own name, in a sentence."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_aigc.cluster.workload import Job
from lightning_aigc.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"trainable": 0.0}, "trainable parameters must be above 0 and at most 1e15, got 0"),
        ({"trainable": 1e30}, "trainable parameters must be above 0 and at most 1e15, got 1e+30"),
        ({"trainable": float("nan")}, "trainable parameters must be above 0 and at most 1e15, got nan"),
        ({"protected": -1}, "protected and small parameters must be 0 or more, got -1 and 0"),
        ({"bucket_bytes": 0.0}, "a bucket must hold more than 0 MB, got 0; set 25, DDP's own"),
        ({"local_steps": 0}, "local_steps must be at least 1, got 0"),
    ],
)
def test_a_number_outside_its_range_is_named_alone(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Job(**({"trainable": 1e6, "forward_s": 0.1, "backward_s": 0.2} | given))
    assert str(refused.value) == said

"""Each shipped config trains, saves and resumes on the fake npu as on a CPU; `make test-long`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fakes.models.transformer_pipelines import MAKE
from fakes.processes.ranks import run_ranks
from fakes.runs.golden_runs import CONFIGS, GOLDEN, family_of, run_config

golden = json.loads(GOLDEN.read_text())


def train(rank: int, config: str, folder: str) -> dict[str, Any]:
    from fakes.npu import fake_npu

    fake_npu.install()
    fake_npu.pin_everything()
    fake_npu.apply_patches()
    sys.argv = ["lightning"]
    family = family_of(Path(config))
    base = "embedded:sd" if family is None else str(MAKE[family](Path(folder, "pipeline")))
    return run_config(Path(config), Path(folder), base, "npu")


@pytest.mark.long
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_config_trains_saves_and_resumes_on_the_npu_as_on_a_cpu(config: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (result,) = run_ranks(train, 1, tmp_path / "ranks", str(config), str(tmp_path / "run"), gloo=False)
    recorded = golden[config.stem]
    assert result["resumed"] == result["files"] and result["files"].keys() == recorded["files"].keys()
    losses = [[float.fromhex(loss) for loss in each["losses"]] for each in (result, recorded)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)  # bfloat16 in another order

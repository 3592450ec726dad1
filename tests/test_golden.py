"""Each shipped config trains as recorded in golden.json: first losses, saved files, and the files of a resumed run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fakes.models.transformer_pipelines import MAKE
from fakes.runs.golden_runs import CONFIGS, GOLDEN, family_of, machine, run_config, work_of

golden = json.loads(GOLDEN.read_text())
trained: dict[str, Any] = {}
"""Results by work: sd_full_zero3 differs from sd_full in its strategy alone, and sd_lora_ascend from sd_lora_cluster in
what machines it is for, all of which a run on one CPU replaces."""


@pytest.mark.filterwarnings("ignore")  # what Lightning says about precisions and loaders
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_config_trains_saves_and_resumes_as_recorded(
    config: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning"])
    family, work = family_of(config), work_of(config)
    if work not in trained:
        base = "embedded:sd" if family is None else str(MAKE[family](tmp_path_factory.mktemp(family)))
        trained[work] = run_config(config, tmp_path, base)
    result, recorded = trained[work], golden[config.stem]
    assert result["resumed"] == result["files"] and result["files"].keys() == recorded["files"].keys()
    assert [float.fromhex(loss) for loss in result["losses"]] == pytest.approx(
        [float.fromhex(loss) for loss in recorded["losses"]], rel=2e-2
    )  # bfloat16 differs between processors
    if machine() == golden["machine"]:
        assert result == recorded

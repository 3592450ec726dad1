"""report.json: what is written is read again, and what cannot be read is one sentence."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fakes.runs.run_records import full_record
from lightning_aigc.errors import DataError
from lightning_aigc.report.paired_scores import Check
from lightning_aigc.report.record import (
    RunRecord,
    read_run,
)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = full_record(tmp_path)
    made.write(tmp_path)
    assert read_run(tmp_path) == made


def test_nan_survives_json(tmp_path: Path) -> None:
    made = RunRecord("run", grids=[Check(0, {"clip_t": [0.1], "clip_i": [math.nan]})])
    made.write(tmp_path)
    assert "NaN" not in (tmp_path / "report.json").read_text()  # which is no JSON
    assert math.isnan(read_run(tmp_path).grids[0].scores("clip_i")[0])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "is no run: it has no report.json"),
        ('{"name": "ru', "cannot be read"),
        ("[]", "cannot be read"),
        ('{"format": 1, "name": 3}', "wanted str"),
        ('{"format": 1}', "cannot be read"),
        ('{"format": 99, "name": "run"}', "of format 99; this version reads 1"),
    ],
)
def test_what_is_no_record_is_one_sentence(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "report.json").write_text(text)
    with pytest.raises(DataError) as caught:
        read_run(tmp_path)
    assert said in str(caught.value) and "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_a_run_of_an_older_version_and_a_missing_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(DataError, match="an older version wrote it"):
        read_run(tmp_path)
    with pytest.raises(DataError, match="there is no folder"):
        read_run(tmp_path / "nowhere")

"""The script that draws charts: made once for a version of vl-convert, then read from the cache folder."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from lightning_aigc.report.vega import bundle


def test_the_script_is_made_once_and_a_folder_that_cannot_be_written_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []

    def javascript_bundle(snippet: object) -> str:
        made.append(snippet)
        return "let tag='</script>'"

    monkeypatch.setattr("vl_convert.javascript_bundle", javascript_bundle)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):
        assert bundle.__wrapped__() == "let tag='<\\/script>'"
    assert made == [None]
    assert [file.name for file in tmp_path.rglob("*.js")] == [f"vega-{version('vl-convert-python')}.js"]
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert bundle.__wrapped__() == "let tag='<\\/script>'" and len(made) == 2

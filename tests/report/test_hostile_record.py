"""A run folder from a stranger: no value of its report.json becomes markup, code or a request."""

from __future__ import annotations

import dataclasses
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fakes.chromium import Chromium
from fakes.runs.run_records import full_record
from lightning_aigc.cli import main
from lightning_aigc.errors import DataError
from lightning_aigc.report.comparison import as_markdown
from lightning_aigc.report.comparison_page import render_comparison_page
from lightning_aigc.report.page import IMAGE
from lightning_aigc.report.record import FineTuneFinding, FineTuneResult, Picture, RunRecord, read_run
from lightning_aigc.report.run_page import render_run_page

EVIL = (
    'x" onerror="document.title=\'RAN\'" y="',
    "</title></script><script>document.title='RAN'</script>",
    "<img src=x onerror=document.title='RAN'>",
    "javascript:document.title='RAN'",
    "data:text/html;base64,PHNjcmlwdD5kb2N1bWVudC50aXRsZT0nUkFOJzwvc2NyaXB0Pg==",
    "data:image/svg+xml,<svg onload=\"document.title='RAN'\"/>",
    "data:image/png;base64,AAAA\" onload=\"document.title='RAN'",
    "`\n# heading\n<script>document.title='RAN'</script>",
)
NUMBERS = ("inf", "-inf")
IN_FIXED_WORDS = ("level", "metric", "rows_are")
PIXEL = "data:image/png;base64,iVBORw0KGgo="


def hostile(value: Any, evil: str, key: str = "") -> Any:
    """The JSON with every string and every free key replaced."""
    if isinstance(value, str):
        return value if key in IN_FIXED_WORDS or value in NUMBERS else evil
    if isinstance(value, list):
        return [hostile(each, evil, key) for each in value]
    if isinstance(value, dict):
        free = key in ("sheets", "result_files", "norms")
        return {evil + str(i) if free else k: hostile(v, evil, k) for i, (k, v) in enumerate(value.items())}
    return value


@pytest.fixture(params=EVIL)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A run's folder whose report.json has this text in every place that holds text."""
    made = full_record(tmp_path)
    made.sheets, made.result_files = {"sheet": PIXEL}, {"file": "a"}
    made.fine_tune = FineTuneResult("summary", [FineTuneFinding("check", "message", "remedy")])
    made.pictures = [Picture("a prompt", 3, False, PIXEL, PIXEL), Picture("another", 3, True, PIXEL, PIXEL)]
    made.write(tmp_path)
    values = json.loads((tmp_path / "report.json").read_text())
    (tmp_path / "report.json").write_text(json.dumps(hostile(values, request.param)))
    return tmp_path


class Markup(HTMLParser):
    """Scripts and addresses that a page's markup runs or asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.handlers: list[str] = []
        self.addresses: list[str] = []
        self.scripts: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action", "srcdoc")]
        if tag == "script":
            self.scripts.append(dict(attrs))


def pages_of(folder: Path) -> dict[str, str]:
    """The page of the run, and of two such runs."""
    record = read_run(folder)
    return {"run": render_run_page(record), "comparison": render_comparison_page([record, record])}


def test_no_value_becomes_markup(folder: Path) -> None:
    for name, text in pages_of(folder).items():
        seen = Markup()
        seen.feed(text)
        assert seen.handlers == [], name
        assert all(IMAGE.fullmatch(address) for address in seen.addresses), name
        assert [s for s in seen.scripts if s.get("type") != "application/json"] == [{}, {}], name  # Vega and our lines


def test_the_policy_runs_our_scripts_alone(folder: Path) -> None:
    for text in pages_of(folder).values():
        policy = text.partition('http-equiv="Content-Security-Policy" content="')[2].partition('"')[0]
        scripts = policy.partition("script-src ")[2]
        assert scripts.count("'sha256-") == 2 and "'unsafe-inline'" not in scripts


def test_markdown_has_no_markup_and_one_line_a_row(folder: Path) -> None:
    record = read_run(folder)
    text = as_markdown([record, record])
    assert "<script" not in text and "<img" not in text and "\n# heading" not in text


@pytest.mark.browser
def test_nothing_runs_in_a_browser(folder: Path) -> None:
    with Chromium() as browser:
        for name, text in pages_of(folder).items():
            page = folder / f"{name}.html"
            page.write_text(text)
            seen = browser.open(page)
            assert seen.title != "RAN" and seen.requests == [], name


@pytest.mark.parametrize("field", ["level", "metric", "rows_are"])
def test_a_word_that_is_none_of_a_field_s_is_refused(tmp_path: Path, field: str) -> None:
    full_record(tmp_path).write(tmp_path)
    text = (tmp_path / "report.json").read_text()
    for word in ("error", "clip_t", "layer"):
        text = text.replace(f'"{field}":"{word}"', f'"{field}":"<b>"')
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(DataError, match="wanted one of"):
        read_run(tmp_path)


def test_values_that_do_not_fit_together_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = full_record(tmp_path)
    broken = dataclasses.replace(record, curves={"loss": dataclasses.replace(record.curves["loss"], values=[1.0])})
    broken.write(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["report", str(tmp_path), "-o", str(tmp_path / "page.html")])
    said = capsys.readouterr().err
    assert stop.value.code not in (0, None) and "values that do not fit together" in said and "Traceback" not in said


def test_snippets_quote_what_they_are_given(tmp_path: Path) -> None:
    record: RunRecord = full_record(tmp_path)
    assert record.lora is not None
    file = 'a b"); import os; os.system("x'
    record.lora = dataclasses.replace(record.lora, file=f"/tmp/{file}.safetensors", base_model='x"); print("y')
    page = render_run_page(record)
    assert "cp &#x27;/tmp/a b" in page
    assert "\\&quot;); import os" in page and "(&quot;x\\&quot;); print(" in page


@pytest.mark.parametrize(
    "text",
    [
        '{"format":1,"config":' + '{"a":' * 50_000 + "1" + "}" * 50_001,
        '{"format":1,"name":"x","steps":1' + "0" * 400 + "}",
        '{"format":1,"name":"x","steps":true}',
    ],
    ids=["deep", "huge", "switch"],
)
def test_a_record_that_no_run_writes_is_refused_in_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(DataError, match=r"report\.json cannot be read .*torn or was edited"):
        read_run(tmp_path)


def test_half_a_surrogate_pair_in_a_name_is_written_as_a_question_mark(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text('{"format":1,"name":"\\ud800 run"}')
    assert render_run_page(read_run(tmp_path)).encode().count(b"? run") == 2
